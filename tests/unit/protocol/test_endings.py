"""How an attempt ends: decided once, or given up for another; and what it leaves behind.

Every step of `Shell` takes the owner's commands and checks its integrity.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest

from headrace.errors import LocalProtocolError
from headrace.ids import AttemptId, Generation, ImportId, RequestId, SlotIndex, SourceId
from headrace.protocol.admission import FailurePolicy
from headrace.protocol.commands import (
    OF_THE_SOURCE,
    Cause,
    Free,
    Publish,
    Quarantine,
    Report,
    Reserve,
    Retry,
    SendCancel,
    StartPrefill,
)
from headrace.protocol.endings import NO_LANE, NO_REASON, NO_SLOT
from headrace.protocol.handoff import HandoffState
from tests.unit.protocol.builders import EPOCH, ROW_NBYTES, Shell
from tests.unit.protocol.scenes import (
    FAULTS,
    HOLDS_SLOT,
    LOCAL,
    LOCALLY,
    MADE,
    TWICE,
    UNDECIDED,
    cause_of,
    finish,
    in_parked,
    in_published,
    in_sealed_with_import,
    in_streaming_with_import,
    lanes,
    reports,
    slots,
    stamped,
    state,
)

S = HandoffState


# Decided at once.


@pytest.mark.parametrize("made", UNDECIDED)
def test_a_cancel_is_reported_at_once_and_all_comes_back(made: str) -> None:
    shell, request = MADE[made]()
    others = {r.request for r in shell.all(Report)}
    assert shell.cancel(request)
    assert reports(shell, request) == [(Cause.CANCELLED, "cancelled by the caller")]
    assert not shell.cancel(request)
    holds_slot = made in HOLDS_SLOT
    told = [c for c in shell.all(SendCancel) if c.attempt.request == request]
    assert len(told) == holds_slot
    finish(shell, request)
    assert state(shell, request) is S.ENDED
    assert len(reports(shell, request)) == 1
    held = [r for r in shell.all(Reserve) if r.attempt.request == request]
    freed = [f for f in shell.all(Free) if f.attempt.request == request]
    assert len(held) == len(freed)
    assert {r.request for r in shell.all(Report)} == others | {request}
    assert not {"quarantined", "draining"} & set(slots(shell))


@pytest.mark.parametrize("made", ["streaming, importing", "sealed, importing"])
@pytest.mark.parametrize("order", ["import first", "source first"])
def test_storage_and_slot_drain_by_themselves_and_never_before_their_tokens(
    made: str, order: str
) -> None:
    shell, request = MADE[made]()
    shell.cancel(request)
    assert not shell.all(Free)
    assert slots(shell)["draining"] == 1
    if order == "import first":
        shell.done(ImportId(0))
        assert len(shell.all(Free)) == 1
        assert slots(shell)["draining"] == 1
        shell.released(request)
    else:
        shell.released(request)
        assert slots(shell)["draining"] == 1
        shell.done(ImportId(0))
        assert len(shell.all(Free)) == 1
    assert slots(shell) == {"free": 2}
    assert not shell.all(Publish)


def test_a_cancel_outruns_a_publish_that_was_not_carried_out() -> None:
    shell, request = in_sealed_with_import()
    shell.owner.import_done(ImportId(0), 0)  # this asks for the publish,
    shell.owner.cancel(request, 0)  # and this comes before the shell took it
    taken = shell.take()
    assert not [c for c in taken if isinstance(c, Publish)]
    assert [c for c in taken if isinstance(c, Free)]
    assert cause_of(shell, request) is Cause.CANCELLED
    with pytest.raises(LocalProtocolError, match="unknown or over"):
        shell.owner.published(AttemptId(*request, 1), 0)


def test_a_cancel_outruns_a_reserve_that_was_not_carried_out() -> None:
    shell = Shell(slots=(1,))
    first = shell.submit()
    shell.owner.submit(4, 0)
    second = RequestId(EPOCH, 1)
    shell.owner.cancel(first, 0)  # the lane is free, and reserved for the second
    shell.owner.cancel(second, 0)
    taken = shell.take()
    assert not [c for c in taken if isinstance(c, Reserve)]
    assert [c.attempt.request for c in taken if isinstance(c, Free)] == [first]
    assert lanes(shell) == {"free": 1}


# What is set apart.


def test_a_failed_import_is_quarantined_only_when_the_others_are_fenced() -> None:
    shell = Shell(chunk_nbytes=4 * ROW_NBYTES)
    request = shell.submit()
    shell.progress(request)
    assert len(shell.begin()) == 3
    shell.import_failed(ImportId(1))
    assert not shell.all(Quarantine)
    shell.done(ImportId(0))
    assert not shell.all(Quarantine)
    shell.done(ImportId(2))
    assert len(shell.all(Quarantine)) == 1
    assert cause_of(shell, request) is Cause.DEVICE


def test_a_failing_device_sets_draining_storage_apart_at_the_last_fence() -> None:
    shell, request = in_streaming_with_import()
    shell.cancel(request)
    shell.owner.device_failed(AttemptId(*request, 1), "no memory", 0)
    assert not shell.all(Quarantine)
    shell.done(ImportId(0))
    assert len(shell.all(Quarantine)) == 1
    assert cause_of(shell, request) is Cause.CANCELLED


def test_a_failure_without_a_reason_quarantines_too() -> None:
    shell, _ = in_streaming_with_import()
    shell.import_failed(ImportId(0), "")
    assert [q.reason for q in shell.all(Quarantine)] == [NO_REASON]
    shell = Shell()
    shell.device_failed(shell.submit(), "")
    assert [q.reason for q in shell.all(Quarantine)] == [NO_REASON]


@pytest.mark.parametrize("reason", ["", "still written"])
def test_a_retired_entry_is_freed_or_set_apart(reason: str) -> None:
    shell, request = in_published()
    shell.retire(request, reason)
    assert [q.reason for q in shell.all(Quarantine)] == [reason] * bool(reason)
    assert len(shell.all(Free)) == (not reason)
    assert lanes(shell) == {"quarantined" if reason else "free": 1}


@pytest.mark.parametrize("made", ["streaming, importing", "sealed, importing"])
def test_what_a_failed_import_leaves_behind_is_its_lane_and_its_read_token(made: str) -> None:
    shell, request = MADE[made]()
    shell.tick(7)
    shell.import_failed(ImportId(0), "device lost")
    (apart,) = shell.owner.apart.values()
    assert list(shell.owner.apart) == [AttemptId(*request, 1)]
    assert (apart.reason, apart.since_ns, apart.lane) == ("device lost", 7, True)
    ((slot, token),) = apart.lost_reads
    assert (slot.index, slot.readers, token) == (0, {0}, 0)


def test_what_a_failed_digest_check_leaves_behind_is_its_lane() -> None:
    shell, request, check = stamped()
    shell.import_failed(check.import_id, "device lost")
    assert shell.owner.apart[AttemptId(*request, 1)].lost_reads == ()


def test_a_lane_that_was_lost_while_it_was_promised_goes_out_of_service_once() -> None:
    shell = Shell()
    first = shell.submit()
    shell.serve(first)
    second = shell.submit()
    shell.retire(first)  # its lane is promised to the second,
    shell.lane_lost(first)  # and lost
    shell.device_failed(second)
    assert lanes(shell) == {"quarantined": 1}
    assert [apart.lane for apart in shell.owner.apart.values()] == [True, False]
    assert len(shell.all(Quarantine)) == 1


# Given up for another.


def test_the_next_attempt_goes_on_with_the_storage_and_reports_nothing() -> None:
    shell = Shell(slots=(1, 1))
    request = shell.submit(policy=TWICE)
    first = AttemptId(*request, 1)
    shell.progress(request)
    shell.land()
    shell.failed(request, "out of memory")
    assert shell.given[-3:] == [
        SendCancel(first, SourceId(0)),
        Retry(first, "out of memory"),
        StartPrefill(first.next, SourceId(1), SlotIndex(0), Generation(0)),
    ]
    assert state(shell, request) is S.STREAMING
    assert lanes(shell) == {"held": 1}
    shell.serve(request)
    assert reports(shell, request) == [(None, "")]
    shell.retire(request)
    assert shell.all(Reserve) == [Reserve(first, 4)]
    assert shell.all(Free) == [Free(first.next)]
    shell.released(request, at=0)
    assert (lanes(shell), slots(shell)) == ({"free": 1}, {"free": 2})


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_source_is_mended_by_another_attempt(fault: str) -> None:
    shell = Shell(slots=(1, 1))
    request = shell.submit(policy=TWICE)
    cause, fail = FAULTS[fault]
    assert cause in OF_THE_SOURCE
    fail(shell, request)
    assert reports(shell, request) == []
    assert [retry.attempt for retry in shell.all(Retry)] == [AttemptId(*request, 1)]
    shell.serve(request)
    assert reports(shell, request) == [(None, "")]
    assert shell.owner.statistics()["retries"] == {"count": 1}


@pytest.mark.parametrize("fault", FAULTS)
def test_without_an_attempt_left_a_fault_of_a_source_is_the_end(fault: str) -> None:
    shell = Shell(slots=(1, 1))
    request = shell.submit()
    cause, fail = FAULTS[fault]
    fail(shell, request)
    assert cause_of(shell, request) is cause
    assert not shell.all(Retry)
    assert lanes(shell) == {"free": 1}


@pytest.mark.parametrize("num_attempts", [1, 2, 3])
def test_attempts_are_counted_and_the_last_failure_is_reported(num_attempts: int) -> None:
    shell = Shell(slots=(1, 1))
    request = shell.submit(policy=FailurePolicy(num_attempts))
    for number in range(1, num_attempts + 1):
        assert reports(shell, request) == []
        assert shell.attempt_of(request) == AttemptId(*request, number)
        shell.failed(request, f"failure {number}")
        if number < num_attempts:
            shell.released(request, at=number - 1)
    tried = [retry.attempt.attempt for retry in shell.all(Retry)]
    assert tried == list(range(1, num_attempts))
    assert [retry.reason for retry in shell.all(Retry)] == [f"failure {n}" for n in tried]
    assert reports(shell, request) == [(Cause.SOURCE_FAILED, f"failure {num_attempts}")]
    statistics = shell.owner.statistics()
    assert statistics["retries"] == {"count": num_attempts - 1}
    assert statistics["ended"] == {"source-failed": 1}


def test_the_last_failure_is_reported_whatever_the_first_was() -> None:
    shell = Shell(slots=(1, 1))
    request = shell.submit(policy=TWICE)
    shell.died(0, "killed by a signal")
    shell.failed(request, "out of memory")
    assert reports(shell, request) == [(Cause.SOURCE_FAILED, "out of memory")]


MANY = FailurePolicy(9, local=True)


def by_import(shell: Shell, request: RequestId) -> None:
    shell.import_failed(ImportId(0), "it")


def by_request(shell: Shell, request: RequestId) -> None:
    shell.device_failed(request, "it")


def by_refusal(shell: Shell, request: RequestId) -> None:
    shell.reserve_refused(request, "it")


def by_caller(shell: Shell, request: RequestId) -> None:
    shell.cancel(request, reason="it")


def by_deadline(shell: Shell, request: RequestId) -> None:
    shell.tick(45)


UNMENDABLE: dict[str, tuple[str, Cause, Callable[[Shell, RequestId], None], str]] = {
    "an import": ("streaming, importing", Cause.DEVICE, by_import, "it"),
    "a reserve": ("streaming", Cause.DEVICE, by_request, "it"),
    "a refusal": ("streaming", Cause.NO_STORAGE, by_refusal, "it"),
    "a cancel": ("streaming, importing", Cause.CANCELLED, by_caller, "it"),
    "a deadline": ("streaming, importing", Cause.DEADLINE, by_deadline, "its deadline passed"),
}


@pytest.mark.parametrize("unmendable", UNMENDABLE)
def test_what_no_other_attempt_can_mend_is_decided_at_once(unmendable: str) -> None:
    made, cause, end, reason = UNMENDABLE[unmendable]
    shell, request = MADE[made](policy=MANY, deadline_ns=45)
    shell.add_source(LOCAL, 1, local=True)
    assert cause not in OF_THE_SOURCE
    end(shell, request)
    assert reports(shell, request) == [(cause, reason)]
    finish(shell, request)
    assert not shell.all(Retry)
    assert state(shell, request) is S.ENDED


def test_that_no_lane_is_left_is_not_mended_by_another_attempt() -> None:
    shell, parked = in_parked(policy=MANY)
    shell.add_source(LOCAL, 1, local=True)
    shell.retire(RequestId(EPOCH, 0), "still written")
    assert reports(shell, parked) == [(Cause.NO_STORAGE, NO_LANE)]
    assert not shell.all(Retry)


@pytest.mark.parametrize("made", HOLDS_SLOT)
def test_an_attempt_is_given_up_in_every_state(made: str) -> None:
    shell, request = MADE[made](policy=TWICE)
    others = len(shell.all(Report))
    shell.failed(request)
    importing = "importing" in made
    assert len(shell.all(Retry)) == (not importing)
    assert state(shell, request) is (
        S.DRAINING if importing else S.WAITING if "parked" in made else S.RESERVED
    )
    finish(shell, request)
    assert shell.attempt_of(request) == AttemptId(*request, 2)
    assert len(shell.all(Report)) == others
    if "parked" in made:
        assert state(shell, request) is S.PARKED
        shell.retire(RequestId(EPOCH, 0))
    shell.serve(request)
    assert reports(shell, request) == [(None, "")]


def test_a_parked_attempt_has_no_storage_to_pass_on() -> None:
    shell, request = in_parked(policy=TWICE)
    before = lanes(shell)
    shell.tick(shell.owner.limits.progress_timeout_ns)
    assert [retry.attempt for retry in shell.all(Retry)] == [AttemptId(*request, 1)]
    assert (state(shell, request), lanes(shell)) == (S.WAITING, before)
    assert slots(shell) == {"free": 1, "draining": 1}
    shell.released(request)
    assert state(shell, request) is S.PARKED
    shell.prefill(request)
    shell.retire(RequestId(EPOCH, 0))
    assert shell.all(Reserve)[-1].attempt == AttemptId(*request, 2)
    shell.land()
    shell.publish(request)
    assert cause_of(shell, request) is None


# Given up, and imports still run.


def given_up(**options: Any) -> tuple[Shell, RequestId]:
    """Three imports of an attempt run that will be followed by another, at another source."""
    shell = Shell(slots=(1, 1), chunk_nbytes=4 * ROW_NBYTES)
    request = shell.submit(policy=TWICE, **options)
    shell.progress(request)
    assert len(shell.begin()) == 3
    shell.failed(request, "out of memory")
    return shell, request


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_storage_is_passed_on_only_when_no_import_runs(order: tuple[int, ...]) -> None:
    shell, request = given_up()
    first = AttemptId(*request, 1)
    for import_id in order:
        assert not shell.all(Retry)
        assert len(shell.all(StartPrefill)) == 1
        assert (state(shell, request), lanes(shell)) == (S.DRAINING, {"held": 1})
        assert reports(shell, request) == []
        shell.done(ImportId(import_id))
    assert shell.all(Retry) == [Retry(first, "out of memory")]
    assert shell.grants_of(request)[-1].attempt == first.next
    assert not shell.all(Free)


@pytest.mark.parametrize("actual", [0xAB, 0xAC])
def test_a_digest_check_is_waited_for_too_and_decides_nothing(actual: int) -> None:
    shell, request, check = stamped(policy=TWICE)
    shell.failed(request, "after its final")
    assert (state(shell, request), shell.all(Retry)) == (S.DRAINING, [])
    shell.checked(check, actual)
    assert [r.reason for r in shell.all(Retry)] == ["failed after its final: after its final"]
    assert (state(shell, request), reports(shell, request)) == (S.RESERVED, [])


@pytest.mark.parametrize("fenced", [0, 1, 2])
def test_a_cancel_decides_it_before_the_last_fence(fenced: int) -> None:
    shell, request = given_up()
    for import_id in range(fenced):
        shell.done(ImportId(import_id))
    assert shell.cancel(request)
    assert reports(shell, request) == [(Cause.CANCELLED, "cancelled by the caller")]
    assert not shell.cancel(request)
    assert not shell.all(Free)
    finish(shell, request)
    assert shell.all(Free) == [Free(AttemptId(*request, 1))]
    assert_over(shell, request)


@pytest.mark.parametrize("fenced", [0, 1, 2])
def test_a_deadline_decides_it_before_the_last_fence(fenced: int) -> None:
    shell, request = given_up(deadline_ns=40)
    assert shell.owner.next_deadline_ns() == 40
    for import_id in range(fenced):
        shell.done(ImportId(import_id))
    shell.tick(40)
    assert reports(shell, request) == [(Cause.DEADLINE, "its deadline passed")]
    assert shell.owner.next_deadline_ns() == 50
    assert not shell.cancel(request)
    finish(shell, request)
    assert shell.all(Free) == [Free(AttemptId(*request, 1))]
    assert_over(shell, request)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_device_fault_decides_it_before_the_last_fence(order: tuple[int, ...]) -> None:
    shell, request = given_up()
    broken, *rest = order
    shell.import_failed(ImportId(broken), "device lost")
    assert reports(shell, request) == [(Cause.DEVICE, "device lost")]
    for import_id in rest:
        assert not shell.all(Quarantine)
        shell.done(ImportId(import_id))
    assert shell.all(Quarantine) == [Quarantine(AttemptId(*request, 1), "device lost")]
    assert not shell.all(Free)
    assert lanes(shell) == {"quarantined": 1}
    assert_over(shell, request)


def test_a_device_fault_by_the_last_import_decides_it() -> None:
    shell, request = given_up()
    shell.done(ImportId(0))
    shell.done(ImportId(1))
    shell.import_failed(ImportId(2), "device lost")
    assert reports(shell, request) == [(Cause.DEVICE, "device lost")]
    assert len(shell.all(Quarantine)) == 1
    assert_over(shell, request)


def test_a_device_fault_of_the_whole_decides_it_and_is_heard_once() -> None:
    shell, request = given_up()
    shell.device_failed(request, "device lost")
    shell.import_failed(ImportId(0), "device lost too")
    assert reports(shell, request) == [(Cause.DEVICE, "device lost")]
    finish(shell, request)
    assert len(shell.all(Quarantine)) == 1
    assert_over(shell, request)


def test_imports_that_are_not_fenced_in_time_decide_it() -> None:
    shell, request = given_up()
    shell.tick(50)
    assert reports(shell, request) == [(Cause.DEVICE, "an import was not fenced in time")]
    assert lanes(shell) == {"quarantined": 1}
    assert_over(shell, request)


@pytest.mark.parametrize("first", ["cancel", "deadline", "device"])
def test_the_first_who_decides_it_wins(first: str) -> None:
    shell, request = given_up(deadline_ns=40)
    if first == "cancel":
        shell.cancel(request)
    elif first == "device":
        shell.import_failed(ImportId(0))
    shell.tick(40)
    assert not shell.cancel(request)
    if first != "device":
        shell.import_failed(ImportId(0))
    cause = {"cancel": Cause.CANCELLED, "deadline": Cause.DEADLINE, "device": Cause.DEVICE}[first]
    assert cause_of(shell, request) is cause
    finish(shell, request)
    assert lanes(shell) == {"quarantined": 1}  # the device failed, whoever decided
    assert_over(shell, request)


def test_the_death_of_its_source_decides_nothing_more() -> None:
    shell, request = given_up()
    shell.died(0)
    assert (reports(shell, request), state(shell, request)) == ([], S.DRAINING)
    for import_id in range(3):
        shell.done(ImportId(import_id))
    assert [retry.reason for retry in shell.all(Retry)] == ["out of memory"]
    shell.serve(request)
    assert cause_of(shell, request) is None


def test_the_loss_of_every_source_meanwhile_is_found_when_it_would_go_on() -> None:
    shell, request = given_up()
    shell.died(1)
    shell.died(0)
    assert reports(shell, request) == []
    for import_id in range(3):
        shell.done(ImportId(import_id))
    assert reports(shell, request) == [(Cause.NO_SOURCE, NO_SLOT)]
    assert shell.all(Free) == [Free(AttemptId(*request, 2))]
    assert lanes(shell) == {"free": 1}


def assert_over(shell: Shell, request: RequestId) -> None:
    """Nothing of it follows, whatever else happens."""
    shell.tick(shell.now_ns + 10**6)
    assert state(shell, request) is S.ENDED
    assert not shell.all(Retry)
    assert len(shell.grants_of(request)) == 1
    assert len(reports(shell, request)) == 1


# What was not carried out yet.


def test_a_retry_withdraws_a_publish_that_was_not_carried_out() -> None:
    shell, request = in_sealed_with_import(policy=TWICE)
    shell.owner.import_done(ImportId(0), 0)  # this asks for the publish
    shell.failed(request)
    assert not shell.all(Publish)
    assert len(shell.all(Retry)) == 1
    with pytest.raises(LocalProtocolError, match="unknown or over"):
        shell.owner.published(AttemptId(*request, 1), 0)


def test_a_reservation_that_was_passed_on_and_not_carried_out_is_withdrawn_with_the_request() -> (
    None
):
    shell = Shell(slots=(1, 1))
    shell.owner.submit(4, 0, policy=TWICE)
    request = RequestId(EPOCH, 0)
    shell.owner.source_died(SourceId(0), "killed", 0)
    shell.owner.cancel(request, 0)
    taken = shell.take()
    assert [type(c) for c in taken] == [StartPrefill, Retry, StartPrefill, SendCancel, Report]
    assert lanes(shell) == {"free": 1}


def test_a_reservation_that_was_passed_on_is_refused_to_the_attempt_that_has_it() -> None:
    shell = Shell(slots=(1, 1))
    request = shell.submit(policy=TWICE)
    shell.died(0)
    with pytest.raises(LocalProtocolError, match="unknown or over"):
        shell.owner.reserve_refused(AttemptId(*request, 1), "no memory", 0)
    shell.reserve_refused(request)
    assert reports(shell, request) == [(Cause.NO_STORAGE, "no memory")]
    assert lanes(shell) == {"free": 1}


# Locally.


def test_after_its_attempts_at_sources_one_more_is_local() -> None:
    shell = Shell(slots=(1, 1))
    shell.add_source(LOCAL, 1, local=True)
    request = shell.submit(policy=FailurePolicy(2, local=True))
    for _ in range(2):
        shell.failed(request)
    assert [g.source for g in shell.grants_of(request)] == [0, 1, LOCAL]
    shell.serve(request)
    assert reports(shell, request) == [(None, "")]
    assert len(shell.all(Reserve)) == 1


@pytest.mark.parametrize("fault", sorted(set(FAULTS) - {"died"}))
def test_nothing_follows_on_a_local_attempt(fault: str) -> None:
    shell = Shell(slots=(1,))
    shell.add_source(LOCAL, 1, local=True)
    request = shell.submit(policy=LOCALLY)
    shell.failed(request)
    assert shell.grants_of(request)[-1].source == LOCAL
    cause, fail = FAULTS[fault]
    fail(shell, request)
    assert cause_of(shell, request) is cause
    assert len(shell.all(Retry)) == 1
    assert lanes(shell) == {"free": 1}


def take_local_slot(shell: Shell) -> RequestId:
    """Somebody was local and was cancelled, and the engine has not given its slot back."""
    request = shell.submit(policy=LOCALLY)
    shell.failed(request)
    shell.released(request, at=0)
    assert shell.grants_of(request)[-1].source == LOCAL
    shell.cancel(request)
    return request


def test_a_local_attempt_does_not_follow_where_the_engines_slot_was_lost() -> None:
    shell = Shell(slots=(1, 1))
    shell.add_source(LOCAL, 1, local=True)
    take_local_slot(shell)
    shell.tick(50)
    request = shell.submit(policy=LOCALLY)
    shell.failed(request, "out of memory")
    assert reports(shell, request) == [(Cause.SOURCE_FAILED, "out of memory")]


@pytest.mark.parametrize("lost", [True, False])
def test_one_that_was_to_go_on_locally_fails_if_the_engine_is_lost_meanwhile(lost: bool) -> None:
    shell = Shell(lanes=2, slots=(1, 1))
    shell.add_source(LOCAL, 1, local=True)
    other = take_local_slot(shell)
    request = shell.submit(policy=LOCALLY)
    shell.progress(request)
    shell.tick(10)
    (command,) = shell.begin()
    shell.failed(request, "out of memory")
    if lost:
        shell.tick(50)
    else:
        shell.released(other)
    shell.done(command.import_id)
    assert [retry.reason for retry in shell.all(Retry)] == ["engine", "out of memory"]
    if lost:
        assert reports(shell, request) == [(Cause.NO_SOURCE, NO_SLOT)]
    else:
        shell.serve(request)
        assert shell.grants_of(request)[-1].source == LOCAL
        assert reports(shell, request) == [(None, "")]
