"""Copies into lanes: how they are cut, and what is in flight. Their order is shown by scenes."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import suppress
from sys import getrefcount

import pytest
import torch

from headrace.backends.base import SlotView
from headrace.backends.lane_copies import RING_PLACES, LaneCopies, rows_of
from headrace.engine.device import Rows
from headrace.errors import DeviceError, LocalProtocolError
from headrace.geometry import Full, Layer, Part
from headrace.plan import Copy, Region
from headrace.testing.fake.core import FakeEvent
from headrace.testing.fake_device import FakeDevice

HEADS, HEAD_DIM = 2, 4
PART = Part("k", HEADS, HEAD_DIM, "float32")
LAYERS = [Layer(0, "layers.0", Full(), (PART, PART))]


class Bench:
    """One lane of 16 positions in device memory, and a slot with as many."""

    positions = 16

    def __init__(self, ring_nbytes: int = 4096) -> None:
        self.device = FakeDevice(all_pinned=True)
        self.copies = LaneCopies(self.device, LAYERS, ring_nbytes)
        flat = self.device.empty(HEADS * self.positions * HEAD_DIM * 4)
        self.lane = flat.view(torch.float32).view(HEADS, self.positions, HEAD_DIM)
        self.device.synchronize()
        self.values = torch.arange(flat.numel() // 4, dtype=torch.float32)
        self.memory = bytearray(self.values.numpy().tobytes())

    def slot(self, layout: str) -> SlotView:
        held = (ctypes.c_char * len(self.memory)).from_buffer(self.memory)
        return SlotView(memoryview(self.memory), ctypes.addressof(held), layout)  # type: ignore[arg-type]

    def by_position(self) -> Copy:
        return Copy(0, 0, 0, self.positions, Region(0, 1, len(self.memory), 0))

    def by_head(self) -> Copy:
        row = self.positions * HEAD_DIM * 4
        return Copy(0, 0, 0, self.positions, Region(0, HEADS, row, row))


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.device.close()
    assert not made.device.faults


def until_done(fence: object) -> None:
    for _ in range(1000):
        if fence.done():  # type: ignore[attr-defined]
            return
    raise AssertionError("never done")


def test_rows_of_a_lane(bench: Bench) -> None:
    head_nbytes = bench.positions * HEAD_DIM * 4
    assert rows_of(bench.lane[:, 3:7]) == Rows(bench.lane.data_ptr() + 3 * 16, head_nbytes)


def test_heads_are_one_strided_copy(bench: Bench) -> None:
    until_done(bench.copies.begin(0, [bench.lane], bench.slot("head_major"), [bench.by_head()]))
    assert bench.device.counts["copies"] == 1
    assert bench.lane.flatten().tolist() == bench.values.tolist()


@pytest.mark.parametrize(
    ("ring_nbytes", "pieces"),
    [(4096, 1), (512, 1), (511, 2), (128, 4), (32, 16), (1, 16)],
)
def test_positions_are_cut_to_the_rings_places(ring_nbytes: int, pieces: int) -> None:
    """A place holds at least one position, and there are more pieces than places."""
    bench = Bench(ring_nbytes)
    fence = bench.copies.begin(0, [bench.lane], bench.slot("token_major"), [bench.by_position()])
    until_done(fence)
    assert bench.device.counts["copies"] == bench.device.counts["kernels"] == pieces
    wanted = bench.values.view(bench.positions, HEADS, HEAD_DIM).permute(1, 0, 2)
    assert torch.equal(bench.lane, wanted)
    bench.device.close()
    assert not bench.device.faults


def test_the_ring_goes_round() -> None:
    bench = Bench(32)
    before = bench.device.statistics()["device_nbytes"]
    for _ in range(3):
        fence = bench.copies.begin(
            0, [bench.lane], bench.slot("token_major"), [bench.by_position()]
        )
        until_done(fence)
    assert bench.positions > RING_PLACES
    assert bench.device.statistics()["device_nbytes"] == before
    bench.device.close()
    assert not bench.device.faults


def test_an_import_of_nothing_is_done_soon(bench: Bench) -> None:
    until_done(bench.copies.begin(0, [], bench.slot("head_major"), []))
    assert bench.device.counts["copies"] == 0


def test_a_lane_is_quiet_when_its_own_fences_are_done(bench: Bench) -> None:
    bench.copies.check_quiet(1)
    (link,) = (stream for stream in bench.device.streams if stream.name == "import")
    bench.device.hold_up(link)
    fence = bench.copies.begin(0, [bench.lane], bench.slot("head_major"), [bench.by_head()])
    bench.copies.check_quiet(1)
    with pytest.raises(LocalProtocolError, match="lane 0 was to be freed, 1 imports in flight"):
        bench.copies.check_quiet(0)
    bench.device.go_on(link)
    until_done(fence)
    bench.copies.check_quiet(0)
    bench.copies.give_back(0)
    bench.copies.check_quiet(0)


def test_no_event_is_asked_again_once_it_is_known_done(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt is thousands of pieces; freeing its lane asks the driver for none of them."""
    fences = [
        bench.copies.begin(0, [bench.lane], bench.slot("head_major"), [bench.by_head()])
        for _ in range(20)
    ]
    for fence in fences[:-1]:
        until_done(fence)
    asked: list[FakeEvent] = []
    done = FakeEvent.done

    def counted(event: FakeEvent) -> bool:
        asked.append(event)
        return done(event)

    monkeypatch.setattr(FakeEvent, "done", counted)
    assert all(fence.done() for fence in fences[:-1])
    assert not asked
    with suppress(LocalProtocolError):
        bench.copies.check_quiet(0)
    assert len(asked) == 1
    until_done(fences[-1])
    asked.clear()
    bench.copies.check_quiet(0)
    assert not asked
    gone = [weakref.ref(fence) for fence in fences]
    del fences, fence
    assert not any(ref() for ref in gone)  # nor does the lane keep them


def test_what_is_moved_is_held_until_it_is_known_done(bench: Bench) -> None:
    here, there = bench.lane[:, :8], bench.lane[:, 8:]
    held = getrefcount(here)
    bench.copies.move([(there, here)])
    assert getrefcount(here) > held
    bench.device.synchronize()
    bench.copies.move([])
    assert getrefcount(here) == held


def test_a_failed_device_is_told_when_asked_for_quiet() -> None:
    bench = Bench()
    bench.copies.begin(0, [bench.lane], bench.slot("head_major"), [bench.by_head()])
    bench.device.fail("lost")
    with pytest.raises(DeviceError, match="lost"):
        bench.copies.check_quiet(0)


def test_moves_of_nothing_queue_nothing(bench: Bench) -> None:
    bench.copies.move([])
    assert bench.device.counts["copies"] == 0


def test_closing_gives_the_ring_back(bench: Bench) -> None:
    bench.device.synchronize()
    before = bench.device.statistics()["device_nbytes"]
    bench.copies.close()
    bench.copies.close()
    assert bench.device.statistics()["device_nbytes"] == before - RING_PLACES * 4096
