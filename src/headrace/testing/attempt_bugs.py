"""Bugs for one attempt: its coverage, its hand-off, its slot, and its source's half.

How they are written down is told in `headrace.testing.planting`.
"""

from __future__ import annotations

from typing import Final

ATTEMPT_BUGS: Final = r"""
[coverage._insert]
one: a cell may be told twice
    if (at and have[at - 1][1] > start) or (at < len(have) and have[at][0] < stop): => if False:
[Coverage._check]
one: a position beyond the prompt is accepted
    span.stop <= self._num_positions => span.stop
one: a layer beyond the model is accepted
    span.layer_stop <= len(self._windows) => span.layer_stop
one: a span without positions is accepted
    span.start < span.stop => span.start <= span.stop
[Coverage._stage]
one: a message's spans are not checked against each other
    if layer not in staged: => if True:
[Coverage.add]
parked: a layer counts as complete with its first cells
    if intervals[0] == self._windows[layer]: => if intervals:
hybrid: the transfer set is complete with its first layer
    self._open.discard(layer) => self._open.clear()
[Handoff._join_queue]
parked-digest: spans are joined that have a digest each
    if queue and entry.digest is None and queue[-1][0].digest is None: => if queue:
parked: what is joined is imported in part
    SpanImport(joined, None, 1), joined => SpanImport(joined, None, 1), span
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
[Handoff.end_import]
hybrid: a span lands with its first piece
    entry.open_pieces == 0 => True
digest: a digest is not checked
    entry.digest is not None => False
[Handoff.begin_import]
hybrid: a piece of a span is not counted
    entry.open_pieces += len(rest) => pass
hybrid: pieces are not cut to the chunk
    plan.cut(told, chunk_nbytes) => plan.cut(told, 1 << 40)
hybrid: what is left of a span is lost
    self._queue.extendleft((entry, *each) for each in reversed(rest)) => pass
[Handoff.end]
one: every end decides
    decided = self.outcome is None and outcome is not None => decided = outcome is not None
[Handoff.decide]
retry: a given-up attempt keeps no terminal
    self.outcome = outcome => pass
[Handoff.live]
one: a published hand-off may still be told of
     and self.state is not HandoffState.PUBLISHED =>
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
reinstated: a quarantined slot loses its readers' tokens
    QUARANTINED READ_END =>
one: a quarantined slot loses its writer's token
    QUARANTINED WRITER_BACK =>
one: nothing is read once the writer is back
    READY READ_BEGIN =>
one: a returned slot is free while it is held
    READY QUIET => FREE
one: an ended lease stays leased
    LEASED END => LEASED

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
    self.plan.span_nbytes, self._held[:count] => self.plan.span_nbytes, self._held
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
