"""Signatures out of kernel texts: each form of a tensor, and every text that is not understood."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.rngd.signature import DTYPES, Tensor, read_signature
from headrace.errors import BackendUnavailable


def text(arguments: str, results: str = "[N]/f32", axes: str = "N=4, M=6, P=8, G=2") -> str:
    lines = ",\n    ".join(arguments.split("; "))
    inner = "def inner<>(\n    x: [9]/f32\n) -> [9]/f32:\n    pass\n"
    return f"{inner}\ndef outer<{axes}>(\n    {lines}\n) -> {results}:\n    x: [N]/f32\n"


def only(argument: str) -> Tensor:
    (tensor,) = read_signature(text(argument)).arguments
    return tensor


def test_the_last_definition_is_read_in_order() -> None:
    read = read_signature(text("a: [N, M]/bf16; b: [M]/i32", "[N]/f32, [N, M]/bool"))
    assert read.name == "outer"
    assert [(each.name, each.shape, each.dtype) for each in read.arguments] == [
        ("a", (4, 6), "bfloat16"),
        ("b", (6,), "int32"),
    ]
    assert [(each.shape, each.dtype) for each in read.results] == [
        ((4,), "float32"),
        ((4, 6), "bool"),
    ]
    assert read.argument("b") is read.arguments[1]
    assert math.prod(read.arguments[0].shape) == 24


def test_a_plain_tensor_is_stored_as_it_is() -> None:
    tensor = only("a: [N, M]/bf16")
    assert (tensor.padded, tensor.stored, tensor.placed) == ((4, 6), (4, 6), False)


def test_a_tensor_that_every_chip_has_gets_a_leading_axis() -> None:
    tensor = only("a: dram([Broadcast] | [N, M])/f8_e4 @ original=[N, M]")
    assert (tensor.stored, tensor.split, tensor.chips) == ((1, 4, 6), None, 1)
    assert tensor.dtype == "float8_e4m3fn"


def test_a_padded_tensor_tells_both_shapes() -> None:
    tensor = only("a: dram([Broadcast] | [N @ P, M])/bf16 @ original=[N, M]")
    assert (tensor.shape, tensor.padded, tensor.stored) == ((4, 6), (8, 6), (1, 8, 6))


def test_a_split_tensor_lies_in_equal_parts() -> None:
    tensor = only("a: dram([P @ 8 / 2] | [N, P @ 8 % 2])/bf16 @ original=[N, P]")
    assert (tensor.split, tensor.chips) == (1, 4)
    assert tensor.stored == (4, 4, 2)


def test_a_tensor_may_be_padded_and_split() -> None:
    tensor = only("a: dram([N @ P / 2] | [(N @ P % 2), M])/bf16 @ original=[N, M]")
    assert (tensor.shape, tensor.padded, tensor.stored) == ((4, 6), (8, 6), (4, 2, 6))


def test_several_split_results_are_told_apart() -> None:
    split = "dram([P @ 8 / 2] | [N, P @ 8 % 2])/bf16 @ original=[N, P]"
    read = read_signature(text("a: [N]/f32", f"{split}, [N, M]/f32, {split}"))
    assert [each.shape for each in read.results] == [(4, 8), (4, 6), (4, 8)]


def test_what_is_no_tensor_is_left_out_and_numbers_are_axes() -> None:
    read = read_signature(text("N: Axis; a: [3, N]/f32"))
    assert [each.shape for each in read.arguments] == [(3, 4)]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.sampled_from(sorted(DTYPES)))
def test_any_plain_shape_and_type_is_read(shape: list[int], dtype: str) -> None:
    axes = ", ".join(f"X{at}={size}" for at, size in enumerate(shape))
    names = ", ".join(f"X{at}" for at in range(len(shape)))
    (tensor,) = read_signature(text(f"a: [{names}]/{dtype}", "[X0]/f32", axes)).arguments
    assert (tensor.shape, tensor.dtype) == (tuple(shape), DTYPES[dtype])


@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 2))
def test_any_split_has_the_elements_of_the_padded_shape(chips: int, step: int, at: int) -> None:
    inner = ["N", "N", "N"]
    inner[at] = f"P @ P % {step}"
    whole = ["N", "N", "N"]
    whole[at] = "P"
    argument = (
        f"a: dram([P @ P / {step}] | [{', '.join(inner)}])/bf16 @ original=[{', '.join(whole)}]"
    )
    (tensor,) = read_signature(text(argument, "[N]/f32", f"N=3, P={chips * step}")).arguments
    assert (tensor.split, tensor.chips) == (at, chips)
    count = 1
    for size in tensor.stored:
        count *= size
    assert count == math.prod(tensor.shape) == 9 * chips * step


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("a: [Q]/f32", "axis 'Q' has no size"),
        ("a: [N]/f16", "'f16' is unknown"),
        ("a: sram([Broadcast] | [N])/f32", "argument 'a' is"),
        ("a: Mut[N]", "argument 'a' is"),
        ("a: dram([Broadcast] | [N, M])/f32 @ original=[N]", "is split as"),
        ("a: dram([Broadcast] | [P @ 8 % 2])/f32 @ original=[P]", "is split as"),
        ("a: dram([P @ 8 / 2] | [P @ 8 % 4])/f32 @ original=[P]", "is split as"),
        ("a: dram([P @ 8 / 2] | [P @ 8 % 2, P @ 8 % 2])/f32 @ original=[P, P]", "is split as"),
        ("a: dram([P @ 8 / 2] | [P])/f32 @ original=[P]", "is split as"),
        ("a: dram([P @ 8 / 2, G] | [P @ 8 % 2])/f32 @ original=[P]", "split along"),
        ("a: dram([P @ 8 / 3] | [P @ 8 % 3])/f32 @ original=[P]", "split along"),
        ("a: dram([P] | [P @ 8 % 2])/f32 @ original=[P]", "split along"),
        ("a: dram([P + 2] | [P @ 8 % 2])/f32 @ original=[P]", "an axis reads 'P + 2'"),
        ("a: dram([Broadcast] | [N * 2])/f32 @ original=[N]", "an axis reads 'N * 2'"),
    ],
)
def test_a_form_that_is_not_understood_is_refused(argument: str, said: str) -> None:
    with pytest.raises(BackendUnavailable, match="api_missing") as caught:
        read_signature(text(argument))
    assert said in caught.value.detail
    assert caught.value.stage == "api_missing"
    assert caught.value.probe == "kernel outer"


@pytest.mark.parametrize("given_text", ["", "def f():\n    pass\n", "outer<N=4>(\n) -> [N]/f32:\n"])
def test_a_text_without_a_definition_is_refused(given_text: str) -> None:
    with pytest.raises(BackendUnavailable, match="no definition"):
        read_signature(given_text)


def test_a_definition_that_is_cut_off_is_refused() -> None:
    whole = text("a: [N]/f32; b: [N]/f32")
    cut = whole[: whole.index(") -> [N]/f32:\n    x")]
    with pytest.raises(BackendUnavailable, match="api_missing"):
        read_signature(cut)


def test_an_argument_that_is_not_there_is_refused() -> None:
    with pytest.raises(BackendUnavailable, match="no argument 'query'"):
        read_signature(text("a: [N]/f32")).argument("query")
