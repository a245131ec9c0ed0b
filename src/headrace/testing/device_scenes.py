"""Short scenes on a device model: each shows one thing that a decoder must keep.

A scene ends quietly, or raises `Broken` or what the code or the device model raised. They are the
instances of the bugs in `headrace.testing.device_bugs`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Final

from headrace.backends.base import SlotView, TimedFence
from headrace.backends.pinning import PROBE_NBYTES, Pins
from headrace.engine.host import HostMemory
from headrace.errors import LocalProtocolError
from headrace.geometry import Layout
from headrace.testing.device_ground import (
    FED,
    KEEP_NBYTES,
    NUM_TOKENS,
    Broken,
    Ground,
    Slot,
    check,
    decode,
    fenced,
    landed,
    prompt_of,
    range_of,
    said_by,
    slab_of,
    stream_of,
    until_done,
)
from headrace.testing.fake.device import FakeDevice

# The decoder.


def decode_waits(ground: Ground) -> None:
    """Published while its copies are queued, it decodes after them, and the host does not wait."""
    layouts: tuple[Layout, ...] = ("head_major", "token_major")
    for layout in layouts:
        with ground.decoder() as (decoder, device):
            prompt = prompt_of(decoder, layout)
            for name in ("import", "layout"):
                device.hold_up(stream_of(device, name))
            reservation = decoder.reserve(NUM_TOKENS)
            decoder.begin_import(reservation, prompt.view, prompt.copies())
            entry = decoder.publish(reservation)
            for name in ("import", "layout"):
                device.go_on(stream_of(device, name))
            check(decode(decoder, entry) == ground.rows(layout, 0), f"{layout}: decodes otherwise")


def host_waits_for_logits(ground: Ground) -> None:
    """Nothing holds the host up from the first copy to the last token, but each token's logits."""
    layouts: tuple[Layout, ...] = ("head_major", "token_major")
    for layout in layouts:
        with ground.decoder() as (decoder, device):
            prompt = prompt_of(decoder, layout)
            before = device.counts["host_waits"]
            entry = decoder.publish(fenced(decoder, prompt))
            waits = device.counts["host_waits"] - before
            check(waits == 0, f"{layout}: the host waited {waits} times for an import")
            decode(decoder, entry)
            waits = device.counts["host_waits"] - before
            check(waits == len(FED), f"{layout}: {waits} waits of the host in {len(FED)} steps")


def decode_waits_for_its_own(ground: Ground) -> None:
    """Decode waits for no other lane's copies, though they were queued before its own."""
    with ground.decoder(2) as (decoder, device):
        device.hold_up(stream_of(device, "layout"))
        other = decoder.reserve(NUM_TOKENS)
        prompt = prompt_of(decoder, "token_major", 1)
        fence = decoder.begin_import(other, prompt.view, prompt.copies()[:2])
        entry = decoder.publish(fenced(decoder, prompt_of(decoder)))
        check(decode(decoder, entry) == ground.rows("head_major", 0), "decodes otherwise")
        device.go_on(stream_of(device, "layout"))
        until_done(fence)


def fences_tell(ground: Ground) -> None:
    """A fence is done when the slot may be written again, not before, and keeps it till then."""
    layouts: tuple[Layout, ...] = ("head_major", "token_major")
    for layout in layouts:
        with ground.decoder() as (decoder, device):
            prompt = prompt_of(decoder, layout)
            wanted = prompt.cells()
            slot = Slot(prompt.view.buffer)
            view = SlotView(memoryview(slot), slot.address, layout)
            reservation = decoder.reserve(NUM_TOKENS)
            device.hold_up(stream_of(device, "import"))
            fence = decoder.begin_import(reservation, view, prompt.copies())
            alive = weakref.ref(slot)
            del view, slot
            check(not any(fence.done() for _ in range(50)), "a fence of copies that are held up")
            check(alive() is not None, "nothing keeps the slot that is copied from")
            device.go_on(stream_of(device, "import"))
            until_done(fence)
            kept = alive()
            if kept is not None:
                kept[:] = bytes(len(kept))
            found = {
                (copy.layer, copy.part): bytes(decoder.read(reservation, layout, copy))
                for copy in prompt.copies()
            }
            check(found == wanted, f"{layout}: the slot was still read after its fence")


def slots_are_let_go(ground: Ground) -> None:
    """A fence that is done keeps nothing, and its times are in order."""
    with ground.decoder() as (decoder, _):
        prompt = prompt_of(decoder)
        slot = Slot(prompt.view.buffer)
        view = SlotView(memoryview(slot), slot.address, "head_major")
        reservation = decoder.reserve(NUM_TOKENS)
        fence = decoder.begin_import(reservation, view, prompt.copies())
        alive = weakref.ref(slot)
        del view, slot
        until_done(fence)
        check(alive() is None, "a fence that is done keeps the slot")
        if not isinstance(fence, TimedFence):
            raise Broken("a fence without times")
        times = fence.times()
        check(times.begun_ns < times.ended_ns, f"the copies ran from {times}")


def lanes_are_reused(ground: Ground) -> None:
    """What comes into a lane next comes after what compute still reads of it."""
    with ground.decoder() as (decoder, _):
        for seed in range(3):
            entry = decoder.publish(fenced(decoder, prompt_of(decoder, "head_major", seed)))
            check(decode(decoder, entry) == ground.rows("head_major", seed), "decodes otherwise")
            decoder.free(entry)


def lanes_are_quiet(ground: Ground) -> None:
    """A lane with copies in flight is not freed."""
    with ground.decoder() as (decoder, device):
        prompt = prompt_of(decoder)
        reservation = decoder.reserve(NUM_TOKENS)
        device.hold_up(stream_of(device, "import"))
        decoder.begin_import(reservation, prompt.view, prompt.copies())
        try:
            decoder.free(reservation)
        except LocalProtocolError:
            pass
        else:
            raise Broken("a lane was freed with copies in flight")
        device.go_on(stream_of(device, "import"))
        device.synchronize()
        decoder.free(reservation)


def ring_is_fenced(ground: Ground) -> None:
    """Cells that go through the ring land, whatever the order of the two streams."""
    for seed in range(4):
        with ground.decoder(seed=seed) as (decoder, _):
            prompt = prompt_of(decoder, "token_major", seed)
            check(landed(decoder, fenced(decoder, prompt), prompt), "other cells landed")


def reads_wait(ground: Ground) -> None:
    """What is read is what landed, whoever waits for it at the time."""
    layouts: tuple[Layout, ...] = ("head_major", "token_major")
    for layout in layouts:
        with ground.decoder(2) as (decoder, _):
            prompt = prompt_of(decoder, layout)
            reservation = decoder.reserve(NUM_TOKENS)
            decoder.begin_import(reservation, prompt.view, prompt.copies())
            check(landed(decoder, reservation, prompt), f"{layout}: other cells were reserved")
            reservation = decoder.reserve(NUM_TOKENS)
            decoder.begin_import(reservation, prompt.view, prompt.copies())
            entry = decoder.publish(reservation)
            check(landed(decoder, entry, prompt), f"{layout}: other cells were published")


def entries_are_kept(ground: Ground) -> None:
    """What is kept outlives the decode of its entry, and who goes on from it has its cells."""
    layouts: tuple[Layout, ...] = ("head_major", "token_major")
    for layout in layouts:
        with ground.decoder(2, keep_nbytes=KEEP_NBYTES) as (decoder, _):
            prompt, rows = prompt_of(decoder, layout), ground.rows(layout, 0)
            entry = decoder.publish(fenced(decoder, prompt))
            decode(decoder, entry)
            decoder.free(entry)  # its memory was used before, by compute too
            reservation = decoder.reserve(NUM_TOKENS)
            decoder.begin_import(reservation, prompt.view, prompt.copies())
            entry = decoder.publish(reservation)
            kept = decoder.keep(entry)
            check(decode(decoder, entry) == rows, "a kept entry decodes otherwise")
            again = decoder.reserve_from(kept, NUM_TOKENS, NUM_TOKENS)
            decoder.evict(kept)
            check(decode(decoder, decoder.publish(again)) == rows, "what goes on decodes otherwise")


def slabs_come_and_go(ground: Ground) -> None:
    """A slab is pinned until its owner lets it go, and not for longer."""
    with ground.decoder(all_pinned=False) as (decoder, device):
        for _ in range(2):
            prompt = prompt_of(decoder)
            slab = slab_of(prompt)
            decoder.register(range_of(slab))
            reservation = decoder.reserve(NUM_TOKENS)
            view = SlotView(slab.view, slab.address, "head_major")
            decoder.begin_import(reservation, view, prompt.copies())
            entry = decoder.publish(reservation)
            check(decode(decoder, entry) == ground.rows("head_major", 0), "decodes otherwise")
            check(device.counts["pageable_copies"] == 0, "a registered slab is copied as pageable")
            device.synchronize()
            decoder.free(entry)
            decoder.unregister(range_of(slab))
            device.unmapped(slab.address, slab.nbytes)


def closing_drains(ground: Ground) -> None:
    """Closed with copies queued from a pinned slab, it is unpinned after them."""
    with ground.decoder(all_pinned=False) as (decoder, device):
        prompt = prompt_of(decoder)
        slab = slab_of(prompt)
        decoder.register(range_of(slab))
        reservation = decoder.reserve(NUM_TOKENS)
        view = SlotView(slab.view, slab.address, "head_major")
        decoder.begin_import(reservation, view, prompt.copies())
        decoder.close()
        decoder.unregister(range_of(slab))
        check(device.statistics()["registered_nbytes"] == 0, "a slab is pinned still")
        device.unmapped(slab.address, slab.nbytes)
    check(not device.faults, "; ".join(device.faults))


# Pinned memory.


def pinning_may_fail(ground: Ground) -> None:
    """However registration fails: copies go on, it is said once, and the device works."""
    slabs = [HostMemory(4 * PROBE_NBYTES) for _ in range(3)]
    for first_failing in range(1, 9):
        device = FakeDevice(pin_fails=lambda n, _, first=first_failing: n >= first)  # type: ignore[misc]
        pins = Pins(device, read_only=True)
        said = said_by(lambda pins=pins: [pins.register(range_of(slab)) for slab in slabs])  # type: ignore[misc]
        device.record(device.compute)
        failures = pins.statistics()["pin_failures"]
        check(said == (1 if failures else 0), f"said {said} times, {failures} failures")
        pinned = pins.statistics()["pinned_nbytes"]
        check(pinned == device.statistics()["registered_nbytes"], f"{pinned} bytes pinned")
        check(pinned == slabs[0].nbytes * (3 - failures), f"{failures} failures, {pinned} bytes")
        for slab in slabs:
            pins.unregister(range_of(slab))
            device.unmapped(slab.address, slab.nbytes)
        device.close()
        check(not device.faults, "; ".join(device.faults))


def small_is_tried_first(ground: Ground) -> None:
    """A small piece is registered before the whole, for reading only before for all."""
    tried: list[int] = []

    def fails(ordinal: int, nbytes: int) -> bool:
        tried.append(nbytes)
        return True

    slab = HostMemory(4 * PROBE_NBYTES)
    pins = Pins(FakeDevice(pin_fails=fails), read_only=True)
    said_by(lambda: pins.register(range_of(slab)))
    check(bool(tried) and max(tried) == PROBE_NBYTES, f"tried {tried} bytes where nothing pins")
    device = FakeDevice(pins_read_only=False)
    pins = Pins(device, read_only=True)
    pins.register(range_of(slab))
    check(pins.statistics()["pinned_nbytes"] == slab.nbytes, "no other way than for reading only")
    pins.close()
    device.close()


SCENES: Final[Mapping[str, Callable[[Ground], None]]] = {
    each.__name__: each
    for each in (
        decode_waits,
        host_waits_for_logits,
        decode_waits_for_its_own,
        fences_tell,
        slots_are_let_go,
        lanes_are_reused,
        lanes_are_quiet,
        ring_is_fenced,
        reads_wait,
        entries_are_kept,
        slabs_come_and_go,
        closing_drains,
        pinning_may_fail,
        small_is_tried_first,
    )
}
