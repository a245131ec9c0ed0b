"""Batched decode: one forward for several lanes, in which each sequence attends to its own lane.

Everything but attention runs on all rows at once, [batch, 1, hidden]: this is where a decode step
reads the weights, and reading them once for all rows is what a batch saves. Attention runs row by
row over exactly the live view of the row's lane, by the function and with the mask of the exact
mode (one sequence per forward). So nothing is padded or gathered, no mask lies over the rows of
others, and what another lane holds is never read. Experts of a mixture run row by row too, because
how many rows meet in one expert would change the shape of its product.

**What is guaranteed.** A forward always has `batch` rows; rows without a sequence are fed token 0,
and neither read nor write a lane. So the shape of every operation is fixed, and a request's logits
are bitwise the same whatever the other rows hold: other requests, none, ones that come and go. A
request keeps its row as long as it holds its lane. `Batching` shows this at the start, with the
weights, the library and the machine at hand, and refuses the model where it does not hold.

**What is not.** The logits are not those of the exact mode, since a product of `batch` rows sums in
another order than one of a single row: they differ by rounding, and so the batch is part of the
pairing. Nor need the rows of a forward round alike; `Batching.rows_alike` tells whether they did at
the start. CUDA graphs are not used: no measurement shows yet that they help and stay exact.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from headrace.engine.lanes import Lane, host_bytes
from headrace.engine.loading import LoadedModel
from headrace.errors import LocalProtocolError, Refused
from headrace.geometry import Layer

_PREFIX: Final = "headrace-rows-"
_SHARED_ROPE: Final = ("dynamic", "longrope")  # their frequencies are those of the longest row
_PROBE_TOKEN: Final = 1
_PROBE_CONTEXT: Final = 4

_occupied: ContextVar[tuple[int, ...]] = ContextVar("rows that hold a sequence")


class Fed(NamedTuple):
    """One sequence of a decode step: who holds the lane, the lane, and the token it is fed."""

    holder: Hashable
    lane: Lane
    token: int


class Batching:
    """Decodes lanes in forwards of `batch` rows, and keeps which row is whose.

    `layers`: of the lanes. `allocate`: makes the memory of the lanes that the start-up probe uses.

    Raises:
        Refused: the model's rows cannot be kept apart.
    """

    def __init__(
        self,
        model: LoadedModel,
        layers: Sequence[Layer],
        batch: int,
        allocate: Callable[[int], torch.Tensor] = host_bytes,
    ) -> None:
        self._forward = BatchedForward(model, batch)
        self._rows = RowTable(batch)
        self.rows_alike = _probe(self._forward, layers, allocate)

    def step(self, fed: Sequence[Fed]) -> list[torch.Tensor]:
        """Each sequence's float32 logits on the host; lanes advance by one position.

        It takes one forward unless two of the sequences have the same row. If it raises, some lanes
        may have advanced: the caller rewinds them.
        """
        rows = [self._rows.row_of(each.holder) for each in fed]
        logits: dict[int, torch.Tensor] = {}
        for forward in without_repeats(rows):
            lanes: list[tuple[Lane, int] | None] = [None] * self._forward.batch
            for at in forward:
                lanes[rows[at]] = fed[at].lane, fed[at].token
            computed = self._forward(lanes)
            logits.update({at: computed[rows[at]] for at in forward})
        return [logits[at] for at in range(len(fed))]

    def forget(self, holder: Hashable) -> None:
        """`holder` gave its lane back, and its row with it; it need not have had one."""
        self._rows.forget(holder)


class RowTable:
    """Which row of a forward a holder of a lane has, from its first step until it is forgotten.

    With no more holders than rows each has one for itself.
    """

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._rows: dict[Hashable, int] = {}

    def row_of(self, holder: Hashable) -> int:
        """The holder's row; a new holder gets the one that the fewest have."""
        if holder not in self._rows:
            taken = list(self._rows.values())
            self._rows[holder] = min(range(self._batch), key=taken.count)
        return self._rows[holder]

    def forget(self, holder: Hashable) -> None:
        self._rows.pop(holder, None)


def without_repeats(rows: Sequence[int]) -> list[list[int]]:
    """The places in `rows`, in as few lists as there are places of one row; none repeats a row."""
    forwards: list[list[int]] = []
    seen: dict[int, int] = {}
    for at, row in enumerate(rows):
        turn = seen.get(row, 0)
        seen[row] = turn + 1
        if turn == len(forwards):
            forwards.append([])
        forwards[turn].append(at)
    return forwards


class BatchedForward:
    """A model's decode step for exactly `batch` rows at once.

    Raises:
        Refused: `batch` is below two, or the model computes something over all rows together.
    """

    def __init__(self, model: LoadedModel, batch: int) -> None:
        if batch < 2:
            raise Refused(f"a decode batch of {batch}; give 2 or more", field="decode_batch")
        _check_rope(model.module)
        self.batch = batch
        self._model = model
        self._attention = _register_attention(model.config._attn_implementation)
        self._experts = _register_experts(model.config._experts_implementation)

    def __call__(self, rows: Sequence[tuple[Lane, int] | None]) -> torch.Tensor:
        """Feed each row's lane its token; float32 logits [batch, vocab] on the host.

        None is a row without a sequence, whose logits mean nothing. There is at least one with.
        """
        if len(rows) != self.batch:
            raise LocalProtocolError(f"{len(rows)} rows in a forward of {self.batch}")
        model = self._model
        cache = _RowsCache([row and row[0] for row in rows])
        fed = [(row[0].length, row[1]) if row else (0, 0) for row in rows]
        both = torch.tensor(fed, dtype=torch.long, device=model.device)
        with torch.inference_mode(), self._row_by_row(cache.occupied):
            output = model.module(
                input_ids=both[:, 1:].contiguous(),
                position_ids=both[:, :1].contiguous(),
                use_cache=True,
                logits_to_keep=1,
                **{model.cache_argument: cache},
            )
            logits: torch.Tensor = output.logits[:, -1]
            return logits.to("cpu", torch.float32).contiguous()

    @contextmanager
    def _row_by_row(self, occupied: tuple[int, ...]) -> Iterator[None]:
        """Only now: the prefill engine runs the same modules as they are."""
        config = self._model.config
        was = config._attn_implementation, config._experts_implementation
        before = _occupied.set(occupied)
        try:
            config._attn_implementation = self._attention
            config._experts_implementation = self._experts
            yield
        finally:
            config._attn_implementation, config._experts_implementation = was
            _occupied.reset(before)


class _RowsCache(Cache):  # type: ignore[misc]
    """The caches of several lanes as one: what transformers asks it for it gets per row, in a list.

    The model hands such lists on untouched, from a layer to those that share its keys and values
    too, until they come to the attention below.
    """

    def __init__(self, lanes: Sequence[Lane | None]) -> None:
        self._batch = len(lanes)
        self._caches = {row: lane.cache for row, lane in enumerate(lanes) if lane is not None}
        self.occupied = tuple(self._caches)
        if not self.occupied:
            raise LocalProtocolError("a forward without a sequence")
        # Only for the kinds of the layers, which are the same in all lanes.
        super().__init__(layers=self._caches[self.occupied[0]].layers)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, **_: Any
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        keys: list[torch.Tensor | None] = [None] * self._batch
        values = list(keys)
        for row, cache in self._caches.items():
            new = key_states[row : row + 1], value_states[row : row + 1]
            keys[row], values[row] = cache.layers[layer_idx].update(*new)
        return keys, values

    def get_query_offset(self, layer_idx: int = 0) -> list[int]:
        offsets = [0] * self._batch
        for row, cache in self._caches.items():
            offsets[row] = cache.get_query_offset(layer_idx)
        return offsets

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[list[int], list[int]]:
        lengths = [0] * self._batch
        offsets = list(lengths)
        for row, cache in self._caches.items():
            lengths[row], offsets[row] = cache.get_mask_sizes(query_length, layer_idx)
        return lengths, offsets


def _register_attention(own: str) -> str:
    """An attention implementation that runs the model's `own` row by row; returns its name."""
    name = f"{_PREFIX}{own}"
    AttentionInterface.register(name, partial(_attend, own))
    if own in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(name, partial(_masks, own))
    return name


def _attend(
    own: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: Sequence[torch.Tensor],
    value: Sequence[torch.Tensor],
    attention_mask: Sequence[torch.Tensor | None] | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Queries [batch, heads, 1, head_dim] to [batch, 1, heads, head_dim]; zeros in empty rows."""
    made_in = sys.modules[type(module).__module__]
    eager = getattr(made_in, "eager_attention_forward", None)
    attend = made_in.ALL_ATTENTION_FUNCTIONS.get_interface(own, eager)
    positions: torch.Tensor | None = options.pop("position_ids", None)
    attended: torch.Tensor | None = None
    for row in _occupied.get():
        if positions is not None:  # of this row, since from others an implementation draws more
            options["position_ids"] = positions[row : row + 1]
        mask = None if attention_mask is None else attention_mask[row]
        mine = attend(module, query[row : row + 1], key[row], value[row], mask, **options)[0]
        if attended is None:
            attended = mine.new_zeros(query.shape[0], *mine.shape[1:])
        attended[row] = mine[0]
    if attended is None:
        raise LocalProtocolError("attention without a sequence")
    return attended, None


def _masks(
    own: str,
    *,
    kv_length: Sequence[int],
    kv_offset: Sequence[int],
    q_offset: Sequence[int],
    batch_size: int,
    **options: Any,
) -> list[torch.Tensor | None]:
    """The mask that each row would have in a forward of its own."""
    make = ALL_MASK_ATTENTION_FUNCTIONS[own]
    masks: list[torch.Tensor | None] = [None] * batch_size
    for row in _occupied.get():
        sizes = {"kv_length": kv_length[row], "kv_offset": kv_offset[row]}
        masks[row] = make(batch_size=1, q_offset=q_offset[row], **sizes, **options)
    return masks


def _register_experts(own: str) -> str:
    """An experts implementation that runs the model's `own` row by row; returns its name."""
    name = f"{_PREFIX}{own}"
    ExpertsInterface.register(name, partial(_route, own))
    return name


def _route(
    own: str, module: torch.nn.Module, hidden: torch.Tensor, *choices: torch.Tensor
) -> torch.Tensor:
    """Hidden states [batch, hidden] through the experts that each row chose; zeros in empty rows.

    `choices`: ids and weights of the experts, [batch, experts of a row].
    """
    forward = type(module).forward.__wrapped__  # type: ignore[attr-defined]
    route = ALL_EXPERTS_FUNCTIONS.get_interface(own, forward)
    routed = torch.zeros_like(hidden)
    for row in _occupied.get():
        routed[row] = route(module, *(each[row : row + 1] for each in (hidden, *choices)))[0]
    return routed


def _check_rope(module: torch.nn.Module) -> None:
    for each in module.modules():
        kinds = getattr(each, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if kind in _SHARED_ROPE:
                raise _refused(
                    f"this model's {kind} positions depend on the longest sequence of a batch"
                )


def _probe(
    forward: BatchedForward,
    layers: Sequence[Layer],
    allocate: Callable[[int], torch.Tensor],
) -> bool:
    """Whether all rows round alike.

    The first and the last row are computed alone and among others: among equals, which meet
    wherever a model treats rows by what they hold, and among others of other lengths and tokens,
    which show where a model takes one row's length for all.

    Raises:
        Refused: a row's logits are not the same in company.
    """
    context = forward.batch + _PROBE_CONTEXT
    lanes = [Lane(layers, context, allocate) for _ in range(forward.batch)]

    def computed(*occupied: int) -> torch.Tensor:
        for row in occupied:
            lanes[row].begin(0)
            lanes[row].publish()
        return forward(
            [(lanes[row], _PROBE_TOKEN) if row in occupied else None for row in range(len(lanes))]
        )

    def uneven(*occupied: int) -> torch.Tensor:
        """After `row` + 1 tokens of its own in each row, its next one."""
        for row, lane in enumerate(lanes):
            lane.rewind(row + 1)
        tokens = [(lanes[row], row + 1) if row in occupied else None for row in range(len(lanes))]
        return forward(tokens)

    ends = (0, forward.batch - 1)
    try:
        among = computed(*range(forward.batch))
        alone = {row: computed(row)[row] for row in ends}
        for lane in lanes:
            lane.begin(0)
            lane.publish()
        for length in range(forward.batch):
            forward([(each, at) if at >= length else None for at, each in enumerate(lanes)])
        mixed = uneven(*range(forward.batch))
        apart = {row: uneven(row)[row] for row in ends}
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as exc:
        raise _refused(f"this model does not decode in batches ({exc})") from exc
    for row in ends:
        equal = torch.equal(alone[row], among[row]) and torch.equal(apart[row], mixed[row])
        if not equal:
            raise _refused(
                f"row {row} of this model's batch of {forward.batch} depends on the other rows"
            )
    return all(torch.equal(row, among[0]) for row in among)


def _refused(why: str) -> Refused:
    return Refused(f"{why}; leave decode_batch out", field="decode_batch")
