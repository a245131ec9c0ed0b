"""The source's half of an attempt: an engine's bug raises where it is and never reaches the owner;
the messages of an attempt stay within their bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from headrace.errors import Cancelled, HeadraceError, LocalProtocolError
from headrace.ids import Span
from headrace.messages import (
    MAX_PROGRESS,
    MAX_SPANS,
    MAX_TEXT,
    Failed,
    Progress,
    Released,
    SourceFinal,
    decode_from_source,
    encode,
)
from headrace.protocol.source import SourceAttempt, SourceState
from tests.unit.protocol.builders import (
    CONTEXT,
    FULL,
    HYBRID,
    attempt_id,
    cells_of,
    grant,
    make_plan,
    trace_of,
)

N = 4
WHOLE = Span(0, 3, 0, N)
A = attempt_id()
S = SourceState


def idle(*, digest: bool = False, num_tokens: int = N) -> SourceAttempt:
    return SourceAttempt(grant(num_tokens, digest=digest), make_plan(num_tokens, *FULL))


def running(*, digest: bool = False, num_tokens: int = N) -> SourceAttempt:
    attempt = idle(digest=digest, num_tokens=num_tokens)
    attempt.start(10)
    return attempt


def complete() -> SourceAttempt:
    attempt = running()
    attempt.commit([WHOLE], [], 20)
    return attempt


def final_given() -> SourceAttempt:
    attempt = complete()
    attempt.final(None, 25, 30)
    return attempt


def failed() -> SourceAttempt:
    attempt = running()
    attempt.fail("engine")
    return attempt


def cancelling() -> SourceAttempt:
    attempt = running()
    attempt.cancel()
    return attempt


def done() -> SourceAttempt:
    attempt = final_given()
    attempt.returned()
    return attempt


MADE: dict[str, Callable[[], SourceAttempt]] = {
    "idle": idle,
    "running": running,
    "complete": complete,
    "final given": final_given,
    "failed": failed,
    "cancelling": cancelling,
    "done": done,
}
EVENTS: dict[str, Callable[[SourceAttempt], object]] = {
    "start": lambda a: a.start(40),
    "check": lambda a: a.check_running(),
    "commit": lambda a: a.commit([WHOLE], [], 40),
    "final": lambda a: a.final(None, 40, 40),
    "fail": lambda a: a.fail("engine"),
    "cancel": lambda a: a.cancel(),
    "return": lambda a: a.returned(),
}
LEGAL: dict[str, dict[str, SourceState]] = {
    "idle": {"start": S.RUNNING},
    "running": {
        "check": S.RUNNING,
        "commit": S.RUNNING,
        "fail": S.RUNNING,
        "cancel": S.CANCELLING,
        "return": S.DONE,
    },
    "complete": {
        "check": S.RUNNING,
        "final": S.RUNNING,
        "fail": S.RUNNING,
        "cancel": S.CANCELLING,
        "return": S.DONE,
    },
    "final given": {"fail": S.RUNNING, "cancel": S.CANCELLING, "return": S.DONE},
    "failed": {"fail": S.RUNNING, "cancel": S.CANCELLING, "return": S.DONE},
    "cancelling": {"fail": S.CANCELLING, "cancel": S.CANCELLING, "return": S.DONE},
    "done": {"fail": S.DONE, "cancel": S.DONE},
}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("made", MADE)
def test_every_event_in_every_state_is_legal_or_leaves_no_trace(made: str, event: str) -> None:
    attempt = MADE[made]()
    before = trace_of(attempt)
    if event in LEGAL[made]:
        EVENTS[event](attempt)
        assert attempt.state is LEGAL[made][event]
    else:
        with pytest.raises(HeadraceError):
            EVENTS[event](attempt)
        assert trace_of(attempt) == before


@pytest.mark.parametrize("event", ["check", "commit", "final"])
def test_a_sink_call_of_a_cancelled_attempt_stops_the_engine(event: str) -> None:
    with pytest.raises(Cancelled, match=f"attempt {A} was cancelled"):
        EVENTS[event](cancelling())


@pytest.mark.parametrize("event", ["check", "commit", "final"])
@pytest.mark.parametrize("made", ["final given", "failed"])
def test_nothing_is_announced_after_the_last_word(made: str, event: str) -> None:
    with pytest.raises(LocalProtocolError, match="the final was given already"):
        EVENTS[event](MADE[made]())


@pytest.mark.parametrize("made", ["final given", "failed", "cancelling", "done"])
def test_a_failure_after_the_last_word_is_not_told(made: str) -> None:
    assert MADE[made]().fail("late") == []


@pytest.mark.parametrize("made", ["running", "complete", "final given", "failed", "cancelling"])
def test_the_last_message_gives_the_write_token_back_once(made: str) -> None:
    attempt = MADE[made]()
    assert attempt.returned() == Released(A, 0, 0)
    with pytest.raises(LocalProtocolError):
        attempt.returned()


def test_a_commit_is_announced_with_its_times() -> None:
    attempt = running()
    assert attempt.commit([Span(0, 1, 0, N)], [], 20) == [
        Progress(A, 0, 0, (Span(0, 1, 0, N),), (), 10, 20)
    ]
    assert attempt.commit([Span(1, 3, 0, N)], [], 30) == [
        Progress(A, 0, 0, (Span(1, 3, 0, N),), (), 20, 30)
    ]
    assert attempt.final(None, 28, 40) == [SourceFinal(A, 0, 0, "logits", 0, 10, 28)]


@pytest.mark.parametrize("token", [0, 5])
def test_a_final_may_be_a_token(token: int) -> None:
    assert complete().final(token, 25, 30) == [SourceFinal(A, 0, 0, "token", token, 10, 25)]


def test_committing_nothing_announces_nothing() -> None:
    assert running().commit([], [], 20) == []


@pytest.mark.parametrize(
    "spans",
    [
        [Span(0, 1, 0, N), Span(0, 1, 3, N)],
        [Span(0, 4, 0, N)],
        [Span(0, 1, 0, N + 1)],
        [Span(0, 1, 0, 2), Span(1, 1, 0, 2)],
    ],
)
def test_a_commit_outside_the_plan_raises_in_the_engine_and_leaves_no_trace(
    spans: list[Span],
) -> None:
    attempt = running()
    before = trace_of(attempt)
    with pytest.raises(LocalProtocolError, match=f"attempt {A}: the engine committed layer"):
        attempt.commit(spans, [], 20)
    assert trace_of(attempt) == before
    attempt.commit([WHOLE], [], 20)


def test_a_cell_committed_before_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="told before"):
        complete().commit([Span(2, 3, 3, N)], [], 30)


def test_a_final_with_missing_cells_is_refused_and_may_follow_them() -> None:
    attempt = running()
    attempt.commit([Span(0, 2, 0, N)], [], 20)
    with pytest.raises(LocalProtocolError, match=r"layers \[2, 3\) x positions \[0, 4\)"):
        attempt.final(None, 25, 25)
    attempt.commit([Span(2, 3, 0, N)], [], 30)
    assert isinstance(attempt.final(None, 35, 35)[-1], SourceFinal)


@pytest.mark.parametrize("digest", [True, False])
@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_there_is_one_digest_per_span_where_asked_for_and_none_where_not(
    digest: bool, count: int
) -> None:
    attempt = running(digest=digest)
    spans = [Span(0, 1, 0, N), Span(1, 2, 0, N)]
    before = trace_of(attempt)
    if count == (2 if digest else 0):
        (message,) = attempt.commit(spans, range(count), 20)
        assert message.digests == tuple(range(count))
    else:
        with pytest.raises(LocalProtocolError, match=f"2 spans with {count} digests"):
            attempt.commit(spans, range(count), 20)
        assert trace_of(attempt) == before


def test_a_failure_drops_what_was_held_and_its_reason_can_travel() -> None:
    for reason in ("engine: \ud800 lone surrogate", "x" * (MAX_TEXT + 1)):
        (message,) = running().fail(reason)
        assert decode_from_source(encode(message)) == message
        assert isinstance(message, Failed)
        assert len(message.reason) <= MAX_TEXT


# The bound on messages.


def single_spans(count: int) -> list[Span]:
    """The first `count` cells of a model of 128 full layers and CONTEXT positions."""
    return [
        Span(at // CONTEXT, at // CONTEXT + 1, at % CONTEXT, at % CONTEXT + 1)
        for at in range(count)
    ]


BIG = make_plan(CONTEXT, *FULL[:1] * 128)


def emit(sizes: Sequence[int], *, digest: bool = False) -> list[Progress | SourceFinal | Released]:
    """All messages of an attempt that commits so many spans at once, one commit after the other."""
    attempt = SourceAttempt(grant(CONTEXT, digest=digest), BIG)
    attempt.start(0)
    spans, at = single_spans(sum(sizes)), 0
    sent: list[Progress | SourceFinal | Released] = []
    for size in sizes:
        batch = spans[at : at + size]
        if at + size == sum(sizes):  # the last one covers what is left of the model
            rest = [Span(layer, layer + 1, 0, CONTEXT) for layer in range(128)]
            last = batch[-1]
            batch[-1] = last._replace(stop=CONTEXT)
            batch += rest[last.layer_start + 1 :]
        sent += attempt.commit(batch, [hash(s) & 0xFF for s in batch] if digest else [], at)
        at += size
    sent += attempt.final(None, 0, 0)
    return [*sent, attempt.returned()]


MAX_ONE_BY_ONE = 64 + 61 * MAX_SPANS  # then one message is left for what the final sends along


@pytest.mark.parametrize(
    "sizes",
    [
        [1],
        [1] * 64,
        [1] * 65,
        [1] * 129,
        [1] * 1000,
        [1] * MAX_ONE_BY_ONE,
        [MAX_SPANS] * 120,
        [MAX_SPANS + 1] * 60,
        [7] * 500,
        [7800],
        [1] * 64 + [63, 65] * 20,
        [1] * 63 + [MAX_SPANS * 61],
        [5, 200, 1, 64] * 10,
    ],
    ids=lambda sizes: f"{len(sizes)} commits of {sum(sizes)}",
)
@pytest.mark.parametrize("digest", [False, True])
def test_an_attempt_never_sends_more_messages_than_its_bound(
    sizes: list[int], digest: bool
) -> None:
    sent = emit(sizes, digest=digest)
    assert len(sent) <= MAX_PROGRESS
    told = [message for message in sent if isinstance(message, Progress)]
    assert all(1 <= len(message.spans) <= MAX_SPANS for message in told)
    spans = [span for message in told for span in message.spans]
    assert sorted(cells_of(BIG, *spans)) == sorted(cells_of(BIG, BIG.whole()))
    if digest:
        stamps = [stamp for message in told for stamp in message.digests]
        assert stamps == [hash(span) & 0xFF for span in spans]
    assert [type(message) for message in sent[-2:]] == [SourceFinal, Released]


def test_the_first_half_is_announced_at_once_and_the_rest_waits_for_full_messages() -> None:
    sizes = [len(m.spans) for m in emit([1] * 1000) if isinstance(m, Progress)]
    assert sizes[:64] == [1] * 64
    assert set(sizes[64:-1]) == {MAX_SPANS}


@pytest.mark.parametrize("sizes", [[1] * 8000, [8128], [MAX_SPANS + 1] * 120, [1] * 64 + [8000]])
def test_more_spans_than_the_messages_can_carry_raise_in_the_engine(sizes: list[int]) -> None:
    attempt = SourceAttempt(grant(CONTEXT), BIG)
    attempt.start(0)
    spans, at, sent = single_spans(sum(sizes)), 0, 0
    with pytest.raises(LocalProtocolError, match="use larger layer groups or chunks"):
        for size in sizes:
            before = trace_of(attempt) if size > 100 else b""
            sent += len(attempt.commit(spans[at : at + size], [], 0))
            at += size
    assert sent <= MAX_PROGRESS - 2
    if before:
        assert trace_of(attempt) == before
    assert [type(m) for m in (*attempt.fail("too many"), attempt.returned())] == [Failed, Released]


def test_a_cancel_drops_the_held_spans() -> None:
    attempt = SourceAttempt(grant(CONTEXT), BIG)
    attempt.start(0)
    sent = [message for span in single_spans(70) for message in attempt.commit([span], [], 0)]
    assert len(sent) == 64
    attempt.cancel()
    assert attempt.fail("cancelled") == []
    assert attempt.returned() == Released(A, 0, 0)


def test_a_hybrid_model_may_be_committed_with_spans_that_hold_no_cells() -> None:
    plan = make_plan(9, *HYBRID)
    attempt = SourceAttempt(grant(9), plan)
    attempt.start(0)
    for span in (Span(0, 1, 0, 5), Span(3, 4, 0, 9), plan.whole()):
        assert len(attempt.commit([span], [], 0)) == 1
    assert len(attempt.final(None, 0, 0)) == 1
