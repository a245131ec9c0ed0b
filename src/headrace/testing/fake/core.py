"""What lies under the device model: its state, and how work is checked and queued."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from headrace.engine.device import Event, Stream
from headrace.engine.registration import Registrations
from headrace.errors import DeviceError, LocalProtocolError
from headrace.testing.fake.memory import Memory, poison
from headrace.testing.fake.queues import Mark, Queue, Queues, Work
from headrace.testing.fake.ranges import Ranges, joined, of_tensor
from headrace.testing.fake.registration import FakeRegistrationCalls, PinFails
from headrace.testing.fake.torch_calls import Kernel, Tensors

ERROR_NS = 2_000  # of its times where the clocks were compared last,
COMPARED_NS = 4_000_000_000  # which is done so often; in between they drift apart


class Fault(DeviceError):
    """The device model was used as no device may be."""


def _never(ordinal: int, nbytes: int) -> bool:
    return False


class FakeEvent:
    """A mark in a queue, as the host sees it."""

    def __init__(self, device: Core, mark: Mark) -> None:
        self._device = device
        self.mark = mark

    def done(self) -> bool:
        """Whether the device has come past it; each call lets a little happen."""
        return self._device.passed(self.mark)

    def wait(self) -> None:
        self._device.wait_for(self.mark)


class Core:
    """A device model without its methods as a device."""

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
        drift_ppm: float = 20.0,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`polls_per_step`: how often the host must ask before one more piece of work is done.

        `memory_nbytes`: all that `empty` gives. `all_pinned`: take all host memory for registered,
        so that no copy of it is staged. `failing_copy`: the number of the copy, from 1, at which
        the device fails. `drift_ppm`: by how much its clock gains on the host's. `faults`: what it
        was shown. `counts`: what it did since it was made.
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
        self._drift = drift_ppm * 1e-6
        self._first_ns: int | None = None
        self._unmapped: list[tuple[int, int]] = []
        self.counts = dict.fromkeys(
            ("copies", "copied_nbytes", "pageable_copies", "kernels", "host_waits"), 0
        )
        self.compute: Stream = self._queues.stream("compute")

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

    def host_waits(self, queue: Queue) -> None:
        """A torch call hands bytes between a stream's memory and the host, which waits for it.

        Nothing is ordered by that: what needs an order must not get it from such a call.
        """
        self._enter()
        self.counts["host_waits"] += 1
        self._queues.flush(queue)
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
        if self._failure is None:  # what comes of the first is none of its own
            self.faults.append(text)
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


class StreamCalls:
    """The torch calls of one stream."""

    def __init__(self, device: Core, queue: Queue) -> None:
        self._device = device
        self._queue = queue

    def before(self, what: str, reads: Tensors, writes: Tensors) -> None:
        self._device.carried_out(self._queue, what, reads, writes)

    def queue(self, what: str, run: Kernel, reads: Tensors, writes: Tensors) -> None:
        self._device.queued(self._queue, what, run, reads, writes)

    def made(self, tensor: torch.Tensor) -> None:
        self._device.made(self._queue, tensor)

    def host_waits(self) -> None:
        self._device.host_waits(self._queue)

    def is_device(self, tensor: torch.Tensor) -> bool:
        return self._device.is_device(tensor)
