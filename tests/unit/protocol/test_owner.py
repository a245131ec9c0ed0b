"""The owner: who may have what, whose a message is, and that every hand-off ends exactly once.

Every step of `Shell` takes the owner's commands and checks its integrity.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.errors import LocalProtocolError, Refused
from headrace.geometry import Full, Sliding
from headrace.ids import AttemptId, Generation, ImportId, RequestId, SlotIndex, SourceId, Span
from headrace.messages import (
    MAX_PROGRESS,
    Computing,
    Failed,
    Progress,
    Released,
    SourceFinal,
)
from headrace.plan import Plan
from headrace.protocol.books import AttemptMessage, Limits
from headrace.protocol.commands import (
    CheckDigest,
    Free,
    KillSource,
    Outcome,
    Publish,
    Quarantine,
    Report,
    Reserve,
    SendCancel,
    StartImport,
    StartPrefill,
)
from headrace.protocol.handoff import HandoffState
from headrace.protocol.owner import NO_LANE, NO_REASON, NO_SLOT, Owner
from tests.unit.protocol.builders import CONTEXT, EPOCH, ROW_NBYTES, Shell

S = HandoffState
WHOLE = Span(0, 3, 0, 4)
ALL_NBYTES = 3 * 4 * ROW_NBYTES


def reports(shell: Shell, request: RequestId) -> list[tuple[Outcome, str]]:
    return [(r.outcome, r.reason) for r in shell.all(Report) if r.request == request]


def outcome(shell: Shell, request: RequestId) -> Outcome:
    (report,) = reports(shell, request)
    return report[0]


def state(shell: Shell, request: RequestId) -> HandoffState:
    return shell.owner.state_of(request)


def slots(shell: Shell) -> dict[str, int]:
    return {name: n for name, n in shell.owner.statistics()["slots"].items() if n}


def lanes(shell: Shell) -> dict[str, int]:
    return {name: n for name, n in shell.owner.statistics()["lanes"].items() if n}


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
    assert reports(shell, request) == [(Outcome.PUBLISHED, "")]
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


def test_a_plan_that_is_refused_leases_no_slot() -> None:
    def refuse(num_tokens: int) -> Plan:
        raise Refused("too long for this source")

    owner = Owner(EPOCH, Limits(1, CONTEXT))
    owner.add_source(SourceId(0), 1, refuse, 0)
    with pytest.raises(Refused):
        owner.submit(4, 0)
    owner.check_integrity()
    assert owner.statistics()["slots"]["free"] == 1


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
    assert [outcome(shell, r) for r in (first, second)] == [Outcome.PUBLISHED] * 2


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
    assert outcome(shell, second) is Outcome.PUBLISHED


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
    assert outcome(shell, active) is Outcome.PUBLISHED


# A request in each state.


def in_waiting() -> tuple[Shell, RequestId]:
    shell = Shell(slots=(1,))
    shell.submit()
    return shell, shell.submit()


def in_parked() -> tuple[Shell, RequestId]:
    shell = Shell()
    shell.serve(shell.submit())
    return shell, shell.submit()


def in_parked_with_final() -> tuple[Shell, RequestId]:
    shell, request = in_parked()
    shell.progress(request)
    shell.final(request)
    return shell, request


def in_reserved() -> tuple[Shell, RequestId]:
    shell = Shell(lanes=2, slots=(1,))
    shell.submit()
    return shell, shell.submit()


def in_streaming() -> tuple[Shell, RequestId]:
    shell = Shell()
    request = shell.submit()
    shell.progress(request, Span(0, 1, 0, 4))
    return shell, request


def in_streaming_with_import() -> tuple[Shell, RequestId]:
    shell, request = in_streaming()
    shell.begin()
    return shell, request


def in_sealed_with_import() -> tuple[Shell, RequestId]:
    shell = Shell()
    request = shell.submit()
    shell.progress(request)
    shell.final(request)
    shell.begin()
    return shell, request


def in_published() -> tuple[Shell, RequestId]:
    shell = Shell()
    request = shell.submit()
    shell.progress(request)
    shell.final(request)
    shell.land()
    shell.publish(request)
    return shell, request


MADE: dict[str, Callable[[], tuple[Shell, RequestId]]] = {
    "waiting": in_waiting,
    "parked": in_parked,
    "parked, final": in_parked_with_final,
    "reserved": in_reserved,
    "streaming": in_streaming,
    "streaming, importing": in_streaming_with_import,
    "sealed, importing": in_sealed_with_import,
    "published": in_published,
}
UNDECIDED = [name for name in MADE if name != "published"]
HOLDS_SLOT = [name for name in UNDECIDED if name not in ("waiting", "reserved")]


def finish(shell: Shell, request: RequestId) -> None:
    """Everything that was out comes back."""
    for command in shell.all(StartImport):
        if command.import_id in shell.owner._imports:
            shell.done(command.import_id)
    if any(g.attempt.request == request for g in shell.all(StartPrefill)):
        shell.released(request)


def test_a_cancel_tells_its_reason() -> None:
    shell = Shell()
    request = shell.submit()
    shell.cancel(request, reason="the server goes down")
    assert reports(shell, request) == [(Outcome.CANCELLED, "the server goes down")]


@pytest.mark.parametrize("made", UNDECIDED)
def test_a_cancel_is_reported_at_once_and_all_comes_back(made: str) -> None:
    shell, request = MADE[made]()
    others = {r.request for r in shell.all(Report)}
    assert shell.cancel(request)
    assert reports(shell, request) == [(Outcome.CANCELLED, "cancelled by the caller")]
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


def test_a_cancel_after_publishing_changes_nothing() -> None:
    shell, request = in_published()
    assert not shell.cancel(request)
    assert outcome(shell, request) is Outcome.PUBLISHED


def test_a_cancel_of_what_nobody_asked_for_changes_nothing() -> None:
    assert not Shell().cancel(RequestId(EPOCH, 99))


def test_a_cancel_outruns_a_publish_that_was_not_carried_out() -> None:
    shell, request = in_sealed_with_import()
    shell.owner.import_done(ImportId(0), 0)  # this asks for the publish,
    shell.owner.cancel(request, 0)  # and this comes before the shell took it
    taken = shell.take()
    assert not [c for c in taken if isinstance(c, Publish)]
    assert [c for c in taken if isinstance(c, Free)]
    assert outcome(shell, request) is Outcome.CANCELLED
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


@pytest.mark.parametrize("made", HOLDS_SLOT)
def test_a_failing_engine_fails_its_own_attempt_unless_it_gave_its_final(made: str) -> None:
    shell, request = MADE[made]()
    shell.failed(request, "out of memory")
    faulty = made in ("parked, final", "sealed, importing")
    reason = "failed after its final: " * faulty + "out of memory"
    assert reports(shell, request) == [(Outcome.FAILED, reason)]
    assert shell.owner.dropped["malformed"] == faulty
    finish(shell, request)
    assert state(shell, request) is S.ENDED


@pytest.mark.parametrize("made", sorted(MADE))
def test_the_death_of_its_source_fails_what_has_no_final_and_nothing_else(made: str) -> None:
    shell, request = MADE[made]()
    goes_on = made in ("parked, final", "sealed, importing", "published")
    shell.died()
    if goes_on:
        assert [o for o, _ in reports(shell, request)] in ([], [Outcome.PUBLISHED])
    else:
        assert reports(shell, request) == [(Outcome.FAILED, "killed")]
    for command in shell.all(StartImport):
        if command.import_id in shell.owner._imports:
            shell.done(command.import_id)
    if made == "sealed, importing":
        shell.publish(request)
    if made == "parked, final":
        shell.retire(RequestId(EPOCH, 0))
        shell.land()
        shell.publish(request)
    assert outcome(shell, request) is (Outcome.PUBLISHED if goes_on else Outcome.FAILED)
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
    assert outcome(shell, first) is Outcome.FAILED
    assert [state(shell, r) for r in (second, third)] == [S.STREAMING, S.RESERVED]
    shell.serve(second)
    assert shell.grant_of(third).source == 1


def test_the_death_of_the_last_source_fails_all_who_lack_a_slot() -> None:
    shell = Shell(lanes=2, slots=(2,))
    requests = [shell.submit() for _ in range(4)]
    shell.died()
    assert [outcome(shell, r) for r in requests] == [Outcome.FAILED] * 4
    assert (slots(shell), lanes(shell)) == ({"free": 2}, {"free": 2})


def test_a_new_source_serves_after_a_death() -> None:
    shell = Shell(slots=(1,))
    shell.submit()
    shell.died()
    shell.add_source(1, 1)
    request = shell.submit()
    shell.serve(request)
    assert outcome(shell, request) is Outcome.PUBLISHED


# Deadlines.


@pytest.mark.parametrize("made", UNDECIDED)
def test_the_request_deadline_fails_it_in_every_state(made: str) -> None:
    shell, request = MADE[made]()
    entry = shell.owner._requests[request]
    shell.owner._requests[request] = type(entry)(entry.handoff, 40)
    shell.tick(39)
    assert reports(shell, request) == []
    assert shell.owner.next_deadline_ns() == 40
    shell.tick(40)
    assert reports(shell, request) == [(Outcome.FAILED, "its deadline passed")]
    finish(shell, request)
    assert state(shell, request) is S.ENDED


def test_a_deadline_after_publishing_changes_nothing() -> None:
    shell = Shell()
    request = shell.submit(deadline_ns=90)
    shell.serve(request)
    assert shell.owner.next_deadline_ns() is None
    shell.tick(1000)
    assert outcome(shell, request) is Outcome.PUBLISHED


@pytest.mark.parametrize("made", ["parked", "streaming"])
def test_a_silent_source_fails_its_attempt_at_the_progress_deadline(made: str) -> None:
    shell, request = MADE[made]()
    shell.tick(99)
    assert reports(shell, request) == []
    shell.tick(100)
    assert reports(shell, request) == [(Outcome.FAILED, "the source made no progress in time")]


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
    assert reports(shell, request) == [(Outcome.FAILED, "the source made no progress in time")]


def test_progress_moves_the_deadline_and_the_final_ends_it() -> None:
    shell = Shell()
    request = shell.submit()
    shell.tick(60)
    shell.progress(request)
    assert shell.owner.next_deadline_ns() == 160
    shell.tick(159)
    shell.final(request)
    assert shell.owner.next_deadline_ns() is None
    shell.tick(10_000)
    assert reports(shell, request) == []


def test_both_deadlines_at_once_end_it_once() -> None:
    shell = Shell()
    request = shell.submit(deadline_ns=100)
    shell.tick(100)
    assert reports(shell, request) == [(Outcome.FAILED, "its deadline passed")]


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
    assert reports(shell, waiting) == [(Outcome.FAILED, NO_SLOT)]
    with pytest.raises(Refused):
        shell.submit()
    assert lanes(shell) == {"free": 2}


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
    assert outcome(shell, sealed) is Outcome.PUBLISHED


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
        (Outcome.CANCELLED, "cancelled by the caller") if cancelled else (Outcome.FAILED, GIVEN_UP)
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
    assert reports(shell, request) == [(Outcome.FAILED, GIVEN_UP)]
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
    shell.begin()
    shell.tick(40)
    shell.done(ImportId(0))
    (check,) = shell.all(CheckDigest)
    assert shell.owner.next_deadline_ns() == 90
    shell.tick(90)
    assert reports(shell, request) == [(Outcome.FAILED, GIVEN_UP)]
    assert lanes(shell) == {"quarantined": 1}
    with pytest.raises(LocalProtocolError, match="is not in flight"):
        shell.checked(check, 5)
    shell.released(request)
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
    assert outcome(shell, again) is Outcome.PUBLISHED


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


# Late, stale, unknown, malformed.


@pytest.mark.parametrize("made", [*HOLDS_SLOT, "published"])
def test_a_dead_source_is_not_heard_any_more(made: str) -> None:
    shell, request = MADE[made]()
    grant = shell.grant_of(request)
    shell.died()
    before = snapshot(shell)
    for count, message in enumerate(messages_of(grant.attempt, grant.slot, grant.generation), 1):
        shell.send(message)
        assert snapshot(shell) == before
        assert shell.owner.dropped == {"dead": count}


def messages_of(attempt: AttemptId, slot: int, generation: int) -> list[AttemptMessage]:
    return [
        Progress(attempt, slot, generation, (WHOLE,), (), 0, 0),
        Computing(attempt, slot, generation),
        SourceFinal(attempt, slot, generation, "logits", 0, 0, 0),
        Failed(attempt, slot, generation, "x"),
        Released(attempt, slot, generation),
    ]


def snapshot(shell: Shell) -> object:
    statistics = shell.owner.statistics()
    del statistics["dropped"]
    return statistics, len(shell.given), shell.owner.next_deadline_ns()


@pytest.mark.parametrize(
    "attempt",
    [
        AttemptId(EPOCH, 99, 1),
        AttemptId(EPOCH - 1, 0, 1),
        AttemptId(EPOCH, 0, 2),
        AttemptId(0, 0, 0),
    ],
    ids=["unknown", "another epoch", "another attempt", "nothing"],
)
def test_a_message_of_an_attempt_that_is_not_there_is_counted_and_dropped(
    attempt: AttemptId,
) -> None:
    shell = Shell()
    shell.submit()
    before = snapshot(shell)
    for count, message in enumerate(messages_of(attempt, 0, 0), 1):
        shell.send(message, source=0)
        assert snapshot(shell) == before
        assert shell.owner.dropped == {"stale": count}


@pytest.mark.parametrize(("slot", "generation"), [(0, 0), (1, 0), (9, 0), (0, 1)])
def test_another_sources_attempt_is_out_of_reach(slot: int, generation: int) -> None:
    shell = Shell(lanes=2, slots=(2, 2))
    first, _ = shell.submit(), shell.submit()
    before = snapshot(shell)
    for count, message in enumerate(messages_of(AttemptId(*first, 1), slot, generation), 1):
        shell.send(message, source=1)
        assert snapshot(shell) == before
        assert shell.owner.dropped == {"stale": count}


@pytest.mark.parametrize("made", [*HOLDS_SLOT, "published"])
def test_a_message_after_the_decision_is_late_and_dropped(made: str) -> None:
    shell, request = MADE[made]()
    shell.cancel(request)
    grant = shell.grant_of(request)
    before = snapshot(shell)
    *late, _ = messages_of(grant.attempt, grant.slot, grant.generation)
    for count, message in enumerate(late, 1):
        shell.send(message)
        assert snapshot(shell) == before
        assert shell.owner.dropped == {"late": count}
    assert len(reports(shell, request)) == 1


def test_a_message_of_an_old_generation_is_stale() -> None:
    shell = Shell(slots=(1,))
    first = shell.submit()
    shell.serve(first)
    shell.retire(first)
    shell.submit()
    before = snapshot(shell)
    for count, message in enumerate(messages_of(AttemptId(*first, 1), 0, 0), 1):
        shell.send(message)
        assert snapshot(shell) == before
        assert shell.owner.dropped == {"stale": count}


@pytest.mark.parametrize(
    ("which", "slot", "generation"),
    [(0, 1, 0), (1, 2, 0), (2, 1 << 63, 0), (3, 0, 1), (0, -1, 0), (3, 1, 0)],
)
def test_a_message_under_a_lease_that_is_not_its_own_fails_its_attempt(
    which: int, slot: int, generation: int
) -> None:
    shell = Shell()
    request, other = shell.submit(), shell.submit()
    shell.send(messages_of(AttemptId(*request, 1), slot, generation)[which])
    ((end, reason),) = reports(shell, request)
    assert end is Outcome.FAILED
    assert f"slot {slot} generation {generation} is not its lease" in reason
    assert shell.owner.dropped == {"malformed": 1}
    assert reports(shell, other) == []
    shell.released(request)
    shell.serve(other)


MALFORMED: dict[str, Callable[[Shell, RequestId], None]] = {
    "a cell twice": lambda s, r: s.progress(r, Span(0, 1, 0, 2), Span(0, 1, 1, 3)),
    "outside the model": lambda s, r: s.progress(r, Span(0, 4, 0, 4)),
    "outside the prompt": lambda s, r: s.progress(r, Span(0, 3, 0, 5)),
    "an early final": lambda s, r: s.final(r),
    "digests that do not match": lambda s, r: s.progress(r, WHOLE, digests=(1, 2)),
    "returned without a final": lambda s, r: s.released(r),
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_a_malformed_message_fails_its_own_attempt_only(fault: str) -> None:
    shell = Shell(lanes=2, slots=(1, 1))
    request, other = shell.submit(), shell.submit()
    shell.progress(other, Span(0, 1, 0, 4))
    MALFORMED[fault](shell, request)
    assert outcome(shell, request) is Outcome.FAILED
    assert shell.owner.dropped["malformed"] == (fault != "returned without a final")
    assert not shell.begin(1) or shell.all(StartImport)[0].attempt.request == other
    shell.progress(other, Span(1, 3, 0, 4))
    shell.final(other)
    shell.released(other)
    shell.land()
    for command in shell.all(StartImport):
        if command.import_id in shell.owner._imports:
            shell.done(command.import_id)
    shell.publish(other)
    assert outcome(shell, other) is Outcome.PUBLISHED


@pytest.mark.parametrize("again", [Shell.final, Shell.progress, Shell.failed])
def test_more_after_the_final_fails_the_attempt_and_the_owner_lives(
    again: Callable[[Shell, RequestId], None],
) -> None:
    shell = Shell()
    request = shell.submit()
    shell.progress(request)
    shell.final(request)
    again(shell, request)
    assert outcome(shell, request) is Outcome.FAILED
    assert shell.owner.dropped == {"malformed": 1}


@pytest.mark.parametrize("decided", [True, False])
def test_a_write_token_that_comes_back_twice_is_malformed(decided: bool) -> None:
    shell = Shell()
    request = shell.submit()
    shell.prefill(request)
    shell.begin()
    if decided:
        shell.cancel(request)
    shell.released(request)
    assert outcome(shell, request) is (Outcome.CANCELLED if decided else Outcome.FAILED)
    assert shell.owner.dropped == {"malformed": 1}
    shell.done(ImportId(0))
    assert slots(shell) == {"free": 2}


# Digests.


def stamped() -> tuple[Shell, RequestId, CheckDigest]:
    shell = Shell()
    request = shell.submit(digest=True)
    shell.progress(request, WHOLE, digests=(0xAB,))
    shell.final(request)
    shell.land()
    (check,) = shell.all(CheckDigest)
    return shell, request, check


def test_a_span_counts_only_after_its_digest_was_found_right() -> None:
    shell, request, check = stamped()
    assert (check.span, check.expected) == (WHOLE, 0xAB)
    assert not shell.all(Publish)
    assert shell.owner.num_in_flight == 1
    shell.checked(check, 0xAB)
    shell.publish(request)
    assert outcome(shell, request) is Outcome.PUBLISHED


def test_a_wrong_digest_fails_the_attempt_and_names_span_and_both_values() -> None:
    shell, request, check = stamped()
    shell.checked(check, 0xAC)
    ((end, reason),) = reports(shell, request)
    assert end is Outcome.FAILED
    assert reason == f"digest of {WHOLE}: 0xac landed, 0xab sent"
    assert not shell.all(Publish)
    assert lanes(shell) == {"free": 1}


@pytest.mark.parametrize("actual", [0xAB, 0xAC])
def test_a_digest_of_a_cancelled_hand_off_decides_nothing(actual: int) -> None:
    shell, request, check = stamped()
    shell.cancel(request)
    assert not shell.all(Free)
    shell.checked(check, actual)
    assert len(shell.all(Free)) == 1
    assert outcome(shell, request) is Outcome.CANCELLED


def test_a_check_is_no_copy_and_a_copy_is_no_check() -> None:
    shell, _, check = stamped()
    before = snapshot(shell)
    with pytest.raises(LocalProtocolError, match="is a digest check, not a copy"):
        shell.done(check.import_id)  # else the span would count unchecked
    assert snapshot(shell) == before
    shell, _ = in_streaming_with_import()
    before = snapshot(shell)
    with pytest.raises(LocalProtocolError, match="is a copy, not a digest check"):
        shell.owner.digest_checked(ImportId(0), 0, 0)  # else its read token would stay out
    assert snapshot(shell) == before


def test_more_progress_messages_than_their_bound_fail_the_attempt() -> None:
    shell = Shell(kinds=(Full(), Sliding(1, 0)))
    request = shell.submit()
    for _ in range(MAX_PROGRESS):
        shell.progress(request, Span(1, 2, 0, 4))
    assert reports(shell, request) == []
    shell.progress(request, Span(0, 1, 0, 4))
    ((end, reason),) = reports(shell, request)
    assert end is Outcome.FAILED
    assert "more than 128 progress messages" in reason
    assert shell.owner.dropped == {"malformed": 1}


def test_a_span_without_a_stamp_is_malformed_where_one_was_asked_for() -> None:
    shell = Shell()
    request = shell.submit(digest=True)
    shell.progress(request)
    assert outcome(shell, request) is Outcome.FAILED
    assert shell.owner.dropped == {"malformed": 1}


# The device fails.


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("made", ["streaming, importing", "sealed, importing"])
def test_a_failed_import_quarantines_storage_and_slot(made: str, cancelled: bool) -> None:
    shell, request = MADE[made]()
    if cancelled:
        shell.cancel(request)
    shell.import_failed(ImportId(0), "device lost")
    assert outcome(shell, request) is (Outcome.CANCELLED if cancelled else Outcome.FAILED)
    assert [q.reason for q in shell.all(Quarantine)] == ["device lost"]
    assert not shell.all(Free)
    assert lanes(shell) == {"quarantined": 1}
    shell.released(request)
    shell.tick(1000)
    shell.died()
    assert slots(shell) == {"free": 1, "quarantined": 1}  # its read token never came back


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
    assert outcome(shell, request) is Outcome.FAILED


def test_a_failed_digest_check_quarantines_the_storage() -> None:
    shell, request, check = stamped()
    shell.import_failed(check.import_id, "device lost")
    assert (lanes(shell), outcome(shell, request)) == ({"quarantined": 1}, Outcome.FAILED)
    shell.released(request)
    assert slots(shell) == {"free": 2}


@pytest.mark.parametrize("made", ["reserved", "streaming", "published"])
def test_a_failing_device_sets_the_storage_apart(made: str) -> None:
    shell, request = MADE[made]()
    shell.device_failed(request, "no memory")
    assert outcome(shell, request) is (Outcome.PUBLISHED if made == "published" else Outcome.FAILED)
    assert [q.reason for q in shell.all(Quarantine)] == ["no memory"]
    assert lanes(shell)["quarantined"] == 1


def test_a_failing_device_sets_draining_storage_apart_at_the_last_fence() -> None:
    shell, request = in_streaming_with_import()
    shell.cancel(request)
    shell.owner.device_failed(AttemptId(*request, 1), "no memory", 0)
    assert not shell.all(Quarantine)
    shell.done(ImportId(0))
    assert len(shell.all(Quarantine)) == 1
    assert outcome(shell, request) is Outcome.CANCELLED


def test_a_failed_publish_fails_the_attempt() -> None:
    shell, request = in_sealed_with_import()
    shell.done(ImportId(0))
    (publish,) = shell.all(Publish)
    shell.owner.device_failed(publish.attempt, "device lost", 0)
    shell.take()
    assert outcome(shell, request) is Outcome.FAILED
    assert lanes(shell) == {"quarantined": 1}


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


@pytest.mark.parametrize("made", ["reserved", "streaming", "sealed"])
def test_a_refused_reservation_fails_its_attempt_and_leaves_the_lane_in_service(made: str) -> None:
    if made == "sealed":
        shell, request = in_parked_with_final()
        shell.retire(RequestId(EPOCH, 0))
    else:
        shell, request = MADE[made]()
    before = len(shell.all(Free))
    shell.reserve_refused(request)
    assert reports(shell, request) == [(Outcome.FAILED, "no memory")]
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
    before = snapshot(shell)
    with pytest.raises(LocalProtocolError, match="not reserving"):
        shell.reserve_refused(request)
    assert snapshot(shell) == before


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
        assert reports(shell, stranded) == [(Outcome.FAILED, NO_LANE)]
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
    assert reports(shell, waiting) == [(Outcome.FAILED, NO_SLOT)]
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
    shell.lane_lost()
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
    shell.lane_lost()
    assert (reports(shell, second), outcome(shell, third)) == ([], Outcome.FAILED)
    shell.lane_lost()  # no more can be lost than there are
    shell.serve(second)
    shell.retire(second, reason)
    assert lanes(shell) == {"quarantined": 1}


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
        lambda: owner.device_failed(unknown, "x", 0),
        lambda: owner.reserve_refused(unknown, "x", 0),
        lambda: owner.retire(unknown.request, 0),
        lambda: owner.retire(waiting.request, 0),
        lambda: owner.source_died(SourceId(5), "x", 0),
        lambda: owner.message(SourceId(5), Released(unknown, 0, 0), 0),
        lambda: owner.add_source(SourceId(0), 1, shell.plan_for, 0),
    ]
    for call in calls:
        before = snapshot(shell)
        with pytest.raises(LocalProtocolError):
            call()
        assert snapshot(shell) == before
    shell.take()


def test_an_import_is_reported_once() -> None:
    shell, _ = in_streaming_with_import()
    shell.done(ImportId(0))
    with pytest.raises(LocalProtocolError, match="import 0 is not in flight"):
        shell.done(ImportId(0))


def test_a_hand_off_without_a_lease_has_neither_slot_nor_source() -> None:
    shell, request = in_waiting()
    handoff = shell.owner._requests[request].handoff
    for look in (shell.owner._slot_of, shell.owner._source_of):
        with pytest.raises(LocalProtocolError, match="has no"):
            look(handoff)
