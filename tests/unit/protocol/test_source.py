"""The source's half of an attempt: an engine's bug raises where it is and never reaches the owner;
the messages of an attempt stay within their bound.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from typing import TypeAlias, get_args

import msgspec
import pytest

from headrace.errors import Cancelled, HeadraceError, LocalProtocolError
from headrace.geometry import Emission, Full, Sliding
from headrace.ids import Span
from headrace.messages import (
    MAX_PROGRESS,
    MAX_SPANS,
    MAX_TEXT,
    Computing,
    DeviceTimes,
    Failed,
    Progress,
    Released,
    Route,
    SourceFinal,
    decode_from_source,
    encode,
)
from headrace.plan import Plan
from headrace.protocol.books import Limits
from headrace.protocol.commands import Outcome
from headrace.protocol.owner import Owner
from headrace.protocol.source import HEARTBEAT_NS, SourceAttempt, SourceState, expected_spans
from tests.unit.protocol.builders import (
    CONTEXT,
    EPOCH,
    FULL,
    HYBRID,
    ROW_NBYTES,
    WINDOW,
    attempt_id,
    cells_of,
    grant,
    make_plan,
    trace_of,
)
from tests.unit.protocol.ends import Ends

FromAttempt: TypeAlias = Computing | Progress | SourceFinal | Failed | Released

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


def broken() -> SourceAttempt:
    attempt = complete()
    with pytest.raises(LocalProtocolError):
        attempt.check_writable([WHOLE])
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
    "broken": broken,
    "cancelling": cancelling,
    "done": done,
}
EVENTS: dict[str, Callable[[SourceAttempt], object]] = {
    "start": lambda a: a.start(40),
    "check": lambda a: a.check_running(),
    "write": lambda a: a.check_writable([]),
    "computing": lambda a: a.computing(40),
    "commit": lambda a: a.commit([], [], 40),
    "final": lambda a: a.final(None, 40, 40),
    "fail": lambda a: a.fail("engine"),
    "cancel": lambda a: a.cancel(),
    "return": lambda a: a.returned(),
}
LEGAL: dict[str, dict[str, SourceState]] = {
    "idle": {"start": S.RUNNING},
    "running": {
        "check": S.RUNNING,
        "write": S.RUNNING,
        "computing": S.RUNNING,
        "commit": S.RUNNING,
        "fail": S.RUNNING,
        "cancel": S.CANCELLING,
        "return": S.DONE,
    },
    "complete": {
        "check": S.RUNNING,
        "write": S.RUNNING,
        "computing": S.RUNNING,
        "commit": S.RUNNING,
        "final": S.RUNNING,
        "fail": S.RUNNING,
        "cancel": S.CANCELLING,
        "return": S.DONE,
    },
    "final given": {"fail": S.RUNNING, "cancel": S.CANCELLING, "return": S.DONE},
    "failed": {"fail": S.RUNNING, "cancel": S.CANCELLING, "return": S.DONE},
    "broken": {"fail": S.RUNNING, "cancel": S.CANCELLING, "return": S.DONE},
    "cancelling": {"fail": S.CANCELLING, "cancel": S.CANCELLING, "return": S.DONE},
    "done": {"fail": S.DONE, "cancel": S.DONE},
}


@pytest.mark.parametrize("made", MADE)
def test_every_event_in_every_state_is_legal_or_leaves_no_trace(made: str) -> None:
    for event in EVENTS:
        check_event(made, event)


def check_event(made: str, event: str) -> None:
    attempt = MADE[made]()
    before = trace_of(attempt)
    if event in LEGAL[made]:
        EVENTS[event](attempt)
        assert attempt.state is LEGAL[made][event]
    else:
        with pytest.raises(HeadraceError):
            EVENTS[event](attempt)
        assert trace_of(attempt) == before


SINK_CALLS = ["check", "write", "computing", "commit", "final"]


@pytest.mark.parametrize("event", SINK_CALLS)
def test_a_sink_call_of_a_cancelled_attempt_stops_the_engine(event: str) -> None:
    with pytest.raises(Cancelled, match=f"attempt {A} was cancelled"):
        EVENTS[event](cancelling())


@pytest.mark.parametrize("event", SINK_CALLS)
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
        Progress(A, 0, 0, (Span(0, 1, 0, N),), (), 10, 20, 20)
    ]
    assert attempt.commit([Span(1, 3, 0, N)], [], 30, write_ns=25) == [
        Progress(A, 0, 0, (Span(1, 3, 0, N),), (), 20, 25, 30)
    ]
    assert attempt.final(None, 28, 40) == [SourceFinal(A, 0, 0, "logits", 0, 10, 28)]


def test_a_commit_is_announced_with_its_devices_times() -> None:
    attempt = running()
    times = DeviceTimes(11, 14, 1), DeviceTimes(15, 18, 2)
    (told,) = attempt.commit([Span(0, 1, 0, N)], [], 20, computed=times[0], copied=times[1])
    assert (told.computed, told.copied) == times
    (untold,) = attempt.commit([Span(1, 3, 0, N)], [], 30)
    assert (untold.computed, untold.copied) == (None, None)


@pytest.mark.parametrize("missing", [None, 0, 1, 2])
def test_commits_that_are_told_together_are_told_from_first_to_last(missing: int | None) -> None:
    """If a device did not tell of one of them, it did not tell of them all."""
    attempt = emitter([150])
    spans = single_spans(6)
    sent: list[Progress] = []
    for at, span in enumerate(spans):
        ran = None if at == missing else DeviceTimes(100 * at + 10, 100 * at + 60, at)
        sent += attempt.commit([span], [], 100 * at + 70, computed=ran, copied=ran)
    width = len(sent[0].spans)
    assert (width, len(sent)) == (2, 3)
    for at, message in enumerate(sent):
        first, last = at * width, at * width + width - 1
        whole = DeviceTimes(100 * first + 10, 100 * last + 60, last)
        hole = missing is not None and first <= missing <= last
        assert message.computed == message.copied == (None if hole else whole)


@pytest.mark.parametrize("fake", [0, 1])
def test_what_a_fake_device_did_among_others_is_told_as_fake(fake: int) -> None:
    attempt = emitter([150])
    sent: list[Progress] = []
    for at, span in enumerate(single_spans(2)):
        ran = DeviceTimes(at, at + 1, 0, "fake" if at == fake else "real")
        sent += attempt.commit([span], [], 5, computed=ran, copied=ran)
    (message,) = sent
    assert message.computed == DeviceTimes(0, 2, 0, "fake")


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
@pytest.mark.parametrize("call", ["commit", "write"])
def test_cells_outside_the_plan_raise_in_the_engine_and_break_its_attempt_for_good(
    spans: list[Span], call: str
) -> None:
    attempt = running()
    held = list(attempt._held), vars(attempt._coverage) | {"_have": [()] * 3}
    text = f"attempt {A}: the engine {'committed' if call == 'commit' else 'would write'} layer"
    with pytest.raises(LocalProtocolError, match=text):
        bring(attempt, call, spans)
    assert (attempt._held, vars(attempt._coverage)) == held
    for again in ("commit", "write", "check", "computing", "final"):
        with pytest.raises(LocalProtocolError, match=text):
            bring(attempt, again, [WHOLE])
    assert [type(m) for m in (*attempt.fail(text), attempt.returned())] == [Failed, Released]


def bring(attempt: SourceAttempt, call: str, spans: list[Span]) -> None:
    if call == "commit":
        attempt.commit(spans, [], 20)
    elif call == "write":
        attempt.check_writable(spans)
    else:
        EVENTS[call](attempt)


@pytest.mark.parametrize("call", ["commit", "write"])
def test_a_cell_told_before_is_neither_told_nor_handed_out_again(call: str) -> None:
    attempt = complete()
    with pytest.raises(LocalProtocolError, match="told before"):
        bring(attempt, call, [Span(2, 3, 3, N)])
    with pytest.raises(LocalProtocolError, match="told before"):
        attempt.final(None, 30, 30)  # all was told, and is not what lies in the slot


def test_cells_that_were_not_told_may_be_handed_out_as_often_as_asked_for() -> None:
    attempt = running()
    attempt.commit([Span(0, 1, 0, N)], [], 20)
    before = trace_of(attempt)
    for _ in range(2):
        attempt.check_writable([Span(1, 3, 0, N)])
    assert trace_of(attempt) == before


# A word of an engine that only computes.


def test_an_engine_at_work_says_so_once_in_a_heartbeat() -> None:
    attempt = running()
    for beat in (1, 2):
        due_ns = 10 + beat * HEARTBEAT_NS
        assert attempt.computing(due_ns - 1) == []
        assert attempt.computing(due_ns) == [Computing(A, 0, 0)]
        assert attempt.computing(due_ns) == []


def test_what_is_told_is_a_word_too() -> None:
    attempt = running()
    assert attempt.commit([Span(0, 1, 0, N)], [], 20)
    assert attempt.computing(20 + HEARTBEAT_NS - 1) == []
    assert attempt.computing(20 + HEARTBEAT_NS) == [Computing(A, 0, 0)]


def test_spans_without_cells_are_no_word_since_they_hold_no_deadline_off() -> None:
    plan = make_plan(N, Full(), Sliding(1, 0), Full())
    attempt = SourceAttempt(grant(N), plan)
    attempt.start(10)
    assert attempt.commit([Span(1, 2, 0, N)], [], 20)
    assert attempt.computing(10 + HEARTBEAT_NS) == [Computing(A, 0, 0)]


def test_spans_that_are_held_are_no_word() -> None:
    attempt = emitter([6000])
    span, _ = single_spans(2)
    assert attempt.commit([span], [], HEARTBEAT_NS - 1) == []
    assert attempt.computing(HEARTBEAT_NS) == [Computing(A, 0, 0)]


def test_a_final_with_missing_cells_is_refused_and_may_follow_them() -> None:
    attempt = running()
    attempt.commit([Span(0, 2, 0, N)], [], 20)
    with pytest.raises(LocalProtocolError, match=r"layers \[2, 3\) x positions \[0, 4\)"):
        attempt.final(None, 25, 25)
    attempt.commit([Span(2, 3, 0, N)], [], 30)
    assert isinstance(attempt.final(None, 35, 35)[-1], SourceFinal)


@pytest.mark.parametrize(("digest", "count"), list(product([True, False], range(4))))
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
    """The first `count` cells of a model of full layers and CONTEXT positions, each by itself."""
    places = (divmod(at, CONTEXT) for at in range(count))
    return [Span(layer, layer + 1, at, at + 1) for layer, at in places]


def plan_of(num_spans: int) -> Plan:
    """A model with just the layers that so many single cells reach."""
    return make_plan(CONTEXT, *FULL[:1] * -(-num_spans // CONTEXT))


def stamp(span: Span) -> int:
    return span.layer_start * CONTEXT + span.start


def emitter(sizes: Sequence[int], *, digest: bool = False, chunk: int = 1) -> SourceAttempt:
    """A running attempt of a model that has a cell for each span of `sizes` commits."""
    attempt = SourceAttempt(grant(CONTEXT, digest=digest, chunk=chunk), plan_of(sum(sizes)))
    attempt.start(0)
    return attempt


def emit(sizes: Sequence[int], *, digest: bool = False, chunk: int = 1) -> list[FromAttempt]:
    """All messages of an attempt that commits so many spans at once, one commit after the other.

    The last span of the last commit holds all that is left of the model.
    """
    attempt = emitter(sizes, digest=digest, chunk=chunk)
    spans, at = single_spans(sum(sizes)), 0
    spans[-1] = spans[-1]._replace(stop=CONTEXT)
    sent: list[FromAttempt] = []
    for size in sizes:
        batch = spans[at : at + size]
        sent += attempt.commit(batch, [stamp(span) for span in batch] if digest else [], at)
        at += size
    sent += attempt.final(None, 0, 0)
    return [*sent, attempt.returned()]


MAX_AT_ONCE = (MAX_PROGRESS - 2) * MAX_SPANS


def told_sizes(sizes: list[int]) -> str:
    return f"{len(sizes)} commits of {sum(sizes)} spans"


@pytest.mark.parametrize(
    "sizes",
    [
        [1],
        [1] * 97,
        [1] * 8000,
        [MAX_SPANS] * 126,
        [7] * 1150,
        [MAX_AT_ONCE],
        [1] * 64 + [63, 65] * 20,
        [5, 200, 1, 64] * 10,
    ],
    ids=told_sizes,
)
@pytest.mark.parametrize("digest", [False, True], ids=["", "digest"])
def test_an_attempt_never_sends_more_messages_than_its_bound(
    sizes: list[int], digest: bool
) -> None:
    sent = emit(sizes, digest=digest)
    assert len(sent) <= MAX_PROGRESS
    told = [message for message in sent if isinstance(message, Progress)]
    assert all(1 <= len(message.spans) <= MAX_SPANS for message in told)
    spans = [span for message in told for span in message.spans]
    plan = plan_of(sum(sizes))
    assert sorted(cells_of(plan, *spans)) == sorted(cells_of(plan, plan.whole()))
    if digest:
        stamps = [value for message in told for value in message.digests]
        assert stamps == [stamp(span) for span in spans]
    assert [type(message) for message in sent[-2:]] == [SourceFinal, Released]


@pytest.mark.parametrize("chunk", [1, 3, 0])
def test_no_sequence_of_commits_goes_over_the_bound(chunk: int) -> None:
    shuffled = random.Random(chunk)
    for _ in range(12):
        most = shuffled.choice([3, 60, 64, 70, 200, 2000])
        sizes = [shuffled.randint(1, most) for _ in range(min(6000 // most, 60))]
        attempt = emitter(sizes, chunk=chunk)
        sent, refused = told_until_refused(attempt, sizes)
        closing = attempt.fail("too many") if refused else []
        assert sent + len(closing) + 1 <= MAX_PROGRESS
        if not refused:  # what is still held goes out with the final, which counts as closing
            assert sent + 2 + -(-len(attempt._held) // MAX_SPANS) <= MAX_PROGRESS


def test_few_spans_are_announced_one_by_one() -> None:
    told = [len(m.spans) for m in emit([1] * 48, chunk=0) if isinstance(m, Progress)]
    assert told == [1] * 48


def test_an_engine_that_cuts_finer_than_asked_is_announced_in_ever_larger_messages() -> None:
    for size in (1, 7):
        sizes = [size] * (1000 // size)
        told = [len(m.spans) for m in emit(sizes, chunk=0) if isinstance(m, Progress)]
        assert told[:96] == [size] * 96
        assert set(told[96:-1]) == {MAX_SPANS}


@pytest.mark.parametrize(
    ("route", "chunk", "first"),
    [("whole", 0, 1), ("chunked", 1, 1), ("streamed", 1, 64)],
)
def test_how_many_spans_a_message_waits_for_follows_from_the_cuts_asked_for(
    route: Route, chunk: int, first: int
) -> None:
    plan = plan_of(95 * CONTEXT)
    attempt = SourceAttempt(grant(CONTEXT, chunk=chunk, route=route), plan)
    attempt.start(0)
    for at, span in enumerate(single_spans(first), 1):
        told = attempt.commit([span], [], 0)
        assert len(told) == (at == first)


@pytest.mark.parametrize("route", get_args(Route))
@pytest.mark.parametrize("emission", get_args(Emission))
def test_the_spans_of_an_engine_that_cuts_as_it_was_asked_to_are_foreseen(
    route: Route, emission: Emission
) -> None:
    for n, at_once, chunk in product([1, 5, 12, CONTEXT], [0, 1, 5, 12, 500], [0, 1, 4, 5, 500]):
        plan, step = make_plan(n, *HYBRID), at_once or n
        computed = [(at, min(at + step, n)) for at in range(0, n, step)]
        num_spans = sum(len(range(start, stop, chunk or n)) for start, stop in computed)
        if route == "streamed":
            num_spans *= sum(map(len, plan.layer_groups(2, emission)))
        prefill = msgspec.structs.replace(
            grant(n, chunk=chunk, route=route),
            prefill_chunk=at_once,
            group_layers=2,
            emission=emission,
        )
        if route == "whole":
            num_spans = 1
        assert expected_spans(prefill, plan) == num_spans
        assert SourceAttempt(prefill, plan)._stride == -(-num_spans // 96)


def test_cuts_of_the_computation_are_foreseen_from_the_first_position_to_emit_on() -> None:
    for n, start, cuts, at_once, chunk in product(
        [12, CONTEXT], [0, 5, 11], [(), (3,), (3, 7), (2, 11)], [0, 1, 5], [0, 1, 4]
    ):
        asked = tuple(sorted({*cuts, *([start] if start else [])}))
        edges = [start, *(cut for cut in asked if start < cut), n]
        step = at_once or n
        computed = [
            (at, min(at + step, stop))
            for begin, stop in pairwise(edges)
            for at in range(begin, stop, step)
        ]
        prefill = msgspec.structs.replace(
            grant(n, chunk=chunk, route="chunked"), prefill_chunk=at_once, start=start, cuts=asked
        )
        num_spans = sum(len(range(begin, stop, chunk or n)) for begin, stop in computed)
        assert expected_spans(prefill, make_plan(n, *HYBRID, start=start)) == num_spans


def test_what_waits_for_its_message_keeps_the_time_at_which_it_began() -> None:
    attempt = emitter([256], chunk=0)
    spans = single_spans(256)
    for at in range(96):
        attempt.commit(spans[at : at + 1], [], at + 1)
    assert attempt.commit([], [], 97) == []
    (full,) = attempt.commit(spans[96:162], [], 100)
    assert (full.begun_ns, full.ready_ns) == (96, 100)
    (rest,) = attempt.commit(spans[162:224], [], 200)
    assert (rest.begun_ns, rest.ready_ns) == (96, 200)


def told_until_refused(attempt: SourceAttempt, sizes: Sequence[int]) -> tuple[int, str]:
    """How many messages were sent until a commit was refused, and the text; empty if none was."""
    spans, at, sent = single_spans(sum(sizes)), 0, 0
    for size in sizes:
        try:
            sent += len(attempt.commit(spans[at : at + size], [], 0))
        except LocalProtocolError as exc:
            return sent, str(exc)
        at += size
    return sent, ""


@pytest.mark.parametrize(
    ("sizes", "chunk"),
    [([1] * 4000, 0), ([MAX_AT_ONCE + 1], 1), ([1] * 64 + [8001], 1), ([1] * (MAX_AT_ONCE + 1), 1)],
)
def test_more_spans_than_the_messages_can_carry_raise_in_the_engine(
    sizes: list[int], chunk: int
) -> None:
    attempt = emitter(sizes, chunk=chunk)
    sent, text = told_until_refused(attempt, sizes)
    assert "use larger layer groups or chunks" in text
    assert sent <= MAX_PROGRESS - 2
    assert [type(m) for m in (*attempt.fail("too many"), attempt.returned())] == [Failed, Released]


def test_a_refused_batch_leaves_no_trace() -> None:
    attempt = emitter([MAX_AT_ONCE + 1])
    before = trace_of(attempt)
    with pytest.raises(LocalProtocolError):
        attempt.commit(single_spans(MAX_AT_ONCE + 1), [], 0)
    assert trace_of(attempt) == before


def test_a_cancel_drops_the_held_spans() -> None:
    attempt = emitter([200], chunk=0)
    sent = [message for span in single_spans(150) for message in attempt.commit([span], [], 0)]
    assert len(sent) < 150
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


# Two machines joined by a lossless pipe.


@pytest.mark.parametrize(
    ("route", "emission", "group_layers", "chunk"),
    [
        ("whole", "layers", 1, 0),
        ("chunked", "layers", 1, 3),
        ("streamed", "layers", 1, 0),
        ("streamed", "layers", 2, 5),
        ("streamed", "cache_groups", 1, 0),
        ("streamed", "cache_groups", 2, 1),
    ],
)
def test_what_one_end_commits_the_other_publishes(
    route: Route, emission: Emission, group_layers: int, chunk: int
) -> None:
    for n in (1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 13):
        for digest in (False, True):
            pipe(route, emission, group_layers, chunk, n, digest)


def pipe(
    route: Route, emission: Emission, group_layers: int, chunk: int, n: int, digest: bool
) -> None:
    options = msgspec.structs.replace(
        grant(n, digest=digest, chunk=chunk, route=route),
        group_layers=group_layers,
        emission=emission,
    )
    limits = Limits(num_lanes=1, context=CONTEXT, chunk_nbytes=4 * ROW_NBYTES)
    ends = Ends(Owner(EPOCH, limits), lambda n, _: make_plan(n, *HYBRID), lambda _: options)
    end = ends.sources[source := ends.add_source(1)]
    request = ends.owner.submit(n, 0, digest=digest)
    ends.obey()
    while request not in ends.ends or end.attempt or end.outbox:
        end.step()
        ends.deliver(source)
        ends.begin(1)
        for import_id in list(ends.flights)[:1]:
            ends.land(import_id)
    assert ends.ends == {request: Outcome.PUBLISHED}
    assert not ends.owner.dropped
    ends.owner.retire(request, 0)
    ends.obey()
    assert not ends.storage
    assert ends.owner.statistics()["slots"]["free"] == 1
