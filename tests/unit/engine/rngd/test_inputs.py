"""What a chunk scatters, gathers and lets be seen, against a statement without tables."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.rngd.buckets import Chunk, choose
from headrace.engine.rngd.inputs import ChunkInputs, attention_inputs, token_inputs
from headrace.engine.rngd.signature import Tensor

LONGEST = 200


@st.composite
def chunk_lists(draw: st.DrawFn) -> tuple[list[Chunk], int | None]:
    """All chunks of a prompt, and a window, None for full attention."""
    window = draw(st.none() | st.integers(1, 64))
    sizes = draw(st.sets(st.integers(1, window or 64), min_size=1, max_size=3))
    cut = draw(st.integers(1, LONGEST - 1))
    stop = draw(st.integers(cut + 1, LONGEST))
    asked = draw(st.sampled_from([[(0, stop)], [(0, cut), (cut, stop)]]))
    return choose(sorted(sizes), LONGEST, window).chunks(asked), window


@given(chunk_lists())
def test_every_position_is_scattered_once_to_the_slot_after_it(
    prompt: tuple[list[Chunk], int | None],
) -> None:
    chunks, _ = prompt
    num_tokens = chunks[-1].stop
    tokens = torch.arange(1000, 1000 + num_tokens, dtype=torch.int32)
    written: Counter[int] = Counter()
    for chunk in chunks:
        given_inputs = token_inputs(tokens, chunk)
        ids, positions = given_inputs["input_ids"], given_inputs["position_ids"]
        slots = given_inputs["kv_scatter_index"]
        assert (ids.shape, positions.shape) == ((chunk.tokens,), (chunk.tokens,))
        assert slots.shape == (1, chunk.tokens)
        assert {each.dtype for each in given_inputs.values()} == {torch.int32}
        for row in range(chunk.tokens):
            slot = int(slots[0, row])
            if row >= chunk.length:
                assert slot == 0
                continue
            assert slot == int(positions[row]) + 1 == chunk.start + row + 1
            assert int(ids[row]) == 1000 + chunk.start + row
            written[slot] += 1
    assert written == Counter(range(1, num_tokens + 1))


@given(chunk_lists())
def test_a_position_sees_those_before_it_in_its_window_and_no_padding(
    prompt: tuple[list[Chunk], int | None],
) -> None:
    chunks, window = prompt
    for chunk in chunks:
        size = chunk.attention if window is None else chunk.window_size(window)
        given_inputs = attention_inputs(chunk, size, window)
        slots, mask = given_inputs["kv_gather_index"], given_inputs["attention_mask"]
        assert (slots.dtype, mask.dtype) == (torch.int32, torch.bool)
        assert (slots.shape, mask.shape) == ((1, size), (1, chunk.tokens, size))
        for row in range(chunk.length):
            at = chunk.start + row
            seen = [slot - 1 for slot in slots[0, mask[0, row]].tolist()]
            assert seen == list(range(0 if window is None else max(0, at - window + 1), at + 1))


@given(chunk_lists())
def test_every_row_sees_something_that_is_real(prompt: tuple[list[Chunk], int | None]) -> None:
    """A row that sees nothing, or only padding, is no number, and poisons slot 0."""
    chunks, window = prompt
    for chunk in chunks:
        size = chunk.attention if window is None else chunk.window_size(window)
        given_inputs = attention_inputs(chunk, size, window)
        for row in range(chunk.tokens):
            seen = given_inputs["kv_gather_index"][0, given_inputs["attention_mask"][0, row]]
            assert len(seen) > 0
            assert all(0 < slot <= chunk.stop for slot in seen.tolist())


class Placing:
    """Counts what is placed."""

    def __init__(self) -> None:
        self.placed: list[str] = []

    def place(self, tensor: Tensor, host: torch.Tensor) -> torch.Tensor:
        self.placed.append(tensor.name)
        return host.clone()


def test_inputs_are_placed_once_for_each_stored_form() -> None:
    executor = Placing()
    inputs = ChunkInputs(executor, {"ids": torch.zeros(4)})  # type: ignore[arg-type]
    plain = Tensor("ids", (4,), (4,), "float32")
    other = Tensor("ids", (4,), (4,), "float32", placed=True)
    assert inputs.place(plain) is inputs.place(plain)
    assert inputs.place(other) is not inputs.place(plain)
    assert executor.placed == ["ids", "ids"]
    assert "ids" in inputs
    assert "slots" not in inputs
    with pytest.raises(KeyError):
        inputs.place(Tensor("slots", (4,), (4,), "float32"))
