"""The owner of one decoder: all hand-offs, all sources, and who may have what.

Messages, completions, cancels, deaths and the clock come in; `commands()` gives out what the shell
must do. A message is looked at in three steps. Whose is it: one of an attempt that is unknown, over
or another source's is counted by reason and dropped. Is it legal: one that breaks the protocol
fails its own attempt and nothing else. Only then does anything change.

Who gets storage and slots is told in `headrace.protocol.grants`; how an attempt ends, and what
follows, in `headrace.protocol.endings`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import assert_never

from headrace.errors import LocalProtocolError, Refused, RemoteProtocolError
from headrace.ids import AttemptId, ImportId, RequestId, SourceId
from headrace.messages import Computing, Failed, Progress, Released, SourceFinal
from headrace.protocol.admission import FailurePolicy
from headrace.protocol.books import AttemptMessage, RequestRecord, Source
from headrace.protocol.commands import (
    Cause,
    CheckDigest,
    Command,
    KillSource,
    Outcome,
    Report,
    StartImport,
)
from headrace.protocol.endings import NO_LANE, NO_REASON, NO_SLOT
from headrace.protocol.grants import Grants
from headrace.protocol.handoff import Handoff, HandoffState
from headrace.protocol.slots import Slot, SlotState


class Owner(Grants):
    """Sans-IO owner of one decoder's storage and of its sources' slots."""

    # What comes in.

    def submit(
        self,
        num_tokens: int,
        now_ns: int,
        deadline_ns: int | None = None,
        *,
        digest: bool = False,
        policy: FailurePolicy | None = None,
        start: int = 0,
        local: bool = False,
    ) -> RequestId:
        """A new request; its hand-off waits for storage and slot.

        `digest`: the source is asked to stamp every span, and one without a stamp is malformed.
        `policy`: what follows on a failure of a source; by default nothing. `start`: positions that
        the storage holds as soon as it is reserved, up to the whole prompt. `local`: it is for the
        owner's own engine from the start.

        Raises:
            Refused: it can never fit, or no source or no storage is left in service.
            LocalProtocolError: `start` is outside the prompt.
        """
        policy = policy or FailurePolicy()
        if not 1 <= num_tokens <= self.limits.context:
            raise Refused(
                f"a prompt of {num_tokens} tokens does not fit a context of 1 to "
                f"{self.limits.context}; raise --context or change the prompt",
                field="prompt",
            )
        if not 0 <= start <= num_tokens:
            raise LocalProtocolError(f"start {start} of a prompt of {num_tokens} tokens")
        local = local or (self.no_slot_left and policy.local)
        unserved = self.no_local_left if local else self.no_slot_left
        if unserved and start < num_tokens:
            raise Refused(NO_SLOT, field="source")
        if self.no_lane_left:
            raise Refused(NO_LANE, field="decoder")
        attempt = AttemptId(self.epoch, self._next_request, 1)
        self._next_request += 1
        handoff = Handoff(attempt, num_tokens, digest=digest, local=local, start=start)
        self._requests[attempt.request] = RequestRecord(handoff, deadline_ns, policy)
        self._admission.join(handoff)
        self._admit(now_ns)
        return attempt.request

    def message(
        self, source_id: SourceId, message: AttemptMessage, now_ns: int, fault: str = ""
    ) -> None:
        """A source told something about an attempt.

        `fault`: what the shell found wrong with it; it is malformed if it is not to be dropped.
        """
        source = self._attached(source_id)
        if source.dead:
            self.dropped["dead"] += 1
            return
        handoff = self._speaking(source_id, message.attempt)
        slot = self._leased(source, message)
        if slot is None:
            if handoff is None:
                self.dropped["stale"] += 1
            else:
                text = f"slot {message.slot} generation {message.generation}"
                self._protocol_fault(handoff, f"{text} is not its lease", now_ns)
        elif isinstance(message, Released) and slot.writer_out:
            self._released(source, slot, handoff, now_ns)
        elif handoff is None or isinstance(message, Released):
            self.dropped["late"] += 1
        elif fault:
            self._protocol_fault(handoff, fault, now_ns)
        else:
            self._tell(handoff, message, now_ns)
        self._admit(now_ns)

    def undecodable(self, source_id: SourceId, reason: str, now_ns: int) -> None:
        """A source sent what is no message: the attempt that it runs fails, if it is undecided."""
        source = self._attached(source_id)
        self.dropped["undecodable"] += 1
        handoff = self._speaking(source_id, source.running)
        if handoff is not None:
            self._fail(handoff, Cause.MALFORMED, reason, now_ns)
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
                    self._fail(handoff, Cause.SOURCE_DIED, reason, now_ns)
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
        if entry is None or entry.handoff.outcome is not None:
            return False
        if entry.handoff.given_up:
            self._decide(entry.handoff, Outcome.CANCELLED, Cause.CANCELLED, reason)
        else:
            self._end(entry.handoff, Outcome.CANCELLED, Cause.CANCELLED, reason, now_ns)
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

    def digest_checked(
        self, import_id: ImportId, actual: int, now_ns: int, reason: str = ""
    ) -> None:
        """The digest of a span's bytes as landed was computed.

        `reason`: what else is wrong with these bytes; then they are bad whatever the digest.
        """
        record = self._expect_import(import_id)
        if record.slot is not None:
            raise LocalProtocolError(f"import {import_id} is a copy, not a digest check")
        self._take_import(import_id)
        handoff = record.handoff
        span = handoff.span_of(import_id)
        good = actual == record.expected and not reason
        handoff.end_import(import_id, good=good)
        if not good and handoff.live:
            reason = reason or f"digest of {span}: {actual:#x} landed, {record.expected:#x} sent"
            self._fail(handoff, Cause.CORRUPT, reason, now_ns)
        self._after(handoff, now_ns)

    def import_failed(self, import_id: ImportId, reason: str, now_ns: int) -> None:
        """The device failed an import without a fence: nothing it touched is known to be quiet.

        The slot's read token stays out, so the slot ends in quarantine, as the storage does.
        """
        record = self._take_import(import_id)
        handoff = record.handoff
        handoff.quarantine_reason = reason or NO_REASON
        if record.slot is not None:
            handoff.lost_reads.append((record.slot, import_id))
        handoff.end_import(import_id, good=False)
        if handoff.outcome is None:
            self._fail(handoff, Cause.DEVICE, reason or NO_REASON, now_ns)
        self._after(handoff, now_ns)

    def published(self, attempt: AttemptId, now_ns: int) -> None:
        """The decoder made the entry visible; the slot is no longer needed."""
        handoff = self._known(attempt)
        handoff.publish()
        if handoff.lease is not None:
            self._slot_of(handoff).end(now_ns)
        self.ended[Outcome.PUBLISHED.value] += 1
        self._commands.append(Report(attempt.request, Outcome.PUBLISHED, None, ""))
        self._admit(now_ns)

    def may_publish(self, attempt: AttemptId) -> bool:
        """Whether `Publish` still holds: its attempt may have ended since it was given."""
        entry = self._requests.get(attempt.request)
        return entry is not None and entry.handoff.attempt == attempt and entry.handoff.publishable

    def publish_refused(self, attempt: AttemptId, reason: str, now_ns: int) -> None:
        """A cell of what was to be published was never written: the storage itself is sound."""
        handoff = self._known(attempt)
        if not handoff.publishable:
            raise LocalProtocolError(f"hand-off {attempt} is {handoff.state.name}: not publishing")
        self._fail(handoff, Cause.CORRUPT, reason, now_ns)
        self._admit(now_ns)

    def reserve_refused(self, attempt: AttemptId, reason: str, now_ns: int) -> None:
        """The decoder set nothing aside: the attempt fails and the lane stays in service."""
        handoff = self._known(attempt)
        if not handoff.has_storage or handoff.in_flight or handoff.outcome is not None:
            raise LocalProtocolError(f"hand-off {attempt} is {handoff.state.name}: not reserving")
        handoff.has_storage = False
        self._admission.lanes_free += 1
        self._fail(handoff, Cause.NO_STORAGE, reason, now_ns)
        self._admit(now_ns)

    def device_failed(self, attempt: AttemptId, reason: str, now_ns: int) -> None:
        """A reserve or a publish failed: the storage is set apart and the attempt fails."""
        handoff = self._known(attempt)
        handoff.quarantine_reason = reason or NO_REASON
        if handoff.outcome is None:
            self._fail(handoff, Cause.DEVICE, reason or NO_REASON, now_ns)
        self._admit(now_ns)

    def retire(self, request: RequestId, now_ns: int, quarantine_reason: str = "") -> None:
        """Nobody decodes the published entry any more: its storage can be freed, or set apart."""
        state = self.state_of(request)
        if state is not HandoffState.PUBLISHED:
            raise LocalProtocolError(f"request {request} is {state.name}, not PUBLISHED")
        handoff = self._requests[request].handoff
        handoff.quarantine_reason = quarantine_reason or handoff.quarantine_reason
        self._end(handoff, Outcome.PUBLISHED, None, "", now_ns)
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
            piece, nbytes = handoff.begin_import(import_id, self.chunk_nbytes)
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

    def overdue_sources(self, now_ns: int) -> list[SourceId]:
        """The sources that a tick would end now: one keeps a write token beyond its time."""
        return [
            source_id
            for source_id, source in self._sources.items()
            for slot in source.slots
            if slot.writer_out and not source.local
            if (self._back_by_ns(source_id, slot) or now_ns + 1) <= now_ns
        ]

    def next_deadline_ns(self) -> int | None:
        """When `tick` must be called next."""
        return min((due_ns for due_ns, _ in self._deadlines(0)), default=None)

    # How it is decided.

    def _released(self, source: Source, slot: Slot, handoff: Handoff | None, now_ns: int) -> None:
        if handoff is not None and not handoff.final:
            reason = "the source returned without its final"
            self._fail(handoff, Cause.SOURCE_FAILED, reason, now_ns)
        source.running = None
        slot.writer_back()

    def _tell(
        self, handoff: Handoff, message: Computing | Progress | SourceFinal | Failed, now_ns: int
    ) -> None:
        try:
            match message:
                case Progress():
                    handoff.progress(message.spans, message.digests, now_ns)
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
                    self._fail(handoff, Cause.SOURCE_FAILED, message.reason, now_ns)
                case _:
                    assert_never(message)
        except RemoteProtocolError as exc:
            self._protocol_fault(handoff, str(exc), now_ns)

    def _protocol_fault(self, handoff: Handoff, reason: str, now_ns: int) -> None:
        self.dropped["malformed"] += 1
        self._fail(handoff, Cause.MALFORMED, reason, now_ns)

    def _after(self, handoff: Handoff, now_ns: int) -> None:
        self._publish_if_ready(handoff)
        if self.attempt_of(handoff.attempt.request) == handoff.attempt:
            self._settle_end(handoff, now_ns)
        self._admit(now_ns)

    def _deadlines(self, now_ns: int) -> Iterator[tuple[int, Callable[[], None]]]:
        def fail(attempt: AttemptId, cause: Cause, reason: str) -> Callable[[], None]:
            def act() -> None:
                entry = self._requests.get(attempt.request)
                if entry is None or entry.handoff.outcome is not None:
                    return
                same = entry.handoff.attempt == attempt and entry.handoff.live
                if same or cause is Cause.DEADLINE:
                    self._fail(entry.handoff, cause, reason, now_ns)

            return act

        for source_id, source in self._sources.items():
            for slot in source.slots:
                back_by_ns = self._back_by_ns(source_id, slot)
                if back_by_ns is not None:
                    yield back_by_ns, partial(self._overdue, source_id, slot)
        for entry in self._requests.values():
            handoff = entry.handoff
            if handoff.outcome is not None:
                continue
            if entry.deadline_ns is not None:
                text = "its deadline passed"
                yield entry.deadline_ns, fail(handoff.attempt, Cause.DEADLINE, text)
            if handoff.lease is not None and not handoff.final and handoff.live:
                due_ns = handoff.last_progress_ns + self.limits.progress_timeout_ns
                text = "the source made no progress in time"
                yield due_ns, fail(handoff.attempt, Cause.STALLED, text)
        for import_id, record in self._imports.items():
            due_ns = record.begun_ns + self.limits.drain_timeout_ns
            yield due_ns, partial(self._give_up, import_id, now_ns)

    def _give_up(self, import_id: ImportId, now_ns: int) -> None:
        if import_id in self._imports:
            self.import_failed(import_id, "an import was not fenced in time", now_ns)

    def _back_by_ns(self, source_id: SourceId, slot: Slot) -> int | None:
        """By when tokens must be back: after the lease ended, or its source gave its final.

        A source that gives its final and does not return would keep all who wait for it waiting.
        """
        if slot.state is SlotState.DRAINING:
            return slot.draining_since_ns + self.limits.drain_timeout_ns
        source, handoff = self._sources[source_id], self._speaking(source_id, slot.holder)
        if handoff is None or not handoff.final or source.local or source.ending:
            return None
        return handoff.last_progress_ns + self.limits.drain_timeout_ns

    def _overdue(self, source_id: SourceId, slot: Slot) -> None:
        if slot.state is SlotState.DRAINING:
            slot.deadline()
        source = self._sources[source_id]
        if slot.writer_out and not source.local:
            source.ending = True
            reason = f"slot {slot.index} was not given back in time"
            self._commands.append(KillSource(source_id, reason))
