"""The calls of the vendor's torch module that are used, on a fake card.

Names and orders of arguments are the vendor's. `Compiler` keeps the one state that outlives a call:
how often something was compiled, and that a failure stays one in the directory it happened in.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch

from headrace.engine.rngd.labels import is_mixed
from headrace.engine.rngd.signature import Tensor, read_signature
from headrace.testing.fake_furiosa.card import FakeCard, FakeEvent, FakeStream, FakeTensor
from headrace.testing.fake_furiosa.kernels import FakeKernel, compute

PES_PER_CHIP: Final = 8


@dataclass(frozen=True)
class FlatDramShape:
    """How a tensor lies in the memories of chips, in the vendor's words."""

    host_sizes: list[int]
    host_strides: list[int]
    intra_chip_sizes: list[int]
    intra_chip_strides: list[int]
    inter_chip_axes: list[tuple[int | None, int]]
    dtype: torch.dtype

    def like(self, other: FlatDramShape) -> bool:
        """Whether both lie on the chips in the same parts, whatever is padding."""
        mine = self.intra_chip_sizes, self.inter_chip_axes, self.dtype
        return mine == (other.intra_chip_sizes, other.inter_chip_axes, other.dtype)


@dataclass(frozen=True)
class Fusion:
    num_fusion: int

    @property
    def num_chips(self) -> int:
        return max(1, self.num_fusion // PES_PER_CHIP)


class UnsupportedOpError(Exception):
    """What the vendor raises for whatever goes wrong in its compiler."""


class Compiler:
    """toolchain: whether there is a cross compiler. num_compiled: successful compilations."""

    def __init__(self) -> None:
        self.toolchain = True
        self.num_compiled = 0
        self.root: str | None = None
        self._failed_without_root: set[str] = set()

    def compile(self, dsl: str, fusion: Fusion) -> InnerRunnable:
        key = hashlib.sha256(dsl.encode()).hexdigest()[:16]
        before = Path(self.root) / key if self.root is not None else None
        known = before.exists() if before is not None else key in self._failed_without_root
        if known or not self.toolchain:
            if before is None:
                self._failed_without_root.add(key)
            else:
                before.mkdir(parents=True, exist_ok=True)
            raise UnsupportedOpError("failed to compile\nNo such file or directory (os error 2)")
        self.num_compiled += 1
        return InnerRunnable(dsl, fusion.num_fusion)

    @contextmanager
    def cache_context(
        self,
        root_dir: str | None = None,
        summary: bool = False,
        ensure: bool = False,
        failure_link_dir: str | None = None,
    ) -> Iterator[None]:
        before, self.root = self.root, root_dir
        try:
            yield
        finally:
            self.root = before


class InnerRunnable:
    """As `ir.Runnable`: a compiled kernel's bytes."""

    def __init__(self, dsl: str, expected_num_fusion: int) -> None:
        self.dsl, self.expected_num_fusion = dsl, expected_num_fusion
        signature = read_signature(dsl)
        chips = Fusion(expected_num_fusion).num_chips
        self.input_dram_shapes = [_dram(each, chips) for each in signature.arguments]
        self.output_dram_shapes = [_dram(each, chips) for each in signature.results]

    @staticmethod
    def deserialize(bytes: bytes) -> InnerRunnable:
        try:
            return InnerRunnable(**json.loads(bytes))
        except (ValueError, TypeError) as exc:
            raise ValueError(f"failed to deserialize: {exc}") from exc

    def serialize(self) -> bytes:
        told = {"dsl": self.dsl, "expected_num_fusion": self.expected_num_fusion}
        return json.dumps(told).encode()


class TclModule:
    """A kernel as a module; on host tensors it runs at once, as on the vendor's CPU executor."""

    def __init__(self, dsl: str | FakeKernel) -> None:
        self.dsl = dsl if isinstance(dsl, str) else dsl.dsl

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        for tensor, given in zip(read_signature(self.dsl).arguments, inputs, strict=True):
            wanted = tensor.stored, f"torch.{tensor.dtype}"
            if (tuple(given.shape), str(given.dtype)) != wanted:
                raise RuntimeError(f"{tensor.name}: {tuple(given.shape)}, expected {wanted}")
        return compute(self.dsl, inputs)


class FakeTorch:
    """Stands in for `furiosa.torch`, for one process with one card."""

    TclModule = TclModule

    def __init__(self, card: FakeCard) -> None:
        self.card = card
        self.compiler = Compiler()
        self._fusion: Fusion | None = None
        self.config = SimpleNamespace(cache_context=self.compiler.cache_context)
        self.ir = SimpleNamespace(Runnable=InnerRunnable, FlatDramShape=FlatDramShape)
        self.CompileModule = _compile_module(self)
        self.Runnable = _runnable(self)
        self.Stream, self.Event = self._stream, self._event

    def set_fusion(self, num_fusion: int) -> Fusion:
        if self._fusion is not None and self._fusion.num_fusion != num_fusion:
            raise RuntimeError(f"fusion was set to {self._fusion.num_fusion} before")
        self._fusion = Fusion(num_fusion)
        return self._fusion

    def get_fusion(self) -> Fusion:
        """As with the vendor, to ask fixes it."""
        if self._fusion is None:
            self._fusion = Fusion(1)
        return self._fusion

    def _stream(self, device: str) -> FakeStream:
        self._open(device)
        return FakeStream(self.card)

    def _event(self, device: str) -> FakeEvent:
        self._open(device)
        return FakeEvent(self.card)

    def current_stream(self, device: str) -> FakeStream:
        self._open(device)
        return self.card.current

    def set_stream(self, stream: FakeStream) -> FakeStream:
        self.card.enter()
        before, self.card.current = self.card.current, stream
        return before

    def empty(self, shape: FlatDramShape, device: Any) -> torch.Tensor:
        """Only on the host: what stands in for an argument while its kernel is compiled."""
        if torch.device(device).type != "cpu":
            raise self.card.fault("the fake makes memory of the card by empty_sharded")
        made = torch.empty(shape.host_sizes, dtype=shape.dtype)
        made.dram_shape = shape  # type: ignore[attr-defined]
        return made

    def empty_sharded(
        self,
        size: Sequence[int],
        *,
        shard_axes: Sequence[tuple[int | None, int]],
        dtype: torch.dtype | None = None,
        device: str | None = None,
    ) -> FakeTensor:
        self._open(device or "")
        return FakeTensor.empty(self.card, size, dtype or torch.float32, list(shard_axes))

    def _open(self, device: str) -> None:
        self.card.enter()
        self.get_fusion()
        if not device.startswith("furiosa:"):
            raise RuntimeError(f"no such device: {device!r}")


def _compile_module(vendor: FakeTorch) -> Any:
    class CompileModule:
        """`runnable._inner` is what can be serialized."""

        def __init__(self, runnable: Any) -> None:
            self.runnable = runnable

        @classmethod
        def from_module(
            cls,
            m: TclModule,
            args: tuple[Any, ...],
            *,
            kwargs: dict[str, Any] | None = None,
            compiler_config: Any = None,
            pass_context: Any = None,
            task_name: str | None = None,
        ) -> CompileModule:
            fusion = vendor.get_fusion()
            if is_mixed(m.dsl):
                raise UnsupportedOpError(
                    "failed to import: some arguments are placed, some are not"
                )
            for tensor, given in zip(read_signature(m.dsl).arguments, args, strict=True):
                _check_example(tensor, given, fusion.num_chips)
            return cls(vendor.Runnable(vendor.compiler.compile(m.dsl, fusion)))

    return CompileModule


def _check_example(tensor: Tensor, given: torch.Tensor, chips: int) -> None:
    """Of an argument that lies on chips, the layout is told by the shape it was made with."""
    fits = tuple(given.shape) == tensor.shape and str(given.dtype) == f"torch.{tensor.dtype}"
    if tensor.placed:
        told, wanted = getattr(given, "dram_shape", None), _dram(tensor, chips)
        fits = fits and told is not None and told.like(wanted)
    if not fits:
        raise UnsupportedOpError(f"failed to import {tensor.name}: {tuple(given.shape)}")


def _runnable(vendor: FakeTorch) -> Any:
    class Runnable:
        """Takes tensors of the card and queues its kernel on the current stream."""

        def __init__(self, runnable: InnerRunnable) -> None:
            self._inner = runnable
            self._loaded = False

        def to(self, device: str) -> Runnable:
            vendor._open(device)
            self._loaded = True
            return self

        def __call__(self, *args: FakeTensor) -> list[FakeTensor]:
            card, inner = vendor.card, self._inner
            card.enter()
            if inner.expected_num_fusion != vendor.get_fusion().num_fusion or not self._loaded:
                raise RuntimeError("it was compiled for another device, or is on none")
            for wanted, given in zip(inner.input_dram_shapes, args, strict=True):
                _check_argument(card, wanted, given)
            results = [
                FakeTensor.empty(card, each.host_sizes, each.dtype, each.inter_chip_axes)
                for each in inner.output_dram_shapes
            ]
            taken, made = [each.memory for each in args], [each.memory for each in results]

            def work() -> None:
                for memory, result in zip(made, compute(inner.dsl, taken), strict=True):
                    memory.copy_(result)
                card.counts["kernels"] += 1

            card.queue(work)
            return results

    return Runnable


def _check_argument(card: FakeCard, wanted: FlatDramShape, given: Any) -> None:
    if not isinstance(given, FakeTensor):
        raise card.fault("a kernel on the card was given memory of the host")
    same = list(given.shape) == wanted.host_sizes and given.dtype == wanted.dtype
    if not same or given.inter_chip_axes != wanted.inter_chip_axes:
        raise card.fault(
            f"a kernel was given {tuple(given.shape)} over {given.inter_chip_axes}, it takes "
            f"{wanted.host_sizes} over {wanted.inter_chip_axes}"
        )


def _dram(tensor: Tensor, chips: int) -> FlatDramShape:
    inner = list(tensor.padded)
    if tensor.split is not None:
        inner[tensor.split] //= chips
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    axes = [(tensor.split, chips)]
    return FlatDramShape(list(tensor.padded), [], inner, [], axes, dtype)
