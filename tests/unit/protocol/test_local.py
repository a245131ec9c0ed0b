"""The owner's own engine: what goes there, what does not, and that it is never killed."""

from __future__ import annotations

import pytest

from headrace.errors import Refused
from headrace.protocol.admission import FailurePolicy
from headrace.protocol.commands import Cause, KillSource, Retry
from headrace.protocol.endings import NO_SLOT
from headrace.protocol.handoff import HandoffState
from tests.unit.protocol.builders import Shell
from tests.unit.protocol.scenes import (
    LOCAL,
    LOCALLY,
    TWICE,
    cause_of,
    reports,
    slots,
    sources_of,
    state,
)

S = HandoffState


# The owner's own engine.


def test_the_owners_own_engine_is_granted_to_local_attempts_only() -> None:
    shell = Shell(lanes=2, slots=())
    shell.add_source(LOCAL, 2, local=True)
    shell.add_source(0, 1)
    first, second = shell.submit(), shell.submit(policy=LOCALLY)
    assert sources_of(shell, first) == [0]
    assert state(shell, second) is S.RESERVED
    shell.serve(first)
    assert sources_of(shell, second) == [0]


def test_a_local_attempt_is_granted_to_nobody_else() -> None:
    shell = Shell(lanes=2, slots=(1, 1))
    shell.add_source(LOCAL, 1, local=True)
    first, second = shell.submit(policy=LOCALLY), shell.submit(policy=LOCALLY)
    shell.failed(first)
    shell.failed(second)
    shell.released(first, at=0)
    shell.released(second, at=0)
    assert [sources_of(shell, r) for r in (first, second)] == [[0, LOCAL], [1]]
    assert (state(shell, second), slots(shell)) == (S.RESERVED, {"free": 2, "leased": 1})
    shell.serve(first)
    assert sources_of(shell, second) == [1, LOCAL]


@pytest.mark.parametrize("made", ["waiting", "reserved"])
def test_who_lacks_a_slot_goes_on_locally_at_once_when_no_source_is_left(made: str) -> None:
    shell = Shell(lanes=1 if made == "waiting" else 2, slots=(1,))
    shell.add_source(LOCAL, 1, local=True)
    first = shell.submit()
    request = shell.submit(policy=FailurePolicy(5, local=True))
    shell.died()
    assert cause_of(shell, first) is Cause.SOURCE_DIED
    assert [retry.reason for retry in shell.all(Retry)] == ["killed"]
    assert [(g.attempt.attempt, g.source) for g in shell.grants_of(request)] == [(2, LOCAL)]
    shell.serve(request)
    assert reports(shell, request) == [(None, "")]


def test_whose_source_died_goes_on_locally_when_no_other_is_left() -> None:
    shell = Shell(slots=(1,))
    shell.add_source(LOCAL, 1, local=True)
    request = shell.submit(policy=FailurePolicy(5, local=True))
    shell.died()
    assert [retry.attempt.attempt for retry in shell.all(Retry)] == [1, 2]
    assert sources_of(shell, request) == [0, LOCAL]


def test_nobody_goes_on_locally_while_a_source_is_expected() -> None:
    shell = Shell(slots=(1,))
    shell.add_source(LOCAL, 1, local=True)
    request = shell.submit(policy=FailurePolicy(2, local=True))
    shell.owner.expect_source()
    shell.died()
    assert (sources_of(shell, request), state(shell, request)) == ([0], S.RESERVED)
    shell.not_coming("it died three times")
    assert sources_of(shell, request) == [0, LOCAL]
    assert [retry.reason for retry in shell.all(Retry)] == ["killed", "it died three times"]


def test_the_first_attempt_is_local_where_no_source_is_in_service() -> None:
    shell = Shell(slots=())
    shell.add_source(LOCAL, 1, local=True)
    request = shell.submit(policy=LOCALLY)
    assert sources_of(shell, request) == [LOCAL]
    assert (shell.attempt_of(request).attempt, shell.all(Retry)) == (1, [])
    shell.failed(request, "out of memory")
    assert reports(shell, request) == [(Cause.SOURCE_FAILED, "out of memory")]


def test_a_local_attempt_does_not_go_to_a_source_that_comes() -> None:
    shell = Shell(lanes=2, slots=())
    shell.add_source(LOCAL, 1, local=True)
    first, second = shell.submit(policy=LOCALLY), shell.submit(policy=LOCALLY)
    shell.add_source(0, 1)
    assert sources_of(shell, second) == []
    shell.serve(first)
    assert sources_of(shell, second) == [LOCAL]


def test_who_waits_for_the_owners_own_engine_fails_when_its_slot_is_lost() -> None:
    shell = Shell(lanes=2, slots=())
    shell.add_source(LOCAL, 1, local=True)
    first, second = shell.submit(policy=LOCALLY), shell.submit(policy=LOCALLY)
    shell.cancel(first)
    shell.tick(49)
    assert reports(shell, second) == []
    shell.tick(50)
    assert reports(shell, second) == [(Cause.NO_SOURCE, NO_SLOT)]
    assert not shell.all(KillSource)
    with pytest.raises(Refused, match=NO_SLOT):
        shell.submit(policy=LOCALLY)
    shell.released(first)
    shell.serve(shell.submit(policy=LOCALLY))


def test_the_owners_own_engine_is_no_source_for_others_to_wait_for() -> None:
    shell = Shell(lanes=2, slots=(1,))
    shell.add_source(LOCAL, 1, local=True)
    first, second = shell.submit(), shell.submit()
    shell.died()
    assert [reports(shell, r) for r in (first, second)] == [
        [(Cause.SOURCE_DIED, "killed")],
        [(Cause.NO_SOURCE, "killed")],
    ]


def test_a_retry_does_not_wait_for_the_owners_own_engine_instead_of_its_source() -> None:
    shell = Shell(slots=(1,))
    shell.add_source(LOCAL, 1, local=True)
    request = shell.submit(policy=TWICE)
    shell.failed(request)
    shell.released(request)
    assert sources_of(shell, request) == [0, 0]


def test_nobody_is_parked_at_the_owners_own_engine_with_one_slot() -> None:
    shell = Shell(slots=(), depth=4)
    shell.add_source(LOCAL, 1, local=True)
    first, second = shell.submit(policy=LOCALLY), shell.submit(policy=LOCALLY)
    shell.serve(first)
    assert (state(shell, second), slots(shell)) == (S.WAITING, {"free": 1})
    shell.retire(first)
    assert state(shell, second) is S.STREAMING


def test_parking_at_a_source_goes_on_beside_the_owners_own_engine() -> None:
    shell = Shell(slots=(2,))
    shell.add_source(LOCAL, 1, local=True)
    first = shell.submit(policy=LOCALLY)
    shell.failed(first)
    shell.released(first, at=0)
    assert sources_of(shell, first) == [0, LOCAL]
    second, third = shell.submit(), shell.submit()
    assert [state(shell, r) for r in (second, third)] == [S.PARKED, S.WAITING]
    shell.prefill(second)
    shell.serve(first)
    shell.retire(first)
    assert [state(shell, r) for r in (second, third)] == [S.SEALED, S.PARKED]


def test_the_time_to_make_progress_is_the_same_for_the_owners_own_engine() -> None:
    shell = Shell(slots=())
    shell.add_source(LOCAL, 1, local=True)
    request = shell.submit(policy=LOCALLY)
    shell.tick(100)
    assert cause_of(shell, request) is Cause.STALLED
