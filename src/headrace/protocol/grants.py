"""Who gets what: sources come and go, and storage and slots are granted as they come free.

The order is that of `headrace.protocol.admission`. Nobody waits for what cannot be had again: when
no source is in service and none is expected, hand-offs without a slot fail (or go on locally), and
when every lane is out of service, hand-offs without storage fail.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from headrace.errors import LocalProtocolError
from headrace.ids import AttemptId, SourceId
from headrace.protocol.books import Apart, PlanFor, Source
from headrace.protocol.commands import Cause, Reserve, StartPrefill
from headrace.protocol.endings import NO_LANE, NO_REASON, NO_SLOT, Endings
from headrace.protocol.handoff import Handoff, HandoffState
from headrace.protocol.slots import SlotState, SlotTable


class Grants(Endings):
    """The part of an owner that grants storage and slots."""

    def add_source(
        self,
        source: SourceId,
        num_slots: int,
        plan_for: PlanFor,
        now_ns: int,
        *,
        expected: bool = False,
        local: bool = False,
    ) -> None:
        """A source attached; `plan_for(n, start)` compiles its plan of positions [start, n).

        `expected`: it was announced. `local`: it is the owner's own engine.
        """
        if source in self._sources:
            raise LocalProtocolError(f"source {source} is attached already")
        if expected:
            self._expect_one_less()
        self._sources[source] = Source(SlotTable(num_slots), plan_for, local)
        self._admit(now_ns)

    def expect_source(self) -> None:
        """A source is being started: hand-offs wait for its slots meanwhile."""
        self._expected += 1

    def source_not_coming(self, reason: str, now_ns: int) -> None:
        """A source that was expected is given up."""
        self._expect_one_less()
        self._fail_stranded(reason, now_ns)
        self._admit(now_ns)

    def lane_lost(self, attempt: AttemptId, reason: str, now_ns: int) -> None:
        """The device failed to free what an attempt held: that lane is out of service.

        It may be promised to another by now: then the count of free lanes is below zero until
        that one gives its own back, or is refused.
        """
        if attempt in self._apart:
            raise LocalProtocolError(f"what attempt {attempt} held is lost already")
        self._apart[attempt] = Apart(reason or NO_REASON, now_ns, self._take_lane_out())
        self._admit(now_ns)

    def reinstate(self, attempt: AttemptId, now_ns: int) -> None:
        """An operator answers for it that the device is quiet: what is apart is in service again.

        Raises:
            LocalProtocolError: nothing of this attempt is apart.
        """
        apart = self._apart.pop(attempt, None)
        if apart is None:
            raise LocalProtocolError(f"nothing of attempt {attempt} is quarantined")
        for slot, token in apart.lost_reads:
            slot.end_read(token)
        heir = next((a for a, other in self._apart.items() if not other.lane), None)
        if apart.lane and heir is not None:  # its storage is apart too, and no lane was left for it
            self._apart[heir] = replace(self._apart[heir], lane=True)
        elif apart.lane:
            self._lanes_quarantined -= 1
            self._admission.lanes_free += 1
        self._admit(now_ns)

    def _admit(self, now_ns: int) -> None:
        while (
            self._admit_storage()
            or self._admit_slot(now_ns)
            or self._fail_stranded(NO_SLOT, now_ns)
        ):
            pass

    def _fail_stranded(self, no_slot_reason: str, now_ns: int) -> bool:
        """Nobody waits for what cannot be had again; returns whether somebody did."""
        stranded = False
        no_lane, no_slot, no_local = self.no_lane_left, self.no_slot_left, self.no_local_left
        for handoff in self._admission.waiting():
            unserved = no_local if handoff.local else no_slot
            if no_lane and not handoff.has_storage:
                self._fail(handoff, Cause.NO_STORAGE, NO_LANE, now_ns)
            elif not handoff.needs_source:
                continue
            elif handoff.lease is None and unserved:
                self._fail(handoff, Cause.NO_SOURCE, no_slot_reason, now_ns)
            elif handoff.lease is None and handoff.has_storage and self._is_jammed():
                self._fail(handoff, Cause.NO_SOURCE, no_slot_reason, now_ns)
                return True  # its storage may help the others
            else:
                continue
            stranded = True
        return stranded

    def _is_jammed(self) -> bool:
        """Whether a retry waits for slots that parked hand-offs keep until they get its storage."""
        holders = [h for h in self._handoffs() if h.has_storage]
        if self._expected or any(h.lease or h.local or not h.needs_source for h in holders):
            return False
        return not any(map(self._will_grant, self._sources))

    def _will_grant(self, source_id: SourceId) -> bool:
        """Whether a slot of it comes free although no parked hand-off gets storage."""
        source = self._sources[source_id]
        parked = [h.attempt for h in self._handoffs() if h.state is HandoffState.PARKED]
        return (
            source.in_service
            and not source.local
            and any(
                slot.state is not SlotState.QUARANTINED and slot.holder not in parked
                for slot in source.slots
            )
        )

    def _admit_storage(self) -> bool:
        handoff = self._admission.next_for_storage()
        if handoff is None:
            return False
        self._admission.lanes_free -= 1
        handoff.reserve()
        self._commands.append(Reserve(handoff.attempt, handoff.num_tokens))
        if handoff.lease is not None or not handoff.needs_source:
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
                partial(self._fits, source_id), num_slots=len(source.slots), num_parked=num_parked
            )
            if handoff is not None:
                self._lease(handoff, source_id, source, now_ns)
                return True
        return False

    def _fits(self, source_id: SourceId, handoff: Handoff) -> bool:
        """Whether a hand-off may go to this source, which is in service."""
        if not handoff.needs_source:
            return False
        local = self._sources[source_id].local
        if local or handoff.local:
            return local and handoff.local
        if handoff.avoid != source_id:
            return True
        return not any(self._will_grant(other) for other in self._sources if other != source_id)

    def _lease(self, handoff: Handoff, source_id: SourceId, source: Source, now_ns: int) -> None:
        plan = source.plan_for(handoff.num_tokens, handoff.start)  # first: it may refuse
        lease = source.slots.lease(handoff.attempt)
        handoff.take_lease(source_id, lease, plan, now_ns)
        source.running = handoff.attempt
        self._commands.append(
            StartPrefill(handoff.attempt, source_id, lease.slot, lease.generation)
        )
        if handoff.has_storage:
            self._admission.leave(handoff)

    def _expect_one_less(self) -> None:
        if not self._expected:
            raise LocalProtocolError("no source was expected")
        self._expected -= 1
