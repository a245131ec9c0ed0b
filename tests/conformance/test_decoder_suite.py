"""The decoder suite bites: one broken decoder for each thing that it checks."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Mapping, Sequence

import pytest

from headrace.backends.base import Caps, Decoder, Entry, Fence, Reservation, SlotView
from headrace.backends.null import NullDecoder, decoder_like
from headrace.backends.replay import open as open_replay
from headrace.errors import HeadraceError, LocalProtocolError
from headrace.geometry import Layout
from headrace.plan import Copy, Region
from headrace.testing.conformance_decoder import DecoderConformance

CONTEXT = 64


class Hashing(NullDecoder):
    """A null decoder that decodes: a row is made of the prompt's cells and the tokens fed."""

    def __init__(self, lanes: int) -> None:
        source = open_replay(
            {"layers": 3, "heads": 2, "head_dim": 8, "window": 16, "full_every": 2}
        )
        super().__init__(decoder_like(source.manifest()), context=CONTEXT, lanes=lanes)
        self.caps = Caps(max_lanes=lanes)
        self.fed: dict[int, tuple[int, ...]] = {}

    def decode_step(self, active: Sequence[tuple[Entry, int]]) -> list[memoryview]:
        vocab_size = self.manifest().vocab_size
        for entry, token in active:
            self._check(entry)
            if not 0 <= token < vocab_size:
                raise LocalProtocolError(f"token {token}")
        if len({entry.lane for entry, _ in active}) != len(active):
            raise LocalProtocolError("an entry twice")
        return [self._row(entry, token) for entry, token in active]

    def publish(self, reservation: Reservation) -> Entry:
        entry = super().publish(reservation)
        self.fed[entry.serial] = ()
        return entry

    def seed_of(self, entry: Entry) -> int:
        layout = self._layouts[entry.lane]
        plan = self._plan(entry.num_tokens, layout)
        cells = (self.read(entry, layout, copy) for copy in plan.copies(plan.whole()))
        return zlib.crc32(b"".join(cells))

    def _row(self, entry: Entry, token: int) -> memoryview:
        fed = self.fed[entry.serial] = (*self.fed[entry.serial], token)
        value = float(zlib.crc32(repr(fed).encode(), self.seed_of(entry)) % 1000)
        return memoryview(array("f", [value] * self.manifest().vocab_size))


class IgnoresACopy(Hashing):
    """Drops one copy of the second part."""

    def begin_import(
        self, reservation: Reservation, slot: SlotView, copies: Sequence[Copy]
    ) -> Fence:
        kept = [copy for copy in copies if (copy.layer, copy.part) != (1, 1)]
        return super().begin_import(reservation, slot, kept)


class IgnoresACutCopy(Hashing):
    """Drops what does not begin at the window's start."""

    def begin_import(
        self, reservation: Reservation, slot: SlotView, copies: Sequence[Copy]
    ) -> Fence:
        windows = self._plan(reservation.num_tokens, slot.layout).windows
        kept = [copy for copy in copies if copy.start == windows[copy.layer][0]]
        return super().begin_import(reservation, slot, kept)


class WritesANeighbour(Hashing):
    """Spills a byte into the next lane."""

    def begin_import(
        self, reservation: Reservation, slot: SlotView, copies: Sequence[Copy]
    ) -> Fence:
        beside = self._lanes[(reservation.lane + 1) % len(self._lanes)]
        beside.view[8] = (beside.view[8] + 1) % 256
        return super().begin_import(reservation, slot, copies)


class VisibleEarly(Hashing):
    """The reservation can be read and decoded as an entry before it is published."""

    def _check(self, held: Reservation | Entry) -> None:
        mine = self._held.get(held.lane)
        if mine is None or mine.serial != held.serial:
            raise LocalProtocolError(f"{held}")


class ReusesAHeldLane(Hashing):
    def reserve(self, num_tokens: int) -> Reservation:
        super().reserve(num_tokens)
        self._held.pop(1, None)
        reservation = Reservation(0, num_tokens, self._next_serial)
        self._held[0] = reservation
        return reservation


class NeverFull(Hashing):
    def reserve(self, num_tokens: int) -> Reservation:
        if len(self._held) == len(self._lanes):
            self._held.pop(0)
        return super().reserve(num_tokens)


class SerialsComeAgain(Hashing):
    def reserve(self, num_tokens: int) -> Reservation:
        self._next_serial = 0
        return super().reserve(num_tokens)


class FreesAnything(Hashing):
    def free(self, held: Reservation | Entry) -> None:
        self._held.pop(held.lane, None)


class ImportsAfterPublishing(Hashing):
    def begin_import(
        self, reservation: Reservation, slot: SlotView, copies: Sequence[Copy]
    ) -> Fence:
        held = self._held.get(reservation.lane)
        if isinstance(held, Entry) and held.serial == reservation.serial:
            self._held[reservation.lane] = reservation
            fence = super().begin_import(reservation, slot, copies)
            self._held[reservation.lane] = held
            return fence
        return super().begin_import(reservation, slot, copies)


class ReadsAnywhere(Hashing):
    """Follows a copy out of the slot."""

    def _lane_offset(self, reservation: Reservation, region: Region) -> int:
        try:
            return super()._lane_offset(reservation, region)
        except LocalProtocolError:
            return 0


class ListensToItsNeighbours(Hashing):
    def seed_of(self, entry: Entry) -> int:
        return super().seed_of(entry) + sum(isinstance(h, Entry) for h in self._held.values())


class SeesReservations(Hashing):
    """What is decoded depends on lanes that are only reserved."""

    def seed_of(self, entry: Entry) -> int:
        return super().seed_of(entry) + len(self._held)


class RemembersTheLane(Hashing):
    """Cells of the lane's last holder still count."""

    def seed_of(self, entry: Entry) -> int:
        return zlib.crc32(self._lanes[entry.lane].view)


class TakesAnyToken(Hashing):
    def decode_step(self, active: Sequence[tuple[Entry, int]]) -> list[memoryview]:
        vocab_size = self.manifest().vocab_size
        return super().decode_step([(entry, token % vocab_size) for entry, token in active])


class TakesAnEntryTwice(Hashing):
    def decode_step(self, active: Sequence[tuple[Entry, int]]) -> list[memoryview]:
        return [
            row for each in active for row in super(TakesAnEntryTwice, self).decode_step([each])
        ]


class ShortRows(Hashing):
    def _row(self, entry: Entry, token: int) -> memoryview:
        return super()._row(entry, token)[:-1]


class MixesUpLayouts(Hashing):
    """Reads head_major whatever is asked for."""

    def read(self, held: Reservation | Entry, layout: Layout, copy: Copy) -> bytes | memoryview:
        plan = self._plan(held.num_tokens, "head_major")
        whole = plan.region(copy.layer, copy.part, copy.start, copy.stop)
        return super().read(held, "head_major", copy._replace(source=whole))


class NoCounts(Hashing):
    def statistics(self) -> Mapping[str, int]:
        return {"lanes": len(self._lanes)}


class Batched(Hashing):
    """Decodes in batches, and is good."""

    def __init__(self, lanes: int) -> None:
        super().__init__(lanes)
        self.caps = Caps(max_lanes=lanes, decode_batch=2)


class CountsItsBatch(Batched):
    """A row is made of how many decode together too."""

    def decode_step(self, active: Sequence[tuple[Entry, int]]) -> list[memoryview]:
        if len(active) < 2:
            return super().decode_step(active)
        return [
            memoryview(array("f", [value + 1 for value in row.tolist()]))
            for row in super().decode_step(active)
        ]


class ChangesAfterSomeoneLeft(Batched):
    """Rows move up when another is freed, and round otherwise there."""

    def __init__(self, lanes: int) -> None:
        super().__init__(lanes)
        self.left = 0

    def free(self, held: Reservation | Entry) -> None:
        super().free(held)
        self.left = 0 if len(self._held) == 0 else self.left + 1

    def _row(self, entry: Entry, token: int) -> memoryview:
        row = super()._row(entry, token).tolist()
        return memoryview(array("f", [value + self.left for value in row]))


class Unordered(Hashing):
    def __init__(self, lanes: int) -> None:
        super().__init__(lanes)
        self.caps = Caps(max_lanes=lanes, ordered_copy=False)


FAULTS: list[tuple[type[Hashing], str]] = [
    (IgnoresACopy, "test_cells_land_where_they_belong"),
    (IgnoresACutCopy, "test_cells_land_where_they_belong"),
    (WritesANeighbour, "test_neighbours_do_not_touch_each_other"),
    (VisibleEarly, "test_nothing_is_visible_before_it_is_published"),
    (ReusesAHeldLane, "test_lanes_are_reserved_once_each"),
    (NeverFull, "test_lanes_are_reserved_once_each"),
    (SerialsComeAgain, "test_lanes_are_reserved_once_each"),
    (SerialsComeAgain, "test_what_was_given_back_is_refused"),
    (FreesAnything, "test_what_was_given_back_is_refused"),
    (ImportsAfterPublishing, "test_what_was_given_back_is_refused"),
    (ReadsAnywhere, "test_a_copy_from_outside_the_slot_is_refused"),
    (ListensToItsNeighbours, "test_decoding_depends_on_the_entry_alone"),
    (SeesReservations, "test_decoding_depends_on_the_entry_alone"),
    (RemembersTheLane, "test_decoding_depends_on_the_entry_alone"),
    (ShortRows, "test_decoding_depends_on_the_entry_alone"),
    (TakesAnyToken, "test_a_step_is_taken_by_published_entries_only"),
    (TakesAnEntryTwice, "test_a_step_is_taken_by_published_entries_only"),
    (MixesUpLayouts, "test_a_part_of_a_span_can_be_read"),
    (NoCounts, "test_lanes_are_reserved_once_each"),
    (CountsItsBatch, "test_a_batch_keeps_its_rows_apart"),
    (ChangesAfterSomeoneLeft, "test_a_batch_keeps_its_rows_apart"),
    (Unordered, "test_its_facts_are_sound"),
]


def suite_of(kind: type[Hashing]) -> DecoderConformance:
    class Suite(DecoderConformance):
        lengths = (1, 40)

        def make_decoder(self, lanes: int) -> Decoder:
            return kind(lanes)

    return Suite()


@pytest.mark.parametrize(("kind", "check"), FAULTS)
def test_the_suite_finds(kind: type[Hashing], check: str) -> None:
    with pytest.raises((AssertionError, HeadraceError)):
        getattr(suite_of(kind), check)()


class TestHashing(DecoderConformance):
    """The decoder behind the faults is good."""

    def make_decoder(self, lanes: int) -> Decoder:
        return Hashing(lanes)


class TestBatched(DecoderConformance):
    """So is the one behind the faults of batches."""

    def make_decoder(self, lanes: int) -> Decoder:
        return Batched(lanes)


def test_a_suite_without_a_decoder_says_so() -> None:
    with pytest.raises(NotImplementedError, match="make_decoder"):
        DecoderConformance().test_its_facts_are_sound()
