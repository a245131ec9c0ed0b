"""Attempt n+1: where it goes, and that nothing of attempt n can touch it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.errors import LocalProtocolError
from headrace.ids import AttemptId, ImportId, RequestId, Span
from headrace.messages import Progress, Released, SourceFinal
from headrace.protocol.admission import FailurePolicy
from headrace.protocol.commands import Cause, CheckDigest, KillSource, Publish, Retry, StartImport
from headrace.protocol.handoff import HandoffState
from tests.unit.protocol.builders import Shell
from tests.unit.protocol.scenes import (
    TWICE,
    WHOLE,
    cause_of,
    lanes,
    messages_of,
    reports,
    slots,
    sources_of,
    stamped,
    state,
    trace,
)

S = HandoffState


# Where the next attempt goes.


def test_the_next_attempt_goes_to_another_source() -> None:
    shell = Shell(slots=(1, 1))
    request = shell.submit(policy=TWICE)
    shell.failed(request)
    assert sources_of(shell, request) == [0, 1]


def test_the_next_attempt_goes_to_the_same_source_where_there_is_no_other() -> None:
    shell = Shell(slots=(1,))
    request = shell.submit(policy=TWICE)
    shell.failed(request)
    assert sources_of(shell, request) == [0]  # its write token is still out
    shell.released(request)
    assert sources_of(shell, request) == [0, 0]
    assert [g.generation for g in shell.grants_of(request)] == [0, 1]


def test_the_next_attempt_waits_for_another_source_that_is_busy() -> None:
    shell = Shell(lanes=2, slots=(1, 1))
    request, other = shell.submit(policy=TWICE), shell.submit()
    shell.failed(request)
    shell.released(request)
    assert (state(shell, request), slots(shell)) == (S.RESERVED, {"free": 1, "leased": 1})
    shell.serve(other)
    assert sources_of(shell, request) == [0, 1]


def test_the_next_attempt_waits_no_longer_for_another_source_that_died() -> None:
    shell = Shell(lanes=2, slots=(1, 1))
    request, _ = shell.submit(policy=TWICE), shell.submit()
    shell.failed(request)
    shell.released(request)
    shell.died(1)
    assert sources_of(shell, request) == [0, 0]


def test_the_next_attempt_waits_no_longer_for_another_source_that_is_to_be_killed() -> None:
    shell = Shell(lanes=2, slots=(1, 1))
    request, other = shell.submit(policy=TWICE), shell.submit()
    shell.cancel(other)
    shell.failed(request)
    shell.released(request)
    shell.tick(50)
    assert [kill.source for kill in shell.all(KillSource)] == [1]
    assert sources_of(shell, request) == [0, 0]


def test_the_next_attempt_waits_no_longer_for_another_source_whose_slots_are_set_apart() -> None:
    shell = Shell(lanes=2, slots=(1, 1))
    request, other = shell.submit(policy=TWICE), shell.submit()
    shell.progress(other)
    shell.begin()
    shell.import_failed(ImportId(0))
    shell.released(other)
    shell.failed(request)
    shell.released(request)
    assert sources_of(shell, request) == [0]
    shell.tick(50)
    assert sources_of(shell, request) == [0, 0]


def test_a_source_that_comes_is_another_one() -> None:
    shell = Shell(slots=(1,))
    request = shell.submit(policy=TWICE)
    shell.failed(request)
    shell.add_source(1, 1)
    assert sources_of(shell, request) == [0, 1]


def test_only_the_source_that_failed_it_last_is_avoided() -> None:
    shell = Shell(slots=(1, 1))
    request = shell.submit(policy=FailurePolicy(3))
    for at in range(2):
        shell.failed(request)
        shell.released(request, at=at)
    assert sources_of(shell, request) == [0, 1, 0]


def test_what_one_request_avoids_another_is_granted() -> None:
    shell = Shell(lanes=3, slots=(1, 1))
    request, other = shell.submit(policy=TWICE), shell.submit()
    younger = shell.submit()
    shell.failed(request)
    shell.released(request)
    assert sources_of(shell, younger) == [0]
    shell.serve(other)
    assert sources_of(shell, request) == [0, 1]


def test_a_retry_outranks_new_parking() -> None:
    shell = Shell(lanes=2, slots=(3,), depth=2)
    first = shell.submit()
    shell.serve(first)
    request = shell.submit(policy=TWICE)
    waiting = shell.submit()
    shell.failed(request)
    shell.released(request)  # the source is free, and the lanes are held by these two
    assert (state(shell, request), sources_of(shell, request)) == (S.STREAMING, [0, 0])
    assert state(shell, waiting) is S.WAITING
    shell.prefill(request)
    assert state(shell, waiting) is S.PARKED


# Nothing of attempt n touches attempt n+1.


def at_another_source() -> tuple[Shell, RequestId]:
    """Attempt 1 failed at source 0, which still has its token; attempt 2 is told by source 1."""
    shell = Shell(slots=(1, 1))
    request = shell.submit(policy=TWICE)
    shell.progress(request, Span(0, 1, 0, 4))
    shell.land()
    shell.failed(request)
    shell.progress(request, Span(0, 1, 0, 4))
    return shell, request


def at_the_same_source() -> tuple[Shell, RequestId]:
    """Attempt 2 has the slot that attempt 1 had, at the next generation."""
    shell = Shell(slots=(1,))
    request = shell.submit(policy=TWICE)
    shell.progress(request, Span(0, 1, 0, 4))
    shell.land()
    shell.failed(request)
    shell.released(request)
    shell.progress(request, Span(0, 1, 0, 4))
    return shell, request


def complete(shell: Shell, request: RequestId) -> None:
    """Attempt 2 goes on as if nothing had been."""
    assert reports(shell, request) == []
    shell.progress(request, Span(1, 3, 0, 4))
    shell.final(request)
    shell.released(request)
    shell.land()
    shell.publish(request)
    assert reports(shell, request) == [(None, "")]
    first, second = (AttemptId(*request, number) for number in (1, 2))
    assert [p.attempt for p in shell.all(Publish)] == [second]
    assert {c.attempt for c in shell.all(StartImport)} == {first, second}


@pytest.mark.parametrize("which", range(5))
def test_what_the_source_of_attempt_1_still_says_is_late(which: int) -> None:
    shell, request = at_another_source()
    first, second = shell.grants_of(request)
    before = trace(shell)
    message = messages_of(first.attempt, first.slot, first.generation)[which]
    shell.send(message)
    if isinstance(message, Released):
        assert slots(shell) == {"free": 1, "leased": 1}
        assert not shell.owner.dropped
        shell.send(message)
        assert shell.owner.dropped == {"stale": 1}
    else:
        assert trace(shell) == before
        assert shell.owner.dropped == {"late": 1}
    assert shell.grants_of(request)[-1] == second
    complete(shell, request)


@pytest.mark.parametrize("which", range(5))
@pytest.mark.parametrize("generation", [0, 1])
def test_what_was_said_of_attempt_1_in_the_slot_of_attempt_2_is_stale(
    which: int, generation: int
) -> None:
    shell, request = at_the_same_source()
    first, second = shell.grants_of(request)
    assert (first.slot, first.generation + 1) == (second.slot, second.generation)
    before = trace(shell)
    shell.send(messages_of(first.attempt, first.slot, generation)[which])
    assert trace(shell) == before
    assert shell.owner.dropped == {"stale": 1}
    complete(shell, request)


@pytest.mark.parametrize("which", range(5))
@pytest.mark.parametrize("number", [1, 2, 3])
def test_no_source_speaks_of_an_attempt_of_another_source(number: int, which: int) -> None:
    shell, request = at_another_source()
    grant = shell.grants_of(request)[min(number, 2) - 1]
    before = trace(shell)
    message = messages_of(AttemptId(*request, number), grant.slot, grant.generation)[which]
    shell.send(message, source=0 if number == 2 else 1)
    assert trace(shell) == before
    assert shell.owner.dropped == {"stale": 1}
    complete(shell, request)


def test_attempt_2_under_the_lease_of_attempt_1_is_malformed() -> None:
    shell, request = at_the_same_source()
    shell.send(messages_of(AttemptId(*request, 2), 0, 0)[0])
    ((cause, reason),) = reports(shell, request)
    assert (cause, "slot 0 generation 0 is not its lease" in reason) == (Cause.MALFORMED, True)


@pytest.mark.parametrize("make", [at_another_source, at_the_same_source])
def test_a_write_token_of_attempt_1_is_not_that_of_attempt_2(
    make: Callable[[], tuple[Shell, RequestId]],
) -> None:
    shell, request = make()
    first, second = shell.grants_of(request)
    for _ in range(3):
        shell.send(Released(first.attempt, first.slot, first.generation))
    lines = {(line.source, line.slot): line for line in shell.owner.snapshot().slots}
    assert lines[second.source, second.slot].tokens == ("write",)
    complete(shell, request)


def test_a_failure_that_is_told_after_the_return_is_heard_once() -> None:
    """The order that a source's two last messages have is turned round."""
    shell = Shell(slots=(1, 1))
    request = shell.submit(policy=TWICE)
    first = shell.grant_of(request)
    shell.released(request)
    assert [r.reason for r in shell.all(Retry)] == ["the source returned without its final"]
    shell.send(messages_of(first.attempt, first.slot, first.generation)[3])
    assert (shell.owner.dropped, reports(shell, request)) == ({"stale": 1}, [])
    shell.serve(request)
    assert cause_of(shell, request) is None


def test_what_attempt_1_told_is_not_told_by_attempt_2() -> None:
    for make in (at_another_source, at_the_same_source):
        shell, request = make()
        shell.progress(request, Span(2, 3, 0, 4))  # layer 1 is missing still
        shell.final(request)
        ((cause, reason),) = reports(shell, request)
        assert (cause, "was never told" in reason) == (Cause.MALFORMED, True)


def test_what_attempt_1_landed_is_not_landed_for_attempt_2() -> None:
    shell = Shell(slots=(1, 1))
    request = shell.submit(policy=TWICE)
    shell.progress(request)
    shell.final(request)
    shell.land()  # all of it: attempt 1 could be published
    shell.publish_refused(request)
    shell.progress(request)
    shell.final(request)
    commands = shell.begin()
    assert [c.attempt for c in commands] == [AttemptId(*request, 2)]
    assert len(shell.all(Publish)) == 1
    shell.done(commands[0].import_id)
    assert [p.attempt for p in shell.all(Publish)] == [AttemptId(*request, n) for n in (1, 2)]
    shell.publish(request)
    assert cause_of(shell, request) is None


def test_what_attempt_1_had_queued_is_never_imported() -> None:
    shell = Shell(slots=(1, 1))
    request = shell.submit(policy=TWICE)
    shell.progress(request)
    shell.failed(request)
    assert shell.begin() == []
    shell.serve(request)
    assert {c.attempt for c in shell.all(StartImport)} == {AttemptId(*request, 2)}


def test_the_fences_of_attempt_1_are_in_before_attempt_2_begins_and_come_once() -> None:
    shell = Shell(slots=(1, 1))
    request = shell.submit(policy=TWICE)
    shell.progress(request)
    shell.begin()
    shell.failed(request)
    shell.done(ImportId(0))
    shell.progress(request)
    assert [c.import_id for c in shell.begin()] == [1]  # an id is never used again
    before = trace(shell)
    with pytest.raises(LocalProtocolError, match="import 0 is not in flight"):
        shell.done(ImportId(0))
    with pytest.raises(LocalProtocolError, match="import 0 is not in flight"):
        shell.import_failed(ImportId(0))
    assert trace(shell) == before


@pytest.mark.parametrize("actual", [0xAB, 0xAC])
def test_a_digest_of_attempt_1_says_nothing_of_attempt_2(actual: int) -> None:
    shell, request, check = stamped(policy=TWICE)
    shell.add_source(1, 1)
    shell.failed(request)
    shell.checked(check, actual)
    shell.progress(request, WHOLE, digests=(0xCD,))
    shell.final(request)
    shell.land()
    assert not shell.all(Publish)
    with pytest.raises(LocalProtocolError, match="is not in flight"):
        shell.checked(check, actual)
    second = shell.all(CheckDigest)[-1]
    assert (second.attempt, second.expected) == (AttemptId(*request, 2), 0xCD)
    shell.checked(second, 0xCD)
    shell.publish(request)
    assert cause_of(shell, request) is None


def test_completions_of_attempt_1_are_our_own_bug() -> None:
    shell, request = at_another_source()
    owner, first = shell.owner, AttemptId(*request, 1)
    calls: list[Callable[[], object]] = [
        lambda: owner.published(first, 0),
        lambda: owner.publish_refused(first, "x", 0),
        lambda: owner.reserve_refused(first, "x", 0),
        lambda: owner.device_failed(first, "x", 0),
        lambda: owner.reinstate(first, 0),
    ]
    for call in calls:
        before = trace(shell)
        with pytest.raises(LocalProtocolError):
            call()
        assert trace(shell) == before
    complete(shell, request)


def test_the_source_of_attempt_1_dies_and_attempt_2_lives_on() -> None:
    shell, request = at_another_source()
    shell.died(0)
    complete(shell, request)


def test_the_source_of_attempt_1_is_killed_for_its_token_and_attempt_2_lives_on() -> None:
    shell, request = at_another_source()
    shell.tick(50)
    assert [kill.source for kill in shell.all(KillSource)] == [0]
    shell.died(0)
    complete(shell, request)


def test_a_cancel_reaches_the_attempt_that_runs() -> None:
    shell, request = at_another_source()
    shell.cancel(request)
    assert reports(shell, request) == [(Cause.CANCELLED, "cancelled by the caller")]
    shell.released(request, at=0)
    assert slots(shell) == {"free": 1, "draining": 1}
    shell.released(request, at=1)
    assert (slots(shell), lanes(shell)) == ({"free": 2}, {"free": 1})
    assert state(shell, request) is S.ENDED


def test_three_attempts_never_hear_one_another() -> None:
    shell = Shell(slots=(3,))
    request = shell.submit(policy=FailurePolicy(3))
    for _ in range(2):
        shell.progress(request, Span(0, 1, 0, 4))
        shell.failed(request)
        shell.released(request)
    grants = shell.grants_of(request)
    assert [g.attempt.attempt for g in grants] == [1, 2, 3]
    before = trace(shell)
    for old in grants[:2]:
        for now in grants:
            identity = old.attempt, now.slot, now.generation
            shell.send(Progress(*identity, (WHOLE,), (), 0, 0, 0))
            shell.send(SourceFinal(*identity, "logits", 0, 0, 0))
            shell.send(Released(*identity))
    assert trace(shell) == before
    shell.serve(request)
    assert cause_of(shell, request) is None
