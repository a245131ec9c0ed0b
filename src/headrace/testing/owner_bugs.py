"""Bugs for the owner: what it takes in, and how an attempt ends.

How they are written down is told in `headrace.testing.planting`.
"""

from __future__ import annotations

from typing import Final

OWNER_BUGS: Final = r"""
[Owner._tell]
one: computing is not heard
    handoff.computing(now_ns) => pass
[Owner._released]
one: a release without a final does not fail
    handoff is not None and not handoff.final => False
one: a release leaves the source busy
    source.running = None => pass
[Owner._protocol_fault]
one: a malformed message is not counted
    self.dropped["malformed"] += 1 => pass
one: a malformed message does not fail its attempt
    self._fail(handoff, Cause.MALFORMED, reason, now_ns) => pass
[Owner.undecodable]
one: garbage is not counted
    self.dropped["undecodable"] += 1 => pass
one: garbage does not fail the attempt that runs
    if handoff is not None: => if False:
[Owner.message]
one: a second release is taken
    isinstance(message, Released) and slot.writer_out: => isinstance(message, Released):
one: what the shell found wrong is taken
    elif fault: => elif False:
[Owner.message]
one: a stale message is not counted
    self.dropped["stale"] += 1 => pass
one: a dead source is heard
    if source.dead: => if False:
one: a dead source's message is counted as a late one
    self.dropped["dead"] => self.dropped["late"]
[Owner._tell]
one: a failure is ignored
    self._fail(handoff, Cause.SOURCE_FAILED, message.reason, now_ns) => pass
one: a failure of the engine is told as a malformed message
    Cause.SOURCE_FAILED => Cause.MALFORMED
one: a failure after the final is not malformed
    Failed() if handoff.final: => Failed() if False:
[Owner.forget_source]
one: a source is forgotten while a slot is out
     or source.slots.num_free < len(source.slots) =>
one: a source that lives is forgotten
    not source.dead or  =>
one: a source is not forgotten
    del self._sources[source_id] => pass
one: a source is forgotten and still counts
    return True => return False
[Owner.source_died]
one: a death does not give the write token back
    slot.writer_back() => pass
one: a death fails what has its final
     and not handoff.final =>
one: a death fails nothing
    handoff is not None and not handoff.final => False
[Owner.submit]
one: requests are taken without a source
    if unserved and start < num_tokens: => if False:
local: a request without a source is not made local
    digest=digest, local=local => digest=digest, local=False
stranded: requests are taken without a lane
    if self.no_lane_left: => if False:
[Owner.published]
one: the slot is kept at publish
    self._slot_of(handoff).end(now_ns) => pass
one: a published hand-off is not told
    self._commands.append(Report(attempt.request, Outcome.PUBLISHED, None, "")) => pass
[Owner.publish_refused]
faults: what holds poison does not fail
    self._fail(handoff, Cause.CORRUPT, reason, now_ns) => pass
one: anything may be refused to be published
    if not handoff.publishable: => if False:
[Owner.cancel]
one: an entry is cancelled
    entry.handoff.outcome is not None => entry.handoff.outcome is Outcome.CANCELLED
one: a cancel is told as a failure
    self._end(entry.handoff, Outcome.CANCELLED => self._end(entry.handoff, Outcome.FAILED
retry: what was given up cannot be cancelled
    entry.handoff.outcome is not None => not entry.handoff.live
[Owner._after]
one: publish is commanded twice
    self._publish_if_ready(handoff) =>
        self._publish_if_ready(handoff); self._publish_if_ready(handoff)
[Owner._tell]
empty: what is complete when its source ends is not published
    self._publish_if_ready(handoff) => pass
[Owner.retire]
one: a hand-off that waits is retired
    state is not HandoffState.PUBLISHED => state is HandoffState.ENDED
digest: an entry that is still written is freed
    handoff.quarantine_reason = quarantine_reason or handoff.quarantine_reason => pass
[Owner.reserve_refused]
faults: a refused reservation is given back once more
    handoff.has_storage = False => pass
faults: a refused reservation sets the lane apart
    self._admission.lanes_free += 1 => self._lanes_quarantined += 1
faults: a refused reservation loses the lane
    self._admission.lanes_free += 1 => pass
faults: a refused reservation does not fail
    self._fail(handoff, Cause.NO_STORAGE, reason, now_ns) => pass
stranded: who waits for the lane of a refused reservation waits on
    self._admit(now_ns) => pass
refused: what has no storage is refused it
    not handoff.has_storage or  =>
digest: storage is refused while it is imported into
    or handoff.in_flight  =>
refused: an entry is refused its storage
     or handoff.outcome is not None =>
[Owner.digest_checked]
digest: a wrong digest is right
    actual == record.expected => True
digest: a wrong digest does not fail
    not good and => False and
[Owner.import_failed]
digest: a failed import gives its read token back
    handoff.lost_reads.append((record.slot, import_id)) => record.slot.end_read(import_id)
reinstated: a failed import's read token is forgotten
    handoff.lost_reads.append((record.slot, import_id)) => pass
digest: a failed import does not fail
    if handoff.outcome is None: => if False:
digest: a failed import is forgotten
    handoff.quarantine_reason = reason or NO_REASON => pass
digest: an import that failed without a reason is forgotten
    handoff.quarantine_reason = reason or NO_REASON => handoff.quarantine_reason = reason
[Owner.device_failed]
digest: a failed reserve or publish is forgotten
    handoff.quarantine_reason = reason or NO_REASON => pass
digest: a failure without a reason is forgotten
    handoff.quarantine_reason = reason or NO_REASON => handoff.quarantine_reason = reason
[Owner.import_done]
one: a fenced import keeps its read token
    record.slot.end_read(import_id) => pass
[Owner.begin_imports]
parked: the budget is not kept
    while begun < budget_nbytes: => while True:
hybrid: a budget ends with its first import
    while begun < budget_nbytes: => while not begun:
one: an import takes no read token
    slot.begin_read(import_id) => pass
[Owner._deadlines]
one: a request's deadline is ignored
    if entry.deadline_ns is not None: => if False:
parked: the progress deadline is ignored
    if handoff.lease is not None and not handoff.final and handoff.live: => if False:
retry-late: an attempt that was given up has a progress deadline
    not handoff.final and handoff.live => not handoff.final
hybrid: the progress deadline outlives the final
     and not handoff.final =>
one: tokens are waited for without an end
    if back_by_ns is not None: => if False:
one: an import is waited for without an end
    for import_id, record in self._imports.items(): => for import_id, record in ():
digest: a digest check is waited for without an end
    yield due_ns, partial(self._give_up, import_id, now_ns) =>
        if record.slot: yield due_ns, partial(self._give_up, import_id, now_ns)
one: an import is waited for as long as a source without progress
    record.begun_ns + self.limits.drain_timeout_ns =>
        record.begun_ns + self.limits.drain_timeout_ns + self.limits.progress_timeout_ns
[Owner._give_up]
one: an import that is given up frees its storage
    self.import_failed(import_id, "an import was not fenced in time", now_ns) =>
        handoff = self._take_import(import_id).handoff;
        handoff.end_import(import_id, good=False);
        handoff.live and self._fail(handoff, Cause.DEVICE, "", now_ns);
        self._after(handoff, now_ns)
one: an import that is given up gives its read token back
    self.import_failed(import_id, =>
        r = self._imports[import_id]; r.slot and r.slot.end_read(import_id);
        self.import_failed(import_id,
one: an import that is given up counts as fenced
    self.import_failed(import_id, "an import was not fenced in time", now_ns) =>
        self.import_done(import_id, now_ns)
one: an import that is given up is still waited for
    self.import_failed(import_id, "an import was not fenced in time", now_ns) =>
        record = self._imports[import_id];
        self.import_failed(import_id, "an import was not fenced in time", now_ns);
        self._imports[import_id] = record
[Owner._overdue]
one: a source that keeps its write token lives on
    self._commands.append(KillSource(source_id, reason)) => pass
one: a source is killed whose write token is back
    if slot.writer_out and not source.local: => if True:
local: the owner's own engine is killed
    if slot.writer_out and not source.local: => if slot.writer_out:
one: a source is killed although the slot is not set apart
    slot.deadline() => pass
[Owner._back_by_ns]
one: the drain deadline is ignored
    if slot.state is SlotState.DRAINING: => if False:
parked: a source may take as long as it likes to return after its final
    if handoff is None or => if True or
parked: a source that computes is as overdue as one that gave its final
    not handoff.final or => False or
local: the owner's own engine is killed when it does not return
     or source.local =>
parked: a source that is to be killed is overdue again
     or source.ending: => :
[Owner._overdue]
times: a source that is to be killed is not noted
    source.ending = True => pass
[Owner._overdue]
one: a source is killed twice for one slot
    self._commands.append(KillSource(source_id, reason)) =>
        self._commands += [KillSource(source_id, reason)] * 2
[Owner.tick]
one: a deadline is early
    due_ns <= now_ns => due_ns <= now_ns + 1
one: a deadline is late
    due_ns <= now_ns => due_ns < now_ns
[Endings._end]
one: no cancel is sent
    self._commands.append(SendCancel(handoff.attempt, source_id)) => pass
one: a cancel is sent to a source that is done
    self._sources[source_id].running == handoff.attempt => True
one: the slot is kept at the end
    slot.end(now_ns) => pass
one: the terminal is told twice
    if decided and outcome is not None: => if True:
one: the terminal is not told
    if decided and outcome is not None: => if False:
one: publish outlives a cancel
    self._withdraw(Publish, handoff.attempt) => pass
[Endings._fail]
retry: nothing is tried again
    elif self._may_go_on(record, cause): => elif False:
retry-digest: a given-up attempt whose device fails goes on
    if handoff.given_up: => if False:
[Endings._may_go_on]
retry-digest: a device's fault is tried again
    cause in OF_THE_SOURCE => True
retry: one attempt too many
    < policy.num_attempts => <= policy.num_attempts
local: a local attempt is tried again
    if handoff.local: => if False:
locals: who lacks a source does not go on locally
    return cause is Cause.NO_SOURCE and local => return False
[Endings._go_on]
retry: a retry loses its storage
    handoff.reserve() => pass
retry: a retry is not told
    self._commands.append(Retry(old.attempt, old.reason)) => pass
retry: a retry does not wait
    self._admission.join(handoff) => pass
retry: a retry is the same attempt
    attempt = old.attempt.next => attempt = old.attempt
retry: the old attempt is still the request's
    record.handoff = handoff => pass
retry-elsewhere: it is forgotten which source failed
    avoid=old.source => avoid=None
local: what follows the last attempt is not local
     or attempt.attempt > record.policy.num_attempts =>
[Endings._settle_end]
retry: a retry takes storage over that is still imported into
    handoff.state is not HandoffState.ENDED => not handoff.given_up and handoff.in_flight
[Endings._decide]
retry: the terminal of a given-up attempt is not told
    self._report(handoff, outcome, cause, reason) => pass
[Endings._settle_end]
one: storage is given back before it drained
    handoff.state is not HandoffState.ENDED =>
        handoff.state not in (HandoffState.DRAINING, HandoffState.ENDED)
one: a lane is lost
    self._admission.lanes_free += 1 => pass
digest: unsafe storage is freed
    if handoff.quarantine_reason: => if False:
lanes: a withdrawn reservation is freed
    if not self._withdraw(Reserve, handoff.attempt): => if True:
[Endings._set_apart]
digest: a quarantined lane is used again
    Apart(reason, now_ns, self._take_lane_out(), lost) => Apart(reason, now_ns, False, lost)
reinstated: a lost read token is forgotten
    tuple(handoff.lost_reads) => ()
[Endings._take_lane_out]
faults: a lost lane is used again
    self._lanes_quarantined += 1 => self._admission.lanes_free += 1
stranded: a lost lane that was promised is forgotten
    if self.no_lane_left: => if self.no_lane_left or not self._admission.lanes_free:
stranded: more lanes are lost than there are
    if self.no_lane_left: => if False:
[Endings._end]
one: a source is killed at once
    slot.end(now_ns) =>
        slot.end(now_ns); slot.writer_out and self._commands.append(KillSource(source_id, reason))
"""
