"""A failed attempt is followed by another, on another source where there is one; it is exact."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.backends.base import Fence, Reservation, SlotView
from headrace.errors import Refused
from headrace.ids import AttemptId, SourceId
from headrace.messages import Failed, SourceFinal
from headrace.runtime.requests import RequestOptions
from tests.faults.failing_engines import faulty
from tests.faults.lab import GEOMETRY, LAYERS, NUM_TOKENS, Lab, expected_cells, prompt

FAILING = "tests.faults.failing_engines:open_failing"
BY_FAULT = {  # what the engine does, and the cause that its caller is told
    "raises": "source-failed",
    "no final": "source-failed",
    "cell twice": "malformed",
    "garbage": "malformed",
    "stray slot": "malformed",
    "final without cells": "malformed",
    "exits": "source-died",
    "hangs up": "source-died",
    "late write": "corrupt",
}


@contextmanager
def lab(directory: Path, *faults: str, sources: int = 1, **limits: Any) -> Iterator[Lab]:
    options = {**GEOMETRY, "faults": list(faults)}
    limits = {"lanes": 3, "slots": 2} | limits
    with Lab(directory, engine=FAILING, options=options, **limits) as made:
        for _ in range(sources - 1):
            made.attach()
        yield made


def serve(made: Lab, **options: Any) -> list[str]:
    """A faulty request that is served in the end, exactly; returns why its attempts failed."""
    asked: dict[str, Any] = {"on_failure": "retry", "hold": True, "trace": True} | options
    request = made.submit(faulty(1), **asked)
    made.until_done(request)
    assert (request.outcome, request.reason, request.cause) == ("finished", "", "")
    made.assert_exact(request, faulty(1))
    assert request.measured is not None
    if asked.get("route", "streamed") == "streamed":  # what is told is of the last attempt only
        assert (request.measured.groups, len(request.imports)) == (LAYERS, LAYERS)
        assert len(request.source_intervals) == 3 * LAYERS + 1
    made.owner.release(request)
    return request.attempts


@pytest.mark.parametrize("fault", BY_FAULT)
def test_another_source_serves_what_one_failed(tmp_path: Path, fault: str) -> None:
    """Whatever it is that the source did; a neighbour of the same source is none the worse."""
    with lab(tmp_path, fault, sources=2) as made:
        neighbour = made.submit(prompt(2), hold=True)
        made.until_done(neighbour)
        (reason,) = serve(made, digest=fault == "late write")
        assert reason
        made.assert_exact(neighbour, prompt(2))
        made.owner.release(neighbour)
        made.settle()
        made.serve_exact(3)


@pytest.mark.parametrize("fault", ["raises", "cell twice", "late write"])
def test_the_same_source_serves_it_where_there_is_no_other(tmp_path: Path, fault: str) -> None:
    with lab(tmp_path, fault) as made:
        assert len(serve(made, digest=fault == "late write")) == 1
        assert made.counts("retries") == {"count": 1}
        made.settle()


@pytest.mark.parametrize("route", ["whole", "chunked", "streamed"])
@pytest.mark.parametrize("slots", [1, 2])
def test_several_attempts_fail(tmp_path: Path, route: str, slots: int) -> None:
    with lab(tmp_path, "raises", "cell twice", "no final", slots=slots) as made:
        chunk = 7 if route == "chunked" else 0
        reasons = serve(made, route=route, chunk=chunk, max_attempts=4)
        made.settle()
        assert reasons[0] == "ValueError: layer 2 went up in smoke"
        assert "told before" in reasons[1]
        assert reasons[2] == "the engine returned without its final"


@pytest.mark.parametrize("fault", BY_FAULT)
def test_the_last_attempt_ends_the_request(tmp_path: Path, fault: str) -> None:
    """Its cause and its reason are told, and those of the attempts before."""
    with lab(tmp_path, fault, fault, sources=3) as made:
        digest = fault == "late write"
        request = made.submit(faulty(1), on_failure="retry", max_attempts=2, digest=digest)
        made.until_done(request)
        assert (request.outcome, request.cause) == ("failed", BY_FAULT[fault])
        assert len(request.attempts) == 1
        assert request.tokens == []
        made.settle()
        made.serve_exact(3)


def test_by_default_the_first_failure_is_the_last(tmp_path: Path) -> None:
    with lab(tmp_path, "raises", sources=2) as made:
        request = made.submit(faulty(1))
        made.until_done(request)
        assert (request.outcome, request.cause, request.attempts) == ("failed", "source-failed", [])
        made.settle()


@pytest.mark.parametrize("max_attempts", [1, 2])
def test_one_attempt_is_no_retry(tmp_path: Path, max_attempts: int) -> None:
    with lab(tmp_path, "raises", "raises", "raises") as made:
        request = made.submit(faulty(1), on_failure="retry", max_attempts=max_attempts)
        made.until_done(request)
        assert len(request.attempts) == max_attempts - 1
        made.settle()


def test_a_killed_source(tmp_path: Path) -> None:
    """The other one goes on with the storage that the first had filled in part."""
    with Lab(tmp_path, lanes=1) as made:
        made.attach()
        made.gates[0].allow(3)
        request = made.submit(prompt(1), hold=True, on_failure="retry")
        made.until_told(request, 3)
        reserved = made.decoder._held[0]
        os.kill(made.handles[0].pid, signal.SIGKILL)
        made.gates[1].open()
        made.until_done(request)
        made.assert_exact(request, prompt(1))
        assert request.entry is not None
        assert request.entry.serial == reserved.serial  # it never gave its lane back
        (reason,) = request.attempts
        assert "signal 9" in reason
        made.owner.release(request)
        made.settle()
        made.serve_exact(2)


def test_a_stopped_source(tmp_path: Path) -> None:
    """What it says when it goes on is of attempt 1 and touches nobody."""
    with Lab(tmp_path, lanes=2, progress_timeout_s=0.3) as made:
        made.attach()
        request = made.submit(prompt(1), hold=True, on_failure="retry")
        os.kill(made.handles[0].pid, signal.SIGSTOP)
        made.gates[1].open()
        made.until_done(request)
        assert request.attempts == ["the source made no progress in time"]
        made.assert_exact(request, prompt(1))
        before = made.counts("dropped").get("late", 0)
        made.gates[0].open()
        os.kill(made.handles[0].pid, signal.SIGCONT)
        made.until_count("slots", "free", 4)
        made.assert_exact(request, prompt(1))
        assert made.counts("dropped").get("late", 0) >= before
        made.owner.release(request)
        made.settle()
        made.serve_exact(2)


def test_replays_of_attempt_1_cannot_touch_attempt_2(tmp_path: Path) -> None:
    """The source of attempt 2 says of it what attempt 1's said, and worse."""
    with Lab(tmp_path, lanes=2, slots=2) as made:
        made.attach()
        made.gates[0].allow(2)
        request = made.submit(prompt(1), hold=True, on_failure="retry")
        made.until_told(request, 2)
        first = lease_of(made, SourceId(0))
        os.kill(made.handles[0].pid, signal.SIGKILL)
        made.until(lambda: bool(request.attempts), "attempt 2 goes on")
        made.gates[1].allow(2)
        made.until_told(request, 2)
        second = lease_of(made, SourceId(1))
        for slot, generation in (first[1:], second[1:]):
            for message in (
                Failed(first[0], slot, generation, "too late"),
                SourceFinal(first[0], slot, generation, "logits", 0, 0, 0),
            ):
                made.owner._sources._take(SourceId(1), message)
        assert not request.done
        assert len(request.attempts) == 1
        made.gates[1].open()
        made.until_done(request)
        made.assert_exact(request, prompt(1))
        made.owner.release(request)
        made.settle()


def lease_of(made: Lab, source: SourceId) -> tuple[AttemptId, int, int]:
    """Who holds a slot of a source, which one, and at which generation."""
    lines = made.owner.snapshot().slots
    (line,) = (each for each in lines if each.source == source and each.holder is not None)
    assert line.holder is not None
    return line.holder, line.slot, line.generation


def test_copies_of_attempt_1_are_waited_for(tmp_path: Path) -> None:
    """They land before attempt 2 writes its first cell, however late the device is."""
    with Lab(tmp_path, lanes=1, slots=2) as made:
        made.attach()
        made.gates[0].allow(2)
        made.decoder.hold_fences = True
        request = made.submit(prompt(1), hold=True, on_failure="retry")
        made.until_told(request, 2)
        made.owner.turn(0.0)
        assert made.counts("requests")["imports"] == 2
        os.kill(made.handles[0].pid, signal.SIGKILL)
        made.gates[1].open()
        made.until(made.handles[0].died, "the source is dead")
        for _ in range(5):
            made.owner.turn(0.01)
        assert request.attempts == []
        assert not request.done
        made.decoder.hold_fences = False
        made.until_done(request)
        assert len(request.attempts) == 1
        made.assert_exact(request, prompt(1))
        made.owner.release(request)
        made.settle()


def test_a_cancel_wins_over_a_retry(tmp_path: Path) -> None:
    """While the copies of attempt 1 are waited for, and while attempt 2 runs."""
    with Lab(tmp_path, lanes=1, slots=2) as made:
        made.attach()
        made.gates[0].allow(2)
        made.decoder.hold_fences = True
        waiting = made.submit(prompt(1), on_failure="retry")
        made.until_told(waiting, 2)
        made.owner.turn(0.0)
        os.kill(made.handles[0].pid, signal.SIGKILL)
        made.until(made.handles[0].died, "the source is dead")
        made.owner.turn(0.01)
        made.owner.cancel(waiting)
        assert (waiting.outcome, waiting.cause) == ("cancelled", "cancelled")
        made.decoder.hold_fences = False
        made.until(lambda: made.owner.idle, "all is quiet")
        made.attach()
        running = made.submit(prompt(2), on_failure="retry")
        (source,) = (line.source for line in made.owner.snapshot().slots if line.holder)
        os.kill(made.handles[source].pid, signal.SIGKILL)
        made.until(lambda: bool(running.attempts), "attempt 2 runs")
        made.owner.cancel(running)
        assert (running.outcome, running.cause) == ("cancelled", "cancelled")
        for gate in made.gates:
            gate.open()
        made.settle()


def test_a_deadline_is_of_all_attempts(tmp_path: Path) -> None:
    with Lab(tmp_path) as made:
        made.attach()
        request = made.submit(prompt(1), on_failure="retry", deadline_s=1.0)
        os.kill(made.handles[0].pid, signal.SIGKILL)
        made.until_done(request)
        assert (request.outcome, request.cause) == ("failed", "deadline")
        assert len(request.attempts) == 1
        for gate in made.gates:
            gate.open()
        made.settle()


def test_a_fault_of_the_device_is_not_tried_again(tmp_path: Path) -> None:
    with Lab(tmp_path, drain_timeout_s=0.3) as made:
        made.gate.open()
        made.decoder.fail_imports = 1
        request = made.submit(prompt(1), on_failure="retry")
        made.until_done(request)
        assert (request.outcome, request.cause, request.attempts) == ("failed", "device", [])
        assert request.reason == "the copy engine is on fire"
        made.until_count("slots", "quarantined", 1)


def test_who_waits_is_served_after_the_retry(tmp_path: Path) -> None:
    """One lane: the retry keeps it, and those behind get it in their order."""
    with lab(tmp_path, "raises", "raises", lanes=1) as made:
        ended: list[str] = []
        first = made.submit(faulty(1), on_failure="retry", max_tokens=2)
        others = [made.submit(prompt(seed), max_tokens=2) for seed in (2, 3)]
        requests = {"first": first, "second": others[0], "third": others[1]}
        while len(ended) < 3:
            made.owner.turn(0.05)
            ended += [name for name, r in requests.items() if r.done and name not in ended]
        assert ended == ["first", "second", "third"]
        assert {r.outcome for r in requests.values()} == {"finished"}
        assert len(first.attempts) == 2
        made.settle()


def test_callbacks_hear_of_each_attempt_anew(tmp_path: Path) -> None:
    told: list[int] = []
    with lab(tmp_path, "late write", "raises") as made:
        tokens = faulty(1)
        progress: list[tuple[int, int]] = []
        request = made.owner.submit(
            tokens,
            RequestOptions(route="streamed", max_tokens=6, on_failure="retry", digest=True),
            on_token=told.append,
            on_progress=lambda span, done, total: progress.append((done, total)),
        )
        made.until_done(request)
        assert request.outcome == "finished"
        assert told == request.tokens
        assert len(told) == 6
        total = sum(map(len, expected_cells(tokens).values()))
        assert progress[-1] == (total, total)  # each attempt counts from nothing
        made.settle()


@pytest.mark.parametrize(
    ("options", "field", "text"),
    [
        ({"on_failure": "maybe"}, "on_failure", "'maybe' is not one of fail, retry, local"),
        ({"on_failure": ["fail"]}, "on_failure", "is not one of fail, retry, local"),
        ({"max_attempts": 0}, "max_attempts", "max_attempts is 0; it is a count from 1 to 16"),
        ({"max_attempts": 17}, "max_attempts", "max_attempts is 17"),
        ({"max_attempts": 2.0}, "max_attempts", "max_attempts is 2.0"),
        ({"on_failure": "local"}, "on_failure", "has no prefill engine of its own; use fail or"),
    ],
)
def test_what_cannot_be_asked(
    tmp_path: Path, options: dict[str, Any], field: str, text: str
) -> None:
    with Lab(tmp_path) as made:
        with pytest.raises(Refused, match=text) as caught:
            made.submit(prompt(1, NUM_TOKENS), **options)
        assert caught.value.field == field
        assert made.counts("requests")["open"] == 0


@pytest.mark.parametrize(("poison", "expected"), [(False, 1), (True, 2)])
def test_a_decoder_that_counts_imports_is_told_where_each_attempt_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, poison: bool, expected: int
) -> None:
    """Before its first import, and after the poison that came before it."""
    with Lab(tmp_path, lanes=1) as made:
        made.attach()
        told: list[int] = []
        begun: list[Reservation] = []
        begin = made.decoder.begin_import

        def begin_import(reservation: Reservation, slot: SlotView, copies: Any) -> Fence:
            begun.append(reservation)
            return begin(reservation, slot, copies)

        monkeypatch.setattr(made.decoder, "begin_import", begin_import)
        monkeypatch.setattr(
            made.decoder, "forget_imports", lambda held: told.append(len(begun)), raising=False
        )
        made.gates[0].allow(2)
        request = made.submit(prompt(1), on_failure="retry", poison=poison, hold=True)
        made.until_told(request, 2)
        made.until(lambda: len(begun) == 2 + poison, "two layers are there")
        assert told == [0, 1][:expected]
        os.kill(made.handles[0].pid, signal.SIGKILL)
        made.gates[1].open()
        made.until_done(request)
        made.assert_exact(request, prompt(1))
        first = 2 + poison
        assert told == [*range(expected), *range(first, first + expected)]
        assert len(set(begun)) == 1
        assert len(begun) == first + poison + LAYERS
        made.owner.release(request)
        made.settle()
