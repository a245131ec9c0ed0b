"""Short scenes of the ATOM decoder on a fake card: what fails, what is stale, what is refused.

A scene ends quietly, or raises `Unkept` or what the engine raised. They are the instances of the
bugs in `headrace.testing.atom_bugs`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from headrace.backends.atom import AtomDecoder
from headrace.backends.base import Entry, Reservation, ReserveFailed
from headrace.errors import (
    BackendUnavailable,
    Closed,
    DeviceError,
    HeadraceError,
    LocalProtocolError,
    Refused,
    WouldBlock,
)
from headrace.ids import Span
from headrace.testing.atom_cases import EXACT, FED, HYBRID, LLAMA, LOSSY
from headrace.testing.atom_ground import (
    Bench,
    Slot,
    Unkept,
    bring,
    check,
    decode,
    imported,
    refused,
    said_by,
    serve,
)


def a_failed_clear_keeps_the_lane(bench: Bench) -> None:
    """It is taken until it is freed, and the next prompt is right."""
    with bench.decoder(LLAMA, clears=True) as (decoder, fake):
        fake.card.fail_update(after=5)
        try:
            decoder.reserve(5)
        except ReserveFailed as exc:
            reservation = exc.reservation
        else:
            raise Unkept("a clear failed, and nobody heard of it")
        refused("the lane", partial(decoder.reserve, 5), WouldBlock)
        refused("a prompt without a cell", partial(decoder.publish, reservation))
        decoder.free(reservation)
        serve(bench, decoder, fake, LLAMA, 11)


def a_lossy_cast_is_refused(bench: Bench) -> None:
    """Unless it is allowed, and one that is exact is not."""
    for case in LOSSY:
        try:
            with bench.decoder(case):
                pass
        except Refused as exc:
            check(exc.field == "lossy", f"{case}: {exc}")
        else:
            raise Unkept(f"{case} was taken")
    for case in (LLAMA, *EXACT):
        with bench.decoder(case):
            pass


def a_stale_card_is_told(bench: Bench) -> None:
    """Before anything is imported, whatever it holds; later by what is read back."""
    for after in (0, 1):
        for case in (LLAMA, HYBRID):
            with bench.decoder(case, read_back=True) as (decoder, fake):
                fake.card.go_stale(after)
                with_prompt = partial(imported, decoder, bench.slot(decoder, case, 21))
                refused("a flush that changed nothing", with_prompt, DeviceError)
    for after in (0, 1, 2):  # the marks, or a part of them, or the zeros after them
        for zeroed in (False, True):
            opened = partial(_opened, bench, stale_after=after, zeroed=zeroed)
            refused("a stale card", opened, BackendUnavailable)
    with bench.decoder(LLAMA) as (decoder, fake):
        fake.card.go_stale()
        slot = bench.slot(decoder, LLAMA, 21)
        reservation = imported(decoder, slot)
        read = bytes(decoder.read(reservation, "head_major", slot.copies()[0]))
        check(not any(read), "what is read is not what the card has")


def a_card_is_warmed_up_first(bench: Bench) -> None:
    """Before anything is written."""
    for what in ("raises", "loses"):
        with bench.decoder(HYBRID, warms_up=True, needs_warm_up=what) as (decoder, fake):
            serve(bench, decoder, fake, HYBRID, 21)
    with bench.decoder(LLAMA) as (_, fake):
        check(not fake.card.counts["prefills"], "a card was warmed up that need not be")


def a_failed_flush_publishes_nothing(bench: Bench) -> None:
    """Whichever it is; and the same lane serves the next prompt."""
    with bench.decoder(HYBRID) as (decoder, fake):
        slot = bench.slot(decoder, HYBRID, 21)
        for failing in (0, 3, 15):
            reservation = decoder.reserve(21)
            fake.card.fail_update(failing)
            refused("a flush", partial(bring, decoder, reservation, slot, "whole"), DeviceError)
            refused("a prompt in part", partial(decoder.publish, reservation))
            decoder.free(reservation)
            serve(bench, decoder, fake, HYBRID, 11, failing)
        reservation = decoder.reserve(21)
        fake.card.fail_update()  # the first one, of a block whose rows are all there
        refused("a flush", partial(bring, decoder, reservation, slot, "layers"), DeviceError)
        for copies in slot.pieces("layers")[1:]:
            decoder.begin_import(reservation, slot.view, copies)
        refused("a prompt whose block failed", partial(decoder.publish, reservation))


def a_failed_step_is_told(bench: Bench) -> None:
    """It counts for nothing, and the same lane serves the next prompt."""
    with bench.decoder(HYBRID) as (decoder, fake):
        entry = decoder.publish(imported(decoder, bench.slot(decoder, HYBRID, 21)))
        decoder.decode_step([(entry, FED[0])])
        fake.card.fail_decode()
        refused("a step", partial(decoder.decode_step, [(entry, FED[1])]), DeviceError)
        decoder.decode_step([(entry, FED[1])])
        check([c.offset for c in fake.card.log[-3:]] == [21, 22, 22], "a failed step was counted")
        decoder.free(entry)
        serve(bench, decoder, fake, HYBRID, 11)


def a_row_that_never_came_is_missed(bench: Bench) -> None:
    """Whichever: of the first block, of the last, of a window, of keys or of values."""
    with bench.decoder(HYBRID) as (decoder, _):
        slot = bench.slot(decoder, HYBRID, 21)
        copies = slot.copies()
        for missing in (0, 1, 2, len(copies) - 1):
            kept = copies[missing]
            for start, stop in ((kept.start + 1, kept.stop), (kept.start, kept.stop - 1)):
                reservation = decoder.reserve(21)
                piece = slot.copies(Span(kept.layer, kept.layer + 1, start, stop))[kept.part]
                given = [*copies[:missing], piece, *copies[missing + 1 :]]
                decoder.begin_import(reservation, slot.view, given)
                refused("a prompt that lacks a row", partial(decoder.publish, reservation))
                whole = partial(decoder.read, reservation, "head_major", kept)
                refused("reading a row that never came", whole)
                decoder.free(reservation)
        refused("an empty prompt", partial(decoder.publish, decoder.reserve(5)))


def what_is_stale_is_refused(bench: Bench) -> None:
    """And what never was: a holder from before, an entry made up, a copy from anywhere."""
    with bench.decoder(LLAMA, context=48) as (decoder, fake):
        slot = bench.slot(decoder, LLAMA, 21)
        first = imported(decoder, slot)
        early = Entry(first.lane, first.num_tokens, first.serial)
        refused("an entry made up", partial(decoder.decode_step, [(early, 1)]))
        refused("an entry made up", partial(decoder.free, early))
        refused("a second prompt", partial(decoder.reserve, 5), WouldBlock)
        entry = decoder.publish(first)
        _check_stale(decoder, first, slot)
        refused("two of one lane", partial(decoder.decode_step, [(entry, 1), (entry, 1)]))
        for token in (-1, decoder.manifest().vocab_size):
            refused(f"token {token}", partial(decoder.decode_step, [(entry, token)]))
        check(decode(decoder, entry) == bench.right(LLAMA, 21).rows, "a refused step was taken")
        decoder.free(entry)
        _check_stale(decoder, first, slot)
        again = imported(decoder, slot)
        check(again != first and decoder.statistics()["lanes_reserved"] == 1, "a serial came again")
        _check_stale(decoder, first, slot)
        refused("an entry from before", partial(decoder.free, entry))
        decoder.free(again)
        for num_tokens in (0, 49):
            refused(f"{num_tokens} tokens", partial(decoder.reserve, num_tokens))
        serve(bench, decoder, fake, LLAMA, 42)
        entry = decoder.publish(imported(decoder, bench.slot(decoder, LLAMA, 48)))
        refused("a step in a full lane", partial(decoder.decode_step, [(entry, 1)]))
        decoder.close()
        refused("a closed decoder", partial(decoder.reserve, 5), Closed)


def a_copy_from_outside_is_refused(bench: Bench) -> None:
    """Of positions, layers and parts that are not; and nothing of its import is made."""
    with bench.decoder(HYBRID) as (decoder, fake):
        slot = bench.slot(decoder, HYBRID, 21)
        reservation, mark = decoder.reserve(21), len(fake.card.log)
        good, last = slot.copies()[0], slot.copies()[-1]
        for bad in (
            good._replace(layer=9),
            good._replace(layer=-1),
            good._replace(part=2),
            good._replace(part=-1),
            good._replace(start=good.start - 1, stop=good.stop - 1),
            last._replace(start=last.start + 1, stop=last.stop + 1),
            last._replace(source=last.source._replace(offset=len(slot.memory) - 8)),
        ):
            taken = partial(decoder.begin_import, reservation, slot.view, [good, bad])
            refused(f"{bad}", taken)
        check(len(fake.card.log) == mark, "a part of a refused import was made")
        refused("what was refused", partial(decoder.read, reservation, "head_major", good))
        bring(decoder, reservation, slot)
        for bad in (good._replace(layer=-2), good._replace(layer=9), good._replace(part=-1)):
            refused(f"reading {bad}", partial(decoder.read, reservation, "head_major", bad))


def another_thread_is_refused(bench: Bench) -> None:
    """Before anything is touched, also where no call of the vendor's would be made."""
    with bench.decoder(LLAMA) as (decoder, fake):
        slot = bench.slot(decoder, LLAMA, 21)
        reservation, mark = decoder.reserve(21), len(fake.card.log)
        part = slot.copies(Span(0, 1, 0, 3))
        acts: list[Callable[[], object]] = [
            partial(decoder.begin_import, reservation, slot.view, part),
            partial(decoder.begin_import, reservation, slot.view, slot.copies()),
            partial(decoder.publish, reservation),
            partial(decoder.free, reservation),
        ]
        told: list[HeadraceError | None] = []
        other = threading.Thread(target=lambda: told.extend(map(said_by, acts)))
        other.start()
        other.join()
        check([type(each) for each in told] == [LocalProtocolError] * 4, f"told was {told}")
        check(len(fake.card.log) == mark, "a second thread called the card")
        refused("what it brought", partial(decoder.read, reservation, "head_major", part[0]))
        decoder.free(reservation)
        serve(bench, decoder, fake, LLAMA, 11)


def a_call_within_a_call_is_refused(bench: Bench) -> None:
    """Such as by what a signal interrupts; the call that runs goes on."""
    told: list[HeadraceError | None] = []
    acts: list[Callable[[], object]] = []

    def within(_: float) -> None:
        told.extend(map(said_by, acts))

    with bench.decoder(LLAMA, step_s=1e9, sleep=within) as (decoder, _):
        slot = bench.slot(decoder, LLAMA, 21)
        entry = decoder.publish(imported(decoder, slot))
        acts.append(partial(decoder.read, entry, "head_major", slot.copies()[0]))
        check(decode(decoder, entry) == bench.right(LLAMA, 21).rows, "other logits")
    check([type(each) for each in told] == [LocalProtocolError] * len(FED), f"told was {told}")


def _check_stale(decoder: AtomDecoder, stale: Reservation, slot: Slot) -> None:
    """A reservation that is none any more is good for nothing."""
    copies = slot.copies()
    refused("importing", partial(decoder.begin_import, stale, slot.view, copies))
    refused("publishing", partial(decoder.publish, stale))
    refused("reading", partial(decoder.read, stale, "head_major", copies[0]))
    refused("freeing", partial(decoder.free, stale))


def _opened(bench: Bench, **knobs: Any) -> None:
    with bench.decoder(LLAMA, **knobs):
        pass


SCENES: Final[Mapping[str, Callable[[Bench], None]]] = {
    scene.__name__: scene
    for scene in (
        a_failed_clear_keeps_the_lane,
        a_lossy_cast_is_refused,
        a_stale_card_is_told,
        a_card_is_warmed_up_first,
        a_failed_flush_publishes_nothing,
        a_failed_step_is_told,
        a_row_that_never_came_is_missed,
        what_is_stale_is_refused,
        a_copy_from_outside_is_refused,
        another_thread_is_refused,
        a_call_within_a_call_is_refused,
    )
}
