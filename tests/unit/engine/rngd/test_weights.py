"""A checkpoint's tensors as kernels take them, against torch's own conversions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from headrace.engine.rngd.weights import Weights
from headrace.errors import Refused


def written(directory: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    save_file(dict(tensors), directory / "model.safetensors")
    return directory


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(7)) * 3).to(dtype)


@pytest.mark.parametrize("have", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", ["bfloat16", "float32", "float16"])
def test_floats_are_converted_as_torch_does(tmp_path: Path, have: torch.dtype, wanted: str) -> None:
    tensor = random(3, 5, dtype=have)
    got = Weights(written(tmp_path, {"w": tensor}), {}).tensor("w", (3, 5), wanted)
    dtype: torch.dtype = getattr(torch, wanted)
    assert got.dtype == dtype
    assert torch.equal(got, tensor.to(dtype))


def test_fp8_comes_as_it_is(tmp_path: Path) -> None:
    tensor = random(4, 4, dtype=torch.float8_e4m3fn)
    got = Weights(written(tmp_path, {"w": tensor}), {}).tensor("w", (4, 4), "float8_e4m3fn")
    assert torch.equal(got.view(torch.uint8), tensor.view(torch.uint8))


def test_names_are_those_of_all_files(tmp_path: Path) -> None:
    save_file({"b": torch.zeros(2)}, tmp_path / "one.safetensors")
    save_file({"a": torch.ones(2)}, tmp_path / "two.safetensors")
    weights = Weights(tmp_path, {})
    assert weights.tensor("a", (2,), "float32").tolist() == [1.0, 1.0]
    assert weights.tensor("b", (2,), "float32").tolist() == [0.0, 0.0]


def test_a_stand_in_is_used_only_for_what_is_missing(tmp_path: Path) -> None:
    both = {"head": torch.ones(2, 2), "embed": torch.zeros(2, 2)}
    stand_ins = {"head": "embed"}
    tied, own = tmp_path / "tied", tmp_path / "own"
    tied.mkdir()
    own.mkdir()
    weights = Weights(written(tied, {"embed": both["embed"]}), stand_ins)
    assert weights.tensor("head", (2, 2), "float32").sum() == 0
    assert Weights(written(own, both), stand_ins).tensor("head", (2, 2), "float32").sum() == 4


def test_axes_of_one_may_come_or_go(tmp_path: Path) -> None:
    tensor = random(4, 1, 3, dtype=torch.float32)
    weights = Weights(written(tmp_path, {"w": tensor}), {})
    assert torch.equal(weights.tensor("w", (1, 4, 3), "float32"), tensor.reshape(1, 4, 3))


@pytest.mark.parametrize("odd", range(8))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_tensor_may_begin_at_any_byte(tmp_path: Path, odd: int, dtype: torch.dtype) -> None:
    tensor = random(3, 5, dtype=dtype)
    raw = tensor.view(torch.uint8).numpy().tobytes()
    kind = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3"}[dtype]
    entry = {"dtype": kind, "shape": [3, 5], "data_offsets": [0, len(raw)]}
    header = json.dumps({"w": entry}).encode()
    header += b" " * (-len(header) % 8 + odd)
    whole = len(header).to_bytes(8, "little") + header + raw
    (tmp_path / "model.safetensors").write_bytes(whole)
    name = str(dtype).removeprefix("torch.")
    got = Weights(tmp_path, {}).tensor("w", (3, 5), name)
    assert torch.equal(got.to(torch.float32), tensor.to(torch.float32))
    assert got.data_ptr() % got.element_size() == 0


def test_what_is_done_to_a_tensor_does_not_reach_the_file(tmp_path: Path) -> None:
    weights = Weights(written(tmp_path, {"w": torch.ones(64)}), {})
    before = (tmp_path / "model.safetensors").read_bytes()
    weights.tensor("w", (64,), "float32").zero_()
    assert (tmp_path / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "said"),
    [
        ("none", (2, 3), "bfloat16", "has no tensor 'none'"),
        ("w", (3, 2), "bfloat16", r"tensor 'w' is .*2, 3.*, its config says \(3, 2\)"),
        ("w", (6,), "bfloat16", "its config says"),
        ("w", (2, 3), "float8_e4m3fn", "tensor 'w' is F32, and the kernels .* take float8_e4m3fn"),
        ("q", (2, 3), "bfloat16", "tensor 'q' is F8_E4M3, and the kernels .* take bfloat16"),
        ("i", (2, 3), "bfloat16", "tensor 'i' is I64"),
    ],
)
def test_what_a_kernel_cannot_take_is_refused_by_name(
    tmp_path: Path, name: str, shape: tuple[int, ...], dtype: str, said: str
) -> None:
    tensors = {
        "w": torch.zeros(2, 3),
        "q": torch.zeros(2, 3).to(torch.float8_e4m3fn),
        "i": torch.zeros(2, 3, dtype=torch.int64),
    }
    with pytest.raises(Refused, match=said) as caught:
        Weights(written(tmp_path, tensors), {}).tensor(name, shape, dtype)
    assert caught.value.field == "model"


def test_a_directory_without_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="holds no"):
        Weights(tmp_path, {})
