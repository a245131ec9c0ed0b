"""What an owner holds, and whether it adds up: lanes, sources with their slots, requests, imports.

The books decide nothing. `Owner` changes them; here they are looked up, counted and checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from headrace.errors import LocalProtocolError
from headrace.ids import AttemptId, ImportId, RequestId, SlotIndex, SourceId
from headrace.messages import Computing, Failed, Progress, Released, SourceFinal
from headrace.plan import Plan
from headrace.protocol.admission import Admission
from headrace.protocol.commands import Command
from headrace.protocol.handoff import Handoff, HandoffState
from headrace.protocol.slots import Slot, SlotState, SlotTable

AttemptMessage: TypeAlias = Computing | Progress | SourceFinal | Failed | Released
PlanFor: TypeAlias = Callable[[int], Plan]

DECIDED = (HandoffState.PUBLISHED, HandoffState.DRAINING, HandoffState.ENDED)


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds an owner. Times in ns; bytes are those of the cells that are copied."""

    num_lanes: int
    context: int
    prefetch_depth: int = 1
    chunk_nbytes: int = 8 << 20
    progress_timeout_ns: int = 600 * 10**9
    drain_timeout_ns: int = 120 * 10**9


@dataclass(slots=True)
class Source:
    slots: SlotTable
    plan_for: PlanFor
    running: AttemptId | None = None
    ending: bool = False  # to be killed: what it were granted now would die with it
    dead: bool = False


@dataclass(frozen=True, slots=True)
class Import:
    handoff: Handoff
    slot: Slot | None  # None: a digest check, which reads the reservation and not the slot
    begun_ns: int
    expected: int = 0


@dataclass(frozen=True, slots=True)
class RequestRecord:
    handoff: Handoff
    deadline_ns: int | None


class Books:
    """The holdings of one owner."""

    def __init__(self, epoch: int, limits: Limits) -> None:
        self.epoch = epoch
        self.limits = limits
        self.dropped: Counter[str] = Counter()
        self._lanes_quarantined = 0
        self._admission = Admission(limits.num_lanes, limits.prefetch_depth)
        self._sources: dict[SourceId, Source] = {}
        self._requests: dict[RequestId, RequestRecord] = {}
        self._imports: dict[ImportId, Import] = {}
        self._commands: list[Command] = []
        self._next_request = 0
        self._next_import = 0

    @property
    def has_pieces(self) -> bool:
        """Whether `begin_imports` would begin something."""
        return any(handoff.has_pieces for handoff in self._handoffs())

    @property
    def no_slot_left(self) -> bool:
        """Whether no source can grant a slot again: all dead or ending, or all slots set apart."""
        return not any(
            slot.state is not SlotState.QUARANTINED
            for source in self._sources.values()
            if not (source.dead or source.ending)
            for slot in source.slots
        )

    @property
    def no_lane_left(self) -> bool:
        """Whether every lane is out of service."""
        return self._lanes_quarantined == self.limits.num_lanes

    @property
    def num_in_flight(self) -> int:
        """Imports and digest checks begun and not reported back."""
        return len(self._imports)

    def is_in_flight(self, import_id: ImportId) -> bool:
        """Whether an import is still waited for; one that was given up on is not."""
        return import_id in self._imports

    def state_of(self, request: RequestId) -> HandoffState:
        """The state of a request's hand-off; ENDED once it is forgotten."""
        entry = self._requests.get(request)
        return HandoffState.ENDED if entry is None else entry.handoff.state

    def statistics(self) -> dict[str, dict[str, int]]:
        """Counts of lanes, slots (all sources) and hand-offs by state, and of dropped messages."""
        slots = Counter({state.name.lower(): 0 for state in SlotState})
        for source in self._sources.values():
            slots.update(source.slots.statistics())
        handoffs = Counter(handoff.state.name.lower() for handoff in self._handoffs())
        lanes = {"free": self._admission.lanes_free, "quarantined": self._lanes_quarantined}
        lanes["held"] = sum(handoff.has_storage for handoff in self._handoffs())
        return {
            "lanes": lanes,
            "slots": dict(slots),
            "handoffs": dict(handoffs),
            "dropped": dict(self.dropped),
        }

    def check_integrity(self) -> None:
        """Every lane, slot and read token is accounted for by exactly one hand-off.

        Raises:
            LocalProtocolError: with what does not add up.
        """
        lanes = self.statistics()["lanes"]
        if sum(lanes.values()) != self.limits.num_lanes:
            raise LocalProtocolError(f"lanes {lanes} are not {self.limits.num_lanes} in all")
        for source_id, source in self._sources.items():
            for slot in source.slots:
                free = slot.state is SlotState.FREE
                if free == (slot.holder is not None or slot.writer_out or bool(slot.readers)):
                    raise LocalProtocolError(f"slot {slot.index} of {source_id}: {slot.state}")
                handoff = self._live(source_id, slot.holder)
                ended = slot.state in (SlotState.DRAINING, SlotState.QUARANTINED, SlotState.FREE)
                if ended == (handoff is not None):
                    raise LocalProtocolError(f"slot {slot.index} and its hand-off disagree")
        in_flight = sum(handoff.in_flight for handoff in self._handoffs())
        if in_flight != len(self._imports):
            raise LocalProtocolError(f"{in_flight} imports in flight, {len(self._imports)} known")

    def _handoffs(self) -> Iterator[Handoff]:
        return (entry.handoff for entry in self._requests.values())

    def _attached(self, source_id: SourceId) -> Source:
        if source_id not in self._sources:
            raise LocalProtocolError(f"source {source_id} is not attached")
        return self._sources[source_id]

    def _known(self, attempt: AttemptId) -> Handoff:
        entry = self._requests.get(attempt.request)
        if entry is None or entry.handoff.attempt != attempt:
            raise LocalProtocolError(f"hand-off {attempt} is unknown or over")
        return entry.handoff

    def _live(self, source_id: SourceId, attempt: AttemptId | None) -> Handoff | None:
        """The undecided hand-off of exactly this attempt at exactly this source."""
        entry = None if attempt is None else self._requests.get(attempt.request)
        if entry is None or entry.handoff.attempt != attempt:
            return None
        handoff = entry.handoff
        known = handoff.source == source_id and handoff.state not in DECIDED
        return handoff if known else None

    def _leased(self, source: Source, message: AttemptMessage) -> Slot | None:
        if not 0 <= message.slot < len(source.slots):
            return None
        slot = source.slots[SlotIndex(message.slot)]
        same = slot.generation == message.generation and slot.holder == message.attempt
        return slot if same else None

    def _slot_of(self, handoff: Handoff) -> Slot:
        if handoff.lease is None:
            raise LocalProtocolError(f"hand-off {handoff.attempt} has no lease")
        return self._sources[self._source_of(handoff)].slots[handoff.lease.slot]

    def _source_of(self, handoff: Handoff) -> SourceId:
        if handoff.source is None:
            raise LocalProtocolError(f"hand-off {handoff.attempt} has no source")
        return handoff.source

    def _new_import(
        self, handoff: Handoff, slot: Slot | None, now_ns: int, expected: int = 0
    ) -> ImportId:
        import_id = ImportId(self._next_import)
        self._next_import += 1
        self._imports[import_id] = Import(handoff, slot, now_ns, expected)
        return import_id

    def _expect_import(self, import_id: ImportId) -> Import:
        if import_id not in self._imports:
            raise LocalProtocolError(f"import {import_id} is not in flight")
        return self._imports[import_id]

    def _take_import(self, import_id: ImportId) -> Import:
        record = self._expect_import(import_id)
        del self._imports[import_id]
        return record
