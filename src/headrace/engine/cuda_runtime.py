"""The calls of the CUDA runtime that torch does not offer, through the library that torch loaded.

It must be that very library: another copy would have a state of its own, and the device's errors
and streams would not be the ones that torch sees.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, Protocol

from headrace.engine.registration import RegistrationCalls
from headrace.errors import BackendUnavailable

INSTALL: Final = "Install a torch build for CUDA into the environment that runs it"
_DEFAULT_KIND: Final = 4  # cudaMemcpyDefault: where both ends lie is told by their addresses


class Runtime(RegistrationCalls, Protocol):
    """The calls of one process; a status of 0 is success."""

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> int: ...

    def copy_rows(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        row_nbytes: int,
        num_rows: int,
        stream: int,
    ) -> int: ...


class CudaRuntime:
    """libcudart by ctypes; implements `Runtime`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, size, status = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        library.cudaMemcpyAsync.argtypes = [pointer, pointer, size, ctypes.c_int, pointer]
        library.cudaMemcpy2DAsync.argtypes = [
            *(pointer, size),
            *(pointer, size),
            *(size, size),
            ctypes.c_int,
            pointer,
        ]
        library.cudaHostRegister.argtypes = [pointer, size, ctypes.c_uint]
        library.cudaHostUnregister.argtypes = [pointer]
        library.cudaGetLastError.argtypes = []
        library.cudaGetErrorString.argtypes = [ctypes.c_int]
        for name in (
            "cudaMemcpyAsync",
            "cudaMemcpy2DAsync",
            "cudaHostRegister",
            "cudaHostUnregister",
            "cudaGetLastError",
        ):
            getattr(library, name).restype = status
        library.cudaGetErrorString.restype = ctypes.c_char_p
        self._library = library

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> int:
        status: int = self._library.cudaMemcpyAsync(target, source, nbytes, _DEFAULT_KIND, stream)
        return status

    def copy_rows(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        row_nbytes: int,
        num_rows: int,
        stream: int,
    ) -> int:
        status: int = self._library.cudaMemcpy2DAsync(
            *(target, target_pitch),
            *(source, source_pitch),
            *(row_nbytes, num_rows),
            _DEFAULT_KIND,
            stream,
        )
        return status

    def host_register(self, address: int, nbytes: int, flags: int) -> int:
        status: int = self._library.cudaHostRegister(address, nbytes, flags)
        return status

    def host_unregister(self, address: int) -> int:
        status: int = self._library.cudaHostUnregister(address)
        return status

    def take_last_error(self) -> int:
        status: int = self._library.cudaGetLastError()
        return status

    def error_text(self, status: int) -> str:
        text: bytes | None = self._library.cudaGetErrorString(status)
        return f"CUDA error {status} ({(text or b'unknown').decode(errors='replace')})"


def load_runtime(cuda_version: str | None) -> CudaRuntime:
    """The runtime that torch loaded, which was built for `cuda_version`, such as `12.8`.

    Raises:
        BackendUnavailable: torch has none, or it cannot be found among what is loaded.
    """
    if not cuda_version:
        detail = "this torch was built without CUDA"
        raise BackendUnavailable("cuda", "sdk_missing", "torch.version.cuda", detail, INSTALL)
    soname = f"libcudart.so.{cuda_version.partition('.')[0]}"
    maps = Path("/proc/self/maps").read_text().splitlines()
    library = find_loaded([soname, *mapped_runtimes(maps)], _open_loaded)
    if library is None:
        detail = "it is not among the libraries of this process"
        raise BackendUnavailable("cuda", "sdk_missing", soname, detail, INSTALL)
    return CudaRuntime(library)


def mapped_runtimes(maps: Iterable[str]) -> list[str]:
    """Paths of CUDA runtimes in the lines of a /proc/PID/maps, each once."""
    found = (re.search(r"/\S*/libcudart[-.][^/]*so[^/]*$", line) for line in maps)
    return list(dict.fromkeys(match.group() for match in found if match))


def find_loaded(
    names: Iterable[str], opened: Callable[[str], ctypes.CDLL | None]
) -> ctypes.CDLL | None:
    """The first of these libraries that this process has loaded already."""
    return next((library for name in names if (library := opened(name)) is not None), None)


def _open_loaded(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None
