"""The emulated link: nothing lands before it could have been carried, and nothing is carried twice
at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import pytest

from headrace.backends.base import Done, Fence, Reservation, SlotView
from headrace.backends.null import NullDecoder, decoder_like
from headrace.backends.replay import ReplayEngine, ReplayOptions
from headrace.bench.links import LinkDecoder
from headrace.errors import Refused
from headrace.geometry import Manifest
from headrace.ids import Span
from headrace.plan import Copy, Plan, compile_plan

NUM_TOKENS = 8


def manifest() -> Manifest:
    options = ReplayOptions(layers=2, heads=1, head_dim=4, dtype="uint8")
    return decoder_like(ReplayEngine(options).manifest())


class Clock:
    def __init__(self) -> None:
        self.now_ns = 1000

    def __call__(self) -> int:
        return self.now_ns


class Counting(NullDecoder):
    """Counts what is copied, and when asked for; its fences are done when `fenced` says so."""

    def __init__(self) -> None:
        super().__init__(manifest(), context=NUM_TOKENS, lanes=1)
        self.nbytes = 0
        self.fenced = True

    def begin_import(
        self, reservation: Reservation, slot: SlotView, copies: Sequence[Copy]
    ) -> Fence:
        super().begin_import(reservation, slot, copies)
        self.nbytes += sum(copy.nbytes for copy in copies)
        return self if not self.fenced else Done()

    def done(self) -> bool:
        return self.fenced


def pieces() -> tuple[Plan, SlotView, list[list[Copy]]]:
    """A plan, a slot full of one byte, and the copies of each layer: 64 bytes each."""
    plan = compile_plan(manifest(), "head_major", NUM_TOKENS, NUM_TOKENS)
    buffer = memoryview(bytearray(b"\x07" * plan.slot.nbytes))
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    layers = [plan.copies(Span(layer, layer + 1, 0, NUM_TOKENS)) for layer in range(2)]
    return plan, SlotView(buffer, address, "head_major"), layers


def test_a_transfer_takes_the_time_of_the_link() -> None:
    clock, inner = Clock(), Counting()
    decoder = LinkDecoder(inner, 64e9 / 100, clock_ns=clock)  # 64 bytes in 100 ns
    _, slot, (first, _) = pieces()
    fence = decoder.begin_import(decoder.reserve(NUM_TOKENS), slot, first)
    assert inner.nbytes == 64  # copied at once
    for now_ns, done in ((1000, False), (1099, False), (1100, True)):
        clock.now_ns = now_ns
        assert fence.done() is done


def test_transfers_queue_behind_each_other() -> None:
    clock = Clock()
    decoder = LinkDecoder(Counting(), 64e9 / 100, clock_ns=clock)
    _, slot, (first, second) = pieces()
    reservation = decoder.reserve(NUM_TOKENS)
    one = decoder.begin_import(reservation, slot, first)
    clock.now_ns = 1050
    other = decoder.begin_import(reservation, slot, second)
    clock.now_ns = 1199
    assert (one.done(), other.done()) == (True, False)
    clock.now_ns = 1200
    assert other.done()


def test_a_link_at_rest_begins_at_once() -> None:
    clock = Clock()
    decoder = LinkDecoder(Counting(), 64e9 / 100, clock_ns=clock)
    _, slot, (first, second) = pieces()
    reservation = decoder.reserve(NUM_TOKENS)
    decoder.begin_import(reservation, slot, first)
    clock.now_ns = 5000
    fence = decoder.begin_import(reservation, slot, second)
    clock.now_ns = 5100
    assert fence.done()


def test_nothing_lands_before_its_copy_is_fenced() -> None:
    clock, inner = Clock(), Counting()
    decoder = LinkDecoder(inner, 1e18, clock_ns=clock)
    _, slot, (first, _) = pieces()
    inner.fenced = False
    fence = decoder.begin_import(decoder.reserve(NUM_TOKENS), slot, first)
    clock.now_ns = 10**12
    assert not fence.done()
    inner.fenced = True
    assert fence.done()


def test_the_rest_is_the_decoders_own() -> None:
    inner = Counting()
    decoder = LinkDecoder(inner, 1e9)
    plan, slot, (first, second) = pieces()
    assert (decoder.caps, decoder.manifest()) == (inner.caps, inner.manifest())
    reservation = decoder.reserve(NUM_TOKENS)
    decoder.begin_import(reservation, slot, [*first, *second])
    entry = decoder.publish(reservation)
    (key, _) = plan.copies(Span(0, 1, 0, NUM_TOKENS))
    assert bytes(decoder.read(entry, "head_major", key)) == b"\x07" * 32
    assert decoder.statistics()["published"] == 1
    with pytest.raises(Exception, match="decodes nothing"):
        decoder.decode_step([(entry, 0)])
    decoder.free(entry)
    assert decoder.statistics()["free"] == 1
    decoder.close()


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan")])
def test_a_link_without_a_speed_is_refused(speed: float) -> None:
    with pytest.raises(Refused, match="it needs a speed"):
        LinkDecoder(Counting(), speed)
