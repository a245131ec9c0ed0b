"""The owner of one decoder: all hand-offs, all sources, and who may have what.

Messages, completions, cancels, deaths and the clock come in; `commands()` gives out what the shell
must do. A message is looked at in three steps. Whose is it: one of an attempt that is unknown, over
or another source's is counted by reason and dropped. Is it legal: one that breaks the protocol
fails its own attempt and nothing else. Only then does anything change.

A caller hears of its hand-off once, at the decision (`Report`). Storage and slot drain after that,
independently: storage is freed when no import runs, the slot when its tokens are back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias, assert_never

from headrace.errors import LocalProtocolError, Refused, RemoteProtocolError
from headrace.ids import AttemptId, ImportId, RequestId, SlotIndex, SourceId
from headrace.messages import Failed, Progress, Released, SourceFinal
from headrace.plan import Plan
from headrace.protocol.admission import Admission
from headrace.protocol.commands import (
    CheckDigest,
    Command,
    Free,
    Outcome,
    Publish,
    Quarantine,
    Report,
    Reserve,
    SendCancel,
    StartImport,
    StartPrefill,
)
from headrace.protocol.handoff import Handoff, HandoffState
from headrace.protocol.slots import Slot, SlotState, SlotTable

AttemptMessage: TypeAlias = Progress | SourceFinal | Failed | Released
PlanFor: TypeAlias = Callable[[int], Plan]

_DECIDED = (HandoffState.PUBLISHED, HandoffState.DRAINING, HandoffState.ENDED)


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds an owner. Times in ns; bytes are those of the cells that are copied."""

    num_lanes: int
    context: int
    prefetch_depth: int = 1
    chunk_nbytes: int = 4 << 20
    progress_timeout_ns: int = 600 * 10**9
    drain_timeout_ns: int = 30 * 10**9


@dataclass(slots=True)
class _Source:
    slots: SlotTable
    plan_for: PlanFor
    running: AttemptId | None = None
    dead: bool = False


@dataclass(frozen=True, slots=True)
class _Import:
    handoff: Handoff
    slot: Slot | None  # None: a digest check, which reads the reservation and not the slot
    expected: int = 0


@dataclass(frozen=True, slots=True)
class _Request:
    handoff: Handoff
    deadline_ns: int | None


class Owner:
    """Sans-IO owner of one decoder's storage and of its sources' slots."""

    def __init__(self, epoch: int, limits: Limits) -> None:
        self.epoch = epoch
        self.limits = limits
        self.dropped: Counter[str] = Counter()
        self._lanes_quarantined = 0
        self._admission = Admission(limits.num_lanes, limits.prefetch_depth)
        self._sources: dict[SourceId, _Source] = {}
        self._requests: dict[RequestId, _Request] = {}
        self._imports: dict[ImportId, _Import] = {}
        self._commands: list[Command] = []
        self._next_request = 0
        self._next_import = 0

    # What comes in.

    def add_source(self, source: SourceId, num_slots: int, plan_for: PlanFor, now_ns: int) -> None:
        """A source attached; `plan_for(n)` compiles the plan of a prompt of n tokens for it."""
        if source in self._sources:
            raise LocalProtocolError(f"source {source} is attached already")
        self._sources[source] = _Source(SlotTable(num_slots), plan_for)
        self._admit(now_ns)

    def submit(
        self,
        num_tokens: int,
        now_ns: int,
        deadline_ns: int | None = None,
        *,
        digest: bool = False,
    ) -> RequestId:
        """A new request; its hand-off waits for storage and slot.

        `digest`: the source is asked to stamp every span, and one without a stamp is malformed.

        Raises:
            Refused: it can never fit, or no source is left to prefill it.
        """
        if not 1 <= num_tokens <= self.limits.context:
            raise Refused(
                f"a prompt of {num_tokens} tokens does not fit a context of 1 to "
                f"{self.limits.context}; raise --context or change the prompt",
                field="prompt",
            )
        if all(source.dead for source in self._sources.values()):
            raise Refused("no prefill source is running", field="source")
        attempt = AttemptId(self.epoch, self._next_request, 1)
        self._next_request += 1
        handoff = Handoff(attempt, num_tokens, digest=digest)
        self._requests[attempt.request] = _Request(handoff, deadline_ns)
        self._admission.join(handoff)
        self._admit(now_ns)
        return attempt.request

    def message(self, source_id: SourceId, message: AttemptMessage, now_ns: int) -> None:
        """A source told something about an attempt."""
        source = self._attached(source_id)
        handoff = self._live(source_id, message.attempt)
        slot = self._leased(source, message)
        if slot is None:
            if handoff is None:
                self.dropped["stale"] += 1
            else:
                text = f"slot {message.slot} generation {message.generation}"
                self._protocol_fault(handoff, f"{text} is not its lease", now_ns)
        elif isinstance(message, Released):
            self._released(source, slot, handoff, now_ns)
        elif handoff is None:
            self.dropped["late"] += 1
        else:
            self._tell(handoff, message, now_ns)
        self._admit(now_ns)

    def source_died(self, source_id: SourceId, reason: str, now_ns: int) -> None:
        """The source's process is proven gone: that gives its write tokens back."""
        source = self._attached(source_id)
        source.dead = True
        source.running = None
        for slot in source.slots:
            if slot.writer_out:
                handoff = self._live(source_id, slot.holder)
                if handoff is not None and not handoff.final:
                    self._end(handoff, Outcome.FAILED, reason, now_ns)
                slot.writer_back()
        if all(other.dead for other in self._sources.values()):
            for handoff in self._admission.waiting():
                if handoff.lease is None:
                    self._end(handoff, Outcome.FAILED, reason, now_ns)
        self._admit(now_ns)

    def cancel(self, request: RequestId, now_ns: int) -> bool:
        """The caller wants no more; False if the hand-off was decided before."""
        entry = self._requests.get(request)
        if entry is None or entry.handoff.state in _DECIDED:
            return False
        self._end(entry.handoff, Outcome.CANCELLED, "cancelled by the caller", now_ns)
        self._admit(now_ns)
        return True

    def import_done(self, import_id: ImportId, now_ns: int) -> None:
        """The import is fenced: its bytes are in the reservation."""
        record = self._expect_import(import_id)
        if record.slot is None:
            raise LocalProtocolError(f"import {import_id} is a digest check, not a copy")
        self._take_import(import_id)
        record.slot.end_read(import_id)
        handoff = record.handoff
        entry = handoff.end_import(import_id)
        if entry is not None and entry.digest is not None:
            check_id = self._new_import(handoff, None, entry.digest)
            handoff.begin_digest_check(check_id, entry)
            self._commands.append(CheckDigest(check_id, handoff.attempt, entry.span, entry.digest))
        self._after(handoff, now_ns)

    def digest_checked(self, import_id: ImportId, actual: int, now_ns: int) -> None:
        """The digest of a span's bytes as landed was computed."""
        record = self._expect_import(import_id)
        if record.slot is not None:
            raise LocalProtocolError(f"import {import_id} is a copy, not a digest check")
        self._take_import(import_id)
        handoff = record.handoff
        span = handoff.span_of(import_id)
        good = actual == record.expected
        handoff.end_import(import_id, good=good)
        if not good and handoff.state not in _DECIDED:
            reason = f"digest of {span}: {actual:#x} landed, {record.expected:#x} sent"
            self._end(handoff, Outcome.FAILED, reason, now_ns)
        self._after(handoff, now_ns)

    def import_failed(self, import_id: ImportId, reason: str, now_ns: int) -> None:
        """The device failed an import without a fence: nothing it touched is known to be quiet.

        The slot's read token stays out, so the slot ends in quarantine, as the storage does.
        """
        handoff = self._take_import(import_id).handoff
        handoff.quarantine_reason = reason
        handoff.end_import(import_id, good=False)
        if handoff.state not in _DECIDED:
            self._end(handoff, Outcome.FAILED, reason, now_ns)
        self._after(handoff, now_ns)

    def published(self, attempt: AttemptId, now_ns: int) -> None:
        """The decoder made the entry visible; the slot is no longer needed."""
        handoff = self._known(attempt)
        handoff.publish()
        self._slot_of(handoff).end(now_ns)
        self._commands.append(Report(attempt.request, Outcome.PUBLISHED, ""))
        self._admit(now_ns)

    def device_failed(self, attempt: AttemptId, reason: str, now_ns: int) -> None:
        """A reserve or a publish failed: the storage is set apart and the attempt fails."""
        handoff = self._known(attempt)
        handoff.quarantine_reason = reason
        if handoff.state is not HandoffState.DRAINING:
            self._end(handoff, Outcome.FAILED, reason, now_ns)
        self._admit(now_ns)

    def retire(self, request: RequestId, now_ns: int) -> None:
        """Nobody decodes the published entry any more: its storage can be freed."""
        state = self.state_of(request)
        if state is not HandoffState.PUBLISHED:
            raise LocalProtocolError(f"request {request} is {state.name}, not PUBLISHED")
        self._end(self._requests[request].handoff, Outcome.PUBLISHED, "", now_ns)
        self._admit(now_ns)

    def tick(self, now_ns: int) -> None:
        """Apply every deadline that has passed; call it by a timer, also when nothing arrives."""
        for due_ns, act in list(self._deadlines(now_ns)):
            if due_ns <= now_ns:
                act()
        self._admit(now_ns)

    def begin_imports(self, budget_nbytes: int) -> int:
        """Begin queued imports, nearest to publishing first, until the budget is used.

        Returns the bytes begun; one piece may go over a budget above zero.
        """
        begun = 0
        while begun < budget_nbytes:
            ready = [h for h in self._handoffs() if h.has_pieces]
            if not ready:
                break
            handoff = min(ready, key=lambda h: h.nearness)
            slot = self._slot_of(handoff)
            import_id = self._new_import(handoff, slot)
            piece, nbytes = handoff.begin_import(import_id)
            slot.begin_read(import_id)
            begun += nbytes
            source = self._source_of(handoff)
            self._commands.append(
                StartImport(import_id, handoff.attempt, source, slot.index, piece)
            )
        return begun

    # What goes out.

    def commands(self) -> list[Command]:
        """What the shell must do now, in this order; each command is given once."""
        out, self._commands = self._commands, []
        return out

    @property
    def has_pieces(self) -> bool:
        """Whether `begin_imports` would begin something."""
        return any(handoff.has_pieces for handoff in self._handoffs())

    @property
    def num_in_flight(self) -> int:
        """Imports and digest checks begun and not reported back."""
        return len(self._imports)

    def next_deadline_ns(self) -> int | None:
        """When `tick` must be called next."""
        return min((due_ns for due_ns, _ in self._deadlines(0)), default=None)

    def state_of(self, request: RequestId) -> HandoffState:
        """The state of a request's hand-off; ENDED once it is forgotten."""
        entry = self._requests.get(request)
        return HandoffState.ENDED if entry is None else entry.handoff.state

    def statistics(self) -> dict[str, dict[str, int]]:
        """Counts of lanes, slots (all sources) and hand-offs by state, and of dropped messages."""
        slots: Counter[str] = Counter()
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

    # How it is decided.

    def _admit(self, now_ns: int) -> None:
        while self._admit_storage() or self._admit_slot(now_ns):
            pass

    def _admit_storage(self) -> bool:
        handoff = self._admission.next_for_storage()
        if handoff is None:
            return False
        self._admission.lanes_free -= 1
        handoff.reserve()
        self._commands.append(Reserve(handoff.attempt, handoff.num_tokens))
        if handoff.lease is not None:
            self._admission.leave(handoff)
            self._publish_if_ready(handoff)
        return True

    def _admit_slot(self, now_ns: int) -> bool:
        num_parked = sum(h.state is HandoffState.PARKED for h in self._handoffs())
        for source_id, source in self._sources.items():
            if source.dead or source.running is not None or not source.slots.num_free:
                continue
            handoff = self._admission.next_for_slot(
                num_slots=len(source.slots), num_parked=num_parked
            )
            if handoff is not None:
                self._lease(handoff, source_id, source, now_ns)
                return True
        return False

    def _lease(self, handoff: Handoff, source_id: SourceId, source: _Source, now_ns: int) -> None:
        plan = source.plan_for(handoff.num_tokens)  # first: it may refuse
        lease = source.slots.lease(handoff.attempt)
        handoff.take_lease(source_id, lease, plan, now_ns)
        source.running = handoff.attempt
        self._commands.append(
            StartPrefill(handoff.attempt, source_id, lease.slot, lease.generation)
        )
        if handoff.has_storage:
            self._admission.leave(handoff)

    def _released(self, source: _Source, slot: Slot, handoff: Handoff | None, now_ns: int) -> None:
        if not slot.writer_out:
            self._protocol_fault(handoff, "the write token came back twice", now_ns)
            return
        if handoff is not None and not handoff.final:
            self._end(handoff, Outcome.FAILED, "the source returned without its final", now_ns)
        source.running = None
        slot.writer_back()

    def _tell(
        self, handoff: Handoff, message: Progress | SourceFinal | Failed, now_ns: int
    ) -> None:
        try:
            match message:
                case Progress():
                    chunk = self.limits.chunk_nbytes
                    handoff.progress(message.spans, message.digests, chunk, now_ns)
                case SourceFinal():
                    token = message.token if message.first == "token" else None
                    handoff.source_final(token, now_ns)
                    self._publish_if_ready(handoff)
                case Failed():
                    self._end(handoff, Outcome.FAILED, message.reason, now_ns)
                case _:
                    assert_never(message)
        except RemoteProtocolError as exc:
            self._protocol_fault(handoff, str(exc), now_ns)

    def _protocol_fault(self, handoff: Handoff | None, reason: str, now_ns: int) -> None:
        self.dropped["malformed"] += 1
        if handoff is not None:
            self._end(handoff, Outcome.FAILED, reason, now_ns)

    def _end(self, handoff: Handoff, outcome: Outcome, reason: str, now_ns: int) -> None:
        published = handoff.state is HandoffState.PUBLISHED
        decided = handoff.end(outcome)
        self._withdraw(Publish, handoff.attempt)
        self._admission.leave(handoff)
        if handoff.lease is not None and not published:
            slot = self._slot_of(handoff)
            source_id = self._source_of(handoff)
            if self._sources[source_id].running == handoff.attempt:
                self._commands.append(SendCancel(handoff.attempt, source_id))
            slot.end(now_ns)
        if decided:
            self._commands.append(Report(handoff.attempt.request, outcome, reason))
        self._forget_if_ended(handoff)

    def _forget_if_ended(self, handoff: Handoff) -> None:
        if handoff.state is not HandoffState.ENDED:
            return
        if handoff.has_storage:
            handoff.has_storage = False
            if handoff.quarantine_reason:
                self._lanes_quarantined += 1
                self._commands.append(Quarantine(handoff.attempt, handoff.quarantine_reason))
            else:
                self._admission.lanes_free += 1
                if not self._withdraw(Reserve, handoff.attempt):
                    self._commands.append(Free(handoff.attempt))
        self._requests.pop(handoff.attempt.request, None)

    def _after(self, handoff: Handoff, now_ns: int) -> None:
        self._publish_if_ready(handoff)
        self._forget_if_ended(handoff)
        self._admit(now_ns)

    def _publish_if_ready(self, handoff: Handoff) -> None:
        if handoff.publishable:
            slot = self._slot_of(handoff)
            source = self._source_of(handoff)
            self._commands.append(Publish(handoff.attempt, source, slot.index, handoff.token))

    def _deadlines(self, now_ns: int) -> Iterator[tuple[int, Callable[[], None]]]:
        def fail(handoff: Handoff, reason: str) -> Callable[[], None]:
            def act() -> None:
                if handoff.state not in _DECIDED:
                    self._end(handoff, Outcome.FAILED, reason, now_ns)

            return act

        for entry in self._requests.values():
            handoff = entry.handoff
            if handoff.state in _DECIDED:
                continue
            if entry.deadline_ns is not None:
                yield entry.deadline_ns, fail(handoff, "its deadline passed")
            if handoff.lease is not None and not handoff.final:
                due_ns = handoff.last_progress_ns + self.limits.progress_timeout_ns
                yield due_ns, fail(handoff, "the source made no progress in time")
        for source in self._sources.values():
            for slot in source.slots:
                if slot.state is SlotState.DRAINING:
                    yield slot.draining_since_ns + self.limits.drain_timeout_ns, slot.deadline

    def _handoffs(self) -> Iterator[Handoff]:
        return (entry.handoff for entry in self._requests.values())

    def _withdraw(self, kind: type[Publish] | type[Reserve], attempt: AttemptId) -> bool:
        """Take back a command that was not given out yet, so that an end outruns it."""
        kept = [c for c in self._commands if not (isinstance(c, kind) and c.attempt == attempt)]
        withdrawn = len(kept) < len(self._commands)
        self._commands = kept
        return withdrawn

    def _attached(self, source_id: SourceId) -> _Source:
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
        known = handoff.source == source_id and handoff.state not in _DECIDED
        return handoff if known else None

    def _leased(self, source: _Source, message: AttemptMessage) -> Slot | None:
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

    def _new_import(self, handoff: Handoff, slot: Slot | None, expected: int = 0) -> ImportId:
        import_id = ImportId(self._next_import)
        self._next_import += 1
        self._imports[import_id] = _Import(handoff, slot, expected)
        return import_id

    def _expect_import(self, import_id: ImportId) -> _Import:
        if import_id not in self._imports:
            raise LocalProtocolError(f"import {import_id} is not in flight")
        return self._imports[import_id]

    def _take_import(self, import_id: ImportId) -> _Import:
        record = self._expect_import(import_id)
        del self._imports[import_id]
        return record
