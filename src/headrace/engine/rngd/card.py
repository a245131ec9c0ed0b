"""The vendor's kernels on a card: two streams, copies that are polled, and one thread.

Kernels and what they take are queued on one stream, copies to the host on another, which waits for
what was queued before on the first. So a layer's K and V can leave while its attention runs, if the
card can do both at once; nothing here relies on it. What is queued refers to its memory: host and
card tensors are kept until the event after them is done.

The vendor says nothing about threads, so the thread that made an executor is the one that uses it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from headrace.engine.faults import raised_as
from headrace.engine.rngd import layout
from headrace.engine.rngd.compiled import CompiledKernels
from headrace.engine.rngd.executor import Program, Ticket
from headrace.engine.rngd.furiosa import set_fusion_once
from headrace.engine.rngd.record import Reads
from headrace.engine.rngd.sdk import Sdk
from headrace.engine.rngd.signature import Signature, Tensor
from headrace.errors import Closed, DeviceError, LocalProtocolError

PES_PER_CHIP: Final = 8
MAX_IN_FLIGHT: Final = 10
"""Pieces of work queued on one stream and not known to be done. Each is up to three operations for
the vendor (a wait, the work, an event), who takes 32 on a stream."""

_LEFT: Final[list[tuple[_Queue, _Queue]]] = []
"""What a card that failed may still use: kept for as long as the process lives, which may try the
card again."""


class CardExecutor:
    """Implements `Executor` on one device of `chips` chips."""

    emulated = False

    def __init__(
        self,
        sdk: Sdk,
        device: int,
        *,
        chips: int,
        reads: Reads,
        cache: CompiledKernels,
        told: Callable[[str], None] = lambda text: None,
    ) -> None:
        """reads: how rows come to the host. told: what goes on, for whoever waits.

        Raises:
            BackendUnavailable: this process has a device of another number of chips.
            DeviceError: the card cannot be opened.
        """
        self._sdk, self._torch = sdk, sdk.torch
        self._where = sdk.device(device)
        self._chips, self._reads, self._cache = chips, reads, cache
        self._thread = threading.get_ident()
        self._broken: str | None = None
        self._closed = False
        self._fusion = PES_PER_CHIP * chips
        set_fusion_once(self._torch, self._fusion)
        self._counts = dict.fromkeys(("kernels_loaded", "host_waits", "reads", "peak_in_flight"), 0)
        told(f"opening {self._where} with {self._fusion} PEs")
        with self._vendor():
            self._compute = _Queue(self._torch, self._where, self._counts)
            self._copies = _Queue(self._torch, self._where, self._counts)
            self._before: Any = self._torch.set_stream(self._compute.stream)

    def load(self, kernel: Any) -> Program:
        self._check()
        runnable, signature = self._cache.load(kernel, fusion=self._fusion, chips=self._chips)
        with self._vendor():
            loaded = runnable.to(self._where)
        self._counts["kernels_loaded"] += 1
        return _CardProgram(self, loaded, signature)

    def place(self, tensor: Tensor, host: torch.Tensor) -> Any:
        self._check()
        source = layout.padded(tensor, host)
        with self._vendor():
            placed = self._empty(tensor)
            self._compute.room()
            placed.copy_(source, non_blocking=True)
            self._compute.queued(source, placed)
        return placed

    def zeros(self, tensor: Tensor) -> Any:
        dtype: torch.dtype = getattr(torch, tensor.dtype)
        return self.place(tensor, torch.zeros(tensor.shape, dtype=torch.uint8).to(dtype))

    def read(
        self, tensor: Tensor, placed: Any, first: int, stop: int, target: torch.Tensor
    ) -> Ticket:
        self._check()
        if tensor.split == 0 or not target.is_contiguous():
            raise LocalProtocolError(f"{tensor.name}: rows {first}..{stop} cannot be read so")
        with self._vendor():
            source, host = placed, torch.empty(tensor.padded, dtype=target.dtype)
            if self._reads == "narrow":
                source, host = placed.narrow(0, first, stop - first), target
                if tensor.padded[1:] != tensor.shape[1:]:
                    host = torch.empty(stop - first, *tensor.padded[1:], dtype=target.dtype)
            self._copies.room()
            self._copies.waits_for(self._compute)
            with self._copies.current():
                host.copy_(source, non_blocking=True)
            event = self._copies.queued(host, source, placed)
        self._counts["reads"] += 1
        start = 0 if self._reads == "narrow" else first
        return _Read(self, event, tensor, host, start, target)

    def wait(self) -> None:
        """See `Executor`; also what queued work referred to is let go."""
        self._check_thread()
        if self._closed and self._broken is None:
            return  # it waited when it was closed
        self._check_broken()
        with self._vendor():
            self._compute.drain()
            self._copies.drain()

    def statistics(self) -> Mapping[str, int]:
        return {**self._counts, **self._cache.statistics()}

    def close(self) -> None:
        """Wait for all that is queued and give the card back; raises DeviceError if it failed."""
        self._check_thread()
        if self._closed:
            return
        try:
            if self._broken is None:  # else nobody can say what is still queued
                self.wait()
                with self._vendor():
                    self._torch.set_stream(self._before)
        finally:
            self._closed = True
            if self._broken is not None:
                _LEFT.append((self._compute, self._copies))

    def run(self, loaded: Any, arguments: Sequence[Any]) -> Sequence[Any]:
        """Queue a kernel; its results are there for what is queued after it."""
        self._check()
        with self._vendor():
            self._compute.room()
            results: Sequence[Any] = loaded(*arguments)
            self._compute.queued(*arguments, *results)
        return results

    def passed(self, event: Any) -> bool:
        """Whether what was queued before an event is done."""
        self._check()
        with self._vendor():
            return bool(event.query())

    def _empty(self, tensor: Tensor) -> Any:
        axes = shard_axes(tensor, self._chips)
        dtype: torch.dtype = getattr(torch, tensor.dtype)
        return self._torch.empty_sharded(
            list(tensor.padded), shard_axes=axes, dtype=dtype, device=self._where
        )

    def _check(self) -> None:
        self._check_thread()
        if self._closed:
            raise Closed(f"{self._where} was closed")
        self._check_broken()

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise LocalProtocolError("a card is used by the thread that opened it")

    def _check_broken(self) -> None:
        if self._broken is not None:
            raise DeviceError(f"{self._where} failed before: {self._broken}")

    @contextmanager
    def _vendor(self) -> Iterator[None]:
        """Whatever the vendor's calls raise is a failure of the card, also of what was queued."""
        with raised_as(self._failed):
            yield

    def _failed(self, told: str) -> DeviceError:
        self._broken = told
        return DeviceError(f"{self._where}: {told}")


def shard_axes(tensor: Tensor, chips: int) -> list[tuple[int | None, int]]:
    """How a tensor lies on the chips, in the vendor's words: one axis in parts, or all on each.

    A list of no axes is another thing to the vendor than a tensor that all chips have.
    """
    return [(tensor.split, chips)]


class _Queue:
    """A stream, and what is queued on it and not known to be done."""

    def __init__(self, torch_furiosa: Any, where: str, counts: dict[str, int]) -> None:
        self._torch, self._where, self._counts = torch_furiosa, where, counts
        self.stream = torch_furiosa.Stream(where)
        self._pending: deque[_Pending] = deque()

    def room(self) -> None:
        """Let go what is done; wait for the oldest if too much is queued."""
        while self._pending and self._pending[0].event.query():
            self._pending.popleft()
        if len(self._pending) >= MAX_IN_FLIGHT:
            self._counts["host_waits"] += 1
            self._pending[0].event.synchronize()  # until then it keeps what its work refers to
            self._pending.popleft()

    def queued(self, *kept: Any) -> Any:
        """An event after what was queued last, which refers to `kept`."""
        event = self._torch.Event(self._where)
        event.record(self.stream)
        self._pending.append(_Pending(event, kept))
        peak = max(self._counts["peak_in_flight"], len(self._pending))
        self._counts["peak_in_flight"] = peak
        return event

    def waits_for(self, other: _Queue) -> None:
        """What is queued here from now on runs after what is queued there by now."""
        if other._pending:
            other._pending[-1].event.wait(self.stream)

    @contextmanager
    def current(self) -> Iterator[None]:
        """The vendor's calls inside of the block queue on this stream."""
        before = self._torch.set_stream(self.stream)
        try:
            yield
        finally:
            self._torch.set_stream(before)

    def drain(self) -> None:
        self.stream.synchronize()
        self._pending.clear()


@dataclass(frozen=True)
class _Pending:
    event: Any
    kept: tuple[Any, ...]


@dataclass
class _Read:
    """A copy to the host; `host` is the target itself, or memory of its own with more than that."""

    executor: CardExecutor
    event: Any
    tensor: Tensor
    host: torch.Tensor
    start: int
    target: torch.Tensor
    _over: bool = field(default=False, init=False)

    def done(self) -> bool:
        if not self._over and self.executor.passed(self.event):
            if self.host is not self.target:
                rows = self.host[self.start : self.start + len(self.target)]
                self.target.copy_(rows[(slice(None), *map(slice, self.tensor.shape[1:]))])
            self._over = True
        return self._over


class _CardProgram:
    def __init__(self, executor: CardExecutor, loaded: Any, signature: Signature) -> None:
        self.signature = signature
        self._executor, self._loaded = executor, loaded

    def __call__(self, arguments: Sequence[Any]) -> Sequence[Any]:
        return self._executor.run(self._loaded, arguments)
