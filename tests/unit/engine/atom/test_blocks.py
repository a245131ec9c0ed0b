"""Where a position lies: against a table that is filled position by position."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.atom.blocks import Rows, block_table, needed, rows_of, window_start
from headrace.engine.atom.caches import Cache
from headrace.errors import LocalProtocolError

full = st.builds(
    lambda rows, blocks: Cache("k", 0, 0, "full", blocks, 1, rows, 1, "float32"),
    st.integers(1, 9),
    st.integers(1, 5),
)
sliding = st.builds(
    lambda rows: Cache("k", 0, 0, "sliding", 3, 1, rows, 1, "float32"), st.integers(1, 20)
)


def places(cache: Cache, num_tokens: int) -> dict[int, tuple[int, int]]:
    """The block and the row of each position, from what decode does: it appends, and where a
    window is full it moves every row on by one.
    """
    if cache.kind == "full":
        return {at: divmod(at, cache.rows) for at in range(num_tokens)}
    window: list[int] = []
    for position in range(num_tokens):
        window = [*window, position][-cache.rows :]
    return {position: (0, row) for row, position in enumerate(window)}


@st.composite
def prompts(draw: st.DrawFn) -> tuple[Cache, int]:
    cache = draw(st.one_of(full, sliding))
    longest = cache.blocks * cache.rows if cache.kind == "full" else 60
    return cache, draw(st.integers(1, longest))


@given(prompts(), st.data())
def test_rows_are_where_decode_would_have_put_them(
    prompt: tuple[Cache, int], data: st.DataObject
) -> None:
    cache, num_tokens = prompt
    wanted = places(cache, num_tokens)
    first = window_start(cache, num_tokens)
    assert first == min(wanted)
    start = data.draw(st.integers(first, num_tokens - 1))
    stop = data.draw(st.integers(start + 1, num_tokens))
    found = {
        rows.start + at: (rows.block, rows.first + at)
        for rows in rows_of(cache, start, stop, num_tokens)
        for at in range(rows.num)
    }
    assert found == {at: wanted[at] for at in range(start, stop)}


@given(prompts())
def test_what_a_prompt_needs_of_a_block_begins_at_its_first_row(prompt: tuple[Cache, int]) -> None:
    """So a block is complete as soon as its first rows are, and each is there once."""
    rows = needed(*prompt)
    assert all(each.first == 0 and 0 < each.num <= prompt[0].rows for each in rows)
    assert len({each.block for each in rows}) == len(rows)
    assert sum(each.num for each in rows) == len(places(*prompt))


@pytest.mark.parametrize(("start", "stop"), [(3, 8), (4, 13), (7, 7), (8, 7), (-1, 5)])
def test_a_position_without_a_row_is_no_place(start: int, stop: int) -> None:
    """A window of 8 at the end of 12: nothing before position 4, nothing from 12 on."""
    cache = Cache("k", 0, 0, "sliding", 1, 1, 8, 1, "float32")
    with pytest.raises(LocalProtocolError, match=r"holds \[4, 12\)"):
        list(rows_of(cache, start, stop, 12))
    assert list(rows_of(cache, 4, 12, 12)) == [Rows(0, 0, 4, 8)]


def test_a_position_beyond_the_last_block_is_no_place() -> None:
    cache = Cache("k", 0, 0, "full", 2, 1, 8, 1, "float32")
    with pytest.raises(LocalProtocolError, match="ends before it"):
        list(rows_of(cache, 0, 17, 17))


def test_a_table_names_the_lanes_blocks_in_order() -> None:
    assert block_table(4, 9) == [0, 1, 2, 3]
    assert block_table(4, 2) == [0, 1, 1, 1]
    assert block_table(1, 1) == [0]
