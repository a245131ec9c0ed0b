"""What the owner and the source of a GPU need of it: streams, events, copies, pinned memory.

The code that owns a device is written against this contract and nothing else, so that the whole of
it runs in tests on a model of a device (`headrace.testing.fake_device`), and on a GPU through
`headrace.engine.cuda`. A device is driven by the one thread that opened it.

Copies and launches are queued: they return before they are done, are carried out in order within
their stream, and in any order between streams but for what `wait` says. Whatever a queued copy
reads or writes must stay as it is, and allocated, until an event recorded after it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch

from headrace.errors import DeviceError
from headrace.messages import DeviceTimes


class PinFailed(DeviceError):
    """Host memory could not be registered; the device works on, and copies of it are pageable."""


class Rows(NamedTuple):
    """One end of a strided copy: the address of the first row, and bytes from one to the next."""

    address: int
    pitch: int


class Stream(Protocol):
    """A queue of a device."""

    @property
    def name(self) -> str: ...


class Event(Protocol):
    """A mark in a stream: done once all that was queued there before it is."""

    def done(self) -> bool:
        """Whether the device has come past it; raises DeviceError if the device failed."""

    def wait(self) -> None:
        """Hold the host up until it is done; raises DeviceError if the device failed."""


class Device(Protocol):
    """One device. Every method raises DeviceError once the device has failed.

    name: as facts and intervals tell it, such as `cuda:0`. kind: `real` or `fake`. torch_device:
    where torch keeps its tensors. compute: the stream on which models run.
    """

    name: str
    kind: str
    torch_device: str
    compute: Stream

    def stream(self, name: str) -> Stream:
        """A new stream."""

    def on_compute(self) -> AbstractContextManager[None]:
        """Models run within: what torch does here is queued on the compute stream."""

    def launch(self, stream: Stream, kernels: Callable[[], None]) -> None:
        """Queue the device's kernels that `kernels` starts: torch operations on device tensors."""

    def copy(
        self, stream: Stream, target: Rows, source: Rows, row_nbytes: int, num_rows: int
    ) -> None:
        """Queue a copy of `num_rows` rows; each end is device memory or host memory."""

    def record(self, stream: Stream) -> Event:
        """Queue an event; all events are timed."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Have a stream wait for an event, on the device; the host goes on."""

    def empty(self, nbytes: int) -> torch.Tensor:
        """Device memory, a flat uint8 tensor. Raises: Refused when there is not that much."""

    def register(self, address: int, nbytes: int, *, read_only: bool) -> None:
        """Pin host memory. Raises: PinFailed, and then the device works on as before."""

    def unregister(self, address: int) -> None:
        """Undo `register`, before the memory is unmapped."""

    def times(self, begun: Event, ended: Event) -> DeviceTimes:
        """When two events that are done were, on the host's CLOCK_MONOTONIC."""

    def synchronize(self) -> None:
        """Hold the host up until all streams are empty."""

    def statistics(self) -> Mapping[str, int]:
        """Bytes allocated and pinned, and registrations that failed."""

    def close(self) -> None:
        """Drain all streams and give everything back. Idempotent."""
