"""A message to the owner: late, stale, unknown and replayed ones are counted and change nothing; a
malformed one fails its own attempt and nothing else.

Every step of `Shell` takes the owner's commands and checks its integrity.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.ids import AttemptId, ImportId, RequestId, Span
from headrace.messages import Released
from headrace.protocol.commands import (
    Cause,
    Report,
    StartImport,
)
from headrace.protocol.handoff import HandoffState
from tests.unit.protocol.builders import EPOCH, Shell
from tests.unit.protocol.scenes import (
    HOLDS_SLOT,
    MADE,
    WHOLE,
    cause_of,
    die,
    finish,
    messages_of,
    reports,
    slots,
    state,
    trace,
)

S = HandoffState


# Late, stale, unknown.


@pytest.mark.parametrize("made", [*HOLDS_SLOT, "published"])
def test_a_dead_source_is_not_heard_any_more(made: str) -> None:
    shell, request = MADE[made]()
    grant = shell.grant_of(request)
    shell.died()
    before = trace(shell)
    for count, message in enumerate(messages_of(grant.attempt, grant.slot, grant.generation), 1):
        shell.send(message)
        assert trace(shell) == before
        assert shell.owner.dropped == {"dead": count}


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
    before = trace(shell)
    for count, message in enumerate(messages_of(attempt, 0, 0), 1):
        shell.send(message, source=0)
        assert trace(shell) == before
        assert shell.owner.dropped == {"stale": count}


@pytest.mark.parametrize(("slot", "generation"), [(0, 0), (1, 0), (9, 0), (0, 1)])
def test_another_sources_attempt_is_out_of_reach(slot: int, generation: int) -> None:
    shell = Shell(lanes=2, slots=(2, 2))
    first, _ = shell.submit(), shell.submit()
    before = trace(shell)
    for count, message in enumerate(messages_of(AttemptId(*first, 1), slot, generation), 1):
        shell.send(message, source=1)
        assert trace(shell) == before
        assert shell.owner.dropped == {"stale": count}


@pytest.mark.parametrize("made", [*HOLDS_SLOT, "published"])
def test_a_message_after_the_decision_is_late_and_dropped(made: str) -> None:
    shell, request = MADE[made]()
    shell.cancel(request)
    grant = shell.grant_of(request)
    before = trace(shell)
    *late, _ = messages_of(grant.attempt, grant.slot, grant.generation)
    for count, message in enumerate(late, 1):
        shell.send(message)
        assert trace(shell) == before
        assert shell.owner.dropped == {"late": count}
    assert len(reports(shell, request)) == 1


def test_a_message_of_an_old_generation_is_stale() -> None:
    shell = Shell(slots=(1,))
    first = shell.submit()
    shell.serve(first)
    shell.retire(first)
    shell.submit()
    before = trace(shell)
    for count, message in enumerate(messages_of(AttemptId(*first, 1), 0, 0), 1):
        shell.send(message)
        assert trace(shell) == before
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
    ((cause, reason),) = reports(shell, request)
    assert cause is Cause.MALFORMED
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
    told = fault != "returned without a final"
    assert cause_of(shell, request) is (Cause.MALFORMED if told else Cause.SOURCE_FAILED)
    assert shell.owner.dropped["malformed"] == told
    assert not shell.begin(1) or shell.all(StartImport)[0].attempt.request == other
    shell.progress(other, Span(1, 3, 0, 4))
    shell.final(other)
    shell.released(other)
    shell.land()
    for command in shell.all(StartImport):
        if shell.owner.is_in_flight(command.import_id):
            shell.done(command.import_id)
    shell.publish(other)
    assert cause_of(shell, other) is None


@pytest.mark.parametrize("again", [Shell.final, Shell.progress, Shell.failed])
def test_more_after_the_final_fails_the_attempt_and_the_owner_lives(
    again: Callable[[Shell, RequestId], None],
) -> None:
    shell = Shell()
    request = shell.submit()
    shell.progress(request)
    shell.final(request)
    again(shell, request)
    assert cause_of(shell, request) is Cause.MALFORMED
    assert shell.owner.dropped == {"malformed": 1}


@pytest.mark.parametrize("decided", [True, False])
@pytest.mark.parametrize("which", range(5))
def test_a_source_that_gave_its_write_token_back_has_no_say_any_more(
    which: int, decided: bool
) -> None:
    shell = Shell()
    request = shell.submit()
    shell.prefill(request)
    shell.begin()
    if decided:
        shell.cancel(request)
    before, grant = trace(shell), shell.grant_of(request)
    shell.send(messages_of(grant.attempt, grant.slot, grant.generation)[which])
    assert trace(shell) == before
    assert shell.owner.dropped == {"late": 1}
    shell.done(ImportId(0))
    if not decided:
        shell.publish(request)
    assert slots(shell) == {"free": 2}


@pytest.mark.parametrize("slot", [0, 1])
def test_no_lease_of_its_own_is_asked_of_a_source_that_gave_its_write_token_back(slot: int) -> None:
    shell = Shell()
    request = shell.submit()
    shell.prefill(request)
    before, attempt = trace(shell), shell.attempt_of(request)
    for message in messages_of(attempt, slot, 1):
        shell.send(message)
        assert trace(shell) == before
    assert shell.owner.dropped == {"stale": 5}


FAULT = "token 99999 is outside the vocabulary"


@pytest.mark.parametrize("which", range(5))
def test_what_the_shell_finds_wrong_fails_the_attempt_and_not_the_return_of_its_token(
    which: int,
) -> None:
    shell = Shell()
    request = shell.submit()
    grant = shell.grant_of(request)
    message = messages_of(grant.attempt, grant.slot, grant.generation)[which]
    shell.send(message, fault=FAULT)
    returned = isinstance(message, Released)
    cause, reason = reports(shell, request)[0]
    assert cause is (Cause.SOURCE_FAILED if returned else Cause.MALFORMED)
    assert (reason == FAULT, shell.owner.dropped["malformed"]) == (not returned, not returned)
    assert slots(shell) == ({"free": 2} if returned else {"free": 1, "draining": 1})


@pytest.mark.parametrize("made", ["decided", "stale"])
def test_what_is_wrong_with_a_message_that_is_dropped_is_of_no_interest(made: str) -> None:
    shell = Shell()
    request = shell.submit()
    grant = shell.grant_of(request)
    if made == "decided":
        shell.cancel(request)
    before = trace(shell)
    attempt = AttemptId(*request, 1 if made == "decided" else 2)
    shell.send(messages_of(attempt, grant.slot, grant.generation)[0], source=0, fault=FAULT)
    assert trace(shell) == before
    assert shell.owner.dropped == {"late" if made == "decided" else "stale": 1}


@pytest.mark.parametrize("made", HOLDS_SLOT)
def test_what_is_no_message_fails_the_attempt_that_its_source_runs(made: str) -> None:
    shell, request = MADE[made]()
    others = {r.request for r in shell.all(Report)}
    shell.undecodable()
    assert reports(shell, request) == [(Cause.MALFORMED, "not a message")]
    assert {r.request for r in shell.all(Report)} == others | {request}
    assert shell.owner.dropped == {"undecodable": 1}
    finish(shell, request)
    assert state(shell, request) is S.ENDED


RUNS_NOTHING: dict[str, Callable[[Shell, RequestId], object]] = {
    "decided": Shell.cancel,
    "returned": Shell.prefill,
    "dead": die,
}


@pytest.mark.parametrize("made", RUNS_NOTHING)
def test_what_is_no_message_of_a_source_that_runs_nothing_fails_nobody(made: str) -> None:
    shell = Shell()
    RUNS_NOTHING[made](shell, shell.submit())
    before = trace(shell)
    shell.undecodable()
    assert trace(shell) == before
    assert shell.owner.dropped == {"undecodable": 1}


def test_what_is_no_message_of_a_source_that_ran_nothing_yet_fails_nobody() -> None:
    shell = Shell()
    before = trace(shell)
    shell.undecodable()
    assert trace(shell) == before
