"""Poison: a pattern put where cells are to be written, and looked for where they must have been.

A digest tells that the bytes as landed are those that were stamped. It cannot tell that they were
stamped before they were written, when what is missing then comes after the import. So the place is
filled with poison first: in the slot before its lease is granted, and where asked for in the
reserved storage before the first import. A row of it that is found later was not written in time.

The pattern is the two bytes F5 7F, over and over. In float16, bfloat16, float32 and float64 that is
a NaN with a payload that no device makes (what arithmetic yields has the quiet bit and, by vendor,
none or all of the others), so no row of a cache that was computed holds it. In one-byte types it is
a row that goes to and fro between two values; what is looked for is one whole row of a head, and
never fewer than eight bytes, which other data holds by chance with 2^-64 at each place.

So rows of fewer than eight bytes are seen only where neighbours are missing as well, and a row that
was written in part is left to the digest. A source that writes old bytes over the poison by itself
is not seen: to these two it is a source that wrote.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from headrace.backends.base import SlotView
from headrace.engine.host import HostMemory
from headrace.plan import Copy, Plan

_UNIT: Final = b"\xf5\x7f"
_BLOCK_NBYTES: Final = 256 << 10
_BLOCK: Final = _UNIT * (_BLOCK_NBYTES // len(_UNIT))
MIN_NEEDLE_NBYTES: Final = 8
_MOST_RUNS: Final = 4


def kv_range(plan: Plan) -> tuple[int, int]:
    """The bytes [begin, end) of a slot in which the plan's cells lie."""
    ends = [
        copy.source.offset + (copy.source.rows - 1) * copy.source.stride + copy.source.row_nbytes
        for copy in plan.copies(plan.whole())
    ]
    return plan.slot.kv_offset, max(ends, default=plan.slot.kv_offset)


def fill(buffer: memoryview) -> None:
    """Fill `buffer` with poison; it begins at an even offset of its slot."""
    for at in range(0, len(buffer), _BLOCK_NBYTES):
        place = buffer[at : at + _BLOCK_NBYTES]
        place[:] = _BLOCK[: len(place)]


class PoisonMemory:
    """Private memory that looks like a slot full of poison, for filling reserved storage from.

    It is made at the largest size that is asked for, and serves all requests.
    """

    def __init__(self) -> None:
        self._memory: HostMemory | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that it takes by now."""
        return 0 if self._memory is None else self._memory.nbytes

    def make(self, plan: Plan) -> HostMemory:
        """Have enough for a plan. Raises: Refused when memory is short."""
        _, end = kv_range(plan)
        memory = self._memory
        if memory is None or memory.nbytes < end:
            memory = self._memory = HostMemory(end, "a slot full of poison")
            fill(memory.view)
        return memory

    def as_slot(self, plan: Plan) -> SlotView:
        """The memory as a slot of a plan. Raises: Refused when memory is short."""
        memory = self.make(plan)
        return SlotView(memory.view, memory.address, plan.layout)


def poison_in(plan: Plan, copy: Copy, cells: memoryview | bytes) -> str:
    """Where the bytes of a copy's cells, in the plan's layout, hold poison; empty if nowhere.

    The text names the layer, the part and the positions, such as "layer 3 part k positions [4, 8)".
    """
    row_nbytes = _row_nbytes(plan, copy)
    at = _find(cells, _needle(row_nbytes))
    if at < 0:
        return ""
    positions = sorted(set(_poisoned(plan, copy, cells))) or [_position(plan, copy, at)]
    runs = list(_runs(positions))
    shown = ", ".join(f"[{start}, {stop})" for start, stop in runs[:_MOST_RUNS])
    more = f" and {len(runs) - _MOST_RUNS} more stretches" if len(runs) > _MOST_RUNS else ""
    name = plan.layers[copy.layer].parts[copy.part].name
    return f"layer {copy.layer} part {name} positions {shown}{more}"


def _needle(row_nbytes: int) -> bytes:
    """A row of poison that every row of it contains, at whichever of its two bytes it begins."""
    nbytes = max(row_nbytes - row_nbytes % 2, MIN_NEEDLE_NBYTES)
    return _UNIT * (nbytes // len(_UNIT))


def _find(cells: memoryview | bytes, needle: bytes) -> int:
    """The first place of `needle`; a view is taken block by block, since only bytes are searched.

    The search of `bytes` runs at several GB/s.
    """
    if isinstance(cells, bytes):
        return cells.find(needle)
    overlap = len(needle) - 1
    for at in range(0, len(cells), _BLOCK_NBYTES):
        found = bytes(cells[at : at + _BLOCK_NBYTES + overlap]).find(needle)
        if found >= 0:
            return at + found
    return -1


def _row_nbytes(plan: Plan, copy: Copy) -> int:
    """Bytes of one head at one position."""
    return plan.layers[copy.layer].parts[copy.part].head_nbytes


def _poisoned(plan: Plan, copy: Copy, cells: memoryview | bytes) -> Iterator[int]:
    """Positions of which a head's row is poison, in any order and perhaps more than once."""
    nbytes = _row_nbytes(plan, copy)
    rows = [(_UNIT * (nbytes // 2 + 1))[begin : begin + nbytes] for begin in (0, 1)]
    for at in range(0, len(cells), nbytes):
        if cells[at : at + nbytes] in rows:
            yield _position(plan, copy, at)


def _position(plan: Plan, copy: Copy, at: int) -> int:
    """The position whose row the byte `at` of a copy's cells belongs to."""
    row = at // _row_nbytes(plan, copy)
    count = copy.stop - copy.start
    if plan.layout == "head_major":
        return copy.start + row % count
    return copy.start + row // plan.layers[copy.layer].parts[copy.part].heads


def _runs(positions: list[int]) -> Iterator[tuple[int, int]]:
    start = previous = positions[0]
    for position in positions[1:]:
        if position != previous + 1:
            yield start, previous + 1
            start = position
        previous = position
    yield start, previous + 1
