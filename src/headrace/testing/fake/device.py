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
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import torch

from headrace.engine.device import Event, Rows, Stream
from headrace.engine.registration import Registrations
from headrace.errors import DeviceError, LocalProtocolError, Refused
from headrace.messages import DeviceTimes
from headrace.testing.fake.memory import Memory, poison
from headrace.testing.fake.queues import Mark, Queue, Queues, Work, join
from headrace.testing.fake.ranges import Ranges, joined, of_rows, of_tensor
from headrace.testing.fake.registration import FakeRegistrationCalls, PinFails
from headrace.testing.fake.torch_calls import AtOnce, Kernel, OnNoStream, Queued, Tensors

ERROR_NS = 2_000


class Fault(DeviceError):
    """The device model was used as no device may be."""


def _never(ordinal: int, nbytes: int) -> bool:
    return False


class FakeEvent:
    """A mark in a queue, as the host sees it."""

    def __init__(self, device: FakeDevice, mark: Mark) -> None:
        self._device = device
        self.mark = mark

    def done(self) -> bool:
        """Whether the device has come past it; each call lets a little happen."""
        return self._device.passed(self.mark)

    def wait(self) -> None:
        self._device.wait_for(self.mark)


class FakeDevice:
    """One device model, driven by the thread that made it."""

    kind = "fake"
    torch_device = "cpu"

    def __init__(
        self,
        *,
        name: str = "fake:0",
        seed: int = 0,
        polls_per_step: int = 1,
        memory_nbytes: int | None = None,
        pin_fails: PinFails = _never,
        pins_read_only: bool = True,
        all_pinned: bool = False,
        failing_copy: int = 0,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`polls_per_step`: how often the host must ask before one more piece of work is done.

        `memory_nbytes`: all that `empty` gives. `all_pinned`: take all host memory for registered,
        so that no copy of it is staged. `failing_copy`: the number of the copy, from 1, at which
        the device fails.

        `faults`: what it was shown. `counts`: what it did since it was made.
        """
        self.name = name
        self.faults: list[str] = []
        self._failure: DeviceError | None = None
        self._thread = threading.get_ident()
        self._closed = False
        self._depth = 0
        self._queues = Queues(seed, now_ns)
        self._memory = Memory(self._queues, self._fault)
        self._polls_per_step = polls_per_step
        self._polls = 0
        self._memory_nbytes = memory_nbytes
        self._calls = FakeRegistrationCalls(pin_fails, read_only=pins_read_only)
        self._registrations = Registrations(self._calls)
        self._all_pinned = all_pinned
        self._failing_copy = failing_copy
        self._skew_ns = random.Random(seed).randint(-ERROR_NS, ERROR_NS)
        self._unmapped: list[tuple[int, int]] = []
        self.counts = dict.fromkeys(
            ("copies", "copied_nbytes", "pageable_copies", "kernels", "host_waits"), 0
        )
        self.compute: Stream = self._queues.stream("compute")

    # The device.

    def stream(self, name: str) -> Stream:
        self._enter()
        return self._queues.stream(name)

    @contextmanager
    def on_compute(self) -> Iterator[None]:
        """Torch calls in here are the compute stream's, carried out when they are made."""
        self._enter()
        with self._inside(), AtOnce(_StreamCalls(self, self._queue(self.compute))):
            yield
        self._sound()

    def launch(self, stream: Stream, kernels: Callable[[], None]) -> None:
        self._enter()
        queue = self._queue(stream)
        calls = _StreamCalls(self, queue)
        with self._inside(), AtOnce(calls) if stream is self.compute else Queued(calls):
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
        begun_ns, ended_ns = (mark.time_ns + self._skew_ns for mark in marks)
        return DeviceTimes(begun_ns, ended_ns, ERROR_NS)

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
        with OnNoStream(self._on_no_stream, _StreamCalls(self, self._queue(self.compute))):
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

    def fail(self, text: str) -> None:
        """The device fails, for good."""
        self._failure = self._failure or DeviceError(f"{self.name}: {text}")
        self._queues.drop()

    # What its events and calls ask of it.

    def passed(self, mark: Mark) -> bool:
        """One look of the host at a mark."""
        self._enter()
        if not mark.passed:
            self._polls += 1
            if self._polls % self._polls_per_step == 0:
                self._queues.step()
            self._sound()
        if mark.passed:
            self._queues.known(mark)
        return mark.passed

    def wait_for(self, mark: Mark) -> None:
        """The host waits for a mark."""
        self._enter()
        self.counts["host_waits"] += 1
        self._queues.run_to(mark)
        self._queues.known(mark)
        self._sound()

    def carried_out(self, queue: Queue, what: str, reads: Tensors, writes: Tensors) -> None:
        """A torch call is about to be carried out, after all that its stream waits for."""
        self._enter()
        self._queues.flush(queue)
        self.counts["kernels"] += 1
        self._numbered(queue, what, self._ranges(reads), self._ranges(writes))
        self._sound()

    def queued(self, queue: Queue, what: str, run: Kernel, reads: Tensors, writes: Tensors) -> None:
        """A torch call takes its place in a stream."""
        self._enter()
        self.counts["kernels"] += 1
        self._push(queue, what, run, self._ranges(reads), self._ranges(writes))
        self._sound()

    def made(self, queue: Queue, tensor: torch.Tensor) -> None:
        """A torch call made a tensor in device memory of its stream."""
        if tensor.numel():
            self._memory.hold(tensor, queue)
            self._memory.note(queue, queue.clock[queue.index], (), of_tensor(tensor))

    def is_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's storage is device memory."""
        return self._memory.block(tensor.untyped_storage().data_ptr()) is not None

    # Within.

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Torch calls are on a stream of ours."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _on_no_stream(self, text: str) -> None:
        if not self._depth:
            self._fault(text)

    def _push(
        self, queue: Queue, what: str, run: Callable[[], object], reads: Ranges, writes: Ranges
    ) -> None:
        self._numbered(queue, what, reads, writes)

        def carried_out() -> None:
            with self._inside():
                run()

        work = Work(what, carried_out, reads, writes, lambda: poison(writes))
        self._queues.push(queue, work)

    def _numbered(self, queue: Queue, what: str, reads: Ranges, writes: Ranges) -> None:
        number, clock = self._queues.number(queue)
        self._memory.check(what, queue, clock, reads, writes)
        self._sound()
        self._memory.note(queue, number, reads, writes)

    def _ranges(self, tensors: Tensors) -> Ranges:
        """The device memory of tensors."""
        held = [
            each
            for tensor in tensors
            if tensor.numel() and self._memory.block(tensor.data_ptr()) is not None
            for each in of_tensor(tensor)
        ]
        return joined(sorted(held))

    def _pageable(self, reads: Ranges, writes: Ranges) -> str:
        """Which end is host memory that is not registered: `source`, `target` or neither."""
        host = ""
        for end, ranges in (("source", reads), ("target", writes)):
            if self._memory.block_of(ranges, "a copy") is not None:
                continue
            if host:
                raise LocalProtocolError("a copy of the device with no end in device memory")
            begin, stop = ranges[0][0], ranges[-1][1]
            if any(a < stop and begin < b for a, b in self._unmapped):
                self._fault(f"a copy's {end} at {begin:#x} is not mapped any more")
            pinned, read_only = self._calls.registered(begin, stop)
            if pinned and read_only and end == "target":
                self._fault("a copy to host memory that is registered for reading only")
            host = end
            if pinned or self._all_pinned:
                host += ", pinned"
        self._sound()
        if host.endswith("pinned") or not host:
            return ""
        self.counts["pageable_copies"] += 1
        return host

    def _check_unused(self, address: int, nbytes: int, how: str) -> None:
        used = self._memory.in_use(address, address + nbytes) if nbytes else ""
        if used:
            self._fault(f"host memory at {address:#x} was {how} that {used} still")
        self._sound()

    def _failing(self) -> None:
        self.fail("a copy failed, as was asked for")

    def _fault(self, text: str) -> None:
        self.faults.append(text)
        if self._failure is None:
            self._failure = Fault(text)
        self._queues.drop()

    def _enter(self) -> None:
        self._check_thread()
        if self._closed:
            raise LocalProtocolError(f"{self.name} was closed")
        if self._calls.left and self._failure is None:
            text = self._calls.error_text(self._calls.left)
            self._fault(f"an error of an earlier call was left behind: {text}")
        self._sound()

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise LocalProtocolError(f"{self.name} is driven by one thread, and not by this one")

    def _sound(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _queue(self, stream: Stream) -> Queue:
        if not isinstance(stream, Queue) or stream not in self._queues.streams:
            raise LocalProtocolError(f"{stream} is no stream of {self.name}")
        return stream

    def _mark(self, event: Event) -> Mark:
        if not isinstance(event, FakeEvent) or event.mark.stream not in self._queues.streams:
            raise LocalProtocolError(f"{event} is no event of {self.name}")
        return event.mark


class _StreamCalls:
    """The torch calls of one stream."""

    def __init__(self, device: FakeDevice, queue: Queue) -> None:
        self._device = device
        self._queue = queue

    def before(self, what: str, reads: Tensors, writes: Tensors) -> None:
        self._device.carried_out(self._queue, what, reads, writes)

    def queue(self, what: str, run: Kernel, reads: Tensors, writes: Tensors) -> None:
        self._device.queued(self._queue, what, run, reads, writes)

    def made(self, tensor: torch.Tensor) -> None:
        self._device.made(self._queue, tensor)

    def is_device(self, tensor: torch.Tensor) -> bool:
        return self._device.is_device(tensor)


def _copy_rows(target: Rows, source: Rows, row_nbytes: int, num_rows: int) -> None:
    for row in range(num_rows):
        ctypes.memmove(
            target.address + row * target.pitch, source.address + row * source.pitch, row_nbytes
        )


def _scatter(target: Rows, staged: bytes, row_nbytes: int, num_rows: int) -> None:
    for row in range(num_rows):
        piece = staged[row * row_nbytes : (row + 1) * row_nbytes]
        ctypes.memmove(target.address + row * target.pitch, piece, row_nbytes)
