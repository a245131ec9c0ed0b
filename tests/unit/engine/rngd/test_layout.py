"""Tensors as chips store them, and rows of them back."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.rngd.layout import padded, rows, stored
from headrace.engine.rngd.signature import Tensor
from headrace.errors import LocalProtocolError


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Of any rank, padding, split and number of chips that a kernel may have."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    dtype = draw(st.sampled_from(["bfloat16", "float32", "int32", "bool", "float8_e4m3fn"]))
    if not draw(st.booleans()):
        return Tensor("x", tuple(shape), tuple(shape), dtype)
    whole = [size + draw(st.integers(0, 3)) for size in shape]
    if len(shape) == 1 or draw(st.booleans()):
        return Tensor("x", tuple(shape), tuple(whole), dtype, placed=True)
    split = draw(st.integers(1, len(shape) - 1))
    chips = draw(st.integers(1, 4))
    whole[split] += -whole[split] % chips
    return Tensor("x", tuple(shape), tuple(whole), dtype, split, chips, placed=True)


def counted(tensor: Tensor) -> torch.Tensor:
    """Elements that differ as far as the dtype allows."""
    numbers = torch.arange(1, math.prod(tensor.shape) + 1, dtype=torch.float32) % 61
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    return numbers.reshape(tensor.shape).to(dtype)


def plain(tensor: torch.Tensor) -> list[float]:
    return tensor.to(torch.float32).flatten().tolist()


@given(tensors(), st.data())
def test_rows_of_what_is_stored_are_the_rows_that_were_placed(
    tensor: Tensor, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, tensor.shape[0] - 1))
    stop = data.draw(st.integers(first, tensor.shape[0]))
    host = counted(tensor)
    kept = stored(tensor, host)
    assert tuple(kept.shape) == tensor.stored
    assert kept.dtype == host.dtype
    got = rows(tensor, kept, first, stop)
    assert tuple(got.shape) == (stop - first, *tensor.shape[1:])
    assert plain(got) == plain(host[first:stop])


@given(tensors())
def test_what_is_stored_is_its_own_and_padded_with_zeros(tensor: Tensor) -> None:
    host = counted(tensor)
    kept = stored(tensor, host)
    assert kept.data_ptr() != host.data_ptr()
    assert kept.is_contiguous()
    assert sum(plain(kept)) == sum(plain(host))
    assert plain(padded(tensor, host)[tuple(map(slice, tensor.shape))]) == plain(host)


def test_each_chip_has_its_part() -> None:
    tensor = Tensor("x", (2, 4), (2, 4), "int32", 1, 2, placed=True)
    kept = stored(tensor, torch.arange(8, dtype=torch.int32).reshape(2, 4))
    assert kept.tolist() == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_rows_may_come_without_the_axis_of_chips() -> None:
    """A result is given back with or without it; the elements are the same."""
    tensor = Tensor("x", (2, 3), (2, 4), "int32", placed=True)
    kept = torch.arange(8, dtype=torch.int32)
    assert rows(tensor, kept.reshape(2, 4), 1, 2).tolist() == [[4, 5, 6]]


@pytest.mark.parametrize(
    "host", [torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.float32)]
)
def test_another_shape_or_dtype_is_refused(host: torch.Tensor) -> None:
    with pytest.raises(LocalProtocolError, match=r"x: .* the kernel takes \(2, 3\) int32"):
        stored(Tensor("x", (2, 3), (2, 4), "int32", placed=True), host)


@pytest.mark.parametrize(
    ("tensor", "kept"),
    [
        (Tensor("x", (2, 3), (2, 3), "int32"), torch.zeros(2, 4)),
        (Tensor("x", (4, 3), (4, 3), "int32", 0, 2, placed=True), torch.zeros(2, 2, 3)),
    ],
)
def test_rows_that_cannot_be_told_are_refused(tensor: Tensor, kept: torch.Tensor) -> None:
    with pytest.raises(LocalProtocolError, match="x: rows of"):
        rows(tensor, kept, 0, 1)
