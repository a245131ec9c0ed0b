"""Who gets what: storage first, then a slot; and nobody waits for what cannot be had again.

Every step of `Shell` takes the owner's commands and checks its integrity.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.errors import LocalProtocolError, Refused
from headrace.ids import AttemptId, ImportId, RequestId, Span
from headrace.protocol.admission import FailurePolicy
from headrace.protocol.commands import Cause, Free, Publish, Reserve, Retry, StartPrefill
from headrace.protocol.endings import NO_LANE, NO_REASON, NO_SLOT
from headrace.protocol.handoff import HandoffState
from tests.unit.protocol.builders import EPOCH, Shell
from tests.unit.protocol.scenes import (
    LOCAL,
    TWICE,
    cause_of,
    in_published,
    lanes,
    reports,
    slots,
    sources_of,
    state,
)

S = HandoffState


# Lanes, slots, parking.


def test_waiting_requests_are_served_in_order() -> None:
    shell = Shell(slots=(1,))
    requests = [shell.submit() for _ in range(4)]
    for request in requests:
        shell.serve(request)
        shell.retire(request)
    assert [g.attempt.request for g in shell.all(StartPrefill)] == requests
    assert [r.attempt.request for r in shell.all(Reserve)] == requests


def test_one_slot_is_used_again_at_the_next_generation() -> None:
    shell = Shell(slots=(1,))
    for generation in range(3):
        request = shell.submit()
        assert shell.grant_of(request).generation == generation
        shell.serve(request)
        shell.retire(request)


def test_a_source_runs_one_attempt_at_a_time() -> None:
    shell = Shell(lanes=2, slots=(2,))
    first, second = shell.submit(), shell.submit()
    assert state(shell, second) is S.RESERVED
    shell.progress(first)
    shell.final(first)
    assert state(shell, second) is S.RESERVED
    shell.released(first)
    assert state(shell, second) is S.STREAMING
    assert shell.grant_of(second).slot == 1


def test_two_sources_run_side_by_side_in_their_own_slots() -> None:
    shell = Shell(lanes=2, slots=(1, 1))
    first, second = shell.submit(), shell.submit()
    assert [shell.grant_of(r).source for r in (first, second)] == [0, 1]
    for request in (second, first):
        shell.serve(request)
    assert [cause_of(shell, r) for r in (first, second)] == [None] * 2


def test_a_request_is_parked_while_the_lane_decodes_and_imports_only_after_it() -> None:
    shell = Shell()
    first, second = shell.submit(), shell.submit()
    shell.serve(first)
    assert state(shell, second) is S.PARKED
    shell.prefill(second)
    assert not shell.owner.has_pieces
    assert slots(shell) == {"free": 1, "ready": 1}
    shell.retire(first)
    assert state(shell, second) is S.SEALED
    shell.land()
    shell.publish(second)
    assert cause_of(shell, second) is None


def test_a_hand_off_parked_in_mid_prefill_streams_on_once_the_lane_is_free() -> None:
    shell = Shell()
    first, second = shell.submit(), shell.submit()
    shell.serve(first)
    shell.progress(second, Span(0, 2, 0, 4))
    shell.retire(first)
    assert state(shell, second) is S.STREAMING
    assert [c.piece for c in shell.begin()] == [Span(0, 2, 0, 4)]


def test_nobody_is_parked_while_a_hand_off_with_storage_lacks_a_slot() -> None:
    shell = Shell(lanes=2, slots=(3,), depth=9)
    first, second, third = (shell.submit() for _ in range(3))
    assert [state(shell, r) for r in (first, second, third)] == [
        S.STREAMING,
        S.RESERVED,
        S.WAITING,
    ]
    shell.progress(first)
    shell.final(first)
    shell.released(first)
    assert [state(shell, r) for r in (second, third)] == [S.STREAMING, S.WAITING]
    shell.prefill(second)
    assert state(shell, third) is S.PARKED


@pytest.mark.parametrize(
    ("num_slots", "depth", "parked"), [(1, 4, 0), (2, 4, 1), (3, 4, 2), (4, 2, 2), (4, 0, 0)]
)
def test_at_most_min_of_depth_and_slots_less_one_are_parked(
    num_slots: int, depth: int, parked: int
) -> None:
    shell = Shell(slots=(num_slots,), depth=depth)
    active = shell.submit()
    shell.serve(active)
    waiting = [shell.submit() for _ in range(5)]
    for request in waiting:
        if state(shell, request) is S.PARKED:
            shell.prefill(request)
    assert [state(shell, r) for r in waiting] == [S.PARKED] * parked + [S.WAITING] * (5 - parked)


def test_a_freed_lane_goes_to_the_oldest_parked_before_any_waiting() -> None:
    shell = Shell(slots=(3,), depth=2)
    active = shell.submit()
    shell.serve(active)
    parked = [shell.submit(), shell.submit()]
    late = shell.submit()
    for request in parked:
        shell.prefill(request)
    shell.retire(active)  # the slots left let one more be parked
    assert [state(shell, r) for r in (*parked, late)] == [S.SEALED, S.PARKED, S.PARKED]
    shell.land()
    shell.publish(parked[0])
    shell.retire(parked[0])
    assert [state(shell, r) for r in (parked[1], late)] == [S.SEALED, S.PARKED]


def test_a_source_whose_only_slot_bars_parking_does_not_bar_it_at_another() -> None:
    shell = Shell(slots=(1, 2))
    active = shell.submit()
    shell.serve(active)
    second = shell.submit()
    assert state(shell, second) is S.PARKED
    assert shell.grant_of(second).source == 1


def test_a_cancelled_parked_hand_off_frees_its_slot_and_the_next_takes_its_place() -> None:
    shell = Shell()
    active, second, third = (shell.submit() for _ in range(3))
    shell.serve(active)
    shell.prefill(second)
    assert shell.cancel(second)
    assert not [f for f in shell.all(Free) if f.attempt.request == second]
    assert state(shell, third) is S.PARKED
    assert cause_of(shell, active) is None


# Sources come and go.


def test_the_slots_of_a_dead_source_are_not_leased_again() -> None:
    shell = Shell(slots=(2, 1))
    shell.died(0)
    request = shell.submit()
    assert shell.grant_of(request).source == 1
    shell.serve(request)
    shell.retire(request)


def test_the_death_of_one_source_spares_who_runs_at_another_and_who_waits() -> None:
    shell = Shell(lanes=3, slots=(1, 1))
    first, second, third = (shell.submit() for _ in range(3))
    shell.died(0)
    assert cause_of(shell, first) is Cause.SOURCE_DIED
    assert [state(shell, r) for r in (second, third)] == [S.STREAMING, S.RESERVED]
    shell.serve(second)
    assert shell.grant_of(third).source == 1


def test_the_death_of_the_last_source_fails_all_who_lack_a_slot() -> None:
    shell = Shell(lanes=2, slots=(2,))
    requests = [shell.submit() for _ in range(4)]
    shell.died()
    causes = [Cause.SOURCE_DIED] + [Cause.NO_SOURCE] * 3
    assert [reports(shell, r) for r in requests] == [[(cause, "killed")] for cause in causes]
    assert (slots(shell), lanes(shell)) == ({"free": 2}, {"free": 2})


def test_a_new_source_serves_after_a_death() -> None:
    shell = Shell(slots=(1,))
    shell.submit()
    shell.died()
    shell.add_source(1, 1)
    request = shell.submit()
    shell.serve(request)
    assert cause_of(shell, request) is None


def test_a_source_that_is_to_be_killed_is_granted_nothing_any_more() -> None:
    shell = Shell(lanes=2, slots=(2, 1))
    first = shell.submit()
    shell.cancel(first)
    shell.tick(50)
    shell.released(first)  # too late: it was read before the death, and the kill was sent
    assert slots(shell) == {"free": 3}
    second, third = shell.submit(), shell.submit()
    assert shell.grant_of(second).source == 1
    assert state(shell, third) is S.RESERVED
    shell.died(0)
    assert reports(shell, third) == []


def test_a_source_that_is_to_be_killed_is_none_to_wait_for() -> None:
    shell = Shell(slots=(1,), lanes=2)
    first, waiting = shell.submit(), shell.submit()
    shell.cancel(first)
    shell.tick(50)
    assert reports(shell, waiting) == [(Cause.NO_SOURCE, NO_SLOT)]
    with pytest.raises(Refused):
        shell.submit()
    assert lanes(shell) == {"free": 2}


# Nobody waits for what cannot be had again.


def test_nobody_waits_for_a_lane_when_all_are_quarantined() -> None:
    shell = Shell()
    first = shell.submit()
    shell.prefill(first)
    shell.begin()
    parked, waiting = shell.submit(), shell.submit()
    assert state(shell, parked) is S.PARKED
    shell.import_failed(ImportId(0))
    for stranded in (parked, waiting):
        assert reports(shell, stranded) == [(Cause.NO_STORAGE, NO_LANE)]
    with pytest.raises(Refused, match="no decoder storage") as refusal:
        shell.submit()
    assert refusal.value.field == "decoder"
    shell.released(parked)
    assert slots(shell)["free"] == 1


def test_as_long_as_a_lane_is_left_it_is_waited_for() -> None:
    shell = Shell(lanes=2, slots=(1, 1))
    first, second, third = shell.submit(), shell.submit(), shell.submit()
    shell.device_failed(first)
    assert [reports(shell, r) for r in (second, third)] == [[], []]
    shell.serve(second)
    shell.retire(second)
    shell.released(first)
    shell.serve(third)


def test_nobody_waits_for_a_slot_when_all_are_quarantined() -> None:
    shell = Shell(lanes=2, slots=(1,))
    first, waiting = shell.submit(), shell.submit()
    shell.progress(first)
    shell.begin()
    shell.import_failed(ImportId(0))  # its read token never comes back
    shell.released(first)
    assert reports(shell, waiting) == []
    shell.tick(50)
    assert reports(shell, waiting) == [(Cause.NO_SOURCE, NO_SLOT)]
    with pytest.raises(Refused, match="no prefill source is left in service"):
        shell.submit()
    assert lanes(shell) == {"free": 1, "quarantined": 1}
    shell.add_source(1, 1)
    shell.serve(shell.submit())


@pytest.mark.parametrize("promised", [False, True])
def test_a_lost_lane_is_taken_out_of_service_also_when_it_is_promised(promised: bool) -> None:
    shell = Shell(lanes=2, slots=(3,))
    first, second = shell.submit(), shell.submit()
    shell.serve(first)
    shell.serve(second)
    if promised:
        third = shell.submit()
    shell.retire(first)
    shell.lane_lost(first)
    assert shell.owner.statistics()["lanes"]["quarantined"] == 1
    if promised:
        waiting = shell.submit()
        assert lanes(shell) == {"free": -1, "held": 2, "quarantined": 1}
        shell.retire(second)
        assert lanes(shell) == {"held": 1, "quarantined": 1}
        assert reports(shell, waiting) == []
        shell.reserve_refused(third)
        assert len([r for r in shell.all(Reserve) if r.attempt.request == waiting]) == 1
        shell.released(third)
        shell.serve(waiting)
    else:
        assert lanes(shell) == {"held": 1, "quarantined": 1}
        shell.retire(second)
        assert lanes(shell) == {"free": 1, "quarantined": 1}


@pytest.mark.parametrize("reason", ["", "still written"])
def test_the_last_lane_lost_fails_who_waits_and_not_who_holds(reason: str) -> None:
    shell = Shell()
    first = shell.submit()
    shell.serve(first)
    second, third = shell.submit(), shell.submit()
    shell.retire(first)
    shell.lane_lost(first)
    assert (reports(shell, second), cause_of(shell, third)) == ([], Cause.NO_STORAGE)
    shell.serve(second)
    shell.retire(second, reason)
    if not reason:
        shell.lane_lost(second)  # no more can be lost than there are
    assert lanes(shell) == {"quarantined": 1}
    assert [apart.lane for apart in shell.owner.apart.values()] == [True, False]


def test_the_last_lane_lost_does_not_fail_who_holds_storage_and_lacks_a_slot() -> None:
    shell, first = in_published()  # its source has not returned
    second, third = shell.submit(), shell.submit()
    shell.retire(first)
    shell.lane_lost(first)
    assert [state(shell, r) for r in (second, third)] == [S.RESERVED, S.ENDED]
    shell.released(first)
    shell.serve(second)
    assert cause_of(shell, second) is None


def test_a_lane_is_lost_with_the_reason_that_was_given_or_one_that_says_so() -> None:
    for reason, told in [("bus error", "bus error"), ("", NO_REASON)]:
        shell = Shell()
        request = shell.submit()
        shell.serve(request)
        shell.retire(request)
        shell.tick(9)
        shell.lane_lost(request, reason)
        (apart,) = shell.owner.apart.values()
        assert (apart.reason, apart.since_ns, apart.lane, apart.lost_reads) == (told, 9, True, ())


# What was set apart, and an operator answers for.


def with_a_lost_read() -> tuple[Shell, RequestId]:
    """An import failed: one of two lanes and slot 0 are out of service, or will be."""
    shell = Shell(lanes=2)
    request = shell.submit()
    shell.progress(request)
    shell.begin()
    shell.import_failed(ImportId(0))
    return shell, request


def test_what_is_reinstated_is_free_when_it_drains() -> None:
    shell, request = with_a_lost_read()
    shell.released(request)
    assert (lanes(shell), slots(shell)) == (
        {"free": 1, "quarantined": 1},
        {"free": 1, "draining": 1},
    )
    shell.reinstate(request)
    assert (lanes(shell), slots(shell)) == ({"free": 2}, {"free": 2})
    assert not shell.owner.apart


def test_what_is_reinstated_is_free_when_it_is_quarantined() -> None:
    shell, request = with_a_lost_read()
    shell.released(request)
    shell.tick(50)
    assert slots(shell) == {"free": 1, "quarantined": 1}
    shell.reinstate(request)
    assert (lanes(shell), slots(shell)) == ({"free": 2}, {"free": 2})


@pytest.mark.parametrize("quarantined", [False, True])
def test_reinstating_does_not_stand_in_for_the_write_token(quarantined: bool) -> None:
    shell, request = with_a_lost_read()
    shell.tick(50 * quarantined)
    shell.reinstate(request)
    held = "quarantined" if quarantined else "draining"
    assert (lanes(shell), slots(shell)) == ({"free": 2}, {"free": 1, held: 1})
    shell.released(request)
    assert slots(shell) == {"free": 2}


def test_every_lost_read_comes_back_and_no_other() -> None:
    shell = Shell(lanes=2, slots=(1, 1))
    first, second = shell.submit(), shell.submit()
    for request in (first, second):
        shell.progress(request, Span(0, 1, 0, 4), Span(1, 3, 0, 4))
        shell.begin()
        shell.released(request)
    for import_id in range(4):
        shell.import_failed(ImportId(import_id))
    shell.reinstate(second)
    assert [line.tokens for line in shell.owner.snapshot().slots] == [("read 0", "read 1"), ()]
    assert list(shell.owner.apart) == [AttemptId(*first, 1)]


def test_a_slot_of_a_dead_source_is_reinstated_and_then_the_source_is_forgotten() -> None:
    shell, request = with_a_lost_read()
    shell.died()
    assert not shell.forget()
    shell.reinstate(request)
    assert shell.forget()


def test_what_is_reinstated_goes_to_who_waits() -> None:
    shell = Shell(lanes=2, slots=(1,))
    first, holder = shell.submit(), shell.submit()
    shell.progress(first)
    shell.begin()
    shell.import_failed(ImportId(0))
    shell.released(first)
    waiting = shell.submit()
    assert [state(shell, r) for r in (holder, waiting)] == [S.RESERVED, S.WAITING]
    shell.reinstate(first)
    assert [state(shell, r) for r in (holder, waiting)] == [S.STREAMING, S.RESERVED]


def test_after_the_last_lane_is_reinstated_requests_are_accepted_again() -> None:
    shell = Shell()
    request = shell.submit()
    shell.device_failed(request)
    shell.released(request)
    with pytest.raises(Refused, match=NO_LANE):
        shell.submit()
    shell.reinstate(request)
    shell.serve(shell.submit())


def test_nothing_is_reinstated_twice_or_where_nothing_is_apart() -> None:
    shell, request = with_a_lost_read()
    shell.reinstate(request)
    for nothing in (request, RequestId(EPOCH, 9)):
        before = shell.owner.snapshot()
        with pytest.raises(LocalProtocolError, match=f"nothing of attempt {nothing}/1 is quaran"):
            shell.reinstate(nothing)
        assert shell.owner.snapshot() == before


def test_the_attempt_that_failed_is_named_and_not_one_before_it() -> None:
    shell = Shell(slots=(1, 1))
    request = shell.submit(policy=TWICE)
    shell.died(0)
    shell.device_failed(request)
    with pytest.raises(LocalProtocolError, match="nothing of attempt"):
        shell.reinstate(request, attempt=1)
    shell.reinstate(request, attempt=2)
    assert lanes(shell) == {"free": 1}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_lane_that_was_lost_while_it_was_promised_comes_back_once(order: tuple[int, int]) -> None:
    shell = Shell()
    first = shell.submit()
    shell.serve(first)
    second = shell.submit()
    shell.retire(first)  # its lane is promised to the second,
    shell.lane_lost(first)  # and lost
    shell.device_failed(second)
    assert lanes(shell) == {"quarantined": 1}
    for which in order:
        shell.reinstate((first, second)[which])
    assert (lanes(shell), dict(shell.owner.apart)) == ({"free": 1}, {})


def test_a_promised_lane_that_is_reinstated_was_never_missing() -> None:
    shell = Shell()
    first = shell.submit()
    shell.serve(first)
    second = shell.submit()
    shell.retire(first)
    shell.lane_lost(first)
    assert lanes(shell) == {"free": -1, "held": 1, "quarantined": 1}
    shell.reinstate(first)
    assert lanes(shell) == {"held": 1}
    shell.serve(second)
    shell.retire(second)
    assert lanes(shell) == {"free": 1}


# A retry that waits for slots which wait for its storage.


def with_a_parked_hand_off() -> tuple[Shell, RequestId, RequestId]:
    """One is parked; another has the only lane left and is told by a source of its own.

    Two lanes, of which one is out of service. Source 0 has one slot, and source 1 has two, of
    which one is set apart: an import of it was given up. The other one is that of the parked.
    """
    shell = Shell(lanes=2, slots=(1, 2))
    request, broken = shell.submit(policy=TWICE), shell.submit()
    shell.progress(broken)
    shell.begin()
    shell.tick(50)
    shell.released(broken)
    parked = shell.submit()
    shell.prefill(parked)
    shell.computing(request)
    shell.tick(100)
    assert [state(shell, r) for r in (request, parked)] == [S.STREAMING, S.PARKED]
    assert slots(shell) == {"leased": 1, "quarantined": 1, "ready": 1}
    assert lanes(shell) == {"held": 1, "quarantined": 1}
    return shell, parked, request


def test_a_retry_fails_where_only_the_parked_hold_slots_and_they_get_its_storage() -> None:
    shell, parked, request = with_a_parked_hand_off()
    shell.died(0)
    assert len(shell.all(Retry)) == 1
    assert reports(shell, request) == [(Cause.NO_SOURCE, "killed")]
    assert shell.all(Free)[-1].attempt == AttemptId(*request, 2)
    assert shell.all(Reserve)[-1].attempt == AttemptId(*parked, 1)
    shell.land()
    shell.publish(parked)
    assert cause_of(shell, parked) is None


def test_a_retry_waits_as_long_as_a_slot_may_drain() -> None:
    shell = Shell(lanes=2, slots=(1, 2))
    request, broken = shell.submit(policy=TWICE), shell.submit()
    shell.progress(broken)
    shell.begin()
    shell.tick(50)
    shell.released(broken)
    parked = shell.submit()
    shell.prefill(parked)
    shell.died(0)
    assert (state(shell, request), slots(shell)["draining"]) == (S.RESERVED, 1)
    shell.tick(99)
    assert reports(shell, request) == []
    shell.tick(100)
    assert reports(shell, request) == [(Cause.NO_SOURCE, NO_SLOT)]
    shell.land()
    shell.publish(parked)


def test_a_retry_waits_while_what_the_parked_wait_for_may_come_free_by_itself() -> None:
    shell = Shell(lanes=3, slots=(1, 2))
    request, broken = shell.submit(policy=TWICE), shell.submit()
    decoding = shell.submit()
    shell.progress(broken)
    shell.begin()
    shell.tick(50)
    shell.released(broken)
    shell.serve(decoding)
    parked = shell.submit()
    shell.prefill(parked)
    shell.computing(request)
    shell.tick(100)
    shell.died(0)
    assert [state(shell, r) for r in (request, parked)] == [S.RESERVED, S.PARKED]
    shell.retire(decoding)
    shell.land()
    shell.publish(parked)
    assert sources_of(shell, request) == [0, 1]


def test_a_retry_waits_where_a_source_is_expected() -> None:
    shell, parked, request = with_a_parked_hand_off()
    shell.owner.expect_source()
    shell.died(0)
    assert [state(shell, r) for r in (request, parked)] == [S.RESERVED, S.PARKED]
    shell.add_source(2, 1, expected=True)
    assert sources_of(shell, request) == [0, 2]
    shell.serve(request)
    shell.retire(request)
    shell.land()
    shell.publish(parked)
    assert [cause_of(shell, r) for r in (request, parked)] == [None, None]


def test_a_retry_that_waited_for_a_source_fails_when_it_does_not_come() -> None:
    shell, parked, request = with_a_parked_hand_off()
    shell.owner.expect_source()
    shell.died(0)
    shell.not_coming("it died three times")
    assert reports(shell, request) == [(Cause.NO_SOURCE, "it died three times")]
    shell.land()
    shell.publish(parked)


def test_a_retry_that_would_wait_for_the_parked_goes_on_locally() -> None:
    shell = Shell(lanes=2, slots=(1, 2))
    shell.add_source(LOCAL, 1, local=True)
    policy = FailurePolicy(2, local=True)
    request, broken = shell.submit(policy=policy), shell.submit()
    shell.progress(broken)
    shell.begin()
    shell.tick(50)
    shell.released(broken)
    parked = shell.submit()
    shell.prefill(parked)
    shell.computing(request)
    shell.tick(100)
    shell.died(0)
    assert [retry.attempt.attempt for retry in shell.all(Retry)] == [1, 2]
    assert sources_of(shell, request) == [0, LOCAL]
    shell.serve(request)
    shell.retire(request)
    shell.land()
    shell.publish(parked)
    assert [cause_of(shell, r) for r in (request, parked)] == [None, None]


def test_of_two_retries_only_one_fails_for_the_parked() -> None:
    """With the storage of the first, the parked one goes on, and its slot is the second's."""
    shell = Shell(lanes=3, slots=(1, 2, 1))
    first, broken, second = (shell.submit(policy=TWICE) for _ in range(3))
    shell.progress(broken)
    shell.begin()
    shell.tick(50)
    shell.released(broken)
    parked = shell.submit()
    shell.prefill(parked)
    shell.computing(first)
    shell.computing(second)
    shell.tick(100)
    assert [state(shell, r) for r in (first, second, parked)] == [
        S.STREAMING,
        S.STREAMING,
        S.PARKED,
    ]
    shell.died(0)
    assert reports(shell, first) == []
    shell.died(2)
    assert [len(reports(shell, r)) for r in (first, second)] == [1, 0]
    shell.land()
    shell.publish(parked)
    assert sources_of(shell, second) == [2, 1]


def test_the_next_attempt_does_not_wait_for_slots_that_only_parked_hand_offs_hold() -> None:
    shell, parked, request = with_a_parked_hand_off()
    shell.failed(request)
    shell.released(request)
    assert sources_of(shell, request) == [0, 0]
    assert state(shell, parked) is S.PARKED


# Sources that are expected.


def test_nobody_is_stranded_while_a_source_is_expected() -> None:
    shell = Shell(lanes=2, slots=(2,))
    requests = [shell.submit(policy=TWICE) for _ in range(3)]
    shell.owner.expect_source()
    shell.died()
    assert [reports(shell, r) for r in requests] == [[], [], []]
    assert [state(shell, r) for r in requests] == [S.RESERVED, S.RESERVED, S.WAITING]
    assert shell.owner.statistics()["sources"] == {"in_service": 0, "gone": 1, "expected": 1}
    shell.add_source(1, 2, expected=True)
    for request in requests:
        shell.serve(request)
        shell.retire(request)
    assert [cause_of(shell, r) for r in requests] == [None] * 3
    assert shell.owner.statistics()["sources"] == {"in_service": 1, "gone": 1, "expected": 0}


def test_a_request_is_accepted_while_a_source_is_expected() -> None:
    shell = Shell(slots=())
    shell.owner.expect_source()
    request = shell.submit()
    assert state(shell, request) is S.RESERVED
    shell.add_source(0, 1, expected=True)
    shell.serve(request)
    assert cause_of(shell, request) is None


def test_who_waited_fails_with_the_reason_when_a_source_does_not_come() -> None:
    shell = Shell(slots=())
    shell.owner.expect_source()
    requests = [shell.submit(), shell.submit()]
    shell.not_coming("it died three times")
    for request in requests:
        assert reports(shell, request) == [(Cause.NO_SOURCE, "it died three times")]
    with pytest.raises(Refused, match=NO_SLOT):
        shell.submit()
    assert lanes(shell) == {"free": 1}


def test_every_source_that_is_expected_is_waited_for() -> None:
    shell = Shell(slots=())
    shell.owner.expect_source()
    shell.owner.expect_source()
    request = shell.submit()
    shell.not_coming()
    assert reports(shell, request) == []
    shell.not_coming()
    assert cause_of(shell, request) is Cause.NO_SOURCE


@pytest.mark.parametrize("in_service", ["another", "its own slot"])
def test_who_can_be_served_waits_on_when_a_source_does_not_come(in_service: str) -> None:
    shell = Shell(lanes=2, slots=(1,))
    first, second = shell.submit(), shell.submit()
    shell.owner.expect_source()
    if in_service == "its own slot":
        shell.prefill(first)
    shell.not_coming()
    assert [reports(shell, r) for r in (first, second)] == [[], []]


def test_a_source_that_was_not_expected_leaves_those_that_are() -> None:
    shell = Shell(slots=())
    shell.owner.expect_source()
    shell.add_source(0, 1)
    shell.died()
    request = shell.submit()
    shell.not_coming()
    assert cause_of(shell, request) is Cause.NO_SOURCE


def test_a_source_that_nobody_expected_neither_comes_nor_stays_away() -> None:
    shell = Shell(slots=())
    calls: list[Callable[[], None]] = [
        lambda: shell.add_source(0, 1, expected=True),
        lambda: shell.not_coming(),
    ]
    for call in calls:
        with pytest.raises(LocalProtocolError, match="no source was expected"):
            call()
    shell.add_source(0, 1)
    shell.owner.expect_source()
    with pytest.raises(LocalProtocolError, match="source 0 is attached already"):
        shell.add_source(0, 1, expected=True)
    assert shell.owner.statistics()["sources"]["expected"] == 1


def test_a_lane_is_lost_once() -> None:
    shell = Shell(lanes=2)
    request = shell.submit()
    shell.serve(request)
    shell.retire(request)
    shell.lane_lost(request)
    with pytest.raises(LocalProtocolError, match="is lost already"):
        shell.lane_lost(request)
    assert shell.owner.statistics()["lanes"] == {"free": 1, "quarantined": 1, "held": 0}


# Prompts that the decoder kept.


def test_a_prompt_that_is_all_kept_needs_a_lane_and_no_source() -> None:
    shell = Shell(slots=())
    request = shell.submit(start=4)
    attempt = AttemptId(*request, 1)
    assert shell.given == [Reserve(attempt, 4), Publish(attempt, None, None, None)]
    assert state(shell, request) is S.SEALED
    shell.owner.published(attempt, 0)
    shell.take()
    shell.retire(request)
    assert state(shell, request) is S.ENDED
    assert lanes(shell) == {"free": 1}


def test_one_that_is_all_kept_takes_no_slot_and_is_not_overtaken() -> None:
    """Whoever were parked meanwhile would have the lane before it, and those after him too."""
    shell = Shell(lanes=1, slots=(2,), depth=1)
    first, kept, last = shell.submit(), shell.submit(start=4), shell.submit()
    assert [state(shell, each) for each in (first, kept)] == [S.STREAMING, S.WAITING]
    shell.serve(first)
    assert state(shell, last) is S.WAITING
    shell.retire(first)
    assert [state(shell, each) for each in (kept, last)] == [S.SEALED, S.PARKED]


def test_it_waits_on_when_no_source_is_left_and_those_that_need_one_fail() -> None:
    shell = Shell(slots=(1,))
    first, kept, cold = shell.submit(), shell.submit(start=4), shell.submit()
    shell.serve(first)
    shell.died()
    assert cause_of(shell, cold) is Cause.NO_SOURCE
    assert state(shell, kept) is S.WAITING
    shell.retire(first)
    assert state(shell, kept) is S.SEALED


def test_a_retry_waits_while_one_that_is_all_kept_holds_a_lane_that_comes_free() -> None:
    shell = Shell(lanes=3, slots=(1, 2))
    request, broken = shell.submit(policy=TWICE), shell.submit()
    kept = shell.submit(start=4)
    shell.progress(broken)
    shell.begin()
    shell.tick(50)
    shell.released(broken)
    parked = shell.submit()
    shell.prefill(parked)
    shell.computing(request)
    shell.tick(100)
    shell.died(0)
    assert [state(shell, r) for r in (request, kept, parked)] == [S.RESERVED, S.SEALED, S.PARKED]
    shell.publish(kept)
    shell.retire(kept)
    shell.land()
    shell.publish(parked)
    assert sources_of(shell, request) == [0, 1]


def test_the_source_computes_from_where_the_kept_part_ends() -> None:
    shell = Shell()
    request = shell.submit(start=3)
    shell.progress(request, Span(0, 3, 3, 4))
    shell.final(request)
    shell.land()
    assert [p.attempt.request for p in shell.all(Publish)] == [request]


def test_a_retry_goes_on_from_the_same_position() -> None:
    shell = Shell()
    request = shell.submit(start=3, policy=TWICE)
    shell.failed(request)
    shell.released(request)
    shell.progress(request, Span(0, 3, 3, 4))
    shell.final(request)
    assert state(shell, request) is S.SEALED
    assert reports(shell, request) == []
