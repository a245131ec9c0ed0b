"""The null decoder: its bounds, its holders and its counts."""

from __future__ import annotations

import ctypes

import pytest

from headrace.backends.base import Entry, Reservation, SlotView
from headrace.backends.null import NullDecoder, decoder_like
from headrace.backends.null import open as open_null
from headrace.backends.replay import open as open_replay
from headrace.errors import LocalProtocolError, Refused, WouldBlock
from headrace.geometry import Sliding
from headrace.plan import Copy, Plan, Region, compile_plan

CONTEXT = 32
NUM_TOKENS = 20
MANIFEST = decoder_like(
    open_replay({"layers": 3, "heads": 2, "head_dim": 4, "window": 8, "full_every": 3}).manifest()
)
CANARY = 0xA5


class Slot:
    """A slot full of one byte, and its plan."""

    def __init__(self, byte: int = 7, num_tokens: int = NUM_TOKENS) -> None:
        self.plan: Plan = compile_plan(MANIFEST, "head_major", num_tokens, CONTEXT)
        memory = bytearray(bytes([byte]) * self.plan.slot.nbytes)
        self._pin = (ctypes.c_char * len(memory)).from_buffer(memory)
        self.view = SlotView(memoryview(memory), ctypes.addressof(self._pin), "head_major")
        self.copies = self.plan.copies(self.plan.whole())


def make(lanes: int = 2) -> NullDecoder:
    decoder = NullDecoder(MANIFEST, context=CONTEXT, lanes=lanes)
    for lane in decoder._lanes:
        lane.view[:] = bytes([CANARY]) * lane.nbytes
    return decoder


def test_it_takes_all_that_the_source_emits() -> None:
    assert MANIFEST.role == "decoder"
    assert MANIFEST.layouts == ("head_major", "token_major")
    assert MANIFEST.layers[0].kind == Sliding(8, 8)  # a window's rows, not all that it could emit


def test_a_lane_is_the_image_of_a_slots_cells() -> None:
    decoder, slot = make(), Slot()
    reservation = decoder.reserve(NUM_TOKENS)
    assert decoder.begin_import(reservation, slot.view, slot.copies).done()
    lane = bytes(decoder._lanes[0].view)
    assert lane.count(7) == slot.plan.nbytes
    assert lane.count(CANARY) == len(lane) - slot.plan.nbytes
    beside = bytes(decoder._lanes[1].view)
    assert beside.count(CANARY) == len(beside)


@pytest.mark.parametrize(
    "region",
    [
        Region(0, 1, 64, 0),  # below the KV area: the prompt's or the logits' bytes
        Region(4096, 1, 64, 0),
        Region(-64, 1, 64, 0),
        Region(1 << 40, 1, 64, 0),
        Region(8192, 1, 1 << 40, 0),
        Region(8192, 1 << 20, 64, 64),
        Region(8192, 2, 64, 1 << 33),
    ],
)
def test_a_region_outside_the_lane_is_refused(region: Region) -> None:
    decoder, slot = make(), Slot()
    assert slot.plan.slot.kv_offset == 8192
    reservation = decoder.reserve(NUM_TOKENS)
    with pytest.raises(LocalProtocolError, match="reaches outside lane 0"):
        decoder.begin_import(reservation, slot.view, [Copy(0, 0, 0, 1, region)])
    for lane in decoder._lanes:
        assert bytes(lane.view).count(CANARY) == lane.nbytes


def test_a_lane_has_one_holder() -> None:
    decoder, slot = make(), Slot()
    first, second = decoder.reserve(NUM_TOKENS), decoder.reserve(3)
    assert (first.lane, second.lane) == (0, 1)
    with pytest.raises(WouldBlock, match="no lane free of 2"):
        decoder.reserve(1)
    forged = Reservation(second.lane, 3, first.serial)
    with pytest.raises(LocalProtocolError, match="is not what lane 1 holds"):
        decoder.begin_import(forged, slot.view, slot.copies)
    entry = decoder.publish(first)
    assert entry == Entry(0, NUM_TOKENS, first.serial)
    for act in (lambda: decoder.publish(first), lambda: decoder.free(first)):
        with pytest.raises(LocalProtocolError):
            act()
    decoder.free(entry)
    with pytest.raises(LocalProtocolError):
        decoder.free(entry)


def test_statistics_follow() -> None:
    decoder = make(3)
    entry = decoder.publish(decoder.reserve(4))
    decoder.reserve(5)
    counts = decoder.statistics()
    assert {key: counts[key] for key in ("lanes", "free", "reserved", "published")} == {
        "lanes": 3,
        "free": 1,
        "reserved": 1,
        "published": 1,
    }
    decoder.free(entry)
    assert decoder.statistics()["free"] == 2
    decoder.close()
    assert decoder.statistics()["lanes"] == 0


def test_it_decodes_nothing() -> None:
    decoder = make()
    assert not decoder.caps.decodes
    with pytest.raises(LocalProtocolError, match="decodes nothing"):
        decoder.decode_step([(decoder.publish(decoder.reserve(1)), 0)])


def test_the_factory_reads_its_options() -> None:
    decoder = open_null({"manifest": MANIFEST, "context": CONTEXT, "lanes": 1})
    assert decoder.caps.max_lanes == 1
    assert decoder.manifest() is MANIFEST
    with pytest.raises(Refused, match="missing required field `context`"):
        open_null({"manifest": MANIFEST})


def test_it_asks_for_the_memory_of_all_lanes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lane alone may fit where all of them do not."""
    asked: list[int] = []
    monkeypatch.setattr(
        "headrace.backends.null.require_memory", lambda nbytes, what: asked.append(nbytes)
    )
    decoder = make(3)
    assert asked == [sum(lane.nbytes for lane in decoder._lanes)]
    monkeypatch.undo()
    with pytest.raises(Refused, match="1000000000 lanes: needs"):
        NullDecoder(MANIFEST, context=CONTEXT, lanes=10**9)
