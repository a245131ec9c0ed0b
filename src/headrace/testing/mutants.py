"""Small bugs, planted one at a time into the real machines: the walk must find each.

They are as close as can be to what a tired programmer would write. How they are written down is
told in `headrace.testing.planting`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Final

from headrace import coverage
from headrace.coverage import Coverage
from headrace.protocol.admission import Admission
from headrace.protocol.books import Books
from headrace.protocol.handoff import Handoff
from headrace.protocol.owner import Owner
from headrace.protocol.slots import Slot
from headrace.protocol.source import SourceAttempt
from headrace.testing.explorer import walk
from headrace.testing.instances import INSTANCES
from headrace.testing.ledger import Violation
from headrace.testing.planting import Mutant, read_mutants
from headrace.testing.source_walk import walk_source


def hunt(mutant: Mutant) -> str | None:
    """Walk with the bug planted; returns how it was found, None if it survived.

    The instance `source` is the walk of a source attempt.
    """
    with mutant.planted():
        try:
            if mutant.instance == "source":
                walk_source(digest=False, chunk=1)
                walk_source(digest=True, chunk=0)
            else:
                walk(INSTANCES[mutant.instance])
        except Violation as exc:
            return str(exc)
    return None


_PLACES: Final[dict[str, type | ModuleType]] = {
    "coverage": coverage,
    **{c.__name__: c for c in (Coverage, Handoff, Slot, Books, Owner, Admission, SourceAttempt)},
}

_BUGS: Final = r"""
[coverage._insert]
one: a cell may be told twice
    if (before and before[-1][1] > start) or (after and after[0][0] < stop): => if False:
[Coverage._check]
one: a position beyond the prompt is accepted
    span.stop <= self._num_positions => span.stop
one: a layer beyond the model is accepted
    span.layer_stop <= len(self._windows) => span.layer_stop
one: a span without positions is accepted
    span.start < span.stop => span.start <= span.stop
[Coverage._stage]
one: a message's spans are not checked against each other
    staged.get(layer, self._have[layer]) => self._have[layer]
[Coverage.add]
parked: a layer counts as complete with its first cells
    if intervals[0] == self._windows[layer]: => if intervals:
hybrid: the transfer set is complete with its first layer
    self._open.discard(layer) => self._open.clear()

[Handoff.publishable]
one: publish does not look at what landed
    and self._landed.complete =>
one: publish does not look at the final
    self.state is HandoffState.SEALED\n        and self.final =>
        self.state in (HandoffState.STREAMING, HandoffState.SEALED)
[Handoff.begin_import]
one: a span lands when its import begins, and publish ignores what is in flight
    self._queued_nbytes -= nbytes => self._landed.add([piece])
    [Handoff.end_import] self._landed.add([entry.span]) => pass
    [Handoff.publishable] and not self._flights =>
[Handoff._settle]
one: sealed without the final
    self.final and self._claimed.complete => self._claimed.complete
one: storage ends while imports run
    HandoffState.DRAINING and not self._flights => HandoffState.DRAINING
[Handoff.source_final]
one: the final is taken before all cells are told, and sealed on it
    missing is not None => False
    [Handoff._settle] and self._claimed.complete =>
one: the final is taken before all cells are told
    missing is not None => False
parked: a second final is taken
    if self.final: => if False:
digest: a token is forgotten
    self.token = token => pass
[Handoff.progress]
empty: progress after the final is taken
    if self.final: => if False:
digest: a span without its digest is taken
    (digests or self.digest) and => digests and
one: too many digests are taken
    len(digests) != len(spans) => len(digests) < len(spans)
times: progress does not move the progress deadline
    self.last_progress_ns = now_ns => pass
empty: spans without cells hold the progress deadline off
    self._step(HandoffEvent.PROGRESS) =>
        self.last_progress_ns = now_ns; self._step(HandoffEvent.PROGRESS)
empty: any number of progress messages is taken
    self._num_progress == MAX_PROGRESS => False
empty: one progress message too few is taken
    self._num_progress == MAX_PROGRESS => self._num_progress + 1 == MAX_PROGRESS
empty: progress messages are not counted
    self._num_progress += 1 => pass
[Handoff.computing]
parked: computing is taken after the final
    if self.final: => if False:
times: computing does not hold the progress deadline off
    self.last_progress_ns = now_ns => pass
[Owner._tell]
one: computing is not heard
    handoff.computing(now_ns) => pass
[Handoff.end_import]
hybrid: a span lands with its first piece
    entry.open_pieces == 0 => True
digest: a digest is not checked
    entry.digest is not None => False
[Handoff._enqueue]
hybrid: a piece of a span is not counted
    SpanImport(span, digest, len(pieces)) => SpanImport(span, digest, 1)
hybrid: pieces are not cut to the chunk
    plan.cut(span, chunk_nbytes) => plan.cut(span, 1 << 40)
[Handoff.end]
one: every end decides
    self.outcome is None => True
[Handoff.take_lease]
times: the progress deadline counts from the submission
    self.last_progress_ns = now_ns => pass
[Handoff.reserve]
one: storage is not noted
    self.has_storage = True => pass
[Handoff.nearness]
sources: the oldest hand-off is imported first
    self.state is not HandoffState.SEALED, self._queued_nbytes => False, 0
[Handoff.TABLE]
parked: an import begins without storage
    PARKED IMPORT_BEGIN => PARKED
digest: a digest is checked while draining
    DRAINING IMPORT_BEGIN => DRAINING
parked: a parked hand-off refuses the final
    PARKED FINAL =>
one: an entry cannot end
    PUBLISHED END =>
one: an entry ends at once
    SEALED PUBLISH => ENDED
parked: a parked hand-off skips streaming
    PARKED RESERVE => RESERVED

[Slot._settle]
one: free without the write token
    not self.writer_out and =>
one: free without the read tokens
    and not self.readers:\n        self.holder => :\n        self.holder
reuse: the generation is not raised
    self.generation + 1 => self.generation
one: the holder stays
    self.holder = None => pass
[Slot.deadline]
one: a deadline frees the slot
    self._step(SlotEvent.DEADLINE) => self.writer_out = False; self._settle()
one: a deadline forgets the readers
    self._step(SlotEvent.DEADLINE) => self._step(SlotEvent.DEADLINE); self.readers.clear()
[Slot.end]
one: draining counts from the start of time
    self.draining_since_ns = now_ns => pass
[Slot.TABLE]
one: a quarantined slot is never free again
    QUARANTINED QUIET =>
one: a quarantined slot loses its writer's token
    QUARANTINED WRITER_BACK =>
one: nothing is read once the writer is back
    READY READ_BEGIN =>
one: a returned slot is free while it is held
    READY QUIET => FREE
one: an ended lease stays leased
    LEASED END => LEASED

[Books._leased]
one: a stale generation is taken
    slot.generation == message.generation and  =>
reuse: another attempt's lease is taken
     and slot.holder == message.attempt =>
one: a slot outside the slab is looked at
    if not 0 <= message.slot < len(source.slots): => if False:
parked: a wrong slot is taken
    source.slots[SlotIndex(message.slot)] =>
        next((s for s in source.slots if s.holder), source.slots[SlotIndex(0)])
[Books._live]
sources: another source speaks for the attempt
    handoff.source == source_id and  =>
one: a late message reaches a decided hand-off
     and handoff.state not in DECIDED =>
one: a message of attempt 2 reaches attempt 1
     or entry.handoff.attempt != attempt =>
[Owner._released]
one: a second release is taken
    not slot.writer_out => False
one: a release without a final does not fail
    handoff is not None and not handoff.final => False
one: a release leaves the source busy
    source.running = None => pass
[Owner._protocol_fault]
one: a second release is dropped without a count
    self.dropped["malformed"] += 1 => pass
one: a malformed message does not fail its attempt
    if handoff is not None: => if False:
[Owner.message]
one: a stale message is not counted
    self.dropped["stale"] += 1 => pass
one: a dead source is heard
    if source.dead: => if False:
one: a dead source's message is counted as a late one
    self.dropped["dead"] => self.dropped["late"]
[Owner._tell]
one: a failure is ignored
    self._end(handoff, Outcome.FAILED, message.reason, now_ns) => pass
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
[Books.no_slot_left]
lanes: what waits for the last source waits on
    return not any( => return False and not any(
uneven: what waits fails with the first of two sources
    return not any( => return not all(
lanes: a dead source counts as one that grants
    source.dead or source.ending => source.ending
times: a source that is to be killed counts as one that grants
    source.dead or source.ending => source.dead
overdue: a slot that is set apart counts as one to be had
    slot.state is not SlotState.QUARANTINED => True
reuse: a slot that drains counts as set apart
    is not SlotState.QUARANTINED => not in (SlotState.QUARANTINED, SlotState.DRAINING)
[Books.no_lane_left]
stranded: what waits for the last lane waits on
    == self.limits.num_lanes => > self.limits.num_lanes
faults: what waits fails with the first of two lanes
    == self.limits.num_lanes => > 0
[Owner._fail_stranded]
uneven: who has a slot fails with the last source
    self.no_slot_left and handoff.lease is None => self.no_slot_left
overdrawn: who holds storage fails when the last lane is lost
    self.no_lane_left and not handoff.has_storage => self.no_lane_left
stranded: who is parked waits on for a lane
    self.no_lane_left and not handoff.has_storage =>
        self.no_lane_left and not handoff.has_storage and handoff.lease is None
[Owner._admit]
overdue: who is stranded by a deadline or a failure waits on
    self._fail_stranded(NO_SLOT, now_ns) => pass
[Owner._admit_slot]
sources: a dead source is granted a slot
    source.dead or  =>
sources: a source that is to be killed is granted a slot
    source.ending or  =>
[Owner.submit]
one: requests are taken without a source
    if self.no_slot_left: => if False:
stranded: requests are taken without a lane
    if self.no_lane_left: => if False:

[Owner._admit_slot]
near: a busy source is granted a second slot
    busy = source.running is not None => busy = False
uneven: a small source ends the search for a slot
    if handoff is not None: => if handoff is None:\n            return False\n        else:
[Admission.next_for_slot]
reuse: the last slot is parked in
    num_slots - 1 => num_slots
prefetch: more is parked than the prefetch depth
    min(self.prefetch_depth, num_slots - 1) => num_slots - 1
prefetch: parked although one with storage lacks a slot
    if reserved is not None: =>
        if reserved is not None and self._oldest(HandoffState.WAITING) is None:
[Admission.next_for_storage]
prefetch: a freed lane goes to a waiting hand-off first
    self._oldest(HandoffState.PARKED) or self._oldest(HandoffState.WAITING) =>
        self._oldest(HandoffState.WAITING) or self._oldest(HandoffState.PARKED)
[Admission._oldest]
prefetch: the youngest is served first
    in self._queue => in reversed(self._queue)
[Admission.leave]
empty: who ended still waits
    if handoff in self._queue: => if False:
[Owner._admit_storage]
reuse: a lane is used twice
    self._admission.lanes_free -= 1 => pass

[Owner._end]
one: no cancel is sent
    self._commands.append(SendCancel(handoff.attempt, source_id)) => pass
one: a cancel is sent to a source that is done
    self._sources[source_id].running == handoff.attempt => True
one: the slot is kept at the end
    slot.end(now_ns) => pass
one: the terminal is told twice
    if decided: => if True:
one: the terminal is not told
    if decided: => if False:
one: publish outlives a cancel
    self._withdraw(Publish, handoff.attempt) => pass
[Owner.published]
one: the slot is kept at publish
    self._slot_of(handoff).end(now_ns) => pass
one: a published hand-off is not told
    self._commands.append(Report(attempt.request, Outcome.PUBLISHED, "")) => pass
[Owner._forget_if_ended]
digest: storage is given back twice
    handoff.has_storage = False => pass
one: storage is given back before it drained
    handoff.state is not HandoffState.ENDED =>
        handoff.state not in (HandoffState.DRAINING, HandoffState.ENDED)
one: a lane is lost
    self._admission.lanes_free += 1 => pass
digest: unsafe storage is freed
    if handoff.quarantine_reason: => if False:
digest: a quarantined lane is used again
    self._take_lane_out() => pass
lanes: a withdrawn reservation is freed
    if not self._withdraw(Reserve, handoff.attempt): => if True:
[Owner.cancel]
one: an entry is cancelled
    entry.handoff.state in DECIDED => entry.handoff.state is HandoffState.DRAINING
one: a cancel is told as a failure
    Outcome.CANCELLED => Outcome.FAILED
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
    handoff.quarantine_reason = quarantine_reason => pass

[Owner.reserve_refused]
faults: a refused reservation is given back once more
    handoff.has_storage = False => pass
faults: a refused reservation sets the lane apart
    self._admission.lanes_free += 1 => self._lanes_quarantined += 1
faults: a refused reservation loses the lane
    self._admission.lanes_free += 1 => pass
faults: a refused reservation does not fail
    self._end(handoff, Outcome.FAILED, reason, now_ns) => pass
stranded: who waits for the lane of a refused reservation waits on
    self._admit(now_ns) => pass
refused: what has no storage is refused it
    not handoff.has_storage or  =>
digest: storage is refused while it is imported into
    or handoff.in_flight  =>
refused: an entry is refused its storage
     or handoff.outcome is not None =>
[Owner._take_lane_out]
faults: a lost lane is used again
    self._lanes_quarantined += 1 => self._admission.lanes_free += 1
stranded: a lost lane that was promised is forgotten
    if not self.no_lane_left: => if self._admission.lanes_free:
stranded: more lanes are lost than there are
    if not self.no_lane_left: => if True:
[Owner.lane_lost]
faults: a lane that could not be freed stays in service
    self._take_lane_out() => pass
stranded: who waits for a lost lane waits on
    self._admit(now_ns) => pass
[Admission.next_for_storage]
stranded: a lane that was lost is promised again
    self.lanes_free <= 0 => self.lanes_free == 0

[Owner.digest_checked]
digest: a wrong digest is right
    actual == record.expected => True
digest: a wrong digest does not fail
    not good and => False and
[Owner.import_failed]
digest: a failed import gives its read token back
    handoff = self._take_import(import_id).handoff =>
        r = self._take_import(import_id); handoff = r.handoff; r.slot and r.slot.end_read(import_id)
digest: a failed import does not fail
    if handoff.state not in DECIDED: => if False:
digest: a failed import is forgotten
    handoff.quarantine_reason = reason or NO_REASON => pass
digest: an import that failed without a reason is forgotten
    reason or NO_REASON => reason
[Owner.device_failed]
digest: a failed reserve or publish is forgotten
    handoff.quarantine_reason = reason or NO_REASON => pass
digest: a failure without a reason is forgotten
    reason or NO_REASON => reason
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
    if handoff.lease is not None and not handoff.final: => if False:
hybrid: the progress deadline outlives the final
     and not handoff.final =>
one: the drain deadline is ignored
    if slot.state is SlotState.DRAINING: => if False:
one: an import is waited for without an end
    for import_id, record in self._imports.items(): => for import_id, record in ():
digest: a digest check is waited for without an end
    yield due_ns, partial(self._give_up, import_id, now_ns) =>
        if record.slot: yield due_ns, partial(self._give_up, import_id, now_ns)
one: an import is waited for as long as a source without progress
    record.begun_ns + self.limits.drain_timeout_ns =>
        record.begun_ns + self.limits.drain_timeout_ns + self.limits.progress_timeout_ns
[Books._new_import]
one: an import's deadline counts from the start of time
    Import(handoff, slot, now_ns, expected) => Import(handoff, slot, 0, expected)
[Owner._give_up]
one: an import that is given up frees its storage
    self.import_failed(import_id, "an import was not fenced in time", now_ns) =>
        handoff = self._take_import(import_id).handoff;
        handoff.end_import(import_id, good=False);
        handoff.state in DECIDED or self._end(handoff, Outcome.FAILED, "", now_ns);
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
[Owner._quarantine]
one: a source that keeps its write token lives on
    self._commands.append(KillSource(source_id, reason)) => pass
one: a source is killed whose write token is back
    if slot.writer_out: => if True:
one: a source is killed although the slot is not set apart
    slot.deadline() => pass
times: a source that is to be killed is not noted
    self._sources[source_id].ending = True => pass
[Owner._end]
one: a source is killed at once
    slot.end(now_ns) =>
        slot.end(now_ns); slot.writer_out and self._commands.append(KillSource(source_id, reason))
[Owner._quarantine]
one: a source is killed twice for one slot
    self._commands.append(KillSource(source_id, reason)) =>
        self._commands += [KillSource(source_id, reason)] * 2
[Owner.tick]
one: a deadline is early
    due_ns <= now_ns => due_ns <= now_ns + 1
one: a deadline is late
    due_ns <= now_ns => due_ns < now_ns

[SourceAttempt.check_running]
source: commits go on after the end
    if self._ended: => if False:
source: a cancelled engine goes on
    if self.state is SourceState.CANCELLING: => if False:
source: a broken attempt may still give its final
    if self._broken: => if False:
[SourceAttempt._break]
source: an engine's fault is forgotten
    self._broken = f"{self._name}: {text}"\n    return LocalProtocolError(self._broken) =>
        return LocalProtocolError(text)
[SourceAttempt.check_writable]
source: told cells are handed out
    self._coverage.check(spans) => pass
source: cells that are handed out count as told
    self._coverage.check(spans) => self._coverage.add(spans)
source: handing told cells out does not break the attempt
    raise self._break(f"the engine would write {exc}") from exc =>
        raise LocalProtocolError(str(exc)) from exc
source: cells are handed out after the end
    self.check_running() => pass
[SourceAttempt.computing]
source: an engine at work says nothing
    self._last_word_ns = now_ns => return []
source: an engine at work says so at every call
    if now_ns - self._last_word_ns < HEARTBEAT_NS: => if False:
source: a word is late
    < HEARTBEAT_NS => <= HEARTBEAT_NS
source: a word is not noted
    self._last_word_ns = now_ns => pass
source: an engine at work says so after the end
    self.check_running() => pass
[SourceAttempt._flush]
source: spans that are held count as a word
    if out:\n        self._last_word_ns = now_ns => self._last_word_ns = now_ns
source: spans that are told do not count as a word
    self._last_word_ns = now_ns => pass
[SourceAttempt.start]
source: the first word counts from the start of time
    self._last_word_ns = now_ns => self._last_word_ns = -HEARTBEAT_NS
[SourceAttempt.final]
source: a final without all cells
    missing is not None => False
source: a final leaves held spans behind
    list(self._flush(len(self._held), now_ns)) => []
[SourceAttempt.fail]
source: a failure follows the final
    self._ended or  =>
source: a failure follows a cancel
     or self.state is SourceState.CANCELLING =>
[SourceAttempt.commit]
source: the engine may commit a cell twice
    self._coverage.add(spans) => pass
source: spans without digests
    if len(digests) != wanted: => if False:
source: more spans than messages
    len(self._held) + len(spans) > MAX_SPANS * room => False
[SourceAttempt.TABLE]
source: a release does not end
    RUNNING RETURN => RUNNING
source: a late cancel is an error
    DONE CANCEL =>
"""

# Bugs that change nothing, since another condition stands behind: they survive and do not count.
# The coverage that landed is complete only after the last fence and digest; SEALED is reached only
# with the final; the final is refused until every cell was told; what fails an import ends its
# hand-off in the same call; no import begins in DRAINING. An import is given up no later than its
# slot is quarantined, and then its read token never comes back.
_SHIELDED: Final = r"""
[Handoff.publishable]
digest: publish ignores what is in flight
    and not self._flights =>
digest: publish ignores the final
    and self.final =>
[Handoff._settle]
digest: sealed without every cell told
     and self._claimed.complete =>
[Owner.import_failed]
digest: a failed import lands
    good=False => good=True
[Handoff.end_import]
digest: a wrong digest lands
    if good: => if True:
[Handoff.end]
digest: an end keeps the queue
    self._queue.clear() => pass
[Slot.TABLE]
one: a quarantined slot loses its readers' tokens
    QUARANTINED READ_END =>
"""

MUTANTS: Final = read_mutants(_BUGS, _PLACES)
EQUIVALENT: Final = read_mutants(_SHIELDED, _PLACES)
