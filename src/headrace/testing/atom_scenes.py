"""Short scenes of the ATOM decoder on a fake card: what it must keep, whatever is cut how.

A scene ends quietly, or raises `Unkept` or what the engine raised. They are the instances of the
bugs in `headrace.testing.atom_bugs`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from headrace.backends.atom import AtomDecoder
from headrace.backends.base import Reservation
from headrace.ids import Span
from headrace.testing.atom_cases import BLOCK, EXACT, HYBRID, LLAMA, LOSSY, Case, Cut
from headrace.testing.atom_ground import (
    Bench,
    Slot,
    bring,
    check,
    check_cells,
    check_copies,
    check_rest,
    decode,
    imported,
    refused,
    serve,
)

EAGER: Final = Case("hybrid", "eager")
LONG: Final = 40
SHAPES: Final[tuple[tuple[int, Cut], ...]] = (
    (LONG, "whole"),
    (21, "positions"),
    (11, "backwards"),
    (24, "late_first"),
)
"""More than a window, a block in part, less than a window, and no block in part."""


def prompts_are_decoded_as_they_came(bench: Bench) -> None:
    """In either layout and every cut, one after the other in the same lane."""
    for case in (LLAMA, HYBRID, EAGER):
        with bench.decoder(case) as (decoder, fake):
            for num_tokens, cut in SHAPES:
                serve(bench, decoder, fake, case, num_tokens, 1, "token_major", cut)
            serve(bench, decoder, fake, case, 16, 2, "head_major", "layers")


def a_lane_may_have_fewer_blocks(bench: Bench) -> None:
    """A table names no block that the card has not; the lane ends where its blocks do."""
    case = Case("hybrid", blocks=4)
    with bench.decoder(case) as (decoder, fake):
        check(decoder.manifest().max_positions == 4 * BLOCK, "the lane is longer than its blocks")
        serve(bench, decoder, fake, case, 21)
        entry = decoder.publish(imported(decoder, bench.slot(decoder, case, 30)))
        for token in (1, 2):
            decoder.decode_step([(entry, token)])
        refused("a step beyond the end", partial(decoder.decode_step, [(entry, 0)]))
    case = Case("hybrid", batch=2)
    with bench.decoder(case) as (decoder, fake):
        serve(bench, decoder, fake, case, 21)


def a_block_goes_to_the_card_once(bench: Bench) -> None:
    """When its last row is there, whole, whatever is cut how; and the counts are the card's."""
    for case in (LLAMA, HYBRID):
        with bench.decoder(case) as (decoder, fake):
            cuts: tuple[Cut, ...] = ("whole", "backwards", "positions", "late_first")
            for cut in cuts:
                slot = bench.slot(decoder, case, 21)
                before, mark = dict(decoder.statistics()), len(fake.card.log)
                nbytes = fake.card.counts["updated_nbytes"]
                reservation = imported(decoder, slot, cut)
                calls = fake.card.log[mark:]
                rows = {call.name: fake.card.memory.meta(call.name).shape[2] for call in calls}
                wanted = sorted(
                    ("update", name, block, 0, rows[name])
                    for name in fake.card.memory.names
                    for block in range(3 if rows[name] == BLOCK else 1)
                )
                check(sorted(calls) == wanted, f"{cut}: other calls: {calls}")
                after = decoder.statistics()
                grown = {name: after[name] - before[name] for name in ("flushes", "fetches")}
                check(grown == {"flushes": len(wanted), "fetches": 0}, f"{cut}: counted {grown}")
                moved = fake.card.counts["updated_nbytes"] - nbytes
                told = after["flushed_nbytes"] - before["flushed_nbytes"]
                check(told == moved, f"{cut}: {told} bytes are told, {moved} were moved")
                decoder.free(reservation)


def parts_of_blocks_are_moved(bench: Bench) -> None:
    """Where the card can, no more than a prompt's rows are."""
    for case in (LLAMA, HYBRID):
        with bench.decoder(case, sub_blocks=True) as (decoder, fake):
            serve(bench, decoder, fake, case, LONG, 3)
            mark = len(fake.card.log)
            serve(bench, decoder, fake, case, 11, 1, "token_major", "positions")
            sizes = [(c.block, c.size) for c in fake.card.log[mark:] if c.call == "update"]
            check(set(sizes) <= {(0, 8), (1, 3), (0, 11)}, f"moved were {set(sizes)}")
            mark = len(fake.card.log)
            reservation = imported(decoder, bench.slot(decoder, case, 11, 1))
            check_cells(bench, decoder, reservation, case, 11)
            sizes = [(c.block, c.size) for c in fake.card.log[mark:] if c.call == "fetch"]
            check(set(sizes) <= {(0, 8), (1, 3), (0, 11)}, f"fetched were {set(sizes)}")


def nothing_is_left_of_another_prompt(bench: Bench) -> None:
    """Behind a prompt's last row there are zeros, and a card that looks there sees nothing."""
    for case in (LLAMA, HYBRID):
        with bench.decoder(case) as (decoder, fake):
            check_rest(fake, 0)
            for num_tokens in (LONG, 14, 11):
                decoder.free(imported(decoder, bench.slot(decoder, case, num_tokens)))
            check_rest(fake, 11, blocks=2)
            slot, given_up = bench.slot(decoder, case, LONG), decoder.reserve(LONG)
            for at in (9, 32):  # of blocks that do not become whole, in a window and before it
                decoder.begin_import(given_up, slot.view, slot.copies(Span(0, 4, at, at + 7)))
            decoder.free(given_up)
            decoder.free(imported(decoder, bench.slot(decoder, case, 11)))
            check_rest(fake, 11, blocks=2)
        for sub_blocks in (False, True):
            knobs = {"leaks": True, "sub_blocks": sub_blocks}
            with bench.decoder(case, clears=True, **knobs) as (decoder, fake):
                for num_tokens in (LONG, 24, 11):
                    serve(bench, decoder, fake, case, num_tokens, 5)
                check(decoder.statistics()["clears"] == 4, "other than one clear for each prompt")
                reservation = decoder.reserve(5)
                check_rest(fake, 0)
                decoder.free(reservation)


def values_are_kept_as_is_said(bench: Bench) -> None:
    """In each format: what is decoded from, what is read back, and how many values changed."""
    for case in (*EXACT, *LOSSY):
        with bench.decoder(case, lossy=case in LOSSY, read_back=True) as (decoder, fake):
            serve(bench, decoder, fake, case, 21, 1, "token_major", "positions")
            slot = bench.slot(decoder, case, 21, 1)
            before = decoder.statistics()["values_changed"]
            reservation = imported(decoder, slot)
            changed = decoder.statistics()["values_changed"] - before
            right = bench.right(case, 21, 1)
            check(changed == right.changed, f"{case}: {changed} changed, not {right.changed}")
            check((changed > 0) == (case in LOSSY), f"{case} changes {changed}")
            check_cells(bench, decoder, reservation, case, 21)
            check(decoder.caps.reads_back == (case in EXACT), f"{case}: reads_back")
            decoder.free(reservation)


def a_nan_keeps_its_payload(bench: Bench) -> None:
    """Poison is one, and is looked for in what is read back."""
    for sent in ("float32", "float16", "bfloat16"):
        case = Case(sent=sent)
        with bench.decoder(case) as (decoder, _):
            slot = bench.slot(decoder, case, 11)
            slot.memory[:] = b"\xf5\x7f" * (len(slot.memory) // 2)
            reservation = imported(decoder, slot)
            for copy in slot.copies():
                read = bytes(decoder.read(reservation, "head_major", copy))
                check(read == b"\xf5\x7f" * (len(read) // 2), f"{sent}: another NaN came back")


def a_second_attempt_lands_alone(bench: Bench) -> None:
    """In a reservation that was kept, over half of a first one or over poison."""
    for case in (LLAMA, HYBRID):
        with bench.decoder(case) as (decoder, _):
            cuts: tuple[Cut, ...] = ("layers", "positions", "whole")
            for cut in cuts:
                slot, other = (bench.slot(decoder, case, 21, seed) for seed in (1, 2))
                for anew in (False, True):
                    reservation = decoder.reserve(21)
                    pieces = other.pieces(cut)
                    for copies in pieces[: max(1, len(pieces) // 2)]:
                        decoder.begin_import(reservation, other.view, copies)
                    if anew:
                        decoder.forget_imports(reservation)
                        _bring_all_but_one(decoder, reservation, slot, cut)
                    bring(decoder, reservation, slot, cut)
                    entry = decoder.publish(reservation)
                    right = bench.right(case, 21, 1).rows
                    check(decode(decoder, entry) == right, f"{cut}: the first attempt is seen")
                    decoder.free(entry)


def _bring_all_but_one(
    decoder: AtomDecoder, reservation: Reservation, slot: Slot, cut: Cut
) -> None:
    """What the first attempt has brought stands for nothing of the second."""
    for copies in slot.pieces(cut)[:-1]:
        decoder.begin_import(reservation, slot.view, copies)
    refused("a part of a second attempt", partial(decoder.publish, reservation))


def what_is_read_is_what_the_card_has(bench: Bench) -> None:
    """In either layout, of any part, while blocks are incomplete and after decode began."""
    for case in (LLAMA, HYBRID):
        with bench.decoder(case) as (decoder, _):
            for cut in ("positions", "late_first"):
                reservation = decoder.reserve(14)
                slot = bench.slot(decoder, case, 14, layout="token_major")
                for copies in slot.pieces(cut):
                    decoder.begin_import(reservation, slot.view, copies)
                    check_copies(decoder, reservation, slot, copies)
                entry = decoder.publish(reservation)
                check(decode(decoder, entry) == bench.right(case, 14).rows, f"{cut}: other logits")
                full = [c for c in slot.copies() if case is LLAMA or c.layer in (1, 3)]
                check_copies(decoder, entry, slot, full)
                if case is HYBRID:
                    moved = partial(decoder.read, entry, "head_major", slot.copies()[0])
                    refused("reading rows that moved on", moved)
                decoder.free(entry)
    with bench.decoder(HYBRID) as (decoder, _):
        slot = bench.slot(decoder, HYBRID, 21)
        entry = decoder.publish(imported(decoder, slot))
        check_copies(decoder, entry, slot, slot.copies())


SCENES: Final[Mapping[str, Callable[[Bench], None]]] = {
    scene.__name__: scene
    for scene in (
        prompts_are_decoded_as_they_came,
        a_lane_may_have_fewer_blocks,
        a_block_goes_to_the_card_once,
        parts_of_blocks_are_moved,
        nothing_is_left_of_another_prompt,
        values_are_kept_as_is_said,
        a_nan_keeps_its_payload,
        a_second_attempt_lands_alone,
        what_is_read_is_what_the_card_has,
    )
}
