"""Sources that die come back, without their owner ever waiting; hopeless ones are set aside."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import LocalProtocolError, Refused
from headrace.ids import SourceId
from headrace.runtime.requests import Request
from headrace.runtime.supervisor import RestartPolicy
from headrace.runtime.worker import SourceHandle
from tests.conftest import open_fds
from tests.faults.lab import GEOMETRY, LAYERS, Lab, prompt

ONCE = "tests.faults.failing_engines:open_once"
QUICK = RestartPolicy(first_delay_s=0.01, longest_delay_s=0.05)


@contextmanager
def lab(directory: Path, policy: RestartPolicy = QUICK, **changes: Any) -> Iterator[Lab]:
    with Lab(directory, restart=policy, **changes) as made:
        yield made


@contextmanager
def once(directory: Path, again: str, policy: RestartPolicy = QUICK, **more: Any) -> Iterator[Lab]:
    """A source that starts once; `again`: what becomes of those that take its place."""
    options = {**GEOMETRY, "started": str(directory / "started"), "again": again}
    with lab(directory, policy, engine=ONCE, options=options, **more) as made:
        yield made


def source(made: Lab) -> SourceHandle:
    """The one in service."""
    (handle,) = made.owner._handles.values()
    assert isinstance(handle, SourceHandle)
    return handle


def kill(made: Lab) -> None:
    os.kill(source(made).pid, signal.SIGKILL)


def until_restarted(made: Lab, count: int = 1) -> None:
    made.until_count("restarts", "restarted", count)
    made.until_count("sources", "gone", 0)


# It comes back.


def test_killed_at_idle(tmp_path: Path) -> None:
    with lab(tmp_path) as made:
        made.gate.open()
        made.serve_exact(1)
        before = source(made).pid
        kill(made)
        until_restarted(made)
        assert source(made).pid != before
        made.serve_exact(2)


@pytest.mark.parametrize("spans", [0, 1, LAYERS])
def test_who_waits_is_served_by_the_next(tmp_path: Path, spans: int) -> None:
    """The running one fails, as it asked for nothing else; nobody else does."""
    with lab(tmp_path, lanes=1, slots=1) as made:
        running = made.submit(prompt(1))
        waiting = [made.submit(prompt(seed), hold=True) for seed in (2, 3)]
        made.gate.allow(spans)
        if spans:
            made.until_told(running, spans)
        kill(made)
        made.until_done(running)
        assert (running.outcome, running.cause) == ("failed", "source-died")
        made.gate.open()
        for seed, request in zip((2, 3), waiting, strict=True):
            made.until_done(request)
            made.assert_exact(request, prompt(seed))
            made.owner.release(request)
        made.settle()


@pytest.mark.parametrize("spans", [0, 2, LAYERS])
def test_a_retry_goes_to_the_next(tmp_path: Path, spans: int) -> None:
    """There is no other source: it waits until this one is back."""
    with lab(tmp_path, lanes=1, slots=1) as made:
        request = made.submit(prompt(1), hold=True, on_failure="retry")
        made.gate.allow(spans)
        if spans:
            made.until_told(request, spans)
        kill(made)
        made.until(lambda: bool(request.attempts), "the first attempt failed")
        made.gate.open()
        made.until_done(request)
        made.assert_exact(request, prompt(1))
        assert "signal 9" in request.attempts[0]
        made.owner.release(request)
        made.settle()


def test_submitted_while_it_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What can never be served is refused by what the first source said of itself."""
    with lab(tmp_path) as made:
        kill(made)
        made.until(lambda: made.counts("sources")["in_service"] == 0, "it is away")
        assert made.counts("sources")["expected"] == 1
        monkeypatch.setattr("headrace.runtime.checks.MOST_SPANS", LAYERS - 1)
        with pytest.raises(Refused, match="this is cut into 6 spans"):
            made.submit(prompt(1))
        monkeypatch.undo()
        request = made.submit(prompt(1), hold=True, poison=True)
        made.gate.open()
        made.until_done(request)
        made.assert_exact(request, prompt(1))
        made.owner.release(request)
        made.settle()


def test_a_stopped_source_is_killed_and_comes_back(tmp_path: Path) -> None:
    """Who waits for its slots is not turned away in between."""
    with lab(tmp_path, slots=1, progress_timeout_s=0.2, drain_timeout_s=0.2) as made:
        stuck = made.submit(prompt(1))
        waiting = made.submit(prompt(2), hold=True)
        os.kill(source(made).pid, signal.SIGSTOP)
        made.gate.open()
        made.until_done(stuck, waiting)
        assert (stuck.outcome, stuck.cause) == ("failed", "stalled")
        made.assert_exact(waiting, prompt(2))
        made.owner.release(waiting)
        made.settle()
        assert made.counts("restarts")["restarted"] == 1


def test_one_that_hangs_up_and_lives_on_is_killed_and_comes_back(tmp_path: Path) -> None:
    engine = "tests.faults.failing_engines:open_failing"
    options = {**GEOMETRY, "faults": ["hangs up"]}
    with lab(tmp_path, engine=engine, options=options) as made:
        tokens = [0, *prompt(1)[1:]]
        request = made.submit(tokens, hold=True, on_failure="retry")
        made.until_done(request)
        made.assert_exact(request, tokens)
        assert "signal 9" in request.attempts[0]
        made.owner.release(request)
        made.settle()


def test_many_deaths_leave_nothing(tmp_path: Path) -> None:
    """Descriptors and counts stay flat; ids are never used again; service counts as health."""
    with lab(tmp_path, RestartPolicy(0.0, 2.0, 0.05, max_failures=2)) as made:
        made.gate.open()
        known: list[SourceId] = []
        flat: list[tuple[object, ...]] = []
        for count in range(1, 16):
            made.serve_exact(count)
            known += made.owner._handles
            kill(made)
            until_restarted(made, count)
            made.owner.turn(0.0)
            names = ("lanes", "slots", "handoffs", "sources", "decoder")
            flat.append((*(made.counts(name) for name in names), open_fds()))
        assert flat == [flat[0]] * len(flat)
        assert known == sorted(set(known))


# The owner does not wait for it.


def test_turns_go_on_while_it_starts(tmp_path: Path) -> None:
    """One that takes for ever to load holds nobody up, and is given up in its time."""
    with once(tmp_path, "hangs", lanes=2, slots=2) as made:
        second = add_replay(made)
        os.kill(made.handles[0].pid, signal.SIGKILL)
        made.until_count("restarts", "starting", 1)
        slowest_s = 0.0
        for seed in range(1, 4):
            request = made.submit(prompt(seed), hold=True)
            while not request.done:
                begun_s = time.monotonic()
                made.owner.turn(0.0)
                slowest_s = max(slowest_s, time.monotonic() - begun_s)
            made.assert_exact(request, prompt(seed))
            made.owner.release(request)
        assert slowest_s < 0.2
        assert made.counts("restarts")["starting"] == 1
        assert not second.died()


def test_a_turn_is_due_when_a_start_is(tmp_path: Path) -> None:
    """A caller with an event loop of its own is told when."""
    with lab(tmp_path, RestartPolicy(first_delay_s=0.3)) as made:
        made.gate.open()
        assert made.owner.next_turn_s() is None
        kill(made)
        made.until_count("restarts", "waiting", 1)
        died_s = time.monotonic()
        due_s = made.owner.next_turn_s()
        assert due_s is not None
        assert 0.0 < due_s <= 0.3
        made.until_count("restarts", "starting", 1)
        assert time.monotonic() - died_s >= due_s * 0.9
        until_restarted(made)
        assert made.owner.next_turn_s() is None


@pytest.mark.parametrize("phase", ["waiting", "starting"])
def test_closing_ends_what_starts(tmp_path: Path, phase: str) -> None:
    policy = RestartPolicy(first_delay_s=60.0 if phase == "waiting" else 0.0, longest_delay_s=60.0)
    with once(tmp_path, "hangs", policy) as made:
        waiting = made.submit(prompt(1), on_failure="retry")
        kill(made)
        made.until_count("restarts", phase, 1)
        assert not waiting.done
    assert (waiting.outcome, waiting.cause) == ("cancelled", "cancelled")


# It is set aside.

REASONS = {
    "exits": "exit status 7 while starting",
    "refuses": "the device is taken by another process",
    "raises": "OSError: no such device",
    "hangs up": "it closed its channel while starting",
    "hangs": "did not get ready in 1 s",
}


@pytest.mark.parametrize("again", REASONS)
def test_one_that_cannot_start_again_is_set_aside(
    tmp_path: Path, again: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who wait for it fail with a reason that says what happened; so do new requests."""
    policy = RestartPolicy(0.0, max_failures=3)
    with once(tmp_path, again, policy) as made:
        if again == "hangs":
            monkeypatch.setattr(source(made), "start_timeout_s", 0.6)
        waiting = made.submit(prompt(1), on_failure="retry")
        kill(made)
        made.until_done(waiting)
        assert (waiting.outcome, waiting.cause) == ("failed", "no-source")
        assert "died 3 times within" in waiting.reason
        assert "is set aside; the last:" in waiting.reason
        assert REASONS[again] in waiting.reason
        restarts = made.counts("restarts")
        assert (restarts["set_aside"], restarts["start_failed"]) == (1, 2)
        assert sum(restarts[phase] for phase in ("waiting", "starting", "ending")) == 0
        with pytest.raises(Refused, match=r"no prefill source is left .* died 3 times"):
            made.submit(prompt(1))
        made.settle()
        assert_another_serves(made)


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("worker.socket_pair", OSError(24, "Too many open files")),
        ("worker.socket_pair", Refused("socket buffers are too small")),
        ("worker.Slab.create", Refused("needs 1 bytes, 0 available")),
        ("worker.Slab.create", MemoryError()),
    ],
)
def test_a_start_that_this_process_has_no_means_for_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: Exception
) -> None:
    """No descriptor, no memory: the owner lives on, and so does its next source."""
    with lab(tmp_path) as made:
        waiting = made.submit(prompt(1), hold=True, on_failure="retry")

        def fail(*given: object) -> None:
            raise error

        monkeypatch.setattr(f"headrace.runtime.{where}", fail)
        kill(made)
        made.until(lambda: made.counts("restarts")["start_failed"] >= 1, "a start failed")
        monkeypatch.undo()
        made.gate.open()
        made.until_done(waiting)
        made.assert_exact(waiting, prompt(1))
        made.owner.release(waiting)
        made.settle()


def test_a_bug_of_the_owners_is_no_failed_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: object, **__: object) -> None:
        raise LocalProtocolError("a rule was broken")

    with lab(tmp_path) as made:
        kill(made)
        with monkeypatch.context() as patch:
            patch.setattr(made.owner._machine, "add_source", wrong)
            with pytest.raises(LocalProtocolError, match="a rule was broken"):
                until_restarted(made)
        restarts = made.counts("restarts")
        assert (restarts["start_failed"], restarts["ending"]) == (0, 0)


def test_one_that_came_back_as_another_is_set_aside_at_once(tmp_path: Path) -> None:
    with once(tmp_path, "another") as made:
        waiting = made.submit(prompt(1), on_failure="retry")
        kill(made)
        made.until_done(waiting)
        assert waiting.cause == "no-source"
        assert "came back with another model and is set aside" in waiting.reason
        assert made.counts("restarts")["start_failed"] == 1
        made.settle()
        assert_another_serves(made)


def test_one_that_dies_of_every_prompt_is_set_aside(tmp_path: Path) -> None:
    engine = "tests.faults.failing_engines:open_failing"
    options = {**GEOMETRY, "faults": ["exits"] * 16}
    policy = RestartPolicy(0.0, max_failures=3)
    with lab(tmp_path, policy, engine=engine, options=options) as made:
        tokens = [0, *prompt(1)[1:]]
        request = made.submit(tokens, on_failure="retry", max_attempts=9)
        made.until_done(request)
        assert (request.outcome, request.cause) == ("failed", "no-source")
        assert len(request.attempts) == 3
        assert "died 3 times within" in request.reason
        made.settle()


def test_one_that_is_idle_and_set_aside_is_told_at_the_next_submit(tmp_path: Path) -> None:
    with lab(tmp_path, RestartPolicy(max_failures=1)) as made:
        kill(made)
        made.until_count("restarts", "set_aside", 1)
        with pytest.raises(Refused, match=r"died once within .* signal 9"):
            made.submit(prompt(1))
        assert_another_serves(made)


def test_the_other_source_serves_when_one_is_set_aside(tmp_path: Path) -> None:
    with lab(tmp_path, RestartPolicy(max_failures=1)) as made:
        made.attach()
        requests: list[Request] = [made.submit(prompt(seed), hold=True) for seed in (1, 2)]
        os.kill(made.handles[0].pid, signal.SIGKILL)
        made.until_done(requests[0])
        assert requests[0].cause == "source-died"
        made.gates[1].open()
        made.until_done(requests[1])
        made.assert_exact(requests[1], prompt(2))
        made.owner.release(requests[1])
        made.settle()


def test_one_that_cannot_be_killed_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a process that is stuck in a device driver."""
    monkeypatch.setattr("headrace.runtime.sources.KILL_WAIT_S", 0.3)
    with lab(tmp_path, slots=1, progress_timeout_s=0.2, drain_timeout_s=0.2) as made:
        handle = source(made)
        stuck = made.submit(prompt(1))
        waiting = made.submit(prompt(2))
        monkeypatch.setattr(handle, "kill", lambda: None)
        os.kill(handle.pid, signal.SIGSTOP)
        made.until_done(stuck, waiting)
        assert waiting.cause == "no-source"
        assert "cannot be killed: stuck in a device driver" in waiting.reason
        monkeypatch.undo()
        kill(made)
        made.until(lambda: not made.owner._handles, "it is gone at last")
        made.settle()
        assert_another_serves(made)


def test_a_start_that_cannot_be_killed_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.runtime.restarts.KILL_WAIT_S", 0.3)
    with once(tmp_path, "another") as made:
        waiting = made.submit(prompt(1), on_failure="retry")
        kills: list[SourceHandle] = []
        monkeypatch.setattr(SourceHandle, "kill", lambda handle: kills.append(handle))
        kill(made)
        made.until_done(waiting)
        assert waiting.cause == "no-source"
        assert "cannot be killed: stuck in a device driver" in waiting.reason
        monkeypatch.undo()
        kills[0].kill()
        made.until(kills[0].died, "it is gone at last")
        made.settle()
        assert_another_serves(made)


def test_without_a_policy_it_is_gone(tmp_path: Path) -> None:
    with Lab(tmp_path) as made:
        kill(made)
        made.until(lambda: not made.owner._handles, "buried and forgotten")
        assert made.counts("restarts")["waiting"] == 0
        with pytest.raises(Refused, match=r"no prefill source is left in service$"):
            made.submit(prompt(1))


def assert_another_serves(made: Lab) -> None:
    """A source that is attached by hand serves, whatever became of the other."""
    add_replay(made)
    made.serve_exact(7)


def add_replay(made: Lab) -> SourceHandle:
    """One more source, which is not started again and waits at no gate."""
    handle = SourceHandle("replay", GEOMETRY, num_slots=made.num_slots)
    made.handles.append(handle)
    handle.start()
    made.owner.attach(handle)
    return handle
