"""The GPU device over recording stand-ins: arguments, order, error paths. No GPU is met here."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from headrace.engine.cuda import ANCHOR_AGE_NS, UNKNOWN_DRIFT, CudaDevice, open_device
from headrace.engine.device import Device, PinFailed, Rows
from headrace.errors import BackendUnavailable, DeviceError, LocalProtocolError, Refused
from tests.unit.engine.test_registration import Calls

Log = list[tuple[object, ...]]


class Runtime(Calls):
    """Records copies too."""

    def __init__(self) -> None:
        super().__init__()
        self.status = 0

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> int:
        self.log.append(("copy", target, source, nbytes, stream))
        return self.status

    def copy_rows(self, *arguments: int) -> int:
        self.log.append(("copy_rows", *arguments))
        return self.status


class RawEvent:
    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self.at_ms = 0.0
        self.stream: RawStream | None = None

    def record(self, stream: RawStream) -> None:
        self._cuda.check()
        self.stream, self.at_ms = stream, next(self._cuda.clock_ms)
        self._cuda.log.append(("record", stream.cuda_stream))

    def query(self) -> bool:
        self._cuda.check()
        return True

    def synchronize(self) -> None:
        self._cuda.check()

    def elapsed_time(self, other: RawEvent) -> float:
        return other.at_ms - self.at_ms


class RawStream:
    _numbers = itertools.count(100)

    def __init__(self, cuda: Cuda, device: int) -> None:
        self._cuda = cuda
        self.cuda_stream = next(self._numbers)

    def wait_event(self, event: RawEvent) -> None:
        self._cuda.check()
        self._cuda.log.append(("wait", self.cuda_stream, event))


class Cuda:
    """`torch.cuda`, as far as the device uses it."""

    def __init__(self) -> None:
        self.log: Log = []
        self.clock_ms: Iterator[float] = iter(itertools.count(0, 1))
        self.failure: RuntimeError | None = None
        self.current: list[object] = []

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def Stream(self, device: int) -> RawStream:  # noqa: N802
        self.check()
        return RawStream(self, device)

    def Event(self, *, enable_timing: bool) -> RawEvent:  # noqa: N802
        assert enable_timing
        return RawEvent(self)

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        assert index == 1
        yield

    @contextmanager
    def stream(self, raw: RawStream) -> Iterator[None]:
        self.current.append(raw)
        yield
        self.current.pop()

    def synchronize(self, index: int) -> None:
        self.check()
        self.log.append(("synchronize", index))


@pytest.fixture
def cuda() -> Cuda:
    return Cuda()


@pytest.fixture
def runtime() -> Runtime:
    return Runtime()


@pytest.fixture
def device(cuda: Cuda, runtime: Runtime) -> CudaDevice:
    return CudaDevice(1, cuda, runtime)


def number(stream: Any) -> int:
    return int(stream.raw.cuda_stream)


def test_it_is_a_device(device: CudaDevice) -> None:
    as_device: Device = device
    assert (as_device.name, as_device.kind, as_device.torch_device) == ("cuda:1", "real", "cuda:1")
    assert device.statistics() == {
        "device_nbytes": 0,
        "registered_nbytes": 0,
        "failed_registrations": 0,
        "refused_read_only": 0,
    }


def test_one_row_and_rows_without_holes_are_one_flat_copy(
    device: CudaDevice, runtime: Runtime
) -> None:
    """A flat copy knows no largest pitch: rows of more than 2 GiB are legal."""
    side = device.stream("side")
    device.copy(side, Rows(1000, 7), Rows(2000, 9), 1 << 32, 1)
    device.copy(side, Rows(1000, 64), Rows(2000, 64), 64, 8)
    assert runtime.log == [
        ("copy", 1000, 2000, 1 << 32, number(side)),
        ("copy", 1000, 2000, 512, number(side)),
    ]


def test_rows_are_one_strided_copy(device: CudaDevice, runtime: Runtime) -> None:
    side = device.stream("side")
    device.copy(side, Rows(1000, 256), Rows(2000, 64), 64, 8)
    assert runtime.log == [("copy_rows", 1000, 256, 2000, 64, 64, 8, number(side))]


def test_rows_too_far_apart_for_the_driver_are_copied_one_by_one(
    device: CudaDevice, runtime: Runtime
) -> None:
    side, far = device.stream("side"), 1 << 31
    device.copy(side, Rows(0, far), Rows(0, 64), 64, 3)
    assert runtime.log == [("copy", n * far, n * 64, 64, number(side)) for n in range(3)]


def test_a_copy_that_fails_leaves_no_error_behind(device: CudaDevice, runtime: Runtime) -> None:
    runtime.status = 700
    with pytest.raises(DeviceError, match="cuda:1: a copy: error 700"):
        device.copy(device.compute, Rows(1, 8), Rows(1, 8), 8, 1)
    assert runtime.log[-1] == ("take",)


@pytest.mark.parametrize(("row_nbytes", "num_rows"), [(0, 3), (3, 0)])
def test_an_empty_copy_is_refused(device: CudaDevice, row_nbytes: int, num_rows: int) -> None:
    with pytest.raises(LocalProtocolError, match="a copy of"):
        device.copy(device.compute, Rows(1, 8), Rows(1, 8), row_nbytes, num_rows)


def test_events_and_waits_are_on_the_streams_that_were_named(
    device: CudaDevice, cuda: Cuda
) -> None:
    side = device.stream("side")
    cuda.log.clear()
    event = device.record(side)
    device.wait(device.compute, event)
    assert cuda.log == [("record", number(side)), ("wait", number(device.compute), event.raw)]
    assert event.done()
    event.wait()


def test_models_and_kernels_run_on_their_streams(device: CudaDevice, cuda: Cuda) -> None:
    side, seen = device.stream("side"), []
    with device.on_compute():
        seen.append(list(cuda.current))
    device.launch(side, lambda: seen.append(list(cuda.current)))
    assert seen == [[device.compute.raw], [side.raw]]  # type: ignore[attr-defined]


def test_streams_of_a_pool_that_begins_anew_are_not_shared(
    device: CudaDevice, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = [RawStream(cuda, 1) for _ in range(4)]
    given = itertools.cycle(pool)
    monkeypatch.setattr(cuda, "Stream", lambda *, device: next(given))
    handles = {number(device.stream(str(at))) for at in range(4)}
    assert len(handles) == 4
    with pytest.raises(LocalProtocolError, match="6 streams are taken"):
        device.stream("more")


def test_what_the_driver_raises_is_the_devices_failure(device: CudaDevice, cuda: Cuda) -> None:
    event = device.record(device.compute)
    cuda.failure = RuntimeError("CUDA error: an illegal memory access\nand much more")

    def within() -> None:
        with device.on_compute():
            cuda.check()

    for act in (
        event.done,
        event.wait,
        device.synchronize,
        within,
        lambda: device.stream("more"),
        lambda: device.record(device.compute),
        lambda: device.wait(device.compute, event),
        lambda: device.launch(device.compute, cuda.check),
    ):
        with pytest.raises(DeviceError, match=r"illegal memory access$"):
            act()


def test_memory_is_made_on_the_compute_stream(
    device: CudaDevice, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, real = [], torch.empty

    def empty(nbytes: int, *, dtype: torch.dtype, device: str) -> torch.Tensor:
        made.append((nbytes, dtype, device, list(cuda.current)))
        return real(nbytes, dtype=dtype)

    monkeypatch.setattr(torch, "empty", empty)
    memory = device.empty(64)
    assert memory.numel() == 64
    assert made == [(64, torch.uint8, "cuda:1", [device.compute.raw])]  # type: ignore[attr-defined]
    view = memory[8:].view(torch.int64)
    del memory
    assert device.statistics()["device_nbytes"] == 64
    del view
    assert device.statistics()["device_nbytes"] == 0


def test_too_little_memory_is_refused(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(*args: object, **kwargs: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64 bytes")

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(Refused, match=r"64 bytes of device memory cannot.*Use fewer lanes"):
        device.empty(64)


def test_registration_and_its_failure(device: CudaDevice, runtime: Runtime) -> None:
    device.register(4096, 8192, read_only=True)
    runtime.register = 2
    with pytest.raises(PinFailed):
        device.register(1 << 20, 8192, read_only=True)
    device.unregister(4096)
    assert runtime.log == [
        ("register", 4096, 8192, 8),
        ("register", 1 << 20, 8192, 8),
        ("take",),
        ("unregister", 4096),
    ]
    assert device.statistics()["failed_registrations"] == 1


def test_close_drains_first_and_then_unregisters(
    device: CudaDevice, cuda: Cuda, runtime: Runtime
) -> None:
    device.register(4096, 8192, read_only=True)
    order: Log = []
    cuda.log, runtime.log = order, order
    device.close()
    device.close()
    assert order == [("synchronize", 1), ("unregister", 4096)]
    with pytest.raises(LocalProtocolError, match="cuda:1 was closed"):
        device.record(device.compute)


def test_close_unregisters_although_the_device_failed(
    device: CudaDevice, cuda: Cuda, runtime: Runtime
) -> None:
    device.register(4096, 8192, read_only=True)
    cuda.failure = RuntimeError("lost")
    with pytest.raises(DeviceError, match="lost"):
        device.close()
    assert runtime.log[-1] == ("unregister", 4096)


def test_streams_and_events_of_something_else_are_refused(device: CudaDevice) -> None:
    with pytest.raises(LocalProtocolError, match="no stream of a GPU"):
        device.record(object())  # type: ignore[arg-type]
    with pytest.raises(LocalProtocolError, match="no event of a GPU"):
        device.wait(device.compute, object())  # type: ignore[arg-type]


# The clock.


def on_a_clock(monkeypatch: pytest.MonkeyPatch, readings: Iterator[int]) -> None:
    monkeypatch.setattr("headrace.engine.cuda.time.monotonic_ns", lambda: next(readings))


def test_times_are_counted_from_the_narrowest_of_a_few_anchors(
    cuda: Cuda, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anchors at 1000 to 1900, 5000 to 5100 and 9000 to 9300 ns: the second is off by 50 ns."""
    later = itertools.repeat(10_000)
    on_a_clock(monkeypatch, itertools.chain((1000, 1900, 5000, 5100, 9000, 9300), later))
    cuda.clock_ms = iter((0.0, 10.0, 20.0, 12.0, 12.5))
    device = CudaDevice(1, cuda, runtime)
    begun, ended = device.record(device.compute), device.record(device.compute)
    times = device.times(begun, ended)
    assert (times.begun_ns, times.ended_ns) == (5050 + 2_000_000, 5050 + 2_500_000)
    drift_ns = round(UNKNOWN_DRIFT * 2_500_000)
    assert 50 + 500 + drift_ns < times.error_ns <= 50 + 500 + drift_ns + 2


def test_the_error_grows_with_the_distance(
    cuda: Cuda, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 4 s a drift that is not known is 400 us, and a step of a float32 half a microsecond."""
    on_a_clock(monkeypatch, itertools.repeat(7))
    cuda.clock_ms = iter((0.0, 0.0, 0.0, 4000.0, 4001.0))
    device = CudaDevice(1, cuda, runtime)
    times = device.times(device.record(device.compute), device.record(device.compute))
    assert 400_100 + 500 + 400 < times.error_ns < 400_100 + 500 + 600


def test_anchors_are_renewed_and_old_events_keep_theirs(
    cuda: Cuda, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = [0]
    on_a_clock(monkeypatch, (now_ns[0] for _ in itertools.count()))
    device = CudaDevice(1, cuda, runtime)
    first = device.record(device.compute)
    again = device.record(device.compute)
    assert again.anchor is first.anchor
    now_ns[0] = ANCHOR_AGE_NS + 1
    second = device.record(device.compute)
    assert second.anchor is not first.anchor
    assert second.anchor.host_ns == now_ns[0]


class Drifting:
    """The host's clock, and a device's that gains on it; both stand still but for `later`.

    A reading of the host's takes 1 us, and the device comes past an event at any time in between.
    """

    def __init__(self, ppm: float, seed: int) -> None:
        self.host_ns = 5_000_000_000_000.0
        self._speed = 1 + ppm * 1e-6
        self._rng = random.Random(seed)
        self.recorded_ns: list[float] = []

    def monotonic_ns(self) -> int:
        self.host_ns += 1000
        return int(self.host_ns)

    def __iter__(self) -> Iterator[float]:
        """What events are recorded at: the float32 milliseconds are made of these when compared."""
        while True:
            self.host_ns += self._rng.uniform(0, 20_000)
            self.recorded_ns.append(self.host_ns)
            yield self.host_ns * self._speed * 1e-6
            self.host_ns += self._rng.uniform(0, 20_000)


@pytest.mark.parametrize("ppm", [5, -5, 30, -30, 100, -100])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_error_covers_what_the_clocks_drift_apart(
    ppm: int, seed: int, cuda: Cuda, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over some anchors, at any age; once there are two the error is microseconds."""
    clock, rng = Drifting(ppm, seed), random.Random(seed)
    monkeypatch.setattr("headrace.engine.cuda.time.monotonic_ns", clock.monotonic_ns)
    monkeypatch.setattr(
        RawEvent,
        "elapsed_time",
        lambda begun, ended: float(torch.tensor(ended.at_ms - begun.at_ms, dtype=torch.float32)),
    )
    cuda.clock_ms = iter(clock)
    device = CudaDevice(1, cuda, runtime)
    first = device._anchor
    errors_ns = {True: [0], False: [0]}
    for _ in range(40):
        event = device.record(device.compute)
        happened_ns = clock.recorded_ns[-1]
        times = device.times(event, event)
        assert abs(times.begun_ns - happened_ns) <= times.error_ns
        errors_ns[event.anchor is first].append(times.error_ns)
        clock.host_ns += rng.uniform(0, 2_500_000_000)
    assert max(errors_ns[True]) > 100_000
    assert 1_000 < max(errors_ns[False]) < 150_000


def test_a_device_whose_clock_stood_still_has_no_rate(
    cuda: Cuda, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = [0]
    on_a_clock(monkeypatch, (now_ns[0] for _ in itertools.count()))
    cuda.clock_ms = itertools.repeat(3.0)
    device = CudaDevice(1, cuda, runtime)
    now_ns[0] = ANCHOR_AGE_NS + 1
    anchor = device.record(device.compute).anchor
    assert (anchor.rate, anchor.rate_error) == (1.0, UNKNOWN_DRIFT)


# Opening.


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch was built for CUDA")
def test_a_torch_without_cuda_is_told_in_one_sentence() -> None:
    with pytest.raises(BackendUnavailable, match=r"was built without CUDA\. Install a torch"):
        open_device(0)


def test_a_gpu_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(BackendUnavailable, match="torch sees 2 GPUs, and number 2 was asked for"):
        open_device(2)
