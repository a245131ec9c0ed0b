"""A GPU as `engine.device.Device`: torch's streams, events and memory, and CUDA's own copies.

Nothing here uses the default stream: models run on a stream of their own, which torch's allocator
then takes for the one that memory belongs to. Memory that a model's run gives up is used again by
the same stream at once, so whoever copies it on another stream holds it until the copy is done.

An event's time is the device's. Now and then an event is recorded on a stream that is always empty,
between two readings of the host's clock; times are counted from the nearest such event before. The
two clocks drift apart by tens of millionths, so what was counted is scaled by the rate that the
last two such events show. The rate is taken to be the same until the next one.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch

from headrace.engine.cuda_runtime import INSTALL, Runtime, load_runtime
from headrace.engine.device import Event, Rows, Stream
from headrace.engine.registration import Registrations
from headrace.errors import BackendUnavailable, DeviceError, LocalProtocolError, Refused
from headrace.messages import DeviceTimes

ANCHOR_AGE_NS: Final = 4_000_000_000
UNKNOWN_DRIFT: Final = 100e-6  # most that a device's clock is taken to drift before it is measured
_ANCHOR_TRIES: Final = 3
_RESOLUTION_NS: Final = 500  # of an event's time, as CUDA's documentation says
_POOL_STREAMS: Final = 32  # that torch has of one priority
MAX_PITCH: Final = (1 << 31) - 1  # cudaDeviceProp.memPitch


class _Anchor(NamedTuple):
    """An event whose time on the host's clock is known, by so much.

    rate: nanoseconds of the host in one of the device, known by `rate_error`.
    """

    event: Any
    host_ns: int
    error_ns: int
    rate: float = 1.0
    rate_error: float = UNKNOWN_DRIFT


class CudaStream:
    """A stream of a GPU, never the default one."""

    def __init__(self, name: str, raw: Any) -> None:
        self.name = name
        self.raw = raw

    def __repr__(self) -> str:
        return f"stream {self.name}"


class CudaEvent:
    """A timed event, and the anchor that its time is counted from."""

    def __init__(self, raw: Any, anchor: _Anchor) -> None:
        self.raw = raw
        self.anchor = anchor

    def done(self) -> bool:
        with _driver("an event"):
            return bool(self.raw.query())

    def wait(self) -> None:
        with _driver("an event"):
            self.raw.synchronize()


class CudaDevice:
    """One GPU of this process; implements `Device`."""

    kind = "real"

    def __init__(self, index: int, cuda: Any, runtime: Runtime) -> None:
        """`cuda`: `torch.cuda`. `open_device` makes one."""
        self.name = self.torch_device = f"cuda:{index}"
        self._index = index
        self._cuda = cuda
        self._runtime = runtime
        self._registrations = Registrations(runtime)
        self._closed = False
        self._taken: set[int] = set()
        self._device_nbytes = 0
        self.compute: Stream = self.stream("compute")
        self._clock = self.stream("clock")
        self._anchor = self._first_anchor()

    def stream(self, name: str) -> CudaStream:
        """A stream that no other of this device is.

        Torch gives out the streams of a small pool in turn, and after the last one the first again:
        two of ours on one would be in an order that nobody asked for.
        """
        self._check_open()
        with _driver("a stream"), self._cuda.device(self._index):
            for _ in range(_POOL_STREAMS):
                raw = self._cuda.Stream(device=self._index)
                if raw.cuda_stream not in self._taken:
                    self._taken.add(raw.cuda_stream)
                    return CudaStream(name, raw)
        raise LocalProtocolError(f"{self.name}: {len(self._taken)} streams are taken, no more")

    @contextmanager
    def on_compute(self) -> Iterator[None]:
        """What torch does here is queued on the compute stream; its errors are DeviceErrors."""
        self._check_open()
        with (
            _driver("the compute stream"),
            self._cuda.device(self._index),
            self._cuda.stream(_raw(self.compute)),
        ):
            yield

    def launch(self, stream: Stream, kernels: Callable[[], None]) -> None:
        self._check_open()
        with (
            _driver(f"a kernel on {stream.name}"),
            self._cuda.device(self._index),
            self._cuda.stream(_raw(stream)),
        ):
            kernels()

    def copy(
        self, stream: Stream, target: Rows, source: Rows, row_nbytes: int, num_rows: int
    ) -> None:
        self._check_open()
        if min(row_nbytes, num_rows) < 1:
            raise LocalProtocolError(f"a copy of {num_rows} rows of {row_nbytes} bytes")
        queue = _raw(stream).cuda_stream
        with self._cuda.device(self._index):
            if num_rows == 1 or target.pitch == source.pitch == row_nbytes:
                nbytes = row_nbytes * num_rows
                self._check(self._runtime.copy(target.address, source.address, nbytes, queue))
            elif max(target.pitch, source.pitch) <= MAX_PITCH:
                status = self._runtime.copy_rows(*target, *source, row_nbytes, num_rows, queue)
                self._check(status)
            else:
                for row in range(num_rows):
                    at = target.address + row * target.pitch, source.address + row * source.pitch
                    self._check(self._runtime.copy(*at, row_nbytes, queue))

    def record(self, stream: Stream) -> CudaEvent:
        self._check_open()
        if time.monotonic_ns() - self._anchor.host_ns > ANCHOR_AGE_NS:
            self._anchor = _with_rate(self._first_anchor(), self._anchor)
        with _driver("an event"), self._cuda.device(self._index):
            event = self._cuda.Event(enable_timing=True)
            event.record(_raw(stream))
        return CudaEvent(event, self._anchor)

    def wait(self, stream: Stream, event: Event) -> None:
        self._check_open()
        with _driver("an event"), self._cuda.device(self._index):
            _raw(stream).wait_event(_event(event).raw)

    def empty(self, nbytes: int) -> torch.Tensor:
        """Device memory, a flat uint8 tensor; it belongs to the compute stream.

        Raises:
            Refused: there is not that much.
        """
        try:
            with self.on_compute():
                memory = torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
        except DeviceError as exc:
            if not isinstance(exc.__cause__, torch.OutOfMemoryError):
                raise
            raise Refused(
                f"{self.name}: {nbytes} bytes of device memory cannot be had: {exc.__cause__}. "
                "Use fewer lanes, a shorter context or a smaller model"
            ) from exc
        self._device_nbytes += nbytes
        weakref.finalize(memory.untyped_storage(), self._dropped, nbytes).atexit = False
        return memory

    def register(self, address: int, nbytes: int, *, read_only: bool) -> None:
        self._check_open()
        with self._cuda.device(self._index):
            self._registrations.register(address, nbytes, read_only=read_only)

    def unregister(self, address: int) -> None:
        self._check_open()
        with self._cuda.device(self._index):
            self._registrations.unregister(address)

    def times(self, begun: Event, ended: Event) -> DeviceTimes:
        """When two events were; the error is an anchor's, the events' resolution and the drift."""
        begun_ns, begun_error_ns = self._time_of(_event(begun))
        ended_ns, ended_error_ns = self._time_of(_event(ended))
        return DeviceTimes(begun_ns, max(begun_ns, ended_ns), max(begun_error_ns, ended_error_ns))

    def synchronize(self) -> None:
        self._check_open()
        with _driver("the device"):
            self._cuda.synchronize(self._index)

    def statistics(self) -> Mapping[str, int]:
        return {
            "device_nbytes": self._device_nbytes,
            "registered_nbytes": self._registrations.nbytes,
            "failed_registrations": self._registrations.failures,
            "refused_read_only": self._registrations.refused_read_only,
        }

    def close(self) -> None:
        """Drain all streams and unregister what is left. Idempotent.

        Memory is given back as its tensors are dropped.
        """
        if self._closed:
            return
        try:
            self.synchronize()
        finally:
            self._closed = True
            with self._cuda.device(self._index):
                self._registrations.close()

    def _dropped(self, nbytes: int) -> None:
        self._device_nbytes -= nbytes

    def _first_anchor(self) -> _Anchor:
        """The narrowest of a few tries to say when an event was; its rate is not known yet."""
        tries: list[_Anchor] = []
        with _driver("an event"), self._cuda.device(self._index):
            for _ in range(_ANCHOR_TRIES):
                event = self._cuda.Event(enable_timing=True)
                before_ns = time.monotonic_ns()
                event.record(self._clock.raw)
                event.synchronize()
                after_ns = time.monotonic_ns()
                half_ns = (after_ns - before_ns + 1) // 2
                tries.append(_Anchor(event, before_ns + half_ns, half_ns))
        return min(tries, key=lambda anchor: anchor.error_ns)

    def _time_of(self, event: CudaEvent) -> tuple[int, int]:
        anchor = event.anchor
        elapsed_ns, step_ns = _elapsed_ns(anchor.event, event.raw)
        drift_ns = abs(elapsed_ns) * anchor.rate_error
        return (
            anchor.host_ns + round(elapsed_ns * anchor.rate),
            anchor.error_ns + math.ceil(_RESOLUTION_NS + step_ns + drift_ns),
        )

    def _check(self, status: int) -> None:
        """Raise a copy's failure; an error that is left behind would be told to the next kernel."""
        if status:
            self._runtime.take_last_error()
            raise DeviceError(f"{self.name}: a copy: {self._runtime.error_text(status)}")

    def _check_open(self) -> None:
        if self._closed:
            raise LocalProtocolError(f"{self.name} was closed")


def check_device(index: int = 0) -> str:
    """The version of torch's CUDA, which has a GPU of this number; nothing is opened.

    Raises:
        BackendUnavailable: torch has no CUDA, or there is no such GPU.
    """
    version = torch.version.cuda
    if version is None:
        detail = f"torch {torch.__version__} was built without CUDA"
        raise BackendUnavailable("cuda", "sdk_missing", "torch.version.cuda", detail, INSTALL)
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not 0 <= index < found:
        detail = f"torch sees {found} GPUs, and number {index} was asked for"
        hint = "Check the driver, CUDA_VISIBLE_DEVICES and the option device"
        raise BackendUnavailable(
            "cuda", "device_missing", "torch.cuda.device_count()", detail, hint
        )
    return version


def open_device(index: int = 0) -> CudaDevice:
    """The GPU of this number, as torch counts them; it is this thread's device from now on.

    Raises:
        BackendUnavailable: torch has no CUDA, or there is no such GPU.
    """
    version = check_device(index)
    with _driver("a GPU"):
        torch.cuda.set_device(index)
        torch.empty(1, device=f"cuda:{index}")  # makes the context, and loads the runtime
    return CudaDevice(index, torch.cuda, load_runtime(version))


def _with_rate(anchor: _Anchor, before: _Anchor) -> _Anchor:
    """An anchor that knows how the clocks drifted since the one before it."""
    device_ns, step_ns = _elapsed_ns(before.event, anchor.event)
    if device_ns <= 0:
        return anchor
    off_ns = before.error_ns + anchor.error_ns + _RESOLUTION_NS + step_ns
    rate = (anchor.host_ns - before.host_ns) / device_ns
    return anchor._replace(rate=rate, rate_error=off_ns / device_ns)


def _elapsed_ns(begun: Any, ended: Any) -> tuple[float, float]:
    """From one event to another on the device's clock, and the step of that figure.

    It is given in float32 milliseconds, whose steps grow with the distance.
    """
    with _driver("the time of an event"):
        elapsed_ns = float(begun.elapsed_time(ended)) * 1e6
    return elapsed_ns, abs(elapsed_ns) * 2.0**-23


@contextmanager
def _driver(what: str) -> Iterator[None]:
    """What torch raises for the driver is the device's failure."""
    try:
        yield
    except RuntimeError as exc:  # torch.AcceleratorError and OutOfMemoryError are of this kind
        raise DeviceError(f"{what}: {str(exc).partition(chr(10))[0]}") from exc


def _raw(stream: Stream) -> Any:
    if not isinstance(stream, CudaStream):
        raise LocalProtocolError(f"{stream} is no stream of a GPU")
    return stream.raw


def _event(event: Event) -> CudaEvent:
    if not isinstance(event, CudaEvent):
        raise LocalProtocolError(f"{event} is no event of a GPU")
    return event
