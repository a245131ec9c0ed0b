"""A request in every state, what was reported of it, and what its owner holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.ids import AttemptId, RequestId, Span
from headrace.messages import Computing, Failed, Progress, Released, SourceFinal
from headrace.protocol.admission import FailurePolicy
from headrace.protocol.books import AttemptMessage
from headrace.protocol.commands import (
    Cause,
    CheckDigest,
    Outcome,
    Report,
    StartImport,
    StartPrefill,
)
from headrace.protocol.handoff import HandoffState
from tests.unit.protocol.builders import Shell

WHOLE = Span(0, 3, 0, 4)
TWICE = FailurePolicy(2)
LOCALLY = FailurePolicy(1, local=True)
LOCAL = 9  # the id of the owner's own engine


def reports(shell: Shell, request: RequestId) -> list[tuple[Cause | None, str]]:
    """Cause and reason of the request's terminals; the cause is None if it was published."""
    found = [report for report in shell.all(Report) if report.request == request]
    for report in found:
        assert report.outcome is outcome_by(report.cause)
    return [(report.cause, report.reason) for report in found]


def outcome_by(cause: Cause | None) -> Outcome:
    if cause is None:
        return Outcome.PUBLISHED
    return Outcome.CANCELLED if cause is Cause.CANCELLED else Outcome.FAILED


def cause_of(shell: Shell, request: RequestId) -> Cause | None:
    """The cause of the request's only terminal."""
    ((cause, _),) = reports(shell, request)
    return cause


def state(shell: Shell, request: RequestId) -> HandoffState:
    return shell.owner.state_of(request)


def slots(shell: Shell) -> dict[str, int]:
    return {name: n for name, n in shell.owner.statistics()["slots"].items() if n}


def lanes(shell: Shell) -> dict[str, int]:
    return {name: n for name, n in shell.owner.statistics()["lanes"].items() if n}


def trace(shell: Shell) -> object:
    """What no message that is dropped may change."""
    statistics = shell.owner.statistics()
    del statistics["dropped"]
    owner = shell.owner
    return statistics, owner.snapshot(), len(shell.given), owner.next_deadline_ns()


def sources_of(shell: Shell, request: RequestId) -> list[int]:
    """Where each attempt of a request was granted a slot."""
    return [grant.source for grant in shell.grants_of(request)]


def messages_of(attempt: AttemptId, slot: int, generation: int) -> list[AttemptMessage]:
    """One of each, the write token's return last."""
    return [
        Progress(attempt, slot, generation, (WHOLE,), (), 0, 0, 0),
        Computing(attempt, slot, generation),
        SourceFinal(attempt, slot, generation, "logits", 0, 0, 0),
        Failed(attempt, slot, generation, "x"),
        Released(attempt, slot, generation),
    ]


def finish(shell: Shell, request: RequestId) -> None:
    """Everything that was out comes back."""
    for command in shell.all(StartImport):
        if shell.owner.is_in_flight(command.import_id):
            shell.done(command.import_id)
    if any(g.attempt.request == request for g in shell.all(StartPrefill)):
        shell.released(request)


# A request in each state; the options are those of its `submit`.


def in_waiting(**options: Any) -> tuple[Shell, RequestId]:
    shell = Shell(slots=(1,))
    shell.submit()
    return shell, shell.submit(**options)


def in_parked(**options: Any) -> tuple[Shell, RequestId]:
    shell = Shell()
    shell.serve(shell.submit())
    return shell, shell.submit(**options)


def in_parked_with_final(**options: Any) -> tuple[Shell, RequestId]:
    shell, request = in_parked(**options)
    shell.progress(request)
    shell.final(request)
    return shell, request


def in_reserved(**options: Any) -> tuple[Shell, RequestId]:
    shell = Shell(lanes=2, slots=(1,))
    shell.submit()
    return shell, shell.submit(**options)


def in_streaming(**options: Any) -> tuple[Shell, RequestId]:
    shell = Shell()
    request = shell.submit(**options)
    shell.progress(request, Span(0, 1, 0, 4))
    return shell, request


def in_streaming_with_import(**options: Any) -> tuple[Shell, RequestId]:
    shell, request = in_streaming(**options)
    shell.begin()
    return shell, request


def in_sealed_with_import(**options: Any) -> tuple[Shell, RequestId]:
    shell = Shell()
    request = shell.submit(**options)
    shell.progress(request)
    shell.final(request)
    shell.begin()
    return shell, request


def in_published(**options: Any) -> tuple[Shell, RequestId]:
    shell = Shell()
    request = shell.submit(**options)
    shell.progress(request)
    shell.final(request)
    shell.land()
    shell.publish(request)
    return shell, request


MADE: dict[str, Callable[..., tuple[Shell, RequestId]]] = {
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


def stamped(**options: Any) -> tuple[Shell, RequestId, CheckDigest]:
    """One whose digest is being checked."""
    shell = Shell()
    request = shell.submit(digest=True, **options)
    shell.progress(request, WHOLE, digests=(0xAB,))
    shell.final(request)
    shell.land()
    (check,) = shell.all(CheckDigest)
    return shell, request, check


# What a source does wrong to an attempt that was granted and has told nothing.


def stall(shell: Shell, request: RequestId) -> None:
    shell.tick(shell.now_ns + shell.owner.limits.progress_timeout_ns)


def die(shell: Shell, request: RequestId) -> None:
    shell.died(shell.grants_of(request)[-1].source)


def send_no_message(shell: Shell, request: RequestId) -> None:
    shell.undecodable(shell.grants_of(request)[-1].source)


def tell_too_much(shell: Shell, request: RequestId) -> None:
    shell.progress(request, Span(0, 4, 0, 4))


def stamp_wrongly(shell: Shell, request: RequestId) -> None:
    shell.progress(request, digests=(1,))
    shell.land()
    shell.checked(shell.all(CheckDigest)[-1], 2)


def leave_poison(shell: Shell, request: RequestId) -> None:
    shell.prefill(request)
    shell.land()
    shell.publish_refused(request)


FAULTS: dict[str, tuple[Cause, Callable[[Shell, RequestId], None]]] = {
    "stalled": (Cause.STALLED, stall),
    "failed": (Cause.SOURCE_FAILED, Shell.failed),
    "returned without a final": (Cause.SOURCE_FAILED, Shell.released),
    "died": (Cause.SOURCE_DIED, die),
    "malformed": (Cause.MALFORMED, tell_too_much),
    "undecodable": (Cause.MALFORMED, send_no_message),
    "a wrong digest": (Cause.CORRUPT, stamp_wrongly),
    "poison": (Cause.CORRUPT, leave_poison),
}
