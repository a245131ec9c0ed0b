"""Admission: storage first, then slot; parking only when nobody with storage lacks a slot; and
whom a source fits is asked of those whose turn it is.
"""

from __future__ import annotations

import pytest

from headrace.ids import SlotIndex, SourceId
from headrace.protocol.admission import Admission, FailurePolicy
from headrace.protocol.handoff import Handoff
from headrace.protocol.slots import Slot
from tests.unit.protocol.builders import FULL, attempt_id, make_plan


def waiting(counter: int) -> Handoff:
    return Handoff(attempt_id(counter), 4)


def parked(counter: int) -> Handoff:
    handoff = waiting(counter)
    lease = Slot(SlotIndex(0)).lease(handoff.attempt)
    handoff.take_lease(SourceId(0), lease, make_plan(4, *FULL), 0)
    return handoff


def reserved(counter: int) -> Handoff:
    handoff = waiting(counter)
    handoff.reserve()
    return handoff


def queue(*handoffs: Handoff, lanes: int = 1, depth: int = 1) -> Admission:
    admission = Admission(lanes, depth)
    for handoff in handoffs:
        admission.join(handoff)
    return admission


def anyone(handoff: Handoff) -> bool:
    return True


def no_one(handoff: Handoff) -> bool:
    return False


def test_by_default_nothing_follows_on_a_failure() -> None:
    assert FailurePolicy() == FailurePolicy(num_attempts=1, local=False)


def test_a_lane_goes_to_the_oldest_parked_before_any_waiting() -> None:
    first, second, third = waiting(0), parked(1), parked(2)
    assert queue(first, second, third).next_for_storage() is second


def test_a_lane_goes_to_the_oldest_waiting_when_none_is_parked() -> None:
    first, second = waiting(0), waiting(1)
    assert queue(reserved(9), first, second).next_for_storage() is first


def test_without_a_lane_nobody_gets_storage() -> None:
    for lanes in (0, -1):  # below zero: one that is promised was lost
        assert queue(waiting(0), parked(1), lanes=lanes).next_for_storage() is None
    assert queue().next_for_storage() is None


def test_a_slot_goes_to_whoever_holds_storage_before_anyone_is_parked() -> None:
    first, second = waiting(0), reserved(1)
    admission = queue(first, second, depth=9)
    assert admission.next_for_slot(anyone, num_slots=9, num_parked=0) is second


def test_a_slot_goes_to_the_oldest_whom_it_fits() -> None:
    first, second, third = reserved(0), reserved(1), reserved(2)
    admission = queue(third, first, second)
    assert admission.next_for_slot(anyone, num_slots=1, num_parked=0) is first
    fits = {id(second), id(third)}
    assert admission.next_for_slot(lambda h: id(h) in fits, num_slots=1, num_parked=0) is second


def test_nobody_is_parked_while_an_older_one_waits_whom_no_slot_fits() -> None:
    first, second = waiting(0), waiting(1)
    admission = queue(first, second)
    assert admission.next_for_slot(lambda h: h is second, num_slots=2, num_parked=0) is None
    assert admission.next_for_slot(lambda h: h is first, num_slots=2, num_parked=0) is first
    assert admission.next_for_slot(no_one, num_slots=2, num_parked=0) is None


def test_nobody_is_parked_while_one_with_storage_waits_for_another_slot() -> None:
    first, second = reserved(0), waiting(1)
    admission = queue(first, second)
    assert admission.next_for_slot(lambda h: h is second, num_slots=9, num_parked=0) is None


@pytest.mark.parametrize(
    ("depth", "num_slots", "num_parked", "parks"),
    [
        (1, 2, 0, True),
        (1, 2, 1, False),  # the depth
        (4, 2, 1, False),  # a slot is kept for whoever gets storage
        (4, 3, 1, True),
        (1, 1, 0, False),  # one slot: prefetch is off
        (0, 2, 0, False),  # depth 0: prefetch is off
        (2, 4, 1, True),
        (2, 4, 2, False),
    ],
)
def test_at_most_min_of_depth_and_slots_less_one_are_parked(
    depth: int, num_slots: int, num_parked: int, parks: bool
) -> None:
    oldest = waiting(0)
    admission = queue(oldest, waiting(1), lanes=0, depth=depth)
    chosen = admission.next_for_slot(anyone, num_slots=num_slots, num_parked=num_parked)
    assert chosen is (oldest if parks else None)


def test_nobody_is_parked_when_nobody_waits() -> None:
    assert queue(parked(0)).next_for_slot(anyone, num_slots=3, num_parked=1) is None


def test_who_joins_again_waits_behind_older_requests_and_before_younger_ones() -> None:
    oldest, youngest = waiting(0), waiting(2)
    admission = queue(oldest, youngest)
    retry = Handoff(attempt_id(1, attempt=3), 4)
    admission.join(retry)
    assert list(admission.waiting()) == [oldest, retry, youngest]


def test_leaving_is_done_once_and_may_be_repeated() -> None:
    first, second = waiting(0), waiting(1)
    admission = queue(first, second)
    admission.leave(first)
    admission.leave(first)
    assert list(admission.waiting()) == [second]
    assert len(admission) == 1


def test_who_waits_may_leave_while_one_looks() -> None:
    admission = queue(waiting(0), waiting(1))
    for handoff in admission.waiting():
        admission.leave(handoff)
    assert len(admission) == 0
