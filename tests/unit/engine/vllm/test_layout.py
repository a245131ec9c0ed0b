"""Where a backend's op puts a cell is learned from its writes, and anything odd is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor as T  # noqa: N817

from headrace.engine.vllm.layout import BlockOrder, Write, learn
from headrace.errors import Refused
from tests.unit.engine.vllm.made_up import place_of, write_cells

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS, SIZE, DIM = 2, 4, 6
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def learned(write: Write, dtype: torch.dtype = torch.float32) -> BlockOrder:
    return learn(write, HEADS, SIZE, DIM, dtype)


def orderly(places: torch.Tensor) -> Write:
    """An op that puts the elements of a block where `places` [2, size, head_dim] says."""

    def write(keys: T, values: T, cache: T, cells: T) -> None:
        flat = cache.view(cache.shape[0], cache.shape[1], -1)
        for part, states in enumerate((keys, values)):
            for row, cell in enumerate(cells.tolist()):
                flat[cell // SIZE][:, places[part, cell % SIZE]] = states[row]

    return write


def shuffled(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(2 * SIZE * DIM, generator=generator).view(2, SIZE, DIM)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("places", [place_of(SIZE, DIM), shuffled(1), shuffled(2)])
def test_any_fixed_order_is_learned(places: torch.Tensor, dtype: torch.dtype) -> None:
    write = orderly(places)
    order = learned(write, dtype)
    cache = torch.zeros((5, HEADS, SIZE, 2 * DIM), dtype=dtype)
    cells = torch.tensor([17, 3, 4, 12, 19, 0])
    states = [torch.randn(6, HEADS, DIM).to(dtype) for _ in "kv"]
    write(states[0], states[1], cache, cells)
    for part in (0, 1):
        rows = order.read(cache, part, cells)
        assert torch.equal(rows, states[part])
        assert rows.shape == (6, HEADS, DIM)
        rows.zero_()
        assert torch.equal(order.read(cache, part, cells[2:4]), states[part][2:4]), "a copy"
        assert torch.equal(order.read(cache, part, cells[[5, 5]]), states[part][[5, 5]])


def test_more_elements_than_one_digit_tells() -> None:
    """The cells of a block of 32 x 64 take three digits of their number, also in bfloat16."""
    calls = 0

    def write(keys: T, values: T, cache: T, cells: T) -> None:
        nonlocal calls
        calls += 1
        assert float(keys.float().abs().max()) < 128
        write_cells(keys, values, cache, cells)

    order = learn(write, 1, 32, 64, torch.bfloat16)
    assert calls == 3, "two digits, and the look at the whole"
    cache = torch.zeros((2, 1, 32, 128), dtype=torch.bfloat16)
    states = torch.randn(1, 1, 64).to(torch.bfloat16)
    write_cells(states, states * 2, cache, torch.tensor([37]))
    assert torch.equal(order.read(cache, 1, torch.tensor([37])), states * 2)


def test_a_block_size_of_one() -> None:
    order = learn(write_cells, HEADS, 1, DIM, torch.float32)
    cache = torch.zeros((3, HEADS, 1, 2 * DIM))
    keys = torch.randn(1, HEADS, DIM)
    write_cells(keys, -keys, cache, torch.tensor([2]))
    assert torch.equal(order.read(cache, 1, torch.tensor([2])), -keys)


# What is refused.


def nothing(keys: T, values: T, cache: T, cells: T) -> None:
    """An op that keeps nothing."""


def keys_only(keys: T, values: T, cache: T, cells: T) -> None:
    write_cells(keys, torch.zeros_like(values), cache, cells)


def doubled(keys: T, values: T, cache: T, cells: T) -> None:
    write_cells(keys * 2, values * 2, cache, cells)


def rounded(keys: T, values: T, cache: T, cells: T) -> None:
    """Whole numbers come through as they are, and others do not."""
    write_cells(keys.round(), values.round(), cache, cells)


def by_block(keys: T, values: T, cache: T, cells: T) -> None:
    """Even blocks lie the other way round."""
    for row, cell in enumerate(cells.tolist()):
        states = (keys, values) if cell // SIZE % 2 else (values, keys)
        first, second = (each[row : row + 1] for each in states)
        write_cells(first, second, cache, torch.tensor([cell]))


def by_head(keys: T, values: T, cache: T, cells: T) -> None:
    """The second head lies the other way round."""
    swapped = [keys.clone(), values.clone()]
    swapped[0][:, 1], swapped[1][:, 1] = values[:, 1], keys[:, 1]
    write_cells(swapped[0], swapped[1], cache, cells)


def across_heads(keys: T, values: T, cache: T, cells: T) -> None:
    write_cells(keys.flip(1), values.flip(1), cache, cells)


def beside(keys: T, values: T, cache: T, cells: T) -> None:
    """What is not asked for is written, too."""
    write_cells(keys, values, cache, cells)
    other = min(set(range(cache.shape[0] * SIZE)) - set(cells.tolist()))
    write_cells(keys[:1], values[:1], cache, torch.tensor([other]))


def with_a_neighbour(keys: T, values: T, cache: T, cells: T) -> None:
    """Only whole blocks are written as they are told."""
    if len(cells) % SIZE:
        cells = cells.flip(0)
    write_cells(keys, values, cache, cells)


@pytest.mark.parametrize("op", [nothing, keys_only, doubled])
def test_no_order_at_all_is_refused(op: Write) -> None:
    with pytest.raises(Refused, match="keeps no plain order") as told:
        learned(op)
    assert told.value.field == "attention backend"


@pytest.mark.parametrize("op", [rounded, by_block, by_head, across_heads, beside, with_a_neighbour])
def test_an_order_that_is_not_the_same_everywhere_is_refused(op: Write) -> None:
    with pytest.raises(Refused, match=r"changes what is written to it, or orders blocks") as told:
        learned(op)
    assert told.value.field == "attention backend"


def test_two_elements_in_one_place_are_refused() -> None:
    places = place_of(SIZE, DIM).clone()
    places[0, 0, 0] = places[0, 0, 1]
    with pytest.raises(Refused, match="keeps no plain order"):
        learned(orderly(places))
