"""How an attempt ends: decided at once, or given up so that another may follow; and what is left.

The caller's terminal is given once, at the decision (`Report`). Storage and slot drain after it,
each by itself. An attempt that failed by its source's fault and may be tried again is given up
instead: it drains without a terminal, and when no import of it runs any more the next attempt goes
on with its storage (`Retry`). A device that gave no proof of being quiet leaves something apart:
the lane, and the read tokens that came back by no fence. Only proof, or an operator who answers for
it (`reinstate`), brings these back.
"""

from __future__ import annotations

from headrace.ids import AttemptId
from headrace.protocol.books import Apart, Books, RequestRecord
from headrace.protocol.commands import (
    OF_THE_SOURCE,
    Cause,
    Free,
    Outcome,
    Publish,
    Quarantine,
    Report,
    Reserve,
    Retry,
    SendCancel,
)
from headrace.protocol.handoff import Handoff, HandoffState

NO_SLOT = "no prefill source is left in service"
NO_LANE = "no decoder storage is left in service"
NO_REASON = "the device failed and gave no reason"


class Endings(Books):
    """The part of an owner that ends attempts."""

    def _publish_if_ready(self, handoff: Handoff) -> None:
        if handoff.publishable:
            slot = None if handoff.lease is None else handoff.lease.slot
            self._commands.append(Publish(handoff.attempt, handoff.source, slot, handoff.token))

    def _fail(self, handoff: Handoff, cause: Cause, reason: str, now_ns: int) -> None:
        """The attempt is over; so is its request, unless another attempt may follow."""
        record = self._requests[handoff.attempt.request]
        if handoff.given_up:
            self._decide(handoff, Outcome.FAILED, cause, reason)
        elif self._may_go_on(record, cause):
            self._end(handoff, None, cause, reason, now_ns)
        else:
            self._end(handoff, Outcome.FAILED, cause, reason, now_ns)

    def _may_go_on(self, record: RequestRecord, cause: Cause) -> bool:
        handoff, policy = record.handoff, record.policy
        if handoff.local:
            return False
        local = policy.local and not self.no_local_left
        if cause in OF_THE_SOURCE:
            return handoff.attempt.attempt < policy.num_attempts or local
        return cause is Cause.NO_SOURCE and local

    def _end(
        self,
        handoff: Handoff,
        outcome: Outcome | None,
        cause: Cause | None,
        reason: str,
        now_ns: int,
    ) -> None:
        """Begin nothing more of the attempt; without an outcome it is given up."""
        published = handoff.state is HandoffState.PUBLISHED
        decided = handoff.end(outcome, reason)
        self._withdraw(Publish, handoff.attempt)
        self._admission.leave(handoff)
        if handoff.lease is not None and not published:
            slot = self._slot_of(handoff)
            source_id = self._source_of(handoff)
            if self._sources[source_id].running == handoff.attempt:
                self._commands.append(SendCancel(handoff.attempt, source_id))
            slot.end(now_ns)
        if decided and outcome is not None:
            self._report(handoff, outcome, cause, reason)
        self._settle_end(handoff, now_ns, after=cause)

    def _decide(self, handoff: Handoff, outcome: Outcome, cause: Cause, reason: str) -> None:
        """The terminal of an attempt that was given up and still drains."""
        handoff.decide(outcome)
        self._report(handoff, outcome, cause, reason)

    def _report(self, handoff: Handoff, outcome: Outcome, cause: Cause | None, reason: str) -> None:
        self.ended[outcome.value if cause is None else cause.value] += 1
        self._commands.append(Report(handoff.attempt.request, outcome, cause, reason))

    def _settle_end(self, handoff: Handoff, now_ns: int, after: Cause | None = None) -> None:
        """Once nothing of the attempt runs: give its storage back, or go on with it."""
        if handoff.state is not HandoffState.ENDED:
            return
        if handoff.given_up:
            self._go_on(handoff, local=after is Cause.NO_SOURCE)
            return
        if handoff.has_storage:
            self._admission.lanes_free += 1
            if handoff.quarantine_reason:
                self._set_apart(handoff, now_ns)
            elif not self._withdraw(Reserve, handoff.attempt):
                self._commands.append(Free(handoff.attempt))
        self._requests.pop(handoff.attempt.request, None)

    def _go_on(self, old: Handoff, *, local: bool) -> None:
        """The next attempt of the request waits, with the storage of the one before."""
        record = self._requests[old.attempt.request]
        attempt = old.attempt.next
        handoff = Handoff(
            attempt,
            old.num_tokens,
            digest=old.digest,
            local=local or attempt.attempt > record.policy.num_attempts,
            avoid=old.source,
            start=old.start,
        )
        if old.has_storage:
            handoff.reserve()
        record.handoff = handoff
        self.num_retries += 1
        self._commands.append(Retry(old.attempt, old.reason))
        self._admission.join(handoff)

    def _set_apart(self, handoff: Handoff, now_ns: int) -> None:
        reason, lost = handoff.quarantine_reason, tuple(handoff.lost_reads)
        self._apart[handoff.attempt] = Apart(reason, now_ns, self._take_lane_out(), lost)
        self._commands.append(Quarantine(handoff.attempt, reason))

    def _take_lane_out(self) -> bool:
        """False where none is left: a lane that was lost while promised goes out once."""
        if self.no_lane_left:
            return False
        self._admission.lanes_free -= 1
        self._lanes_quarantined += 1
        return True

    def _withdraw(self, kind: type[Publish] | type[Reserve], attempt: AttemptId) -> bool:
        """Take back a command that was not given out yet, so that an end outruns it.

        A `Reserve` may be of an attempt before this one, which passed its storage on.
        """
        kept = [
            command
            for command in self._commands
            if not (isinstance(command, kind) and command.attempt.request == attempt.request)
        ]
        withdrawn = len(kept) < len(self._commands)
        self._commands = kept
        return withdrawn
