"""The memory of the device model: what is allocated, what is poison, who touches what when."""

from __future__ import annotations

import ctypes
import weakref
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from headrace.testing.fake.queues import Clock, Queue, Queues
from headrace.testing.fake.ranges import Marks, Ranges

POISON: Final = np.frombuffer(b"\xfb\x7f", dtype=np.uint8)
"""A NaN in every float that a cache is kept in, and not the one that an owner poisons with."""


@dataclass(frozen=True)
class Block:
    """Device memory, which belongs to the stream that it was allocated on."""

    begin: int
    end: int
    owner: Queue
    kept: bool  # asked for with `empty`: reads of it count too


class Memory:
    """All that is known of bytes by address; `fault` tells of what must never be."""

    def __init__(self, queues: Queues, fault: Callable[[str], None]) -> None:
        self._queues = queues
        self._fault = fault
        self._begins: list[int] = []
        self._blocks: list[Block] = []
        self._writes: dict[int, Marks] = {}
        self._reads: dict[int, Marks] = {}
        self.nbytes = 0

    # Allocation.

    def empty(self, nbytes: int, owner: Queue) -> torch.Tensor:
        """Fresh memory full of poison.

        It may have been anyone's until now, and its owner's queued work may still use it: another
        stream comes after that.
        """
        flat = torch.empty(nbytes, dtype=torch.uint8)
        where = ((flat.data_ptr(), flat.data_ptr() + nbytes),)
        poison(where)
        self.hold(flat, owner, kept=True)
        self.note(owner, self._queues.number(owner)[0], (), where)
        return flat

    def hold(self, tensor: torch.Tensor, owner: Queue, *, kept: bool = False) -> None:
        """The storage of a tensor is device memory until it is dropped; once more is harmless."""
        storage = tensor.untyped_storage()
        begin, nbytes = storage.data_ptr(), storage.nbytes()
        if nbytes == 0:
            return
        at = bisect_right(self._begins, begin)
        if self.block(begin) is not None:
            if kept:
                self._blocks[at - 1] = Block(begin, begin + nbytes, owner, kept)
            return
        self._begins.insert(at, begin)
        self._blocks.insert(at, Block(begin, begin + nbytes, owner, kept))
        self.nbytes += nbytes
        weakref.finalize(storage, self._dropped, begin).atexit = False

    def block(self, address: int) -> Block | None:
        """The device memory that an address lies in."""
        at = bisect_right(self._begins, address) - 1
        return self._blocks[at] if at >= 0 and address < self._blocks[at].end else None

    def block_of(self, ranges: Ranges, what: str) -> Block | None:
        """The block that all ranges lie in, None for host memory; a fault if they leave it."""
        block = self.block(ranges[0][0])
        if block is not None and ranges[-1][1] > block.end:
            self._fault(f"{what} reaches {ranges[-1][1] - block.end} bytes past its device memory")
        return block

    def _dropped(self, begin: int) -> None:
        at = bisect_right(self._begins, begin) - 1
        block = self._blocks.pop(at)
        del self._begins[at]
        self.nbytes -= block.end - block.begin
        where = ((block.begin, block.end),)
        late = self._unordered(where, self._queues.host, block.owner, reads=True)
        if late:
            self._fault(f"early free: device memory was dropped that {late}, not known to be done")
            return
        for marks in (*self._writes.values(), *self._reads.values()):
            marks.clear(block.begin, block.end)

    # Order.

    def check(self, what: str, queue: Queue, clock: Clock, reads: Ranges, writes: Ranges) -> None:
        """Tell a fault unless all that this work must come after is ordered before it."""
        late = self._unordered(reads, clock, queue, reads=False)
        if late:
            self._fault(f"race: {what} on {queue} reads bytes that {late}, in no order")
        late = self._unordered(writes, clock, queue, reads=True)
        if late:
            self._fault(f"race: {what} on {queue} overwrites bytes that {late}, in no order")

    def note(self, queue: Queue, number: int, reads: Ranges, writes: Ranges) -> None:
        """This work touched these bytes last."""
        reads = tuple(each for each in reads if self._counts(each[0], queue))
        for marks, ranges in ((self._reads, reads), (self._writes, writes)):
            mine = marks.setdefault(queue.index, Marks())
            if ranges and len(mine) > 256:
                mine.forget(self._queues.host.get(queue.index, 0))
            for begin, end in ranges:
                mine.put(begin, end, number)

    def _counts(self, address: int, queue: Queue) -> bool:
        """Whether a read counts: not by the stream whose torch call made what is read."""
        block = self.block(address)
        return block is None or block.kept or block.owner is not queue

    def in_use(self, begin: int, end: int) -> str:
        """Which work the host does not know to be done with these bytes; empty if none."""
        nobody = Queue(-1, "the host")
        return self._unordered(((begin, end),), self._queues.host, nobody, reads=True)

    def _unordered(self, ranges: Ranges, clock: Clock, queue: Queue, *, reads: bool) -> str:
        kinds = [("writes", self._writes), *([("reads", self._reads)] if reads else [])]
        for kind, by_stream in kinds:
            for index, marks in by_stream.items():
                if index == queue.index:
                    continue
                for begin, end in ranges:
                    if marks.above(begin, end, clock.get(index, 0)):
                        return f"{self._queues.streams[index]} {kind}"
        return ""


def poison(ranges: Ranges) -> None:
    """Fill bytes with poison."""
    for begin, end in ranges:
        first = begin % 2
        size = end - begin + first
        if size <= 1 << 12:
            ctypes.memmove(begin, (_BLOCK[first:])[: end - begin].tobytes(), end - begin)
        else:
            at(begin, end - begin)[:] = np.resize(np.roll(POISON, -first), end - begin)


def at(address: int, nbytes: int) -> Any:
    """The bytes at an address, a numpy array of uint8; nothing is kept alive."""
    raw = (ctypes.c_ubyte * nbytes).from_address(address)
    return np.frombuffer(memoryview(raw), dtype=np.uint8)


_BLOCK: Final = np.resize(POISON, 1 << 13)
