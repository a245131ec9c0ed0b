"""Chunks tile the pieces of a prompt, and their buckets hold what is computed and looked at."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.pieces import pieces
from headrace.engine.rngd.buckets import Buckets, choose
from headrace.errors import LocalProtocolError, Refused

LONGEST = 400


@st.composite
def prompts(draw: st.DrawFn) -> tuple[Buckets, list[tuple[int, int]]]:
    """Buckets, and the pieces of a prompt with any prefill chunk and cuts."""
    asked = draw(st.sets(st.integers(1, 96), min_size=1, max_size=5))
    num_tokens = draw(st.integers(1, LONGEST))
    cuts = sorted(draw(st.sets(st.integers(1, LONGEST), max_size=3)))
    chunk = draw(st.integers(0, num_tokens))
    return choose(sorted(asked), LONGEST, None), pieces(
        num_tokens, chunk, [cut for cut in cuts if cut < num_tokens]
    )


@given(prompts())
def test_chunks_tile_the_pieces(prompt: tuple[Buckets, list[tuple[int, int]]]) -> None:
    buckets, asked = prompt
    chunks = buckets.chunks(asked)
    assert chunks[0].start == 0
    assert chunks[-1].stop == asked[-1][1]
    assert all(before.stop == after.start for before, after in pairwise(chunks))
    edges = {chunk.start for chunk in chunks}
    assert {start for start, _ in asked} <= edges
    for chunk in chunks:
        inside = [start <= chunk.start and chunk.stop <= stop for start, stop in asked]
        assert inside.count(True) == 1


@given(prompts(), st.integers(96, 200))
def test_buckets_hold_what_is_needed(
    prompt: tuple[Buckets, list[tuple[int, int]]], window: int
) -> None:
    buckets, asked = prompt
    for chunk in buckets.chunks(asked):
        assert chunk.tokens in buckets.tokens
        assert chunk.length == chunk.stop - chunk.start <= chunk.tokens
        assert not any(chunk.length <= size < chunk.tokens for size in buckets.tokens)
        assert chunk.attention >= chunk.stop
        # the kernels take as many positions as tokens at the beginning, and more after it
        assert (chunk.attention == chunk.tokens) == (chunk.start == 0)
        assert chunk.attention >= chunk.tokens
        size = chunk.window_size(window)
        first = max(0, chunk.stop - size)
        assert first <= max(0, chunk.start - window + 1)
        assert first + size >= chunk.stop
        assert size >= min(chunk.attention, chunk.tokens + window)


@given(prompts())
def test_every_chunk_has_one_of_the_shapes_that_are_told(
    prompt: tuple[Buckets, list[tuple[int, int]]],
) -> None:
    buckets, asked = prompt
    shapes = [(chunk.tokens, chunk.attention) for chunk in buckets.shapes()]
    assert len(set(shapes)) == len(shapes)
    used = {(chunk.tokens, chunk.attention) for chunk in buckets.chunks(asked)}
    assert used <= set(shapes)


def test_the_number_of_attention_shapes_is_small() -> None:
    """Each is a kernel of its own, which a card compiles for minutes."""
    buckets = choose((16, 64), 1024, None)
    shapes = {
        (chunk.tokens, chunk.attention)
        for num_tokens in range(1, 1025)
        for chunk in buckets.chunks([(0, num_tokens)])
    }
    assert len([each for each in shapes if each[0] == 64]) <= 5
    assert len(shapes) <= 12


def test_buckets_are_sorted_and_those_above_a_window_left_out() -> None:
    assert choose((64, 16, 32), 128, None).tokens == (16, 32, 64)
    assert choose((64, 16, 32), 128, 32).tokens == (16, 32)


@pytest.mark.parametrize("asked", [(), (0,), (16, -1), (16, 16)])
def test_buckets_that_mean_nothing_are_refused(asked: tuple[int, ...]) -> None:
    with pytest.raises(Refused, match="must be positive and differ"):
        choose(asked, 128, None)


def test_buckets_that_a_models_kernels_do_not_take_are_left_out_and_some_must_be_left() -> None:
    assert choose((8, 16, 64), 128, 32, least=16).tokens == (16,)
    with pytest.raises(Refused, match="take 1 to 16 tokens"):
        choose((32, 64), 128, 16)
    with pytest.raises(Refused, match="take 32 to 32 tokens"):
        choose((8, 16, 64), 128, 32, least=32)


def test_a_prompt_past_the_caches_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="position 128, the engine holds 128"):
        choose((64,), 128, None).chunks([(0, 129)])
