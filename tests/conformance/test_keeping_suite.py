"""The suite of decoders that keep entries bites: one broken decoder for each thing it checks."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from headrace.backends import storages
from headrace.backends.base import Decoder, Entry, Kept, Reservation
from headrace.backends.cpu import CpuDecoder
from headrace.backends.lane_table import LaneTable, copy_now
from headrace.backends.storages import Rows, Storages
from headrace.engine.lanes import LaneStorage, host_bytes, lane_nbytes
from headrace.engine.loading import LoadedModel, load_model
from headrace.errors import HeadraceError
from headrace.geometry import Layer
from headrace.plan import live_window
from headrace.testing.conformance_keeping import KeepingConformance
from tests.e2e.families import directory_of

CONTEXT = 64


class Good(CpuDecoder):
    """The CPU decoder, over a table that can be broken."""

    Table: ClassVar[type[LaneTable]] = LaneTable
    Memories: ClassVar[type[Storages]] = Storages
    extra: ClassVar[int] = 2

    def __init__(self, model: LoadedModel, lanes: int) -> None:
        super().__init__(model, lanes, CONTEXT)
        layers = self.manifest().layers
        self.keeps_nbytes = 2 * (
            lane_nbytes(layers, CONTEXT) + storages.tails_nbytes(layers, CONTEXT)
        )
        self._lanes = self.Table(layers, CONTEXT, lanes, extra=self.extra)
        self._lanes._storages = self.Memories(layers, CONTEXT, lanes + self.extra, host_bytes)


class KeepsViews(Good):
    """Rows of a window stay where decode overwrites them."""

    class Table(LaneTable):
        def keep(self, entry: Entry) -> Kept:
            kept = super().keep(entry)
            tails = self._storages._tails(kept)
            for layer, rows in tails.rows.items():
                window = live_window(self._layers[layer], entry.num_tokens)
                lane = self._records[entry.lane].lane
                tails.rows[layer] = tuple(
                    lane.cells(layer, part, *window) for part in range(len(rows))
                )
            return kept


class CopiesNothing(Good):
    """What is kept is taken over in place or not at all."""

    def __init__(self, model: LoadedModel, lanes: int) -> None:
        super().__init__(model, lanes)
        self._lanes._copier = lambda moves: None


class CopiesOneMove(Good):
    def __init__(self, model: LoadedModel, lanes: int) -> None:
        super().__init__(model, lanes)
        self._lanes._copier = lambda moves: copy_now(moves[:-1])


class TakesOverWhatOthersKeep(Good):
    class Memories(Storages):
        def take_over(self, kept: Kept, positions: int, lane: int) -> LaneStorage | None:
            memory = self._memory(kept)
            if memory.lane is not None:
                return None
            memory.lane = lane
            return memory.storage


class TakesOverWhatDecodes(Good):
    class Memories(Storages):
        def take_over(self, kept: Kept, positions: int, lane: int) -> LaneStorage | None:
            return self._memory(kept).storage

        def leave(self, lane: int) -> None:
            for memory in self._memories:
                if memory.lane == lane:
                    memory.lane = None


class GoesOnFromAnything(Good):
    class Memories(Storages):
        def can_reuse(self, kept: Kept, positions: int) -> bool:
            self._tails(kept)
            return 1 <= positions <= kept.num_tokens

        def rows(self, kept: Kept, layer: Layer, start: int, stop: int) -> Rows:
            first = live_window(layer, kept.num_tokens)[0]
            shift = max(0, first - start)
            if layer.index not in self._tails(kept).rows:
                return super().rows(kept, layer, start, stop)
            if stop <= first:
                parts = super().rows(kept, layer, first, first + 1)
                return tuple(rows.expand(-1, stop - start, -1) for rows in parts)
            parts = super().rows(kept, layer, start + shift, stop)
            return tuple(
                torch.cat([rows[:, :1].expand(-1, shift, -1), rows], dim=1) for rows in parts
            )


class GoesOnPastTheEnd(Good):
    class Table(LaneTable):
        def can_reuse(self, kept: Kept, positions: int) -> bool:
            return positions > kept.num_tokens or super().can_reuse(kept, positions)


class RefusesEverything(Good):
    class Table(LaneTable):
        def can_reuse(self, kept: Kept, positions: int) -> bool:
            super().can_reuse(kept, positions)
            return False


class TakesAShorterPrompt(Good):
    class Table(LaneTable):
        def reserve_from(self, kept: Kept, positions: int, num_tokens: int) -> Reservation:
            return super().reserve_from(kept, positions, max(positions, num_tokens))


class ImportsOver(Good):
    class Table(LaneTable):
        def reserve_from(self, kept: Kept, positions: int, num_tokens: int) -> Reservation:
            reservation = super().reserve_from(kept, positions, num_tokens)
            self._records[reservation.lane].kept_positions = 0
            return reservation


class KeepsWhatWasDecoded(Good):
    class Table(LaneTable):
        def keep(self, entry: Entry) -> Kept:
            lane = self._records[entry.lane].lane
            length = lane.length
            lane.rewind(entry.num_tokens)
            try:
                return super().keep(entry)
            finally:
                lane.rewind(length)


class KeepsWhatIsNotPublished(Good):
    class Table(LaneTable):
        def keep(self, entry: Entry) -> Kept:
            return self._storages.keep(
                entry.lane, entry.num_tokens, self._storages.new_tails(entry.num_tokens)
            )


class CountsWhatIsUsed(Good):
    class Memories(Storages):
        @property
        def kept_nbytes(self) -> int:
            used = sum(m.storage.nbytes for m in self._memories if m.lane is not None and m.kept)
            return used + super().kept_nbytes


class CountsNoMemory(Good):
    class Memories(Storages):
        @property
        def kept_nbytes(self) -> int:
            return sum(tails.kept.nbytes for tails in self._all_kept())


class EvictsTwice(Good):
    class Memories(Storages):
        def evict(self, kept: Kept) -> None:
            self._memory(kept).kept.pop(kept.serial, None)


class ForgetsNothing(Good):
    class Memories(Storages):
        def evict(self, kept: Kept) -> None:
            self._tails(kept)


class TellsNothing(Good):
    """Its statistics do not show what is kept."""

    class Memories(Storages):
        def statistics(self) -> dict[str, int]:
            return {"storages_kept": 0}


class SerialsComeAgain(Good):
    class Memories(Storages):
        def keep(self, lane: int, num_tokens: int, tails: dict[int, Rows]) -> Kept:
            self._last_serial = 0
            return super().keep(lane, num_tokens, tails)


class ForgetsAtFree(Good):
    class Memories(Storages):
        def leave(self, lane: int) -> None:
            self._used_by(lane).kept.clear()
            super().leave(lane)


class HasNoMoreMemories(Good):
    extra: ClassVar[int] = 0


FAULTS: list[tuple[type[Good], str]] = [
    (KeepsViews, "test_kept_cells_come_back"),
    (KeepsViews, "test_kept_cells_are_shared_while_the_entry_decodes"),
    (CopiesNothing, "test_kept_cells_come_back"),
    (CopiesNothing, "test_kept_cells_are_shared_while_the_entry_decodes"),
    (CopiesOneMove, "test_kept_cells_come_back"),
    (CopiesOneMove, "test_kept_cells_are_shared_while_the_entry_decodes"),
    (TakesOverWhatOthersKeep, "test_a_longer_prompt_goes_on_from_it"),
    (TakesOverWhatDecodes, "test_kept_cells_are_shared_while_the_entry_decodes"),
    (GoesOnFromAnything, "test_a_part_is_given_whole_or_not_at_all"),
    (GoesOnPastTheEnd, "test_a_part_is_given_whole_or_not_at_all"),
    (RefusesEverything, "test_a_part_is_given_whole_or_not_at_all"),
    (TakesAShorterPrompt, "test_a_part_is_given_whole_or_not_at_all"),
    (ImportsOver, "test_what_is_kept_is_not_imported_over"),
    (KeepsWhatWasDecoded, "test_only_a_published_entry_is_kept_and_only_while_it_is_new"),
    (KeepsWhatIsNotPublished, "test_only_a_published_entry_is_kept_and_only_while_it_is_new"),
    (CountsWhatIsUsed, "test_what_is_kept_is_counted"),
    (CountsNoMemory, "test_what_is_kept_is_counted"),
    (TellsNothing, "test_what_is_kept_is_counted"),
    (ForgetsNothing, "test_what_is_kept_is_counted"),
    (EvictsTwice, "test_what_was_evicted_is_refused"),
    (ForgetsNothing, "test_what_was_evicted_is_refused"),
    (SerialsComeAgain, "test_what_was_evicted_is_refused"),
    (ForgetsAtFree, "test_kept_cells_come_back"),
    (HasNoMoreMemories, "test_lanes_are_all_there_beside_what_is_kept"),
]


def suite_of(broken: type[Good]) -> Any:
    class Suite(KeepingConformance):
        context = CONTEXT
        lengths = (5, 40)

        def make_decoder(self, lanes: int) -> Decoder:
            return broken(load_model(directory_of("gemma3")), lanes)

    return Suite()


NAMES = [name for name in vars(KeepingConformance) if name.startswith("test_")]


@pytest.mark.parametrize("name", NAMES)
def test_a_good_one_passes(name: str) -> None:
    getattr(suite_of(Good), name)()


@pytest.mark.parametrize(
    ("broken", "name"), FAULTS, ids=[f"{broken.__name__}-{name}" for broken, name in FAULTS]
)
def test_a_broken_one_is_found(broken: type[Good], name: str) -> None:
    with pytest.raises((AssertionError, HeadraceError)):
        getattr(suite_of(broken), name)()


def test_each_check_finds_something() -> None:
    assert {name for _, name in FAULTS} == set(NAMES)


def test_a_decoder_that_keeps_nothing_is_told() -> None:
    class Suite(KeepingConformance):
        def make_decoder(self, lanes: int) -> Decoder:
            return NotAKeeper()  # type: ignore[return-value]

    class NotAKeeper:
        def close(self) -> None: ...

    with pytest.raises(AssertionError, match="keeps no entries"):
        Suite().test_what_is_kept_is_counted()
