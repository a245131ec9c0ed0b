"""Ranges and marks against what they say, byte by byte."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.device import Rows
from headrace.testing.fake.ranges import Marks, Ranges, joined, of_rows, of_tensor, overlap


def as_set(ranges: Ranges) -> set[int]:
    return {at for begin, end in ranges for at in range(begin, end)}


def touched(tensor: torch.Tensor) -> set[int]:
    """Every byte of every element, by its indices."""
    found = set()
    strides, size = tensor.stride(), tensor.element_size()
    for index in itertools.product(*map(range, tensor.shape)):
        at = sum(i * stride for i, stride in zip(index, strides, strict=True)) * size
        found |= set(range(tensor.data_ptr() + at, tensor.data_ptr() + at + size))
    return found


BASE = torch.zeros(4, 6, 8, dtype=torch.int16)
VIEWS = {
    "all": BASE,
    "a head": BASE[2],
    "rows": BASE[:, 1:4],
    "one row": BASE[:, 5:6],
    "columns": BASE[:, :, 2:5],
    "every other": BASE[::2, ::3],
    "turned": BASE.permute(2, 0, 1)[3:],
    "an element": BASE[1, 2, 3],
    "expanded": BASE[:, :1].expand(4, 6, 8),
    "with a batch": BASE[None, :, 2:3],
}


@pytest.mark.parametrize("name", VIEWS)
def test_of_a_tensor(name: str) -> None:
    view = VIEWS[name]
    ranges = of_tensor(view)
    assert as_set(ranges) == touched(view)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(ranges))


def test_of_nothing() -> None:
    assert of_tensor(torch.zeros(0, 3)) == ()


def test_of_very_many_pieces_the_extent() -> None:
    column = torch.zeros(1 << 16, 2, dtype=torch.uint8)[:, :1]
    ((begin, end),) = of_tensor(column)
    assert (begin, end - begin) == (column.data_ptr(), 2 * (1 << 16) - 1)


def test_of_rows() -> None:
    assert of_rows(Rows(100, 10), 4, 3) == ((100, 104), (110, 114), (120, 124))
    assert of_rows(Rows(100, 4), 4, 3) == ((100, 112),)
    assert of_rows(Rows(100, 0), 4, 1) == ((100, 104),)


pairs = st.tuples(st.integers(0, 30), st.integers(1, 6)).map(lambda p: (p[0], p[0] + p[1]))
some_ranges = st.lists(pairs, max_size=6).map(lambda each: joined(sorted(each)))


@given(some_ranges, some_ranges)
def test_overlap(some: Ranges, others: Ranges) -> None:
    both = as_set(some) & as_set(others)
    found = overlap(some, others)
    assert (found is None) == (not both)
    if found is not None:
        assert found[0] == min(both)
        assert as_set((found,)) <= both


class Bytewise:
    """What `Marks` says it is."""

    def __init__(self) -> None:
        self.marks: dict[int, int] = {}

    def put(self, begin: int, end: int, value: int) -> None:
        self.marks.update(dict.fromkeys(range(begin, end), value))

    def clear(self, begin: int, end: int) -> None:
        for at in range(begin, end):
            self.marks.pop(at, None)

    def forget(self, value: int) -> None:
        self.marks = {at: mark for at, mark in self.marks.items() if mark > value}

    def above(self, begin: int, end: int, value: int) -> bool:
        return any(self.marks.get(at, -1) > value for at in range(begin, end))


steps = st.one_of(
    st.tuples(st.just("put"), pairs, st.integers(1, 9)),
    st.tuples(st.just("clear"), pairs, st.none()),
    st.tuples(st.just("forget"), st.none(), st.integers(1, 5)),
)


@given(st.lists(steps, max_size=25), pairs, st.integers(0, 9))
def test_marks(run: list[tuple[str, Any, Any]], asked: tuple[int, int], value: int) -> None:
    marks, model = Marks(), Bytewise()
    for name, where, number in run:
        arguments = [*(where or ()), *(() if number is None else (number,))]
        getattr(marks, name)(*arguments)
        getattr(model, name)(*arguments)
        for begin in range(37):
            for least in range(10):
                found = marks.above(begin, begin + 1, least)
                assert (found is not None) == model.above(begin, begin + 1, least)
    found = marks.above(*asked, value)
    assert (found is not None) == model.above(*asked, value)
    if found is not None:
        assert asked[0] <= found[0] < found[1] <= asked[1]
