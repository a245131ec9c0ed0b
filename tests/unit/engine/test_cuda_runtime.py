"""Finding the CUDA runtime that torch loaded, and the types of its calls."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.engine.cuda_runtime import CudaRuntime, find_loaded, load_runtime, mapped_runtimes
from headrace.errors import BackendUnavailable

MAPS = [
    "7f00-7f01 r-xp 00000000 08:01 1   /site/nvidia/cuda_runtime/lib/libcudart.so.12",
    "7f01-7f02 r--p 00001000 08:01 1   /site/nvidia/cuda_runtime/lib/libcudart.so.12",
    "7f02-7f03 r-xp 00000000 08:01 2   /site/torch/lib/libcudart-d0da41ae.so.11.0",
    "7f03-7f04 r-xp 00000000 08:01 3   /lib/libc.so.6",
    "7f04-7f05 rw-p 00000000 00:00 0",
]


class Function:
    """A C function that records its calls."""

    def __init__(self, name: str, log: list[tuple[object, ...]], answer: Any) -> None:
        self.argtypes: list[Any] | None = None
        self.restype: Any = None
        self._name, self._log, self._answer = name, log, answer

    def __call__(self, *arguments: object) -> Any:
        assert self.argtypes is not None
        assert len(arguments) == len(self.argtypes)
        self._log.append((self._name, *arguments))
        return self._answer


def library(log: list[tuple[object, ...]], **answers: Any) -> Any:
    names = (
        "cudaMemcpyAsync",
        "cudaMemcpy2DAsync",
        "cudaHostRegister",
        "cudaHostUnregister",
        "cudaGetLastError",
        "cudaGetErrorString",
    )
    return SimpleNamespace(**{name: Function(name, log, answers.get(name, 0)) for name in names})


def test_calls_have_their_arguments_in_order() -> None:
    log: list[tuple[object, ...]] = []
    runtime = CudaRuntime(library(log, cudaGetErrorString=b"no luck"))
    runtime.copy(1 << 63, 2, 3, 4)
    runtime.copy_rows(1, 2, 3, 4, 5, 6, 7)
    runtime.host_register(4096, 1 << 33, 8)
    runtime.host_unregister(4096)
    assert runtime.take_last_error() == 0
    assert runtime.error_text(2) == "CUDA error 2 (no luck)"
    assert log == [
        ("cudaMemcpyAsync", 1 << 63, 2, 3, 4, 4),
        ("cudaMemcpy2DAsync", 1, 2, 3, 4, 5, 6, 4, 7),
        ("cudaHostRegister", 4096, 1 << 33, 8),
        ("cudaHostUnregister", 4096),
        ("cudaGetLastError",),
        ("cudaGetErrorString", 2),
    ]


def test_addresses_and_sizes_are_wide() -> None:
    """An int that ctypes was told nothing of would be cut to 32 bits."""
    made = library([])
    CudaRuntime(made)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    assert made.cudaMemcpyAsync.argtypes == [pointer, pointer, size, ctypes.c_int, pointer]
    rows = [pointer, size, pointer, size, size, size, ctypes.c_int, pointer]
    assert made.cudaMemcpy2DAsync.argtypes == rows
    assert made.cudaHostRegister.argtypes == [pointer, size, ctypes.c_uint]
    assert made.cudaGetErrorString.restype is ctypes.c_char_p


def test_runtimes_among_the_maps() -> None:
    assert mapped_runtimes(MAPS) == [
        "/site/nvidia/cuda_runtime/lib/libcudart.so.12",
        "/site/torch/lib/libcudart-d0da41ae.so.11.0",
    ]


def test_the_first_that_is_loaded_is_taken() -> None:
    asked: list[str] = []

    def opened(name: str) -> Any:
        asked.append(name)
        return name if name == "b" else None

    found: Any = find_loaded(["a", "b", "c"], opened)
    assert (found, asked) == ("b", ["a", "b"])
    assert find_loaded(["a"], opened) is None


@pytest.mark.parametrize(("version", "probe"), [(None, "torch.version.cuda"), ("99.1", "so.99")])
def test_no_runtime_is_told_in_one_sentence(version: str | None, probe: str) -> None:
    with pytest.raises(BackendUnavailable, match=f"{probe}.*Install a torch build for CUDA"):
        load_runtime(version)
