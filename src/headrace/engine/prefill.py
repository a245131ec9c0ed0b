"""A prefill whose keys and values can be taken layer by layer, while it runs.

A layer's states are final when its cache is updated, before the layer's own attention runs, so that
is where they are taken: one layer's compute earlier than a hook at the layer's end. The forward
calls are the same whatever is done with the states, which is why the route changes no bit.

A prefill is computed in pieces, one forward each. A piece's result depends on the states before it
and not on how those came to be there: a run that is seeded with the states of [0, p) gives, bit for
bit, what a run from 0 gives that is cut at p.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from transformers import DynamicCache

from headrace.engine.layers import check_states
from headrace.engine.loading import LoadedModel
from headrace.engine.pieces import pieces
from headrace.errors import LocalProtocolError
from headrace.geometry import Layer, Sliding

States: TypeAlias = tuple[torch.Tensor, torch.Tensor]
Forward: TypeAlias = Callable[[torch.Tensor, Any], torch.Tensor]


class Seed(NamedTuple):
    """What a prefill goes on from: the states of positions [0, `num_tokens`).

    layers: by model layer its keys and values, [heads, rows, head_dim], the last row of position
    `num_tokens` - 1. A full-attention layer has a row for every position, a sliding one the last
    `needed_rows` of them, a layer that shares another's has none. They are read, never written.
    """

    num_tokens: int
    layers: tuple[States | None, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        tensors = [tensor for states in self.layers if states for tensor in states]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def needed_rows(layer: Layer, num_tokens: int) -> int:
    """How many of the last of `num_tokens` positions the next one is computed from."""
    if isinstance(layer.kind, Sliding):
        return min(num_tokens, layer.kind.window - 1)
    return num_tokens


class Taker(Protocol):
    """What becomes of a prefill's states, positions [start, stop) being computed at once.

    States are [heads, positions, head_dim] tensors that the cache may own: copy, do not keep.
    """

    keep_full: bool
    """Whether `end` needs the full-attention layers' states; else they are dropped when taken."""

    def begin(self, start: int, stop: int) -> None:
        """Positions [start, stop) are about to be computed."""

    def take(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """The states of the positions being computed are final in this layer."""

    def end(self, start: int, stop: int, cache: TakenCache) -> None:
        """Positions [start, stop) are computed in all layers."""


class TakenCache(DynamicCache):  # type: ignore[misc]
    """transformers' own cache, which shows each layer's new states to a taker.

    seed: where it starts from. keep: hold on to what a later prefill can be seeded with.
    """

    def __init__(
        self,
        model: LoadedModel,
        layers: Sequence[Layer],
        taker: Taker,
        seed: Seed | None = None,
        *,
        keep: bool = False,
    ) -> None:
        super().__init__(config=model.module.config)
        self._geometry = layers
        self._taker = taker
        self._keep = keep
        self.last = False
        for kept in self.layers:
            # The layer would move it there when it is first used, and a scalar of pageable memory
            # holds the host up until the device has come to it.
            if hasattr(kept, "_sliding_window_tensor"):
                kept._sliding_window_tensor = torch.full(
                    (), kept.sliding_window, dtype=torch.long, device=model.device
                )
        if seed is not None:
            self._start_from(seed)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer, count = self._geometry[layer_idx], key_states.shape[2]
        check_states(layer, key_states, value_states, count)
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        # The cache has just laid the rows out head by head; the raw states often lie token by
        # token, and copying those costs a transposition more.
        first = keys.shape[2] - count
        self._taker.take(layer_idx, keys[0, :, first:], values[0, :, first:])
        self._drop(layer_idx)
        return keys, values

    def states(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A kept full-attention layer's keys and values, [heads, positions so far, head_dim]."""
        kept = self.layers[layer]
        return kept.keys[0], kept.values[0]

    def seed(self) -> Seed:
        """What a later prefill can go on from, once all is computed, if that is kept."""
        num_tokens = self.get_seq_length()
        layers: list[States | None] = []
        for layer, kept in zip(self._geometry, self.layers, strict=True):
            rows = needed_rows(layer, num_tokens)
            layers.append(
                (kept.keys[0, :, -rows:], kept.values[0, :, -rows:]) if layer.parts else None
            )
        return Seed(num_tokens, tuple(layers))

    def _start_from(self, seed: Seed) -> None:
        for layer, kept, states in zip(self._geometry, self.layers, seed.layers, strict=True):
            if states is None:
                continue
            keys, values = (tensor[None] for tensor in states)
            check_states(layer, keys, values, needed_rows(layer, seed.num_tokens))
            # The cache makes a new tensor of these and its new rows, and so never writes to them.
            kept.lazy_initialization(keys, values)
            kept.keys, kept.values = keys, values
            if isinstance(layer.kind, Sliding):
                kept.cumulative_length = seed.num_tokens

    def _drop(self, layer_idx: int) -> None:
        """Let go of what no later forward and no taker reads."""
        kept = self.layers[layer_idx]
        sliding = isinstance(self._geometry[layer_idx].kind, Sliding)
        if self.last and not self._keep and (sliding or not self._taker.keep_full):
            kept.keys = kept.values = None
        elif sliding:
            # The cache keeps a view of the last rows that pins the storage of all of them.
            kept.keys, kept.values = kept.keys.clone(), kept.values.clone()


def run_prefill(
    model: LoadedModel,
    layers: Sequence[Layer],
    tokens: Sequence[int],
    prefill_chunk: int,
    taker: Taker,
    *,
    cuts: Sequence[int] = (),
    seed: Seed | None = None,
    keep: Callable[[Seed], None] | None = None,
    forward: Forward | None = None,
) -> tuple[torch.Tensor, int]:
    """Compute `tokens` by the `pieces` that `prefill_chunk` and `cuts` make of them.

    With a `seed` only what comes after it is computed, which must begin a piece. `keep` is called
    with the states of all of `tokens` when the last piece is computed. `forward` stands in for the
    model's own, which returns when its logits are on the host.

    Returns the last position's float32 logits, and when they were there (host CLOCK_MONOTONIC, ns),
    which is before the last piece's states are taken away.

    Raises:
        LocalProtocolError: a token is unknown, a layer's states or the seed's differ from its
            geometry, `cuts` are not those of this prompt, or no piece begins where the seed ends.
    """
    model.check_tokens(tokens)
    forward = forward or model.forward
    ids = torch.tensor([list(tokens)], dtype=torch.long, device=model.device)
    begin = seed.num_tokens if seed is not None else 0
    todo = [piece for piece in pieces(len(tokens), prefill_chunk, cuts) if piece[0] >= begin]
    if not todo or todo[0][0] != begin:
        raise LocalProtocolError(f"a seed of {begin} positions, where no piece begins")
    cache = TakenCache(model, layers, taker, seed, keep=keep is not None)
    for start, stop in todo:
        cache.last = stop == len(tokens)
        taker.begin(start, stop)
        logits = forward(ids[:, start:stop], cache)
        ready_ns = time.monotonic_ns()
        taker.end(start, stop, cache)
    if keep is not None:
        keep(cache.seed())
    return logits, ready_ns
