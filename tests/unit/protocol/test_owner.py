"""The owner: whose a message is, what it does, and that every hand-off ends exactly once.

Every step of `Shell` takes the owner's commands and checks its integrity.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.errors import LocalProtocolError, Refused
from headrace.geometry import Full, Sliding
from headrace.ids import AttemptId, Generation, ImportId, RequestId, SlotIndex, SourceId, Span
from headrace.messages import MAX_PROGRESS, Computing, Progress, Released
from headrace.plan import Plan
from headrace.protocol.admission import FailurePolicy
from headrace.protocol.books import AttemptMessage, Limits
from headrace.protocol.commands import (
    Cause,
    CheckDigest,
    Free,
    KillSource,
    Publish,
    Quarantine,
    Reserve,
    Retry,
    StartImport,
    StartPrefill,
)
from headrace.protocol.endings import NO_LANE, NO_SLOT
from headrace.protocol.handoff import HandoffState
from headrace.protocol.owner import Owner
from tests.unit.protocol.builders import CONTEXT, EPOCH, ROW_NBYTES, Shell
from tests.unit.protocol.scenes import (
    HOLDS_SLOT,
    LOCAL,
    LOCALLY,
    MADE,
    TWICE,
    UNDECIDED,
    WHOLE,
    cause_of,
    finish,
    in_parked_with_final,
    in_published,
    in_sealed_with_import,
    in_streaming_with_import,
    lanes,
    reports,
    slots,
    stamped,
    state,
    trace,
)

S = HandoffState
ALL_NBYTES = 3 * 4 * ROW_NBYTES


# One hand-off from end to end.


def test_storage_first_then_the_slot_then_the_grant() -> None:
    shell = Shell()
    request = shell.submit()
    attempt = AttemptId(*request, 1)
    assert shell.given == [
        Reserve(attempt, 4),
        StartPrefill(attempt, SourceId(0), SlotIndex(0), Generation(0)),
    ]
    assert state(shell, request) is S.STREAMING


@pytest.mark.parametrize("token", [None, 0, 5])
def test_a_hand_off_is_published_and_everything_is_free_again(token: int | None) -> None:
    shell = Shell()
    request = shell.submit()
    shell.prefill(request, token)
    (command,) = shell.begin()
    attempt = AttemptId(*request, 1)
    assert command == StartImport(ImportId(0), attempt, SourceId(0), SlotIndex(0), WHOLE)
    assert not shell.all(Publish)
    shell.done(command.import_id)
    assert shell.all(Publish) == [Publish(attempt, SourceId(0), SlotIndex(0), token)]
    shell.publish(request)
    assert reports(shell, request) == [(None, "")]
    assert (slots(shell), lanes(shell)) == ({"free": 2}, {"held": 1})
    shell.retire(request)
    assert shell.given[-1] == Free(attempt)
    assert (slots(shell), lanes(shell)) == ({"free": 2}, {"free": 1})
    assert state(shell, request) is S.ENDED
    assert shell.owner.next_deadline_ns() is None


def test_an_import_may_end_before_the_final() -> None:
    shell = Shell()
    request = shell.submit()
    shell.progress(request)
    shell.land()
    assert not shell.all(Publish)
    shell.final(request)
    assert len(shell.all(Publish)) == 1


def test_the_slot_of_a_published_hand_off_is_free_when_the_source_gives_it_back() -> None:
    shell = Shell()
    request = shell.submit()
    shell.progress(request)
    shell.final(request)
    shell.land()
    shell.publish(request)
    assert slots(shell) == {"free": 1, "draining": 1}
    shell.released(request)
    assert slots(shell) == {"free": 2}
    assert not shell.owner.dropped


def test_imports_are_cut_to_the_chunk_and_the_budget() -> None:
    shell = Shell(chunk_nbytes=ROW_NBYTES)
    request = shell.submit()
    shell.progress(request)
    assert shell.owner.has_pieces
    assert len(shell.begin(1)) == 1  # one piece may go over a budget above zero
    assert len(shell.begin(0)) == 0
    assert len(shell.begin(2 * ROW_NBYTES)) == 2
    assert shell.owner.begin_imports(1 << 30, 0) == ALL_NBYTES - 3 * ROW_NBYTES
    assert not shell.owner.has_pieces
    assert shell.owner.num_in_flight == 12


def test_the_hand_off_nearest_to_publishing_is_imported_first() -> None:
    shell = Shell(lanes=2, slots=(1, 1))
    first, second = shell.submit(), shell.submit()
    shell.progress(first)
    shell.progress(second)
    shell.final(second)
    assert [c.attempt.request for c in shell.begin()] == [second, first]


# Refused at once.


@pytest.mark.parametrize("num_tokens", [0, -1, CONTEXT + 1])
def test_what_can_never_fit_is_refused_at_once(num_tokens: int) -> None:
    shell = Shell()
    with pytest.raises(Refused, match="does not fit a context of 1 to 64") as refusal:
        shell.submit(num_tokens)
    assert refusal.value.field == "prompt"
    assert not shell.given


def test_without_a_living_source_a_request_is_refused() -> None:
    shell = Shell(slots=())
    with pytest.raises(Refused, match="no prefill source") as refusal:
        shell.submit()
    assert refusal.value.field == "source"
    shell.add_source(0, 1)
    shell.died(0)
    with pytest.raises(Refused):
        shell.submit()


def test_without_a_lane_in_service_a_request_is_refused() -> None:
    shell = Shell()
    shell.device_failed(shell.submit())
    with pytest.raises(Refused, match=NO_LANE) as refusal:
        shell.submit()
    assert refusal.value.field == "decoder"


@pytest.mark.parametrize("policy", [None, TWICE, LOCALLY])
def test_without_a_source_only_a_local_request_is_accepted_and_only_where_it_can_be_served(
    policy: FailurePolicy | None,
) -> None:
    shell = Shell(slots=())
    with pytest.raises(Refused, match=NO_SLOT):
        shell.submit(policy=policy)
    shell.add_source(LOCAL, 1, local=True)
    if policy is not LOCALLY:
        with pytest.raises(Refused, match=NO_SLOT):
            shell.submit(policy=policy)
        return
    request = shell.submit(policy=policy)
    grant = shell.grant_of(request)
    assert (grant.attempt.attempt, grant.source) == (1, LOCAL)
    shell.serve(request)
    assert reports(shell, request) == [(None, "")]


def test_a_plan_that_is_refused_leases_no_slot() -> None:
    def refuse(num_tokens: int, start: int) -> Plan:
        raise Refused("too long for this source")

    owner = Owner(EPOCH, Limits(1, CONTEXT))
    owner.add_source(SourceId(0), 1, refuse, 0)
    with pytest.raises(Refused):
        owner.submit(4, 0)
    owner.check_integrity()
    assert owner.statistics()["slots"]["free"] == 1


# The caller cancels, an engine fails, a source dies.


@pytest.mark.parametrize("made", MADE)
def test_a_cancel_decides_what_is_not_decided_once_and_with_its_reason(made: str) -> None:
    shell, request = MADE[made]()
    published = made == "published"
    assert shell.cancel(request, reason="the server goes down") is not published
    assert not shell.cancel(request)
    end = (None, "") if published else (Cause.CANCELLED, "the server goes down")
    assert reports(shell, request) == [end]


def test_a_cancel_decides_what_was_given_up_and_still_drains() -> None:
    shell, request = in_streaming_with_import(policy=TWICE)
    shell.failed(request)
    assert shell.cancel(request)
    assert not shell.cancel(request)
    shell.done(ImportId(0))
    assert (cause_of(shell, request), shell.all(Retry)) == (Cause.CANCELLED, [])


def test_an_engine_that_returns_without_its_final_has_failed() -> None:
    shell = Shell()
    request = shell.submit()
    shell.released(request)
    text = "the source returned without its final"
    assert reports(shell, request) == [(Cause.SOURCE_FAILED, text)]
    assert slots(shell) == {"free": 2}


def test_a_cancel_of_what_nobody_asked_for_changes_nothing() -> None:
    assert not Shell().cancel(RequestId(EPOCH, 99))


@pytest.mark.parametrize("made", HOLDS_SLOT)
def test_a_failing_engine_fails_its_own_attempt_unless_it_gave_its_final(made: str) -> None:
    shell, request = MADE[made]()
    shell.failed(request, "out of memory")
    faulty = made in ("parked, final", "sealed, importing")
    reason = "failed after its final: " * faulty + "out of memory"
    cause = Cause.MALFORMED if faulty else Cause.SOURCE_FAILED
    assert reports(shell, request) == [(cause, reason)]
    assert shell.owner.dropped["malformed"] == faulty
    finish(shell, request)
    assert state(shell, request) is S.ENDED


@pytest.mark.parametrize("made", sorted(MADE))
def test_the_death_of_its_source_fails_what_has_no_final_and_nothing_else(made: str) -> None:
    shell, request = MADE[made]()
    goes_on = made in ("parked, final", "sealed, importing", "published")
    cause = Cause.SOURCE_DIED if made in HOLDS_SLOT else Cause.NO_SOURCE
    shell.died()
    if goes_on:
        assert reports(shell, request) == [(None, "")] * (made == "published")
    else:
        assert reports(shell, request) == [(cause, "killed")]
    for command in shell.all(StartImport):
        if shell.owner.is_in_flight(command.import_id):
            shell.done(command.import_id)
    if made == "sealed, importing":
        shell.publish(request)
    if made == "parked, final":
        shell.retire(RequestId(EPOCH, 0))
        shell.land()
        shell.publish(request)
    assert cause_of(shell, request) is (None if goes_on else cause)
    assert set(slots(shell)) == {"free"}
    shell.died()  # told twice
    assert len(reports(shell, request)) == 1


def test_a_death_between_final_and_release_frees_the_slot_only_after_the_import() -> None:
    shell, request = in_sealed_with_import()
    shell.died()
    assert slots(shell) == {"free": 1, "reading": 1}
    shell.done(ImportId(0))
    shell.publish(request)
    assert slots(shell) == {"free": 2}


# Deadlines.


@pytest.mark.parametrize("made", UNDECIDED)
def test_the_request_deadline_fails_it_in_every_state(made: str) -> None:
    shell, request = MADE[made](deadline_ns=40)
    shell.tick(39)
    assert reports(shell, request) == []
    assert shell.owner.next_deadline_ns() == 40
    shell.tick(40)
    assert reports(shell, request) == [(Cause.DEADLINE, "its deadline passed")]
    finish(shell, request)
    assert state(shell, request) is S.ENDED


def test_a_deadline_after_publishing_changes_nothing() -> None:
    shell = Shell()
    request = shell.submit(deadline_ns=90)
    shell.serve(request)
    assert shell.owner.next_deadline_ns() is None
    shell.tick(1000)
    assert cause_of(shell, request) is None


@pytest.mark.parametrize("made", ["parked", "streaming"])
def test_a_silent_source_fails_its_attempt_at_the_progress_deadline(made: str) -> None:
    shell, request = MADE[made]()
    shell.tick(99)
    assert reports(shell, request) == []
    shell.tick(100)
    assert reports(shell, request) == [(Cause.STALLED, "the source made no progress in time")]


def test_spans_without_cells_do_not_move_the_deadline() -> None:
    shell = Shell(kinds=(Full(), Sliding(2, 2)))
    request = shell.submit()
    shell.tick(60)
    shell.progress(request, Span(1, 2, 0, 2))
    assert shell.owner.next_deadline_ns() == 100
    shell.progress(request, Span(1, 2, 0, 2), Span(0, 1, 0, 1))
    assert shell.owner.next_deadline_ns() == 160


def test_a_word_of_work_moves_the_deadline_as_often_as_it_comes() -> None:
    shell = Shell()
    request = shell.submit()
    for now_ns in (60, 159, 258):
        shell.tick(now_ns)
        shell.computing(request)
        assert shell.owner.next_deadline_ns() == now_ns + 100
    shell.tick(358)
    assert reports(shell, request) == [(Cause.STALLED, "the source made no progress in time")]


def test_progress_moves_the_deadline_and_the_final_ends_it() -> None:
    shell = Shell()
    request = shell.submit()
    shell.tick(60)
    shell.progress(request)
    assert shell.owner.next_deadline_ns() == 160
    shell.tick(159)
    shell.final(request)
    shell.released(request)
    assert shell.owner.next_deadline_ns() is None
    shell.tick(10_000)
    assert reports(shell, request) == []


def test_a_source_that_does_not_return_after_its_final_is_ended() -> None:
    shell = Shell()
    request = shell.submit()
    shell.tick(60)
    shell.progress(request)
    shell.final(request)
    assert shell.owner.next_deadline_ns() == 110
    assert shell.owner.overdue_sources(109) == []
    assert shell.owner.overdue_sources(110) == [SourceId(0)]
    for now_ns in (110, 111):
        shell.tick(now_ns)
        assert [kill.source for kill in shell.all(KillSource)] == [SourceId(0)]
    assert reports(shell, request) == []  # its cells are there, and its death changes nothing
    assert shell.owner.overdue_sources(10_000) == []


def test_the_owners_own_engine_may_return_late() -> None:
    shell = Shell(slots=())
    shell.add_source(LOCAL, 1, local=True)
    request = shell.submit(policy=LOCALLY)
    shell.progress(request)
    shell.final(request)
    assert shell.owner.next_deadline_ns() is None
    assert shell.owner.overdue_sources(10_000) == []


def test_both_deadlines_at_once_end_it_once() -> None:
    shell = Shell()
    request = shell.submit(deadline_ns=100)
    shell.tick(100)
    assert reports(shell, request) == [(Cause.DEADLINE, "its deadline passed")]


@pytest.mark.parametrize("made", HOLDS_SLOT)
def test_the_deadline_of_a_request_outlives_its_attempt(made: str) -> None:
    shell, request = MADE[made](deadline_ns=45, policy=TWICE)
    shell.failed(request)
    shell.tick(44)
    assert reports(shell, request) == []
    shell.tick(45)
    assert reports(shell, request) == [(Cause.DEADLINE, "its deadline passed")]
    shell.tick(46)
    finish(shell, request)
    assert state(shell, request) is S.ENDED
    assert len(reports(shell, request)) == 1


def test_the_deadline_at_the_moment_of_a_stall_ends_the_attempt_that_follows_too() -> None:
    shell = Shell(slots=(1, 1))
    request = shell.submit(policy=TWICE, deadline_ns=100)
    other = shell.submit(policy=TWICE)
    shell.tick(100)
    assert reports(shell, request) == [(Cause.DEADLINE, "its deadline passed")]
    assert reports(shell, other) == []


def test_a_stall_ends_one_attempt_and_leaves_the_request_its_deadline() -> None:
    """Both are due at one tick, and what was due to be done is looked up when it is done."""
    shell = Shell(slots=(1, 1))
    request = shell.submit(policy=TWICE, deadline_ns=100)
    (_, deadline), (_, stall) = shell.owner._deadlines(100)
    stall()
    stall()  # the attempt that follows has not stalled
    shell.take()
    assert [retry.attempt.attempt for retry in shell.all(Retry)] == [1]
    assert reports(shell, request) == []
    deadline()
    shell.take()
    assert reports(shell, request) == [(Cause.DEADLINE, "its deadline passed")]


def test_an_attempt_that_was_given_up_makes_no_progress_and_misses_none() -> None:
    shell = Shell(drain_timeout_ns=500)
    request = shell.submit(policy=TWICE)
    shell.progress(request)
    shell.begin()
    shell.failed(request)
    shell.released(request)
    assert shell.owner.next_deadline_ns() == 500  # that of the import, and of the slot it reads
    shell.tick(499)
    assert (reports(shell, request), state(shell, request)) == ([], S.DRAINING)


def test_each_attempt_has_its_own_time_to_make_progress() -> None:
    shell = Shell(slots=(1, 1))
    request = shell.submit(policy=TWICE)
    shell.tick(90)
    shell.died(0)
    assert shell.owner.next_deadline_ns() == 190
    shell.tick(189)
    assert reports(shell, request) == []
    shell.tick(190)
    assert cause_of(shell, request) is Cause.STALLED


def test_a_drain_that_takes_too_long_ends_in_quarantine_and_is_left_only_by_proof() -> None:
    shell = Shell(slots=(1,))
    request = shell.submit()
    shell.now_ns = 10
    shell.cancel(request)
    assert shell.owner.next_deadline_ns() == 60
    shell.tick(59)
    assert slots(shell) == {"draining": 1}
    shell.tick(60)
    assert slots(shell) == {"quarantined": 1}
    shell.tick(10**9)
    assert slots(shell) == {"quarantined": 1}
    shell.released(request)
    assert slots(shell) == {"free": 1}


def test_a_write_token_that_is_overdue_ends_its_source_once_and_its_death_is_the_proof() -> None:
    shell = Shell(lanes=2, slots=(2, 1))
    request = shell.submit()
    shell.cancel(request)
    shell.tick(49)
    assert not shell.all(KillSource)
    kill = KillSource(SourceId(0), "slot 0 was not given back in time")
    for now_ns in (50, 51, 10**9):
        shell.tick(now_ns)
        assert shell.all(KillSource) == [kill]
        assert slots(shell) == {"free": 2, "quarantined": 1}
    shell.died(0)
    assert slots(shell) == {"free": 3}
    assert shell.owner.next_deadline_ns() is None


def test_a_slot_that_only_an_import_reads_is_quarantined_and_its_source_lives_on() -> None:
    shell = Shell(lanes=2)
    request = shell.submit()
    shell.progress(request)
    shell.begin()
    shell.cancel(request)
    shell.released(request)
    shell.tick(50)
    assert slots(shell) == {"free": 1, "quarantined": 1}
    assert not shell.all(KillSource)
    other = shell.submit()
    assert shell.grant_of(other).slot == 1


def test_the_owners_own_engine_is_never_killed() -> None:
    shell = Shell(slots=())
    shell.add_source(LOCAL, 1, local=True)
    request = shell.submit(policy=LOCALLY)
    shell.cancel(request)
    for now_ns in (50, 10**9):
        shell.tick(now_ns)
        assert slots(shell) == {"quarantined": 1}
    assert not shell.all(KillSource)
    shell.released(request)
    assert slots(shell) == {"free": 1}


def test_what_a_source_that_is_to_be_killed_has_sealed_is_published() -> None:
    shell = Shell()
    sealed = shell.submit()
    shell.prefill(sealed)
    doomed = shell.submit()
    assert state(shell, doomed) is S.PARKED
    shell.cancel(doomed)
    shell.tick(50)
    shell.died()
    shell.land()
    shell.publish(sealed)
    assert cause_of(shell, sealed) is None


GIVEN_UP = "an import was not fenced in time"


@pytest.mark.parametrize("made", ["streaming, importing", "sealed, importing"])
@pytest.mark.parametrize("cancelled", [False, True])
def test_an_import_that_is_not_fenced_in_time_is_given_up_and_nothing_of_it_is_used_again(
    made: str, cancelled: bool
) -> None:
    shell, request = MADE[made]()
    if cancelled:
        shell.cancel(request)
    assert shell.owner.next_deadline_ns() == 50
    shell.tick(49)
    assert shell.owner.is_in_flight(ImportId(0))
    shell.tick(50)
    assert not shell.owner.is_in_flight(ImportId(0))
    (report,) = reports(shell, request)
    assert report == (
        (Cause.CANCELLED, "cancelled by the caller") if cancelled else (Cause.DEVICE, GIVEN_UP)
    )
    assert state(shell, request) is S.ENDED
    assert lanes(shell) == {"quarantined": 1}
    assert [q.reason for q in shell.all(Quarantine)] == [GIVEN_UP]
    assert not shell.all(Free)
    with pytest.raises(LocalProtocolError, match="import 0 is not in flight"):
        shell.done(ImportId(0))  # its fence is too late
    shell.released(request)
    shell.died()
    shell.tick(10**9)
    assert slots(shell) == {"free": 1, "quarantined": 1}  # its read token stays out
    assert not shell.forget()


def test_each_import_has_its_own_deadline_and_the_storage_waits_for_the_last() -> None:
    shell = Shell()
    request = shell.submit()
    shell.progress(request, Span(0, 1, 0, 4), Span(1, 2, 0, 4))
    shell.begin(1)
    shell.tick(30)
    shell.begin()
    assert shell.owner.next_deadline_ns() == 50
    shell.tick(50)
    assert reports(shell, request) == [(Cause.DEVICE, GIVEN_UP)]
    assert not shell.all(Quarantine)
    shell.tick(80)
    assert lanes(shell) == {"quarantined": 1}


def test_an_import_that_was_fenced_has_no_deadline() -> None:
    shell, request = in_streaming_with_import()
    shell.tick(49)
    shell.done(ImportId(0))
    assert shell.owner.next_deadline_ns() == 100  # that of progress
    shell.tick(99)
    assert reports(shell, request) == []


def test_a_digest_check_has_a_deadline_of_its_own() -> None:
    shell = Shell()
    request = shell.submit(digest=True)
    shell.progress(request, digests=[5])
    shell.final(request)
    shell.released(request)
    shell.begin()
    shell.tick(40)
    shell.done(ImportId(0))
    (check,) = shell.all(CheckDigest)
    assert shell.owner.next_deadline_ns() == 90
    shell.tick(90)
    assert reports(shell, request) == [(Cause.DEVICE, GIVEN_UP)]
    assert lanes(shell) == {"quarantined": 1}
    with pytest.raises(LocalProtocolError, match="is not in flight"):
        shell.checked(check, 5)
    assert slots(shell) == {"free": 2}  # it read the reservation, not the slot


def test_an_import_that_is_over_is_not_given_up() -> None:
    shell, request = in_streaming_with_import()
    shell.done(ImportId(0))
    shell.owner._give_up(ImportId(0), 50)
    assert shell.take() == []
    assert reports(shell, request) == []


# Forgetting a source.


def test_a_source_is_forgotten_when_it_is_dead_and_all_its_slots_are_free() -> None:
    shell, _ = in_streaming_with_import()
    assert not shell.forget()
    shell.died()
    assert not shell.forget()  # the import still reads
    shell.done(ImportId(0))
    assert shell.forget()
    assert slots(shell) == {}
    assert shell.owner.no_slot_left
    with pytest.raises(LocalProtocolError, match="source 0 is not attached"):
        shell.forget()
    shell.add_source(0, 1)
    again = shell.submit()
    shell.serve(again)
    assert cause_of(shell, again) is None


def test_a_source_that_lives_is_not_forgotten() -> None:
    shell = Shell()
    assert not shell.forget()
    assert slots(shell) == {"free": 2}


def test_what_a_forgotten_source_brought_decodes_on() -> None:
    shell, request = in_published()
    shell.died()
    assert shell.forget()
    assert not shell.cancel(request)
    shell.tick(10**6)
    shell.retire(request)
    assert state(shell, request) is S.ENDED
    assert lanes(shell) == {"free": 1}


# A message is dropped, taken or blamed; test_owner_messages.py has every case of it.


def test_a_message_that_is_nobodys_is_counted_and_dropped() -> None:
    shell = Shell(slots=(1,))
    request = shell.submit()
    grant = shell.grant_of(request)
    shell.send(Computing(AttemptId(EPOCH, 99, 1), 0, 0), source=0)
    shell.cancel(request)
    shell.send(Computing(grant.attempt, 0, 0))
    shell.died()
    shell.send(Computing(grant.attempt, 0, 0))
    assert shell.owner.dropped == {"stale": 1, "late": 1, "dead": 1}


@pytest.mark.parametrize(
    ("message", "fault", "reason"),
    [
        (Computing(AttemptId(EPOCH, 0, 1), 1, 0), "", "slot 1 generation 0 is not its lease"),
        (
            Progress(AttemptId(EPOCH, 0, 1), 0, 0, (Span(0, 9, 0, 4),), (), 0, 0, 0),
            "",
            "outside the model",
        ),
        (Computing(AttemptId(EPOCH, 0, 1), 0, 0), "it makes no sense", "it makes no sense"),
    ],
)
def test_a_message_that_breaks_the_protocol_fails_its_attempt(
    message: AttemptMessage, fault: str, reason: str
) -> None:
    shell = Shell()
    request = shell.submit()
    shell.send(message, fault=fault)
    ((cause, told),) = reports(shell, request)
    assert (cause, reason in told) == (Cause.MALFORMED, True), told
    assert shell.owner.dropped == {"malformed": 1}


def test_what_is_no_message_fails_the_attempt_of_which_its_source_may_speak() -> None:
    shell = Shell()
    shell.undecodable()
    request = shell.submit()
    shell.undecodable()
    assert cause_of(shell, request) is Cause.MALFORMED
    assert shell.owner.dropped == {"undecodable": 2}


# Digests.


def test_a_span_counts_only_after_its_digest_was_found_right() -> None:
    shell, request, check = stamped()
    assert (check.span, check.expected) == (WHOLE, 0xAB)
    assert not shell.all(Publish)
    assert shell.owner.num_in_flight == 1
    shell.checked(check, 0xAB)
    shell.publish(request)
    assert cause_of(shell, request) is None


def test_a_wrong_digest_fails_the_attempt_and_names_span_and_both_values() -> None:
    shell, request, check = stamped()
    shell.checked(check, 0xAC)
    text = f"digest of {WHOLE}: 0xac landed, 0xab sent"
    assert reports(shell, request) == [(Cause.CORRUPT, text)]
    assert not shell.all(Publish)
    assert lanes(shell) == {"free": 1}


@pytest.mark.parametrize("actual", [0xAB, 0xAC])
def test_bytes_that_are_bad_for_another_reason_fail_the_attempt_whatever_the_digest(
    actual: int,
) -> None:
    shell, request, check = stamped()
    shell.checked(check, actual, "layer 1 position 2 was never written")
    text = "layer 1 position 2 was never written"
    assert reports(shell, request) == [(Cause.CORRUPT, text)]
    assert lanes(shell) == {"free": 1}


@pytest.mark.parametrize("actual", [0xAB, 0xAC])
def test_a_digest_of_a_cancelled_hand_off_decides_nothing(actual: int) -> None:
    shell, request, check = stamped()
    shell.cancel(request)
    assert not shell.all(Free)
    shell.checked(check, actual)
    assert len(shell.all(Free)) == 1
    assert cause_of(shell, request) is Cause.CANCELLED


def test_a_check_is_no_copy_and_a_copy_is_no_check() -> None:
    shell, _, check = stamped()
    before = trace(shell)
    with pytest.raises(LocalProtocolError, match="is a digest check, not a copy"):
        shell.done(check.import_id)  # else the span would count unchecked
    assert trace(shell) == before
    shell, _ = in_streaming_with_import()
    before = trace(shell)
    with pytest.raises(LocalProtocolError, match="is a copy, not a digest check"):
        shell.owner.digest_checked(ImportId(0), 0, 0)  # else its read token would stay out
    assert trace(shell) == before


def test_more_progress_messages_than_their_bound_fail_the_attempt() -> None:
    shell = Shell(kinds=(Full(), Sliding(1, 0)))
    request = shell.submit()
    for _ in range(MAX_PROGRESS):
        shell.progress(request, Span(1, 2, 0, 4))
    assert reports(shell, request) == []
    shell.progress(request, Span(0, 1, 0, 4))
    ((cause, reason),) = reports(shell, request)
    assert cause is Cause.MALFORMED
    assert "more than 128 progress messages" in reason
    assert shell.owner.dropped == {"malformed": 1}


def test_a_span_without_a_stamp_is_malformed_where_one_was_asked_for() -> None:
    shell = Shell()
    request = shell.submit(digest=True)
    shell.progress(request)
    assert cause_of(shell, request) is Cause.MALFORMED
    assert shell.owner.dropped == {"malformed": 1}


# The device fails.


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("made", ["streaming, importing", "sealed, importing"])
def test_a_failed_import_quarantines_storage_and_slot(made: str, cancelled: bool) -> None:
    shell, request = MADE[made]()
    if cancelled:
        shell.cancel(request)
    shell.import_failed(ImportId(0), "device lost")
    assert cause_of(shell, request) is (Cause.CANCELLED if cancelled else Cause.DEVICE)
    assert [q.reason for q in shell.all(Quarantine)] == ["device lost"]
    assert not shell.all(Free)
    assert lanes(shell) == {"quarantined": 1}
    shell.released(request)
    shell.tick(1000)
    shell.died()
    assert slots(shell) == {"free": 1, "quarantined": 1}  # its read token never came back


def test_a_failed_digest_check_quarantines_the_storage() -> None:
    shell, request, check = stamped()
    shell.import_failed(check.import_id, "device lost")
    assert (lanes(shell), cause_of(shell, request)) == ({"quarantined": 1}, Cause.DEVICE)
    shell.released(request)
    assert slots(shell) == {"free": 2}


@pytest.mark.parametrize("made", ["reserved", "streaming", "published"])
def test_a_failing_device_sets_the_storage_apart(made: str) -> None:
    shell, request = MADE[made]()
    shell.device_failed(request, "no memory")
    if made == "published":
        shell.retire(request)
    assert cause_of(shell, request) is (None if made == "published" else Cause.DEVICE)
    assert [q.reason for q in shell.all(Quarantine)] == ["no memory"]
    assert lanes(shell)["quarantined"] == 1


def test_a_failed_publish_fails_the_attempt() -> None:
    shell, request = in_sealed_with_import()
    shell.done(ImportId(0))
    (publish,) = shell.all(Publish)
    shell.owner.device_failed(publish.attempt, "device lost", 0)
    shell.take()
    assert cause_of(shell, request) is Cause.DEVICE
    assert lanes(shell) == {"quarantined": 1}


def test_a_refused_publish_fails_the_attempt_and_the_storage_is_free() -> None:
    shell, request = in_sealed_with_import()
    shell.done(ImportId(0))
    shell.publish_refused(request, "poison at layer 1")
    assert reports(shell, request) == [(Cause.CORRUPT, "poison at layer 1")]
    assert (len(shell.all(Free)), shell.all(Quarantine)) == (1, [])
    shell.released(request)
    assert (lanes(shell), slots(shell)) == ({"free": 1}, {"free": 2})


@pytest.mark.parametrize("made", MADE)
def test_only_a_publish_that_was_asked_for_can_be_refused(made: str) -> None:
    shell, request = MADE[made]()
    before = trace(shell)
    with pytest.raises(LocalProtocolError, match="not publishing"):
        shell.publish_refused(request)
    assert trace(shell) == before


@pytest.mark.parametrize("made", ["reserved", "streaming", "sealed"])
def test_a_refused_reservation_fails_its_attempt_and_leaves_the_lane_in_service(made: str) -> None:
    if made == "sealed":
        shell, request = in_parked_with_final()
        shell.retire(RequestId(EPOCH, 0))
    else:
        shell, request = MADE[made]()
    before = len(shell.all(Free))
    shell.reserve_refused(request)
    assert reports(shell, request) == [(Cause.NO_STORAGE, "no memory")]
    assert state(shell, request) is S.ENDED
    assert (len(shell.all(Free)), shell.all(Quarantine)) == (before, [])
    assert lanes(shell)["free"] == 1
    assert shell.submit() in {r.attempt.request for r in shell.all(Reserve)}


def test_the_lane_of_a_refused_reservation_goes_to_the_next() -> None:
    shell = Shell(slots=(1,))
    first, second = shell.submit(), shell.submit()
    shell.reserve_refused(first)
    assert state(shell, second) is S.RESERVED
    shell.released(first)
    shell.serve(second)


@pytest.mark.parametrize("made", ["waiting", "parked", "streaming, importing", "published"])
def test_only_an_open_reservation_can_be_refused(made: str) -> None:
    shell, request = MADE[made]()
    before = trace(shell)
    with pytest.raises(LocalProtocolError, match="not reserving"):
        shell.reserve_refused(request)
    assert trace(shell) == before


# Our own bugs.


def test_completions_of_what_is_not_there_are_our_own_bug() -> None:
    shell = Shell()
    owner, unknown = shell.owner, AttemptId(EPOCH, 9, 1)
    waiting = AttemptId(*shell.submit(), 1)
    calls: list[Callable[[], object]] = [
        lambda: owner.import_done(ImportId(5), 0),
        lambda: owner.digest_checked(ImportId(5), 0, 0),
        lambda: owner.import_failed(ImportId(5), "x", 0),
        lambda: owner.published(unknown, 0),
        lambda: owner.published(waiting, 0),
        lambda: owner.published(waiting._replace(attempt=2), 0),
        lambda: owner.publish_refused(unknown, "x", 0),
        lambda: owner.device_failed(unknown, "x", 0),
        lambda: owner.reserve_refused(unknown, "x", 0),
        lambda: owner.retire(unknown.request, 0),
        lambda: owner.retire(waiting.request, 0),
        lambda: owner.source_died(SourceId(5), "x", 0),
        lambda: owner.message(SourceId(5), Released(unknown, 0, 0), 0),
        lambda: owner.undecodable(SourceId(5), "x", 0),
        lambda: owner.add_source(SourceId(0), 1, shell.plan_for, 0),
        lambda: owner.add_source(SourceId(0), 1, shell.plan_for, 0, expected=True),
        lambda: owner.add_source(SourceId(1), 1, shell.plan_for, 0, expected=True),
        lambda: owner.source_not_coming("x", 0),
        lambda: owner.reinstate(waiting, 0),
    ]
    for call in calls:
        before = trace(shell)
        with pytest.raises(LocalProtocolError):
            call()
        assert trace(shell) == before
    shell.take()


def test_an_import_is_reported_once() -> None:
    shell, _ = in_streaming_with_import()
    shell.done(ImportId(0))
    with pytest.raises(LocalProtocolError, match="import 0 is not in flight"):
        shell.done(ImportId(0))


def test_a_publish_that_was_commanded_may_be_moot() -> None:
    shell = Shell()
    request = shell.submit()
    attempt = shell.grant_of(request).attempt
    assert not shell.owner.may_publish(attempt)
    shell.progress(request)
    shell.final(request)
    shell.begin()
    shell.done(ImportId(0))
    assert shell.owner.may_publish(attempt)
    assert not shell.owner.may_publish(attempt.next)
    shell.cancel(request)
    assert not shell.owner.may_publish(attempt)


# Prompts that the decoder kept.


@pytest.mark.parametrize("start", [-1, 5])
def test_a_start_outside_the_prompt_is_our_own_mistake(start: int) -> None:
    shell = Shell()
    with pytest.raises(LocalProtocolError, match=f"start {start} of a prompt of 4 tokens"):
        shell.owner.submit(4, 0, start=start)
    assert shell.owner.statistics()["lanes"]["free"] == 1


def test_what_is_for_the_owners_own_engine_goes_there_and_nowhere_else() -> None:
    shell = Shell(slots=(2,))
    shell.add_source(1, 1, local=True)
    request = shell.submit(start=1, local=True)
    assert [grant.source for grant in shell.grants_of(request)] == [SourceId(1)]
    shell.failed(request)
    assert cause_of(shell, request) is Cause.SOURCE_FAILED


def test_without_an_engine_of_its_own_the_owner_refuses_what_is_for_it() -> None:
    with pytest.raises(Refused, match=NO_SLOT):
        Shell(slots=(2,)).submit(start=1, local=True)


def test_what_is_published_without_a_source_ends_once_and_gives_its_lane_back() -> None:
    shell = Shell()
    request = shell.submit(start=4)
    shell.publish(request)
    assert reports(shell, request) == [(None, "")]
    shell.retire(request)
    assert [free.attempt.request for free in shell.all(Free)] == [request]


def test_a_kept_prompt_can_be_cancelled_before_it_is_published() -> None:
    shell = Shell()
    request = shell.submit(start=4)
    shell.cancel(request)
    assert cause_of(shell, request) is Cause.CANCELLED
    assert not shell.owner.may_publish(AttemptId(*request, 1))
    assert [free.attempt.request for free in shell.all(Free)] == [request]
