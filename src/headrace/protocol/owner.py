"""The owner of one decoder: all hand-offs, all sources, and who may have what.

Messages, completions, cancels, deaths and the clock come in; `commands()` gives out what the shell
must do. A message is looked at in three steps. Whose is it: one of an attempt that is unknown, over
or another source's is counted by reason and dropped. Is it legal: one that breaks the protocol
fails its own attempt and nothing else. Only then does anything change.

A caller hears of its hand-off once, at the decision (`Report`). Storage and slot drain after that,
independently: storage is freed when no import runs, the slot when its tokens are back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import assert_never

from headrace.errors import LocalProtocolError, Refused, RemoteProtocolError
from headrace.ids import AttemptId, ImportId, RequestId, SourceId
from headrace.messages import Computing, Failed, Progress, Released, SourceFinal
from headrace.protocol.books import (
    DECIDED,
    AttemptMessage,
    Books,
    PlanFor,
    RequestRecord,
    Source,
)
from headrace.protocol.commands import (
    CheckDigest,
    Command,
    Free,
    KillSource,
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

NO_SLOT = "no prefill source is left in service"
NO_LANE = "no decoder storage is left in service"
NO_REASON = "the device failed and gave no reason"


class Owner(Books):
    """Sans-IO owner of one decoder's storage and of its sources' slots."""

    # What comes in.

    def add_source(self, source: SourceId, num_slots: int, plan_for: PlanFor, now_ns: int) -> None:
        """A source attached; `plan_for(n)` compiles the plan of a prompt of n tokens for it."""
        if source in self._sources:
            raise LocalProtocolError(f"source {source} is attached already")
        self._sources[source] = Source(SlotTable(num_slots), plan_for)
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
            Refused: it can never fit, or no source or no storage is left in service.
        """
        if not 1 <= num_tokens <= self.limits.context:
            raise Refused(
                f"a prompt of {num_tokens} tokens does not fit a context of 1 to "
                f"{self.limits.context}; raise --context or change the prompt",
                field="prompt",
            )
        if self.no_slot_left:
            raise Refused(NO_SLOT, field="source")
        if self.no_lane_left:
            raise Refused(NO_LANE, field="decoder")
        attempt = AttemptId(self.epoch, self._next_request, 1)
        self._next_request += 1
        handoff = Handoff(attempt, num_tokens, digest=digest)
        self._requests[attempt.request] = RequestRecord(handoff, deadline_ns)
        self._admission.join(handoff)
        self._admit(now_ns)
        return attempt.request

    def message(self, source_id: SourceId, message: AttemptMessage, now_ns: int) -> None:
        """A source told something about an attempt."""
        source = self._attached(source_id)
        if source.dead:
            self.dropped["dead"] += 1
            return
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
        self._fail_stranded(reason, now_ns)
        self._admit(now_ns)

    def forget_source(self, source_id: SourceId) -> bool:
        """Drop a dead source from the books once all its slots are free; False before that."""
        source = self._attached(source_id)
        if not source.dead or source.slots.num_free < len(source.slots):
            return False
        del self._sources[source_id]
        return True

    def cancel(
        self, request: RequestId, now_ns: int, reason: str = "cancelled by the caller"
    ) -> bool:
        """The caller wants no more; False if the hand-off was decided before."""
        entry = self._requests.get(request)
        if entry is None or entry.handoff.state in DECIDED:
            return False
        self._end(entry.handoff, Outcome.CANCELLED, reason, now_ns)
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
            check_id = self._new_import(handoff, None, now_ns, entry.digest)
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
        if not good and handoff.state not in DECIDED:
            reason = f"digest of {span}: {actual:#x} landed, {record.expected:#x} sent"
            self._end(handoff, Outcome.FAILED, reason, now_ns)
        self._after(handoff, now_ns)

    def import_failed(self, import_id: ImportId, reason: str, now_ns: int) -> None:
        """The device failed an import without a fence: nothing it touched is known to be quiet.

        The slot's read token stays out, so the slot ends in quarantine, as the storage does.
        """
        handoff = self._take_import(import_id).handoff
        handoff.quarantine_reason = reason or NO_REASON
        handoff.end_import(import_id, good=False)
        if handoff.state not in DECIDED:
            self._end(handoff, Outcome.FAILED, reason, now_ns)
        self._after(handoff, now_ns)

    def published(self, attempt: AttemptId, now_ns: int) -> None:
        """The decoder made the entry visible; the slot is no longer needed."""
        handoff = self._known(attempt)
        handoff.publish()
        self._slot_of(handoff).end(now_ns)
        self._commands.append(Report(attempt.request, Outcome.PUBLISHED, ""))
        self._admit(now_ns)

    def reserve_refused(self, attempt: AttemptId, reason: str, now_ns: int) -> None:
        """The decoder set nothing aside: the attempt fails and the lane stays in service."""
        handoff = self._known(attempt)
        if not handoff.has_storage or handoff.in_flight or handoff.outcome is not None:
            raise LocalProtocolError(f"hand-off {attempt} is {handoff.state.name}: not reserving")
        handoff.has_storage = False
        self._admission.lanes_free += 1
        self._end(handoff, Outcome.FAILED, reason, now_ns)
        self._admit(now_ns)

    def device_failed(self, attempt: AttemptId, reason: str, now_ns: int) -> None:
        """A reserve or a publish failed: the storage is set apart and the attempt fails."""
        handoff = self._known(attempt)
        handoff.quarantine_reason = reason or NO_REASON
        if handoff.state is not HandoffState.DRAINING:
            self._end(handoff, Outcome.FAILED, reason, now_ns)
        self._admit(now_ns)

    def retire(self, request: RequestId, now_ns: int, quarantine_reason: str = "") -> None:
        """Nobody decodes the published entry any more: its storage can be freed, or set apart."""
        state = self.state_of(request)
        if state is not HandoffState.PUBLISHED:
            raise LocalProtocolError(f"request {request} is {state.name}, not PUBLISHED")
        handoff = self._requests[request].handoff
        handoff.quarantine_reason = quarantine_reason
        self._end(handoff, Outcome.PUBLISHED, "", now_ns)
        self._admit(now_ns)

    def lane_lost(self, now_ns: int) -> None:
        """The device failed to free a lane: it is taken out of service.

        It may be promised to another by now: then the count of free lanes is below zero until
        that one gives its own back, or is refused.
        """
        self._take_lane_out()
        self._admit(now_ns)

    def tick(self, now_ns: int) -> None:
        """Apply every deadline that has passed; call it by a timer, also when nothing arrives."""
        for due_ns, act in list(self._deadlines(now_ns)):
            if due_ns <= now_ns:
                act()
        self._admit(now_ns)

    def begin_imports(self, budget_nbytes: int, now_ns: int) -> int:
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
            import_id = self._new_import(handoff, slot, now_ns)
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

    def next_deadline_ns(self) -> int | None:
        """When `tick` must be called next."""
        return min((due_ns for due_ns, _ in self._deadlines(0)), default=None)

    # How it is decided.

    def _admit(self, now_ns: int) -> None:
        while self._admit_storage() or self._admit_slot(now_ns):
            pass
        self._fail_stranded(NO_SLOT, now_ns)

    def _fail_stranded(self, no_slot_reason: str, now_ns: int) -> None:
        """Nobody waits for what cannot be had again."""
        for handoff in self._admission.waiting():
            if self.no_lane_left and not handoff.has_storage:
                self._end(handoff, Outcome.FAILED, NO_LANE, now_ns)
            elif self.no_slot_left and handoff.lease is None:
                self._end(handoff, Outcome.FAILED, no_slot_reason, now_ns)

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
            busy = source.running is not None
            if source.dead or source.ending or busy or not source.slots.num_free:
                continue
            handoff = self._admission.next_for_slot(
                num_slots=len(source.slots), num_parked=num_parked
            )
            if handoff is not None:
                self._lease(handoff, source_id, source, now_ns)
                return True
        return False

    def _lease(self, handoff: Handoff, source_id: SourceId, source: Source, now_ns: int) -> None:
        plan = source.plan_for(handoff.num_tokens)  # first: it may refuse
        lease = source.slots.lease(handoff.attempt)
        handoff.take_lease(source_id, lease, plan, now_ns)
        source.running = handoff.attempt
        self._commands.append(
            StartPrefill(handoff.attempt, source_id, lease.slot, lease.generation)
        )
        if handoff.has_storage:
            self._admission.leave(handoff)

    def _released(self, source: Source, slot: Slot, handoff: Handoff | None, now_ns: int) -> None:
        if not slot.writer_out:
            self._protocol_fault(handoff, "the write token came back twice", now_ns)
            return
        if handoff is not None and not handoff.final:
            self._end(handoff, Outcome.FAILED, "the source returned without its final", now_ns)
        source.running = None
        slot.writer_back()

    def _tell(
        self, handoff: Handoff, message: Computing | Progress | SourceFinal | Failed, now_ns: int
    ) -> None:
        try:
            match message:
                case Progress():
                    chunk = self.limits.chunk_nbytes
                    handoff.progress(message.spans, message.digests, chunk, now_ns)
                case Computing():
                    handoff.computing(now_ns)
                case SourceFinal():
                    token = message.token if message.first == "token" else None
                    handoff.source_final(token, now_ns)
                    self._publish_if_ready(handoff)
                case Failed() if handoff.final:
                    reason = f"failed after its final: {message.reason}"
                    self._protocol_fault(handoff, reason, now_ns)
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
            self._admission.lanes_free += 1
            if handoff.quarantine_reason:
                self._take_lane_out()
                self._commands.append(Quarantine(handoff.attempt, handoff.quarantine_reason))
            elif not self._withdraw(Reserve, handoff.attempt):
                self._commands.append(Free(handoff.attempt))
        self._requests.pop(handoff.attempt.request, None)

    def _take_lane_out(self) -> None:
        if not self.no_lane_left:  # a lane that was lost while promised goes out of service once
            self._admission.lanes_free -= 1
            self._lanes_quarantined += 1

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
                if handoff.state not in DECIDED:
                    self._end(handoff, Outcome.FAILED, reason, now_ns)

            return act

        for entry in self._requests.values():
            handoff = entry.handoff
            if handoff.state in DECIDED:
                continue
            if entry.deadline_ns is not None:
                yield entry.deadline_ns, fail(handoff, "its deadline passed")
            if handoff.lease is not None and not handoff.final:
                due_ns = handoff.last_progress_ns + self.limits.progress_timeout_ns
                yield due_ns, fail(handoff, "the source made no progress in time")
        for import_id, record in self._imports.items():
            due_ns = record.begun_ns + self.limits.drain_timeout_ns
            yield due_ns, partial(self._give_up, import_id, now_ns)
        for source_id, source in self._sources.items():
            for slot in source.slots:
                if slot.state is SlotState.DRAINING:
                    due_ns = slot.draining_since_ns + self.limits.drain_timeout_ns
                    yield due_ns, partial(self._quarantine, source_id, slot)

    def _give_up(self, import_id: ImportId, now_ns: int) -> None:
        if import_id in self._imports:
            self.import_failed(import_id, "an import was not fenced in time", now_ns)

    def _quarantine(self, source_id: SourceId, slot: Slot) -> None:
        slot.deadline()
        if slot.writer_out:
            self._sources[source_id].ending = True
            reason = f"slot {slot.index} was not given back in time"
            self._commands.append(KillSource(source_id, reason))

    def _withdraw(self, kind: type[Publish] | type[Reserve], attempt: AttemptId) -> bool:
        """Take back a command that was not given out yet, so that an end outruns it."""
        kept = [c for c in self._commands if not (isinstance(c, kind) and c.attempt == attempt)]
        withdrawn = len(kept) < len(self._commands)
        self._commands = kept
        return withdrawn
