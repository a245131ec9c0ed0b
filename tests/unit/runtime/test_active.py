"""What is measured of a request: others' decode steps between its final and its publishing."""

from __future__ import annotations

import time

import pytest

from headrace.backends.base import Entry, Reservation
from headrace.backends.null import decoder_like
from headrace.backends.replay import open as open_replay
from headrace.ids import AttemptId, RequestId
from headrace.messages import Progress, SourceFinal
from headrace.plan import compile_plan
from headrace.protocol.commands import Cause
from headrace.runtime.active import Active, reason_of
from headrace.runtime.requests import Request, RequestOptions

FINAL, PUBLISHED = 1000, 2000


def in_the_way(*steps: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> int:
    """Of these steps, before publishing at 2000; the final was ready at 1000 and told last."""
    attempt = AttemptId(1, 2, 1)
    active = Active(attempt, Request(RequestId(1, 2), 4, RequestOptions()), [1, 2, 3, 4])
    manifest = open_replay({"layers": 1}).manifest()
    active.plan = compile_plan(decoder_like(manifest), manifest.layouts[0], 4, 4)
    for step in steps:
        active.record.neighbour_decoded(*step)
    active.record.heard(SourceFinal(attempt, 0, 0, "logits", 0, 0, FINAL), None)
    monkeypatch.setattr(time, "monotonic_ns", lambda: PUBLISHED)
    active.published(Entry(0, 4, 1))
    active.record.neighbour_decoded(PUBLISHED, PUBLISHED + 500)
    active.end("finished", "", None)
    assert active.request.measured is not None
    return active.request.measured.decode_in_the_way_ns


@pytest.mark.parametrize(
    ("steps", "ns"),
    [
        ([], 0),
        ([(0, 900)], 0),  # before the final
        ([(0, FINAL)], 0),
        ([(800, 1300)], 300),  # a step that the final came in the middle of
        ([(1200, 1500)], 300),
        ([(0, PUBLISHED)], PUBLISHED - FINAL),
        ([(100, 200), (900, 1100), (1400, 1600), (1700, 1800)], 400),
        ([(at, at + 1) for at in range(1000)] + [(1500, 1600)], 100),
    ],
)
def test_a_step_in_the_way_counts_where_it_overlaps(
    steps: list[tuple[int, int]], ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert in_the_way(*steps, monkeypatch=monkeypatch) == ns


def test_a_retry_begins_anew_and_keeps_what_is_held() -> None:
    attempt = AttemptId(1, 2, 1)
    request = Request(RequestId(1, 2), 4, RequestOptions(trace=True))
    active = Active(attempt, request, [1, 2, 3, 4])
    manifest = open_replay({"layers": 1}).manifest()
    plan = active.plan = compile_plan(decoder_like(manifest), manifest.layouts[0], 4, 4)
    active.held = Reservation(0, 4, 7)
    active.callback_error = "boom"
    active.imported(plan.whole(), 1, 2, 100)
    active.record.heard(Progress(attempt, 0, 0, (plan.whole(),), (), 1, 1, 2), plan)
    active.retry("the card overheated")
    assert active.attempt == AttemptId(1, 2, 2)
    assert request.attempts == ["the card overheated"]
    assert (request.source_intervals, request.owner_intervals) == ([], [])
    assert [active.plan, active.callback_error, active.poisoned] == [None, "", None]
    assert active.reservation == Reservation(0, 4, 7)
    assert bytes(active.prompt_bytes()[:4]) == b"\1\0\0\0"
    active.plan = plan
    active.record.heard(SourceFinal(active.attempt, 0, 0, "logits", 0, 0, 10), plan)
    active.published(Entry(0, 4, 7))
    active.end("finished", "", None)
    assert request.measured is not None
    assert (request.measured.imports, request.measured.groups) == (0, 0)


def test_its_end_names_the_cause() -> None:
    request = Request(RequestId(1, 2), 1, RequestOptions())
    Active(AttemptId(1, 2, 1), request, [1]).end("failed", "why", Cause.STALLED)
    assert (request.outcome, request.reason, request.cause) == ("failed", "why", "stalled")


def test_what_an_exception_says() -> None:
    assert reason_of(ValueError("why")) == "why"
    assert reason_of(ZeroDivisionError()) == "ZeroDivisionError"
