"""A device in this process: `engine.device.Device` on the host's memory, which tells on its users.

It does what a device may do and a test on a fast one rarely shows. Copies land late, in order
within their stream and in an order drawn by chance between streams. What a queued copy will
overwrite is poison until it lands. Every queued copy, kernel and torch call is checked when it is
queued: whatever it reads or overwrites must be ordered after those that wrote or still read it, by
its stream, by events that its stream waits for, or by events that the host found done. What is not
is a fault, whether or not it would have gone well. So is memory given up while queued work may
still use it, and an error left behind by a registration. After a fault the device has failed.

Copies of host memory that is not registered are as CUDA's: to the device they are staged in the
call, from the device they are over when it returns.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import torch

from headrace.engine.device import Event, Rows, Stream
from headrace.errors import DeviceError, LocalProtocolError, Refused
from headrace.messages import DeviceTimes
from headrace.testing.fake.core import COMPARED_NS, ERROR_NS, Core, FakeEvent, StreamCalls
from headrace.testing.fake.queues import Mark, join
from headrace.testing.fake.ranges import of_rows
from headrace.testing.fake.torch_calls import AtOnce, OnNoStream, Queued, ToHost


class FakeDevice(Core):
    """One device model, driven by the thread that made it."""

    kind = "fake"
    torch_device = "cpu"

    # The device.

    def stream(self, name: str) -> Stream:
        self._enter()
        return self._queues.stream(name)

    @contextmanager
    def on_compute(self) -> Iterator[None]:
        """Torch calls in here are the compute stream's, carried out when they are made."""
        self._enter()
        calls = StreamCalls(self, self._queue(self.compute))
        with self._inside(), ToHost(calls), AtOnce(calls):
            yield
        self._sound()

    def launch(self, stream: Stream, kernels: Callable[[], None]) -> None:
        self._enter()
        queue = self._queue(stream)
        calls = StreamCalls(self, queue)
        mode = AtOnce(calls) if stream is self.compute else Queued(calls)
        with self._inside(), ToHost(calls), mode:
            kernels()
        self._sound()

    def copy(
        self, stream: Stream, target: Rows, source: Rows, row_nbytes: int, num_rows: int
    ) -> None:
        self._enter()
        if min(row_nbytes, num_rows) < 1:
            raise LocalProtocolError(f"a copy of {num_rows} rows of {row_nbytes} bytes")
        for end in (target, source):
            if num_rows > 1 and end.pitch < row_nbytes:
                raise DeviceError(f"a pitch of {end.pitch} for rows of {row_nbytes} bytes")
        queue = self._queue(stream)
        reads = of_rows(source, row_nbytes, num_rows)
        writes = of_rows(target, row_nbytes, num_rows)
        pageable = self._pageable(reads, writes)
        self.counts["copies"] += 1
        self.counts["copied_nbytes"] += row_nbytes * num_rows
        run = self._failing if self.counts["copies"] == self._failing_copy else None
        if pageable == "source":
            self._queues.flush(queue)
            staged = [ctypes.string_at(b, e - b) for b, e in reads]
            run = run or (lambda: _scatter(target, b"".join(staged), row_nbytes, num_rows))
        self._push(
            queue,
            "a copy",
            run or (lambda: _copy_rows(target, source, row_nbytes, num_rows)),
            reads,
            writes,
        )
        if pageable == "target":
            self.counts["host_waits"] += 1
            self._queues.flush(queue)
            join(self._queues.host, queue.clock)
        self._sound()

    def record(self, stream: Stream) -> Event:
        self._enter()
        return FakeEvent(self, self._queues.record(self._queue(stream)))

    def wait(self, stream: Stream, event: Event) -> None:
        self._enter()
        self._queues.wait(self._queue(stream), self._mark(event))

    def empty(self, nbytes: int) -> torch.Tensor:
        self._enter()
        left = self._memory_nbytes
        if left is not None and self._memory.nbytes + nbytes > left:
            raise Refused(
                f"{self.name}: {nbytes} bytes of device memory, {left - self._memory.nbytes} are "
                "free. Use fewer lanes, a shorter context or a smaller model"
            )
        return self._memory.empty(nbytes, self._queue(self.compute))

    def register(self, address: int, nbytes: int, *, read_only: bool) -> None:
        self._enter()
        self._registrations.register(address, nbytes, read_only=read_only)
        self._unmapped = [
            (begin, end)
            for begin, end in self._unmapped
            if end <= address or address + nbytes <= begin
        ]

    def unregister(self, address: int) -> None:
        self._enter()
        nbytes, _ = self._calls.ranges.get(address, (0, False))
        self._check_unused(address, nbytes, "unregistered")
        self._registrations.unregister(address)

    def times(self, begun: Event, ended: Event) -> DeviceTimes:
        """On the host's clock, off by no more than is said."""
        self._enter()
        marks = self._mark(begun), self._mark(ended)
        if not all(mark.passed for mark in marks):
            raise LocalProtocolError("the time of an event that is not done")
        (begun_ns, begun_error_ns), (ended_ns, ended_error_ns) = map(self._time_of, marks)
        error_ns = max(begun_error_ns, ended_error_ns)
        return DeviceTimes(begun_ns, max(begun_ns, ended_ns), error_ns, "fake")

    def _time_of(self, mark: Mark) -> tuple[int, int]:
        """A mark's time as this device tells it, and how far off it may be."""
        if self._first_ns is None:
            self._first_ns = mark.time_ns
        age_ns = (mark.time_ns - self._first_ns) % COMPARED_NS
        drifted_ns = math.ceil(age_ns * abs(self._drift))
        told_ns = mark.time_ns + self._skew_ns + round(age_ns * self._drift)
        return told_ns, ERROR_NS + drifted_ns

    def synchronize(self) -> None:
        self._enter()
        self.counts["host_waits"] += 1
        for queue in self._queues.streams:
            self._queues.flush(queue)
        for queue in self._queues.streams:
            join(self._queues.host, queue.clock)
        self._sound()

    def statistics(self) -> Mapping[str, int]:
        return {
            "device_nbytes": self._memory.nbytes,
            "registered_nbytes": self._registrations.nbytes,
            "failed_registrations": self._registrations.failures,
            "refused_read_only": self._registrations.refused_read_only,
        }

    def close(self) -> None:
        if self._closed:
            return
        self._check_thread()
        try:
            if self._failure is None:
                self.synchronize()
        finally:
            self._closed = True
            self._queues.drop()
            with suppress(DeviceError):
                self._registrations.close()

    # What a test tells it.

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Torch calls on device memory that are on no stream of this device are faults in here."""
        with OnNoStream(self._on_no_stream, StreamCalls(self, self._queue(self.compute))):
            yield
        self._sound()

    @property
    def streams(self) -> list[Stream]:
        """All streams, in the order in which they were made."""
        return list(self._queues.streams)

    def hold_up(self, stream: Stream) -> None:
        """Carry nothing out on a stream; whoever would wait for it gets `HostWaits`."""
        self._queue(stream).held_up = True

    def go_on(self, stream: Stream) -> None:
        """Undo `hold_up`."""
        self._queue(stream).held_up = False

    def unmapped(self, address: int, nbytes: int) -> None:
        """This host memory is given back to the system now."""
        if self._calls.meets(address, address + nbytes):
            self._fault(f"host memory at {address:#x} was unmapped while it is registered")
        self._check_unused(address, nbytes, "unmapped")
        self._unmapped.append((address, address + nbytes))
        self._sound()


def _copy_rows(target: Rows, source: Rows, row_nbytes: int, num_rows: int) -> None:
    for row in range(num_rows):
        ctypes.memmove(
            target.address + row * target.pitch, source.address + row * source.pitch, row_nbytes
        )


def _scatter(target: Rows, staged: bytes, row_nbytes: int, num_rows: int) -> None:
    for row in range(num_rows):
        piece = staged[row * row_nbytes : (row + 1) * row_nbytes]
        ctypes.memmove(target.address + row * target.pitch, piece, row_nbytes)
