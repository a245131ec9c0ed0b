"""A fake card: its memory, the private calls to and from it, and what must not be done with it.

All calls are synchronous. A mirror is read, or written, while the call lasts and at no other time.
What a real card would leave to chance is a `Fault` here: it is raised, and kept in `faults` for the
case that somebody swallows it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, TypeAlias

import torch

from headrace.testing.fake_rebellions.compiled import CacheMeta
from headrace.testing.fake_rebellions.memory import Memory, NumberFormat

ALIGNMENT: Final = 4096
PRIVATE_CALLS: Final = (
    "_update_kv_cache",
    "_fetch_kv_cache",
    "_copy_kv_cache",
    "_get_kv_cache_size",
)

Place: TypeAlias = tuple[str, int]
"""A block of a cache: its name and its number."""


class Fault(Exception):
    """The fake card was misused."""


class Call(NamedTuple):
    """One call, as the log has it. Of a decode or a prefill, offset and size are positions."""

    call: str
    name: str = ""
    block: int = 0
    offset: int = 0
    size: int = 0


@dataclass(kw_only=True, eq=False)
class Knobs:
    """In what a card may differ from another one.

    number_format: of mirrors and memory. sub_blocks: whether parts of a block can be moved; if not,
    such calls are refused. needs_warm_up: what becomes of calls before anything was computed, since
    the caches have no memory until then. leaks: a decode step sees one row too many of the values.
    sliding: where a position is in a window. bidirectional_prefill: each position of a prefill
    attends to all of it, which must fit into a chunk, as where the vendor compiles a mask and
    position ids without a phase for images. calls: the private calls that exist.
    update_nbytes_per_s, step_s: a paced card takes so long for moving bytes, and at least so long
    for a decode step; None for as fast as it goes. sleep: how it waits. npu_name: what a card is
    called. num_devices: how many there are.
    """

    number_format: NumberFormat = "declared"
    sub_blocks: bool = False
    needs_warm_up: Literal["raises", "loses"] | None = None
    leaks: bool = False
    sliding: Literal["by_position", "ring"] = "by_position"
    bidirectional_prefill: bool = False
    calls: Sequence[str] = PRIVATE_CALLS
    update_nbytes_per_s: float | None = None
    step_s: float | None = None
    sleep: Callable[[float], None] = time.sleep
    npu_name: str = "RBLN-CA25"
    num_devices: int = 1


@dataclass
class _Due:
    """Something that is to happen once, after `after` more calls."""

    after: int

    def comes(self) -> bool:
        self.after -= 1
        return self.after < 0


@dataclass
class _Sequence:
    """The last decode step of an item of the batch, and the blocks that were updated since."""

    position: int
    updated: set[Place] = field(default_factory=set)


class Card:
    """One device.

    faults: each misuse. counts: what was done. log: every call, in order.
    """

    def __init__(self, knobs: Knobs) -> None:
        self.knobs = knobs
        self.faults: list[str] = []
        self.log: list[Call] = []
        self.counts = dict.fromkeys(
            ("updates", "updated_nbytes", "fetches", "prefills", "decodes", "warm_ups"), 0
        )
        self.memory = Memory((), knobs.number_format)
        self._metas: Sequence[CacheMeta] = ()
        self._thread: int | None = None
        self._inside = ""
        self._warm = False
        self._sequences: dict[int, _Sequence] = {}
        self._failing_update: _Due | None = None
        self._failing_decode: _Due | None = None
        self._stale: _Due | None = None

    def fail_update(self, after: int = 0) -> None:
        """`after` more updates work; the next raises what a driver would, and its block is lost."""
        self._failing_update = _Due(after)

    def fail_decode(self, after: int = 0) -> None:
        """`after` more decode steps work, and the next one raises what a driver would."""
        self._failing_decode = _Due(after)

    def go_stale(self, after: int = 0) -> None:
        """`after` more updates work; from then on all return as ever, and change nothing."""
        self._stale = _Due(after)

    def fault(self, text: str) -> Fault:
        """A misuse, to be raised."""
        self.faults.append(text)
        return Fault(text)

    def install(self, metas: Sequence[CacheMeta]) -> None:
        """A model was loaded: its caches are all that the card has."""
        self._metas = metas
        self.memory = Memory(metas, self.knobs.number_format)
        self._warm = self.knobs.needs_warm_up is None
        self._sequences.clear()

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """A call of the vendor's: by the one thread, and one at a time."""
        mine = threading.get_ident()
        self._thread = self._thread or mine
        if mine != self._thread:
            raise self.fault(f"{name} by a second thread")
        if self._inside:
            raise self.fault(f"{name} within {self._inside}")
        self._inside = name
        try:
            yield
        finally:
            self._inside = ""

    def update(self, mirror: torch.Tensor, block: int, offset: int, size: int, name: str) -> None:
        """`_update_kv_cache`: rows of a block of a mirror to the card. Raises: RuntimeError."""
        with self.call("_update_kv_cache"):
            rows = self._moved("update", mirror, block, offset, size, name)
            self._mark_updated((name, block))
            if self._failing_update is not None and self._failing_update.comes():
                self._failing_update = None
                self.memory.lose(name, block)
                raise RuntimeError("fake driver: the transfer to the card failed")
            changes = self._warm and not (self._stale is not None and self._stale.comes())
            started = time.monotonic()
            nbytes = mirror[block, :, rows].numel() * mirror.element_size()
            if changes:
                self.memory.update(name, mirror, block, rows)
            self.counts["updates"] += 1
            self.counts["updated_nbytes"] += nbytes
            self._wait_for_bytes(nbytes, started)

    def fetch(self, mirror: torch.Tensor, block: int, offset: int, size: int, name: str) -> None:
        """`_fetch_kv_cache`: rows of a block from the card to a mirror. Raises: RuntimeError."""
        with self.call("_fetch_kv_cache"):
            rows = self._moved("fetch", mirror, block, offset, size, name)
            started = time.monotonic()
            nbytes = self.memory.fetch(name, mirror, block, rows)
            self.counts["fetches"] += 1
            self._wait_for_bytes(nbytes, started)

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """`_copy_kv_cache`: the first rows of a block to another, in all full-attention caches."""
        with self.call("_copy_kv_cache"):
            self.log.append(Call("copy", "", target, source, num_tokens))
            for name in self._full_names():
                blocks, _, rows, _ = self.memory.meta(name).shape
                if not (0 <= source < blocks and 0 <= target < blocks and num_tokens <= rows):
                    raise self.fault(f"{num_tokens} rows from block {source} to {target}")
                self.memory.copy_block(name, source, target, num_tokens)
                self._mark_updated((name, target))

    def size(self, name: str | None = None) -> int:
        """`_get_kv_cache_size`: bytes of a cache, or of all."""
        with self.call("_get_kv_cache_size"):
            names = self.memory.names if name is None else [self._known(name)]
            return sum(self.memory.host_nbytes(each) for each in names)

    def begin_prefill(self, start: int, stop: int) -> None:
        """Positions [start, stop) are about to be computed."""
        self.log.append(Call("prefill", offset=start, size=stop - start))
        self.counts["prefills"] += 1
        self._warm_up()
        self._sequences.clear()

    def begin_decode(self, item: int, position: int, blocks: frozenset[Place]) -> None:
        """A step of a sequence whose past is in `blocks`. Raises: Fault, RuntimeError."""
        self.log.append(Call("decode", offset=position, size=1))
        if self._failing_decode is not None and self._failing_decode.comes():
            self._failing_decode = None
            raise RuntimeError("fake driver: the card did not answer")
        last = self._sequences.get(item)
        self._sequences[item] = _Sequence(position)
        if last is not None and position == last.position + 1:
            self._check_undisturbed(last, blocks)
        self.counts["decodes"] += 1
        self._warm_up()

    def end_decode(self, started: float) -> None:
        """The step is computed; a paced card takes its time."""
        if self.knobs.step_s is not None:
            self._wait(self.knobs.step_s, started)

    def _check_undisturbed(self, last: _Sequence, blocks: frozenset[Place]) -> None:
        """A sequence goes on where the last step was. Another one that is as long as that may be in
        the same blocks, and then each of them was written anew.
        """
        touched = last.updated & blocks
        if touched and not blocks <= last.updated:
            raise self.fault(
                f"{sorted(touched)[0]} was updated between the decode steps at positions "
                f"{last.position} and {last.position + 1}"
            )

    def _mark_updated(self, place: Place) -> None:
        for sequence in self._sequences.values():
            sequence.updated.add(place)

    def _warm_up(self) -> None:
        if not self._warm:
            self._warm = True
            self.counts["warm_ups"] += 1

    def _full_names(self) -> list[str]:
        return [meta.name for meta in self._metas if meta.is_full]

    def _known(self, name: str) -> str:
        if name not in self.memory:
            raise self.fault(f"no cache is named {name!r}")
        return name

    def _moved(
        self, call: str, mirror: torch.Tensor, block: int, offset: int, size: int, name: str
    ) -> slice:
        """The rows that a call moves, once all that it names is as it must be."""
        self.log.append(Call(call, name, block, offset, size))
        shape = tuple(self.memory.meta(self._known(name)).shape)
        itemsize = self.memory.host_itemsize(name)
        if mirror.data_ptr() % ALIGNMENT:
            raise self.fault(f"a mirror of {name} at no multiple of {ALIGNMENT}")
        if tuple(mirror.shape) != shape or not mirror.is_contiguous():
            raise self.fault(f"a mirror {tuple(mirror.shape)} of {name}, which is {shape}")
        if mirror.element_size() != itemsize:
            raise self.fault(f"a mirror of {name} in {mirror.dtype}, its elements have {itemsize}")
        if not 0 <= block < shape[0]:
            raise self.fault(f"block {block} of {name}, which has {shape[0]}")
        if offset < 0 or size < 1 or offset + size > shape[2]:
            raise self.fault(f"rows [{offset}, {offset + size}) of {name}, a block has {shape[2]}")
        if (offset, size) != (0, shape[2]) and not self.knobs.sub_blocks:
            raise RuntimeError("fake driver: only whole blocks can be moved")
        if not self._warm and self.knobs.needs_warm_up == "raises":
            raise RuntimeError("fake driver: the caches have no memory before the first run")
        return slice(offset, offset + size)

    def _wait_for_bytes(self, nbytes: int, started: float) -> None:
        if self.knobs.update_nbytes_per_s is not None:
            self._wait(nbytes / self.knobs.update_nbytes_per_s, started)

    def _wait(self, seconds: float, started: float) -> None:
        left = seconds - (time.monotonic() - started)
        if left > 0:
            self.knobs.sleep(left)
