"""Kernels compiled for a card, kept on disk: each is compiled once, which may take minutes.

A file holds what the vendor's `Runnable` serializes to. Its name is a digest of all that it depends
on: the text that is compiled, which has the shapes in it, the versions of the packages, and the
number of PEs. It is written in one step and checked when it is read, since the vendor's reader
takes changed bytes for a program.

The vendor's compiler keeps a cache of its own, in which a failure stays a failure after its cause
is gone. It is given an empty directory for each compilation, which is thrown away.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from headrace.engine.faults import raised_as
from headrace.engine.models import cache_root
from headrace.engine.rngd.labels import is_mixed, labelled
from headrace.engine.rngd.sdk import VENDOR, Sdk
from headrace.engine.rngd.signature import Signature, Tensor, changed, read_signature
from headrace.errors import BackendUnavailable, Refused

FORMAT: Final = b"headrace rngd 1\n"
_DIGEST_NBYTES: Final = hashlib.sha256().digest_size
_LENGTH_NBYTES: Final = 8
SIGN_EVERY_S: Final = 30.0
"""Between two words while the compiler is at work."""

_NO_FILE: Final = "No such file or directory"
"""What the vendor's compiler says where it finds no cross compiler."""

_TOLD_AFTER: Final = "compile error:"
_TOLD_LENGTH: Final = 300


class CompiledKernels:
    """The compiled kernels of one directory."""

    def __init__(
        self,
        sdk: Sdk,
        told: Callable[[str], None] = lambda text: None,
        directory: Path | None = None,
    ) -> None:
        """told: what is compiled, before and after. directory: by default one of headrace's."""
        self._sdk, self._told = sdk, told
        self._directory = directory or cache_root() / "rngd" / "kernels"
        self._num_compiled = self._num_found = self._num_broken = 0

    def load(self, kernel: Any, *, fusion: int, chips: int) -> tuple[Any, Signature]:
        """The vendor's `Runnable` of a kernel, not yet on a device, and the kernel's signature.

        Raises:
            BackendUnavailable: it cannot be compiled, or is not for what its text says.
        """
        signature = read_signature(kernel.dsl)
        path = self._path(kernel, signature, fusion)
        found = self._read(path)
        if found is not None:
            try:
                inner = self._opened(found, signature, fusion, chips)
            except BackendUnavailable as exc:
                self._num_broken += 1
                self._told(f"{path} cannot be used, so it is made again: {exc.detail}")
                self._remove(path)
            else:
                self._num_found += 1
                return self._sdk.torch.Runnable(inner), signature
        made = self._made(kernel, signature, path, chips)
        inner = self._opened(made, signature, fusion, chips)
        return self._sdk.torch.Runnable(inner), signature

    def statistics(self) -> Mapping[str, int]:
        """Kernels that were compiled and that were found, and files that were not as written."""
        return {
            "kernels_compiled": self._num_compiled,
            "kernels_found": self._num_found,
            "kernels_broken": self._num_broken,
        }

    def _opened(self, body: bytes, signature: Signature, fusion: int, chips: int) -> Any:
        """The program of these bytes, which takes and gives what the kernel's text says."""
        with raised_as(partial(changed, signature.name)):
            inner = self._sdk.torch.ir.Runnable.deserialize(body)
            _check(inner, signature, fusion, chips)
        return inner

    def _path(self, kernel: Any, signature: Signature, fusion: int) -> Path:
        text = hashlib.sha256(labelled(kernel.dsl).encode()).hexdigest()
        known = [self._sdk.name, sorted(self._sdk.versions.items()), fusion, text]
        digest = hashlib.sha256(json.dumps(known).encode()).hexdigest()[:24]
        return self._directory / f"{signature.name}-{digest}.kernel"

    def _made(self, kernel: Any, signature: Signature, path: Path, chips: int) -> bytes:
        """Compile, unless another process did so meanwhile."""
        with self._on_disk(), self._alone(path, signature):
            found = self._read(path)
            if found is not None:
                self._num_found += 1
                return found
            if path.exists():
                self._num_broken += 1
                self._told(f"{path} is not as it was written; compiling {signature.name} again")
            with _scratch(path.with_suffix(".compiler")) as own:
                made = self._compile(kernel, signature, chips, own)
            try:
                _write(path, made)
            except OSError as exc:  # it took minutes: go on with it all the same
                self._told(f"{signature.name} is not kept: {exc.strerror}")
            return made

    def _remove(self, path: Path) -> None:
        with self._on_disk():
            path.unlink(missing_ok=True)

    @contextmanager
    def _on_disk(self) -> Iterator[None]:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            yield
        except OSError as exc:
            raise Refused(
                f"compiled kernels cannot be kept in {self._directory}: {exc.strerror}; name "
                "another directory as compile_cache, or in HEADRACE_CACHE",
                field="compile_cache",
            ) from exc

    @contextmanager
    def _alone(self, path: Path, signature: Signature) -> Iterator[None]:
        """No other process compiles this kernel meanwhile; a lock ends with its process."""
        with open(path.with_suffix(".lock"), "ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._told(f"waiting for another process that compiles {signature.name}")
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _compile(self, kernel: Any, signature: Signature, chips: int, own: Path) -> bytes:
        """own: an empty directory, for the vendor's cache."""
        self._num_compiled += 1
        label = f"{signature.name} {_shapes(signature)}"
        ahead = "" if self._num_compiled > 1 else "; headrace rngd compile does this ahead"
        self._told(f"compiling {label}, number {self._num_compiled} of this process{ahead}")
        began = time.monotonic()
        vendor = self._sdk.torch
        try:
            mixed = is_mixed(kernel.dsl)
            examples = tuple(self._example(each, chips, mixed) for each in signature.arguments)
            module = vendor.TclModule(labelled(kernel.dsl) if mixed else kernel)
            with vendor.config.cache_context(str(own)), _sign_of_life(label, self._told):
                compiled = vendor.CompileModule.from_module(
                    module, examples, task_name=signature.name
                )
            made: bytes = compiled.runnable._inner.serialize()
        except Exception as exc:  # the vendor wraps whatever goes wrong, panics too
            raise _failed(signature, exc) from exc
        self._told(f"compiled {label} in {time.monotonic() - began:.1f} s")
        return made

    def _example(self, tensor: Tensor, chips: int, mixed: bool) -> torch.Tensor:
        """What stands in for an argument while its kernel is compiled; its memory is not touched.

        The vendor takes the layout of one that lies on chips from the shape that it was made with:
        as the model has it, padded and in parts on each chip.
        """
        dtype: torch.dtype = getattr(torch, tensor.dtype)
        if not tensor.placed and not mixed:
            return torch.empty(tensor.shape, dtype=dtype)
        inner = list(tensor.padded)
        if tensor.split is not None:
            inner[tensor.split] //= chips
        shape = self._sdk.torch.ir.FlatDramShape(
            list(tensor.shape),
            _strides(tensor.shape),
            inner,
            _strides(tuple(inner)),
            [(tensor.split, chips)],
            dtype,
        )
        made: torch.Tensor = self._sdk.torch.empty(shape, torch.device("cpu"))
        return made

    def _read(self, path: Path) -> bytes | None:
        """What a file holds; None if there is none, or it is not as it was written."""
        if not path.exists():
            return None
        with self._on_disk():
            whole = path.read_bytes()
        head = len(FORMAT) + _DIGEST_NBYTES + _LENGTH_NBYTES
        digest = whole[len(FORMAT) : head - _LENGTH_NBYTES]
        length = int.from_bytes(whole[head - _LENGTH_NBYTES : head], "little")
        body = whole[head:]
        as_written = whole.startswith(FORMAT) and len(body) == length
        return body if as_written and hashlib.sha256(body).digest() == digest else None


@contextmanager
def _scratch(own: Path) -> Iterator[Path]:
    """A directory for the length of the block; one that an ended process left is emptied first."""
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir()
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)


@contextmanager
def _sign_of_life(label: str, told: Callable[[str], None]) -> Iterator[None]:
    """Say every half minute that the compiler is still at it, from a thread that does only this."""
    over, began = threading.Event(), time.monotonic()

    def tell() -> None:
        while not over.wait(SIGN_EVERY_S):
            told(f"still compiling {label}, for {time.monotonic() - began:.0f} s")

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


def _write(path: Path, body: bytes) -> None:
    """In one step: who reads meanwhile, or after this was interrupted, finds all of it or none."""
    digest, length = hashlib.sha256(body).digest(), len(body).to_bytes(_LENGTH_NBYTES, "little")
    part = path.with_suffix(".part")
    try:
        with open(part, "wb") as file:
            file.write(FORMAT + digest + length + body)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _check(inner: Any, signature: Signature, fusion: int, chips: int) -> None:
    """That a program takes and gives what the text of its kernel says.

    Raises:
        BackendUnavailable: it does not, so the engine's tensors would not fit it.
    """
    if inner.expected_num_fusion != fusion:
        raise changed(
            signature.name, f"it is for {inner.expected_num_fusion} PEs, wanted for {fusion}"
        )
    pairs = (
        (signature.arguments, inner.input_dram_shapes),
        (signature.results, inner.output_dram_shapes),
    )
    for tensors, shapes in pairs:
        wanted = [(list(each.padded), [(each.split, chips)]) for each in tensors]
        got = [(list(each.host_sizes), list(each.inter_chip_axes)) for each in shapes]
        if wanted != got:
            raise changed(signature.name, f"it was compiled for {got}, its text says {wanted}")


def _failed(signature: Signature, exc: Exception) -> BackendUnavailable:
    """The vendor's text is its graph, then a line that says what is wrong, then places in it."""
    text = str(exc).strip() or type(exc).__name__
    lines = [line.strip() for line in text.rpartition(_TOLD_AFTER)[2].splitlines()]
    said = next((line for line in lines if line), type(exc).__name__)[:_TOLD_LENGTH]
    probe = f"compiling {signature.name}"
    if _NO_FILE in text:
        hint = "Install the cross compiler (Debian and Ubuntu: apt install gcc-aarch64-linux-gnu)"
        return BackendUnavailable(VENDOR, "toolchain_missing", probe, said, hint)
    hint = "The compiler of these packages does not take this kernel; emulation runs it"
    return BackendUnavailable(VENDOR, "api_missing", probe, said, hint)


def _shapes(signature: Signature) -> str:
    return " ".join("x".join(map(str, each.shape)) for each in signature.results)


def _strides(shape: tuple[int, ...]) -> list[int]:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return strides
