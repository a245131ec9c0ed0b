"""The device model tells on wrong use, each time, and not on right use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from headrace.engine.device import Device, Event, PinFailed, Rows, Stream
from headrace.errors import DeviceError, LocalProtocolError, Refused
from headrace.testing.fake_device import FakeDevice, Fault, HostWaits

NBYTES = 64


class Host:
    """Host memory, and where it lies."""

    def __init__(self, fill: int | None = None, nbytes: int = NBYTES) -> None:
        values = np.arange(nbytes) if fill is None else np.full(nbytes, fill)
        self.bytes = values.astype(np.uint8)
        self.address = int(self.bytes.ctypes.data)

    @property
    def rows(self) -> Rows:
        return Rows(self.address, self.bytes.nbytes)


class Bench:
    """A device with a stream, and copies of 64 bytes between host and device memory."""

    def __init__(self, **how: Any) -> None:
        self.device = FakeDevice(**{"all_pinned": True, **how})
        self.side = self.device.stream("side")
        self.memory = self.device.empty(NBYTES)
        self.device.synchronize()
        self.event: Event | None = None  # for those who try all calls

    def up(self, host: Host, stream: Stream | None = None, memory: Any = None) -> None:
        self.device.copy(stream or self.side, rows_of(memory, self.memory), host.rows, NBYTES, 1)

    def down(self, host: Host, stream: Stream | None = None, memory: Any = None) -> None:
        self.device.copy(stream or self.side, host.rows, rows_of(memory, self.memory), NBYTES, 1)

    def mark(self, stream: Stream | None = None) -> Event:
        return self.device.record(stream or self.side)

    def compute_waits(self) -> None:
        self.device.wait(self.device.compute, self.mark())

    def compute(self) -> torch.Tensor:
        """What the device holds, by the compute stream."""
        with self.device.on_compute():
            return self.memory + 0


def rows_of(memory: Any, otherwise: torch.Tensor) -> Rows:
    return Rows((otherwise if memory is None else memory).data_ptr(), NBYTES)


@contextmanager
def fault(bench: Bench, match: str) -> Iterator[None]:
    """The device tells a fault, stays failed, and never does what was queued."""
    with pytest.raises(Fault, match=match):
        yield
    (text,) = bench.device.faults
    assert match in text
    with pytest.raises(Fault, match=match):
        bench.device.record(bench.side)
    bench.device.close()


def done(made: torch.Tensor) -> None:
    """A kernel was started, and nobody wants what it made."""


def until_done(event: Event) -> int:
    polls = 0
    while not event.done():
        polls += 1
        assert polls < 1000
    return polls


def test_it_is_a_device() -> None:
    device: Device = FakeDevice()
    assert (device.name, device.kind, device.torch_device) == ("fake:0", "fake", "cpu")


# It lags.


def test_a_copy_lands_late_and_its_target_is_poison_until_then() -> None:
    bench, host = Bench(), Host()
    bench.memory.zero_()
    bench.up(host)
    event = bench.mark()
    assert torch.isnan(bench.memory.view(torch.float32)).all()
    assert torch.isnan(bench.memory.view(torch.bfloat16)).all()
    assert torch.isnan(bench.memory.view(torch.float64)).all()
    assert until_done(event) >= 1
    assert bytes(bench.memory.numpy()) == bytes(host.bytes)


def test_fresh_memory_is_poison() -> None:
    assert torch.isnan(FakeDevice().empty(64).view(torch.float16)).all()


def test_a_host_target_is_poison_too() -> None:
    bench, host = Bench(), Host(1)
    bench.up(Host())
    bench.down(host)
    assert bytes(host.bytes[:2]) == b"\xfb\x7f"
    until_done(bench.mark())
    assert bytes(host.bytes) == bytes(Host().bytes)


def test_what_an_earlier_copy_still_reads_is_poison_only_after_it() -> None:
    bench, first, landed = Bench(), Host(7), Host(0)
    bench.up(first)
    bench.down(landed)
    bench.up(Host(9))
    until_done(bench.mark())
    assert set(landed.bytes.tolist()) == {7}
    assert set(bench.memory.tolist()) == {9}


@pytest.mark.parametrize("polls", [1, 3])
def test_how_late_it_is_can_be_told(polls: int) -> None:
    bench = Bench(polls_per_step=polls)
    bench.up(Host())
    assert until_done(bench.mark()) == 2 * polls - 1


def test_a_stream_is_in_order_and_streams_are_not() -> None:
    """Over seeds, two streams end in either order; one never overtakes itself."""
    orders = set()
    for seed in range(12):
        bench = Bench(seed=seed)
        other = bench.device.stream("other")
        memory = bench.device.empty(NBYTES)
        bench.device.synchronize()
        bench.up(Host(1))
        bench.up(Host(2), other, memory)
        bench.up(Host(3), other, memory)
        events = {"side": bench.mark(), "other": bench.mark(other)}
        ended: list[str] = []
        while len(ended) < 2:
            ended += [n for n, e in events.items() if n not in ended and e.done()]
        orders.add(tuple(ended))
        assert set(memory.tolist()) == {3}
    assert orders == {("side", "other"), ("other", "side")}


def test_the_same_seed_is_the_same_order() -> None:
    def order(seed: int) -> list[bool]:
        bench = Bench(seed=seed)
        other = bench.device.stream("other")
        memory = bench.device.empty(NBYTES)
        bench.device.synchronize()
        for _ in range(6):
            bench.up(Host(1))
            bench.up(Host(2), other, memory)
        events = [bench.mark(), bench.mark(other)]
        return [event.done() for _ in range(20) for event in events]

    assert order(4) == order(4)
    assert len({tuple(order(seed)) for seed in range(6)}) > 1


def test_rows_are_copied_with_their_pitches() -> None:
    bench, host = Bench(), Host(nbytes=64)
    source = Rows(host.address + 1, 16)
    bench.device.copy(bench.side, Rows(bench.memory.data_ptr() + 8, 8), source, 4, 3)
    bench.mark().wait()
    for row in range(3):
        begin = 8 + 8 * row
        assert bench.memory[begin : begin + 4].tolist() == list(range(1 + 16 * row, 5 + 16 * row))
    assert torch.isnan(bench.memory[:8].view(torch.float32)).all()


def test_a_stream_that_is_held_up_hangs_whoever_waits_for_it() -> None:
    bench = Bench()
    bench.up(Host())
    event = bench.mark()
    bench.device.hold_up(bench.side)
    assert not any(event.done() for _ in range(20))
    bench.compute_waits()
    for act in (event.wait, bench.device.synchronize, bench.compute):
        with pytest.raises(HostWaits, match="stream side"):
            act()
    bench.device.go_on(bench.side)
    assert bench.compute().tolist() == Host().bytes.tolist()


# It finds what is not in order.


def test_compute_must_wait_for_a_copy() -> None:
    bench = Bench()
    bench.up(Host())
    with fault(bench, "reads bytes that stream side writes"):
        bench.compute()


def test_compute_that_waits_for_a_copy() -> None:
    bench = Bench()
    bench.up(Host())
    bench.compute_waits()
    assert bench.compute().tolist() == Host().bytes.tolist()


def test_what_the_host_saw_done_is_in_order() -> None:
    bench = Bench()
    bench.up(Host())
    until_done(bench.mark())
    assert bench.compute().tolist() == Host().bytes.tolist()


def test_luck_is_no_order() -> None:
    """The copy has run, and nobody asked: still a fault."""
    bench = Bench()
    bench.up(Host())
    other = bench.device.stream("other")
    for _ in range(10):
        bench.mark(other).done()
    assert bytes(bench.memory.numpy()) == bytes(Host().bytes)
    with fault(bench, "reads bytes that stream side writes"):
        bench.compute()


def test_an_event_of_before_the_copy_is_the_wrong_one() -> None:
    bench = Bench()
    early = bench.mark()
    bench.up(Host())
    bench.device.wait(bench.device.compute, early)
    with fault(bench, "reads bytes that stream side writes"):
        bench.compute()


def test_an_event_of_another_stream_is_the_wrong_one() -> None:
    bench = Bench()
    bench.up(Host())
    bench.device.wait(bench.device.compute, bench.mark(bench.device.stream("other")))
    with fault(bench, "reads bytes that stream side writes"):
        bench.compute()


def test_order_is_handed_on_from_stream_to_stream() -> None:
    bench = Bench()
    middle = bench.device.stream("middle")
    bench.up(Host())
    bench.device.wait(middle, bench.mark())
    bench.device.wait(bench.device.compute, bench.mark(middle))
    assert bench.compute().tolist() == Host().bytes.tolist()


def test_a_copy_must_wait_for_what_compute_wrote() -> None:
    bench = Bench()
    with bench.device.on_compute():
        bench.memory.fill_(5)
    with fault(bench, "reads bytes that stream compute writes"):
        bench.down(Host())


def test_a_copy_must_wait_for_what_compute_reads() -> None:
    bench = Bench()
    bench.up(Host())
    bench.compute_waits()
    bench.compute()
    with fault(bench, "overwrites bytes that stream compute reads"):
        bench.up(Host(1))


def test_a_copy_after_an_event_of_compute() -> None:
    bench, host = Bench(), Host(0)
    with bench.device.on_compute():
        bench.memory.fill_(5)
    bench.device.wait(bench.side, bench.device.record(bench.device.compute))
    bench.down(host)
    bench.mark().wait()
    assert set(host.bytes.tolist()) == {5}


def test_two_copies_into_the_same_bytes() -> None:
    bench = Bench()
    bench.up(Host())
    with fault(bench, "overwrites bytes that stream side writes"):
        bench.up(Host(), bench.device.stream("other"))


def test_host_memory_counts_too() -> None:
    bench, host = Bench(), Host(0)
    other, memory = bench.device.stream("other"), bench.device.empty(NBYTES)
    bench.device.synchronize()
    bench.up(Host())
    bench.down(host)
    with fault(bench, "reads bytes that stream side writes"):
        bench.up(host, other, memory)


def test_neighbouring_bytes_are_apart() -> None:
    """Rows of two copies lie between each other, in the same memory."""
    bench, host = Bench(), Host()
    other = bench.device.stream("other")
    for stream, shift in ((bench.side, 0), (other, 4)):
        target = Rows(bench.memory.data_ptr() + shift, 8)
        bench.device.copy(stream, target, Rows(host.address + shift, 8), 4, 8)
    bench.compute_waits()
    bench.device.wait(bench.device.compute, bench.mark(other))
    assert bench.compute().tolist() == host.bytes.tolist()


def test_fresh_memory_may_still_be_used_by_compute() -> None:
    """It may have been freed by a model's run whose kernels are queued yet."""
    bench = Bench()
    memory = bench.device.empty(NBYTES)
    with fault(bench, "overwrites bytes that stream compute writes"):
        bench.up(Host(), memory=memory)


def test_views_of_what_is_queued_may_be_made() -> None:
    bench = Bench()
    bench.up(Host())
    with bench.device.on_compute(), torch.inference_mode():
        view = bench.memory.view(8, 8).permute(1, 0)[2:]
    bench.compute_waits()
    with bench.device.on_compute(), torch.inference_mode():
        assert view.contiguous()[0].tolist() == list(range(2, 64, 8))


def test_a_copy_hidden_in_a_call_is_seen() -> None:
    bench = Bench()
    bench.up(Host())
    with fault(bench, "reads bytes"), bench.device.on_compute(), torch.inference_mode():
        bench.memory.view(8, 8).t().contiguous()


def test_torch_calls_on_no_stream_of_ours() -> None:
    bench = Bench()
    with fault(bench, "on no stream of this device"), bench.device.watched():
        bench.memory.add_(1)


def test_torch_calls_elsewhere_are_let_be() -> None:
    bench = Bench()
    with bench.device.watched():
        assert (torch.ones(3) + 1).sum() == 6
        bench.up(Host())
        bench.compute_waits()
        bench.compute()
        bench.device.launch(bench.side, lambda: None)
        until_done(bench.mark())


# Kernels on other streams.


def test_kernels_are_queued_in_order() -> None:
    bench, landed = Bench(), bytearray()
    bench.up(Host())
    memory = bench.device.empty(NBYTES)
    bench.device.wait(bench.side, bench.device.record(bench.device.compute))

    def transpose() -> None:
        rows = bench.memory.view(8, 8)
        memory.view(8, 8).copy_((rows.to(torch.int16) + 1).t())

    bench.device.launch(bench.side, transpose)
    assert torch.isnan(memory.view(torch.float32)).all()
    bench.mark().wait()
    landed[:] = bytes(memory.numpy())
    assert landed == bytes((np.arange(64).reshape(8, 8).T + 1).astype(np.uint8).ravel())


def test_kernels_are_checked_when_they_are_queued() -> None:
    bench = Bench()
    bench.up(Host())
    with fault(bench, "reads bytes that stream side writes"):
        bench.device.launch(bench.device.stream("other"), lambda: done(bench.memory.clone()))


def test_kernels_on_the_compute_stream() -> None:
    bench = Bench()
    bench.up(Host())
    bench.compute_waits()
    bench.device.launch(bench.device.compute, lambda: done(bench.memory.add_(1)))
    assert bench.compute()[0] == 1


# Memory.


def test_memory_is_not_dropped_while_a_copy_uses_it() -> None:
    bench = Bench()
    bench.up(Host())
    with fault(bench, "early free"):
        del bench.memory
        bench.mark()


def test_memory_that_the_host_knows_to_be_quiet_may_be_dropped() -> None:
    bench = Bench()
    bench.up(Host())
    until_done(bench.mark())
    before = bench.device.statistics()["device_nbytes"]
    del bench.memory
    assert bench.device.statistics()["device_nbytes"] == before - NBYTES
    bench.mark()


def test_what_a_model_made_is_memory_too() -> None:
    """The allocator gives it to the model again, whatever copies it."""
    bench, host = Bench(), Host(0)
    with bench.device.on_compute():
        made = torch.ones(NBYTES, dtype=torch.uint8)
    bench.device.wait(bench.side, bench.device.record(bench.device.compute))
    bench.down(host, memory=made)
    with fault(bench, "early free"):
        del made
        bench.mark()


def test_what_a_model_made_and_the_host_saw_copied() -> None:
    bench, host = Bench(), Host(0)
    with bench.device.on_compute():
        made = torch.ones(NBYTES, dtype=torch.uint8)
        spare = made + 1  # used and dropped by the same stream
        del spare
    bench.device.wait(bench.side, bench.device.record(bench.device.compute))
    bench.down(host, memory=made)
    until_done(bench.mark())
    del made
    bench.mark()
    assert set(host.bytes.tolist()) == {1}


def test_a_copy_past_its_memory() -> None:
    bench, host = Bench(), Host(nbytes=2 * NBYTES)
    with fault(bench, "past its device memory"):
        bench.device.copy(bench.side, rows_of(None, bench.memory), host.rows, 2 * NBYTES, 1)


def test_memory_runs_out() -> None:
    device = FakeDevice(memory_nbytes=100)
    held = device.empty(60)
    with pytest.raises(Refused, match="60 bytes of device memory, 40 are free"):
        device.empty(60)
    assert held.numel() == 60
    device.record(device.compute)


# Host memory.


def test_pinned_memory_is_not_unpinned_while_it_is_copied() -> None:
    bench, host = Bench(all_pinned=False), Host()
    bench.device.register(host.address, NBYTES, read_only=True)
    bench.up(host)
    with fault(bench, "was unregistered that stream side reads still"):
        bench.device.unregister(host.address)


def test_pinned_memory_is_not_unmapped() -> None:
    bench, host = Bench(all_pinned=False), Host()
    bench.device.register(host.address, NBYTES, read_only=True)
    with fault(bench, "unmapped while it is registered"):
        bench.device.unmapped(host.address, NBYTES)


def test_memory_is_not_unmapped_while_it_is_copied() -> None:
    bench, host = Bench(), Host()
    bench.up(host)
    with fault(bench, "was unmapped that stream side reads still"):
        bench.device.unmapped(host.address, NBYTES)


def test_unmapped_memory_is_not_copied() -> None:
    bench, host = Bench(), Host()
    bench.device.unmapped(host.address, NBYTES)
    with fault(bench, "not mapped any more"):
        bench.up(host)


def test_memory_comes_and_goes_in_order() -> None:
    bench, host = Bench(all_pinned=False), Host()
    for _ in range(2):
        bench.device.register(host.address, NBYTES, read_only=True)
        bench.up(host)
        until_done(bench.mark())
        bench.device.unregister(host.address)
        bench.device.unmapped(host.address, NBYTES)
    assert bench.device.counts["pageable_copies"] == 0


def test_memory_for_reading_only_is_not_written() -> None:
    bench, host = Bench(all_pinned=False), Host()
    bench.device.register(host.address, NBYTES, read_only=True)
    with fault(bench, "registered for reading only"):
        bench.down(host)


def test_pageable_memory_to_the_device_is_staged() -> None:
    """The call has the bytes; they land later."""
    bench, host = Bench(all_pinned=False), Host()
    wanted = bytes(host.bytes)
    bench.up(host)
    host.bytes[:] = 0
    assert torch.isnan(bench.memory.view(torch.float32)).all()
    until_done(bench.mark())
    assert bytes(bench.memory.numpy()) == wanted
    assert bench.device.counts["pageable_copies"] == 1


def test_pageable_memory_from_the_device_is_there_on_return() -> None:
    bench, host = Bench(all_pinned=False), Host(0)
    bench.up(Host())
    bench.down(host)
    assert bytes(host.bytes) == bytes(Host().bytes)
    bench.compute()  # the host waited for all that came before


def test_a_copy_needs_an_end_on_the_device() -> None:
    bench, host = Bench(), Host()
    with pytest.raises(LocalProtocolError, match="no end in device memory"):
        bench.device.copy(bench.side, host.rows, Host().rows, NBYTES, 1)


# Pinning.


def test_pinning_fails_on_demand_and_the_device_works_on() -> None:
    bench = Bench(all_pinned=False, pin_fails=lambda ordinal, _: ordinal == 2)
    hosts = [Host(), Host(), Host()]
    bench.device.register(hosts[0].address, NBYTES, read_only=False)
    with pytest.raises(PinFailed, match="out of memory"):
        bench.device.register(hosts[1].address, NBYTES, read_only=False)
    bench.device.register(hosts[2].address, NBYTES, read_only=False)
    statistics = bench.device.statistics()
    assert statistics["registered_nbytes"] == 2 * NBYTES
    assert statistics["failed_registrations"] == 1


def test_a_device_without_the_flag_for_reading_only() -> None:
    device, host = FakeDevice(pins_read_only=False), Host()
    with pytest.raises(PinFailed, match="not supported"):
        device.register(host.address, NBYTES, read_only=True)
    device.register(host.address, NBYTES, read_only=False)


def test_an_error_that_is_left_behind_fails_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, host = Bench(pin_fails=lambda *_: True), Host()
    monkeypatch.setattr(
        "headrace.testing.fake.registration.FakeRegistrationCalls.take_last_error", lambda self: 0
    )
    with pytest.raises(PinFailed):
        bench.device.register(host.address, NBYTES, read_only=False)
    with fault(bench, "left behind: out of memory"):
        bench.device.record(bench.side)


# It fails, ends, and is one thread's.


def test_a_copy_fails_on_demand_and_the_device_with_it() -> None:
    bench = Bench(failing_copy=2)
    bench.up(Host())
    bench.up(Host())
    event = bench.mark()
    with pytest.raises(DeviceError, match="a copy failed"):
        until_done(event)
    for act in every_call(bench):
        with pytest.raises(DeviceError, match="a copy failed"):
            act()
    assert not bench.device.faults
    bench.device.close()


def every_call(bench: Bench) -> list[Callable[[], Any]]:
    device, event = bench.device, bench.event
    calls: list[Callable[[], Any]] = [
        lambda: device.stream("more"),
        lambda: device.on_compute().__enter__(),
        lambda: device.launch(bench.side, lambda: None),
        lambda: bench.up(Host()),
        lambda: device.record(bench.side),
        lambda: device.empty(8),
        lambda: device.register(1 << 20, 4096, read_only=True),
        lambda: device.unregister(1 << 20),
        device.synchronize,
    ]
    if event is not None:
        calls += [
            lambda: device.wait(bench.side, event),
            lambda: device.times(event, event),
            event.done,
            event.wait,
        ]
    return calls


def test_no_call_from_another_thread() -> None:
    bench = Bench()
    bench.event = bench.mark()
    raised: list[BaseException] = []

    def run() -> None:
        for act in [*every_call(bench), bench.device.close]:
            try:
                act()
            except LocalProtocolError as exc:
                raised.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(raised) == len(every_call(bench)) + 1
    assert all("driven by one thread" in str(exc) for exc in raised)
    bench.compute()


def test_no_call_after_close() -> None:
    bench = Bench()
    bench.event = bench.mark()
    bench.device.close()
    bench.device.close()
    for act in every_call(bench):
        with pytest.raises(LocalProtocolError, match="was closed"):
            act()


def test_close_drains_and_unpins() -> None:
    bench, host, kept = Bench(all_pinned=False), Host(0), Host(0)
    bench.device.register(host.address, NBYTES, read_only=False)
    bench.up(Host())
    bench.down(host)
    bench.device.close()
    assert bytes(host.bytes) == bytes(Host().bytes)
    assert bench.device.statistics()["registered_nbytes"] == 0
    assert set(kept.bytes.tolist()) == {0}


def test_streams_and_events_of_another_device_are_refused() -> None:
    bench, other = Bench(), Bench()
    with pytest.raises(LocalProtocolError, match="no stream of"):
        bench.device.record(other.side)
    with pytest.raises(LocalProtocolError, match="no event of"):
        bench.device.wait(bench.side, other.mark())


@pytest.mark.parametrize(("row_nbytes", "num_rows"), [(0, 1), (4, 0)])
def test_an_empty_copy_is_refused(row_nbytes: int, num_rows: int) -> None:
    bench = Bench()
    with pytest.raises(LocalProtocolError, match="a copy of"):
        bench.device.copy(bench.side, Rows(1, 8), Rows(1, 8), row_nbytes, num_rows)


def test_a_pitch_is_no_less_than_a_row() -> None:
    bench, host = Bench(), Host()
    with pytest.raises(DeviceError, match="a pitch of 2"):
        bench.device.copy(bench.side, Rows(bench.memory.data_ptr(), 8), Rows(host.address, 2), 4, 2)


# Time.


def test_times_are_the_hosts_within_the_error() -> None:
    now_ns = iter(range(1_000_000, 2_000_000, 1000))
    bench = Bench(now_ns=lambda: next(now_ns))
    begun = bench.mark()
    bench.up(Host())
    ended = bench.mark()
    until_done(ended)
    times = bench.device.times(begun, ended)
    assert times.ended_ns - times.begun_ns == 1000
    assert abs(times.begun_ns - 1_000_000) <= times.error_ns <= 2001


@pytest.mark.parametrize("ppm", [5, -5, 20, -30, 100, -100])
def test_the_error_covers_what_its_clock_drifts(ppm: int) -> None:
    """At any time since the clocks were compared last, which shows in what is told."""
    for seed in range(4):
        now_ns = [10**12]
        bench = Bench(seed=seed, drift_ppm=ppm, now_ns=lambda now_ns=now_ns: now_ns[0])
        offs = []
        for _ in range(20):
            event = bench.mark()
            event.wait()
            times = bench.device.times(event, event)
            offs.append(times.begun_ns - now_ns[0])
            assert abs(offs[-1]) <= times.error_ns
            now_ns[0] += 612_345_678
        assert max(offs) - min(offs) > abs(ppm) * 3_000


def test_its_clock_drifts_unless_told_otherwise() -> None:
    now_ns = [0]
    bench = Bench(now_ns=lambda: now_ns[0])
    told = []
    for _ in range(2):
        event = bench.mark()
        event.wait()
        told.append(bench.device.times(event, event))
        now_ns[0] += 1_000_000_000
    assert told[1].begun_ns - told[0].begun_ns == 1_000_020_000
    assert told[1].error_ns == told[0].error_ns + 20_000


# The host waits.


def brought(memory: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Ways to have a value of the device, or to give it one, that hold the host up."""
    ordinary = torch.ones(4)
    cells = memory.view(torch.float32)[:4]
    return {
        "item": lambda: cells[0].item(),
        "bool": lambda: bool(cells[0] > 1),
        "equal": lambda: torch.equal(cells, cells),
        "nonzero": lambda: cells.nonzero(),
        "cpu": lambda: cells.cpu(),
        "tolist": lambda: cells.tolist(),
        "to": lambda: cells.to("cpu"),
        "to with a type": lambda: cells.to(device="cpu", dtype=torch.float16),
        "down": lambda: ordinary.copy_(cells),
        "up": lambda: cells.copy_(ordinary),
    }


@pytest.mark.parametrize("how", brought(torch.empty(64, dtype=torch.uint8)))
@pytest.mark.parametrize("inferring", [False, True])
def test_a_torch_call_that_holds_the_host_up_is_counted(how: str, inferring: bool) -> None:
    """In inference mode torch tells of other calls than without."""
    bench = Bench()
    call = brought(bench.memory)[how]
    with bench.device.on_compute(), torch.inference_mode(inferring):
        bench.memory.view(torch.float32).fill_(2.0)
        before = bench.device.counts["host_waits"]
        call()
        assert bench.device.counts["host_waits"] == before + 1
    assert not bench.device.faults


@pytest.mark.parametrize("how", ["cpu", "to", "down"])
def test_a_kernel_on_another_stream_that_holds_the_host_up_is_counted(how: str) -> None:
    bench = Bench()
    bench.up(Host())
    before = bench.device.counts["host_waits"]
    call = brought(bench.memory)[how]

    def kernels() -> None:
        bench.memory.add_(1)  # is carried out before the host goes on
        call()

    bench.device.launch(bench.side, kernels)
    assert bench.device.counts["host_waits"] == before + 1
    bench.device.hold_up(bench.side)
    bench.device.record(bench.side)
    with pytest.raises(HostWaits, match="the host waits"):
        bench.device.launch(bench.side, kernels)


def test_what_stays_on_the_device_holds_nobody_up() -> None:
    bench, ordinary = Bench(), torch.ones(4)
    with bench.device.on_compute():
        before = bench.device.counts["host_waits"]
        cells = bench.memory.view(torch.float32).fill_(2.0)
        cells[:4].copy_(cells[4:8])
        assert cells.to(torch.float16).dtype is torch.float16
        cells.to(cells.device)
        assert ordinary.to("cpu").tolist() == [1.0] * 4
        assert ordinary.sum().item() == 4
        assert bench.device.counts["host_waits"] == before + 1  # what is made here is the device's


def test_what_was_brought_to_the_host_is_the_hosts() -> None:
    bench = Bench()
    with bench.device.on_compute():
        cells = bench.memory.view(torch.float32).fill_(2.0)
        landed = cells.to("cpu")
        cells.fill_(3.0)
    assert set(landed.tolist()) == {2.0}
    assert not bench.device.is_device(landed)


def test_an_event_that_is_not_done_has_no_time() -> None:
    bench = Bench()
    bench.up(Host())
    event = bench.mark()
    with pytest.raises(LocalProtocolError, match="not done"):
        bench.device.times(event, event)
