"""Bugs for what an owner holds, and for who gets what.

How they are written down is told in `headrace.testing.planting`.
"""

from __future__ import annotations

from typing import Final

GRANT_BUGS: Final = r"""
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
     and handoff.live =>
one: a message of attempt 2 reaches attempt 1
     or entry.handoff.attempt != attempt =>
[Books.no_slot_left]
lanes: what waits for the last source waits on
    not any( => False and not any(
uneven: what waits fails with the first of two sources
    not any( => not all(
restarts: who waits for a source that is expected fails
    not self._expected and not any( => not any(
local: the owner's own engine counts as a source
    source.in_service and not source.local => source.in_service
[Books.no_local_left]
local-lost: a source counts as the owner's own engine
     and source.local =>
[Source.in_service]
lanes: a dead source counts as one that grants
    self.dead or self.ending => self.ending
times: a source that is to be killed counts as one that grants
    self.dead or self.ending => self.dead
overdue: a slot that is set apart counts as one to be had
    s.state is not SlotState.QUARANTINED => True
reuse: a slot that drains counts as set apart
    is not SlotState.QUARANTINED => not in (SlotState.QUARANTINED, SlotState.DRAINING)
[Books.no_lane_left]
stranded: what waits for the last lane waits on
    == self.limits.num_lanes => > self.limits.num_lanes
faults: what waits fails with the first of two lanes
    == self.limits.num_lanes => > 0
[Grants._fail_stranded]
uneven: who has a slot fails with the last source
    elif handoff.lease is None and unserved: => elif unserved:
overdrawn: who holds storage fails when the last lane is lost
    no_lane and not handoff.has_storage => no_lane
stranded: who is parked waits on for a lane
    no_lane and not handoff.has_storage =>
        no_lane and not handoff.has_storage and handoff.lease is None
local-lost: a local attempt waits on for a lost slot
    no_local if handoff.local else no_slot => no_slot
lanes: who lacks a source is told that storage is lacking
    and unserved:\n            self._fail(handoff, Cause.NO_SOURCE =>
        and unserved:\n            self._fail(handoff, Cause.NO_STORAGE
[Grants._admit]
overdue: who is stranded by a deadline or a failure waits on
    or self._fail_stranded(NO_SLOT, now_ns) =>
[Grants._admit_slot]
sources: a dead source is granted a slot
    source.dead or  =>
sources: a source that is to be killed is granted a slot
    source.ending or  =>
[Grants._fits]
retry-elsewhere: a retry goes to the source that failed it
    handoff.avoid != source_id => True
retry: a retry waits for another source where there is none
    return not any(self._will_grant(other) for other in self._sources if other != source_id) =>
        return False
local: a local attempt goes to a source
    local or handoff.local => local
locals: an attempt that is not local goes to the owner's own engine
    return local and handoff.local => return local
[Grants._will_grant]
retry-elsewhere: a dead source counts as another that grants
    source.in_service\n        and  =>
[Grants.source_not_coming]
restarts: one that does not come is still expected
    self._expect_one_less() => pass
[Grants.add_source]
restarts: one that came is still expected
    if expected: => if False:
[Grants._expect_one_less]
retry: fewer than none are expected
    if not self._expected: => if False:
[Grants.reinstate]
reinstated: a lane that is reinstated stays out of service
    self._lanes_quarantined -= 1 => pass
reinstated: a read token that was lost stays lost
    slot.end_read(token) => pass
reinstated-promised: a lane comes back that was another's
    if apart.lane: => if True:
reinstated: what is reinstated is still apart
    self._apart.pop(attempt, None) => self._apart.get(attempt)
[Grants._admit_slot]
near: a busy source is granted a second slot
    busy = source.running is not None => busy = False
uneven: a small source ends the search for a slot
    if handoff is not None: => if handoff is None:\n            return False\n        else:
[Admission.next_for_slot]
reuse: the last slot is parked in
    num_slots - 1 => num_slots
prefetch: more is parked than the prefetch depth
    min(self.prefetch_depth, num_slots - 1) => num_slots - 1
kept-between: a younger one is parked past one that no slot fits
    return first if fits(first) else None => return self._oldest(HandoffState.WAITING, fits)
prefetch: parked although one with storage lacks a slot
    if self._oldest(HandoffState.RESERVED): =>
        if self._oldest(HandoffState.RESERVED) and not self._oldest(HandoffState.WAITING):
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
[Admission.join]
retry-queue: a retry goes to the end of the queue
    self._queue.sort(key=lambda waiting: waiting.attempt) => pass
[Grants._admit_storage]
reuse: a lane is used twice
    self._admission.lanes_free -= 1 => pass
[Grants.lane_lost]
faults: a lane that could not be freed stays in service
    self._take_lane_out() => False
stranded: who waits for a lost lane waits on
    self._admit(now_ns) => pass
[Admission.next_for_storage]
stranded: a lane that was lost is promised again
    self.lanes_free <= 0 => self.lanes_free == 0
[Books._new_import]
one: an import's deadline counts from the start of time
    Import(handoff, slot, now_ns, expected) => Import(handoff, slot, 0, expected)
[Books._speaking]
one: a source has its say after it has returned
     and self._slot_of(handoff).writer_out else None => else None
"""
