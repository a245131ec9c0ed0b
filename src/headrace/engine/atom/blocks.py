"""Where positions lie in the caches of lane 0: which block, which row, and how many rows it needs.

    full       block p // rows, row p % rows; the lane's blocks are 0, 1, 2, ...
    sliding    block 0; with a prompt of n positions, row i holds position max(0, n - rows) + i

So a sliding window is placed by the length of the whole prompt, which must be known before its
first row is written. What came before the window has no row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from headrace.engine.atom.caches import Cache
from headrace.errors import LocalProtocolError

LANE = 0
"""The item of the compiled batch that is used."""


class Rows(NamedTuple):
    """Rows [first, first + num) of a block, which hold positions [start, start + num)."""

    block: int
    first: int
    start: int
    num: int


def window_start(cache: Cache, num_tokens: int) -> int:
    """The first position that a prompt has a row for."""
    return 0 if cache.kind == "full" else max(0, num_tokens - cache.rows)


def rows_of(cache: Cache, start: int, stop: int, num_tokens: int) -> Iterator[Rows]:
    """The rows of positions [start, stop) of a prompt, block by block.

    Raises:
        LocalProtocolError: a position has no row.
    """
    first = window_start(cache, num_tokens)
    if not first <= start < stop <= num_tokens:
        raise LocalProtocolError(
            f"positions [{start}, {stop}) of {cache.name}, which holds [{first}, {num_tokens})"
        )
    if cache.kind == "sliding":
        yield Rows(LANE, start - first, start, stop - start)
        return
    if stop > cache.blocks * cache.rows:
        raise LocalProtocolError(f"position {stop - 1} of {cache.name}, which ends before it")
    at = start
    while at < stop:
        block, row = divmod(at, cache.rows)
        num = min(cache.rows - row, stop - at)
        yield Rows(block, row, at, num)
        at += num


def needed(cache: Cache, num_tokens: int) -> list[Rows]:
    """All rows of a prompt: of each block that it has rows in, how many, from row 0 on."""
    return list(rows_of(cache, window_start(cache, num_tokens), num_tokens, num_tokens))


def block_table(max_blocks: int, num_blocks: int) -> list[int]:
    """The lane's blocks of full attention, as many as a table has.

    Where the card has fewer, the last one stands for those that are never reached.
    """
    return [min(at, num_blocks - 1) for at in range(max_blocks)]


def lane_blocks(cache: Cache, positions: int) -> range:
    """The blocks of a lane of so many positions; a sliding window has one."""
    return range(-(-positions // cache.rows) if cache.kind == "full" else 1)
