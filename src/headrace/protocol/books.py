"""What an owner holds, and whether it adds up: lanes, sources with their slots, requests, imports.

The books decide nothing. `Owner` changes them; here they are looked up, counted and checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from headrace.errors import LocalProtocolError
from headrace.ids import AttemptId, ImportId, RequestId, SlotIndex, SourceId
from headrace.messages import Computing, Failed, Progress, Released, SourceFinal
from headrace.plan import Plan
from headrace.protocol.admission import Admission, FailurePolicy
from headrace.protocol.commands import Command
from headrace.protocol.handoff import Handoff, HandoffState
from headrace.protocol.slots import Slot, SlotState, SlotTable
from headrace.protocol.snapshot import LaneLine, SlotLine, Snapshot

AttemptMessage: TypeAlias = Computing | Progress | SourceFinal | Failed | Released
PlanFor: TypeAlias = Callable[[int, int], Plan]


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
    local: bool = False  # an engine in the owner's own process, which cannot die
    running: AttemptId | None = None
    ending: bool = False  # to be killed: what it were granted now would die with it
    dead: bool = False

    @property
    def in_service(self) -> bool:
        """Whether some slot of it can be granted, now or later."""
        gone = self.dead or self.ending
        return not gone and any(s.state is not SlotState.QUARANTINED for s in self.slots)


@dataclass(frozen=True, slots=True)
class Import:
    handoff: Handoff
    slot: Slot | None  # None: a digest check, which reads the reservation and not the slot
    begun_ns: int
    expected: int = 0


@dataclass(slots=True)
class RequestRecord:
    handoff: Handoff  # of the attempt that runs
    deadline_ns: int | None
    policy: FailurePolicy


@dataclass(frozen=True, slots=True)
class Apart:
    """What an attempt left behind that is not known to be quiet.

    lane: whether a lane went out of service with it; not when it was promised one that was lost
    before. lost_reads: read tokens that came back by no fence.
    """

    reason: str
    since_ns: int
    lane: bool = True
    lost_reads: tuple[tuple[Slot, ImportId], ...] = ()


class Books:
    """The holdings of one owner.

    chunk_nbytes: what imports that are begun from now on are cut to, as the limits say at first.
    """

    def __init__(self, epoch: int, limits: Limits) -> None:
        self.epoch = epoch
        self.limits = limits
        self.chunk_nbytes = limits.chunk_nbytes
        self.dropped: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.num_retries = 0
        self._lanes_quarantined = 0
        self._apart: dict[AttemptId, Apart] = {}
        self._expected = 0
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
        """Whether no source can grant a slot again, and none is expected."""
        return not self._expected and not any(
            source.in_service and not source.local for source in self._sources.values()
        )

    @property
    def no_local_left(self) -> bool:
        """Whether the owner has no engine of its own, or has lost its slot."""
        return not any(source.in_service and source.local for source in self._sources.values())

    @property
    def no_lane_left(self) -> bool:
        """Whether every lane is out of service."""
        return self._lanes_quarantined == self.limits.num_lanes

    @property
    def num_in_flight(self) -> int:
        """Imports and digest checks begun and not reported back."""
        return len(self._imports)

    @property
    def apart(self) -> Mapping[AttemptId, Apart]:
        """What is out of service, by the attempt that left it behind."""
        return self._apart

    def is_in_flight(self, import_id: ImportId) -> bool:
        """Whether an import is still waited for; one that was given up on is not."""
        return import_id in self._imports

    def state_of(self, request: RequestId) -> HandoffState:
        """The state of a request's hand-off; ENDED once it is forgotten."""
        entry = self._requests.get(request)
        return HandoffState.ENDED if entry is None else entry.handoff.state

    def attempt_of(self, request: RequestId) -> AttemptId | None:
        """The attempt that a request is at; None once it is forgotten."""
        entry = self._requests.get(request)
        return None if entry is None else entry.handoff.attempt

    def snapshot(self) -> Snapshot:
        """Everything that is held now."""
        holders = [handoff for handoff in self._handoffs() if handoff.has_storage]
        lanes = [LaneLine(handoff.attempt, _lane_state(handoff)) for handoff in holders]
        for attempt, apart in self._apart.items():
            if apart.lane:
                lanes.append(LaneLine(attempt, "quarantined", apart.reason, apart.since_ns))
        slots = [
            SlotLine(
                source_id,
                slot.index,
                slot.generation,
                slot.state.name.lower(),
                slot.holder,
                tuple(slot.tokens_out()),
                slot.draining_since_ns if slot.state in _NOT_REUSABLE else 0,
            )
            for source_id, source in self._sources.items()
            for slot in source.slots
        ]
        return Snapshot(
            self._admission.lanes_free,
            tuple(lanes),
            tuple(slots),
            tuple(handoff.attempt for handoff in self._admission.waiting()),
            tuple(self._count_sources().items()),
        )

    def statistics(self) -> dict[str, dict[str, int]]:
        """Counts: lanes, slots (all sources), hand-offs by state, sources; and since the start.

        dropped: messages by reason. ended: requests by cause, or `published`. retries: attempts
        that another followed. quarantined: what is out of service; for reasons see `apart`.
        """
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
            "sources": self._count_sources(),
            "dropped": dict(self.dropped),
            "ended": dict(self.ended),
            "retries": {"count": self.num_retries},
            "quarantined": {
                "attempts": len(self._apart),
                "lanes": self._lanes_quarantined,
                "reads": sum(len(apart.lost_reads) for apart in self._apart.values()),
            },
        }

    def check_integrity(self) -> None:
        """Every lane, slot and read token is accounted for by exactly one hand-off.

        Raises:
            LocalProtocolError: with what does not add up.
        """
        lanes = self.statistics()["lanes"]
        if sum(lanes.values()) != self.limits.num_lanes:
            raise LocalProtocolError(f"lanes {lanes} are not {self.limits.num_lanes} in all")
        if sum(apart.lane for apart in self._apart.values()) != self._lanes_quarantined:
            raise LocalProtocolError(f"{lanes}, and apart are {self._apart}")
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

    def _count_sources(self) -> dict[str, int]:
        in_service = sum(source.in_service for source in self._sources.values())
        return {
            "in_service": in_service,
            "gone": len(self._sources) - in_service,
            "expected": self._expected,
        }

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
        return handoff if handoff.source == source_id and handoff.live else None

    def _speaking(self, source_id: SourceId, attempt: AttemptId | None) -> Handoff | None:
        """As `_live`, and the write token is out: after its return a source has no say."""
        handoff = self._live(source_id, attempt)
        return handoff if handoff is not None and self._slot_of(handoff).writer_out else None

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


_NOT_REUSABLE = (SlotState.DRAINING, SlotState.QUARANTINED)


def _lane_state(handoff: Handoff) -> str:
    if handoff.state is HandoffState.PUBLISHED:
        return "published"
    return "draining" if handoff.state is HandoffState.DRAINING else "reserved"
