"""Ranges of bytes by address, and which of them was last touched when."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Final

import numpy as np
import torch

from headrace.engine.device import Rows

Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges of addresses, ascending and apart."""

_MOST_RANGES: Final = 1 << 15  # of one tensor, beyond which its whole extent counts


def of_rows(rows: Rows, row_nbytes: int, num_rows: int) -> Ranges:
    """What one end of a strided copy touches."""
    if num_rows == 1 or rows.pitch == row_nbytes:
        return ((rows.address, rows.address + row_nbytes * num_rows),)
    begins = range(rows.address, rows.address + rows.pitch * num_rows, rows.pitch)
    return tuple((begin, begin + row_nbytes) for begin in begins)


def of_tensor(tensor: torch.Tensor) -> Ranges:
    """What a tensor's elements take up."""
    if tensor.numel() == 0:
        return ()
    run, itemsize, begin = tensor.element_size(), tensor.element_size(), tensor.data_ptr()
    dims = sorted(
        (stride * itemsize, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size > 1 and stride > 0
    )
    while dims and dims[0][0] <= run:
        stride, size = dims.pop(0)
        run = stride * (size - 1) + run
    count = int(np.prod([size for _, size in dims], dtype=np.int64))
    if count > _MOST_RANGES:
        return ((begin, begin + run + sum(stride * (size - 1) for stride, size in dims)),)
    offsets = np.zeros(1, dtype=np.int64)
    for stride, size in reversed(dims):
        offsets = np.add.outer(offsets, np.arange(size, dtype=np.int64) * stride).ravel()
    return joined((begin + int(at), begin + int(at) + run) for at in np.sort(offsets))


def joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Ascending ranges with those that meet or overlap made one."""
    made: list[tuple[int, int]] = []
    for begin, end in ranges:
        if made and begin <= made[-1][1]:
            made[-1] = (made[-1][0], max(end, made[-1][1]))
        else:
            made.append((begin, end))
    return tuple(made)


def overlap(some: Ranges, others: Ranges) -> tuple[int, int] | None:
    """The first bytes that both hold."""
    if not some or not others or some[-1][1] <= others[0][0] or others[-1][1] <= some[0][0]:
        return None
    ours, theirs = 0, 0
    while ours < len(some) and theirs < len(others):
        begin = max(some[ours][0], others[theirs][0])
        end = min(some[ours][1], others[theirs][1])
        if begin < end:
            return begin, end
        if some[ours][1] <= others[theirs][1]:
            ours += 1
        else:
            theirs += 1
    return None


class Marks:
    """A number for each byte that has one: the last put there counts."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._values: list[int] = []

    def put(self, begin: int, end: int, value: int) -> None:
        """Mark bytes [begin, end)."""
        first = self._cut_out(begin, end)
        self._begins.insert(first, begin)
        self._ends.insert(first, end)
        self._values.insert(first, value)

    def clear(self, begin: int, end: int) -> None:
        """Take the marks of bytes [begin, end) away."""
        self._cut_out(begin, end)

    def above(self, begin: int, end: int, value: int) -> tuple[int, int] | None:
        """The first marked bytes in [begin, end) whose number is greater than `value`."""
        first = bisect_right(self._ends, begin)
        for at in range(first, bisect_left(self._begins, end)):
            if self._values[at] > value:
                return max(begin, self._begins[at]), min(end, self._ends[at])
        return None

    def forget(self, value: int) -> None:
        """Take all marks away whose number is not greater than `value`."""
        kept = [at for at, mark in enumerate(self._values) if mark > value]
        self._begins = [self._begins[at] for at in kept]
        self._ends = [self._ends[at] for at in kept]
        self._values = [self._values[at] for at in kept]

    def __len__(self) -> int:
        return len(self._begins)

    def _cut_out(self, begin: int, end: int) -> int:
        """Clear [begin, end); returns where a mark of it belongs."""
        first = bisect_right(self._ends, begin)
        last = bisect_left(self._begins, end)
        if first >= last:
            return first
        pieces = []
        if self._begins[first] < begin:
            pieces.append((self._begins[first], begin, self._values[first]))
        if end < self._ends[last - 1]:
            pieces.append((end, self._ends[last - 1], self._values[last - 1]))
        self._begins[first:last] = [piece[0] for piece in pieces]
        self._ends[first:last] = [piece[1] for piece in pieces]
        self._values[first:last] = [piece[2] for piece in pieces]
        return first + bool(pieces and pieces[0][1] == begin)
