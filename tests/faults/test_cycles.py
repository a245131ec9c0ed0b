"""Two hundred times and more: killed, stopped or cancelled at every place, on every route.

Here it is done to sources, under one owner that outlives them all. Owners and parents are dealt
with in `test_cycles_owner`; together they are counted in `test_two_hundred`.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from headrace.errors import HeadraceError, PeerDied, Refused
from headrace.messages import Route
from tests.faults import census
from tests.faults.lab import prompt
from tests.faults.stage import (
    CHUNK,
    ROUTES,
    SLOTS,
    Cycle,
    Stage,
    in_random_order,
    marked,
    wait_until,
)
from tests.faults.stations import Stations

AFTER_FINAL = ("final", "return")
SERVED = ("finished", "")
ENDINGS = {
    "kill": ("failed", "source-died"),
    "cancel": ("cancelled", "cancelled"),
    "stop": ("failed", "stalled"),
    "stop, deaf": ("failed", "stalled"),
}


def places(route: Route) -> list[str]:
    """Where a source may stand still within one attempt."""
    steps = [f"{verb} {k}" for k in range(ROUTES[route]) for verb in ("writing", "written", "told")]
    return ["start", "poll 0", *steps, "computed", *AFTER_FINAL]


def some_places(route: Route) -> list[str]:
    """Fewer, for what takes its time."""
    k = ROUTES[route] // 2
    return ["start", f"writing {k}", f"written {k}", f"told {k}", "computed", *AFTER_FINAL]


AT_EVERY_PLACE = [
    Cycle(deed, route, place)
    for deed in ("kill", "cancel")
    for route in ROUTES
    for place in places(route)
]
STOPS = [Cycle("stop", route, place) for route in ROUTES for place in some_places(route)]
DEAF = [
    Cycle("stop, deaf", route, place) for route in ROUTES for place in ("written 0", "computed")
]
IN_AN_ATTEMPT = AT_EVERY_PLACE + STOPS + DEAF
LOADING = [
    Cycle(deed, "whole", place)
    for deed in ("kill", "stop")
    for place in ("load", "manifest", "attach", "idle", "close")
]


def test_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with marked(tmp_path, monkeypatch) as stations, Stage(tmp_path, stations) as stage:
        for cycle in in_random_order(IN_AN_ATTEMPT):
            one_attempt(stage, cycle)


def one_attempt(stage: Stage, cycle: Cycle) -> None:
    """One victim; then all is as before, and the next request is exact."""
    chunk = CHUNK if cycle.route == "chunked" else 0
    late = stage.counts("dropped").get("late", 0)
    manner = "deaf" if cycle.deed == "stop, deaf" else ""
    with stage.neighbours():
        victim = stage.stand(cycle.place, manner, route=cycle.route, chunk=chunk)
        served = cycle.place in AFTER_FINAL
        if cycle.deed == "kill":
            os.kill(stage.handle.pid, signal.SIGKILL)
            stage.until_done(victim)
            assert served or "signal 9" in victim.reason
            stage.assert_untouched()
            stage.finish(victim)
            stage.until(lambda: not stage.owner._handles, "the source is forgotten")
            stage.owner.check_integrity()
            stage.attach()
        else:
            if cycle.deed == "cancel":
                stage.owner.cancel(victim)
                assert victim.done  # at once
            else:
                stage.until_done(victim)
            assert stage.counts("slots")["draining"] == 1  # its source may still write
            stage.assert_untouched()
            stage.finish(victim)
            stage.go_on()
            stage.until_count("slots", "free", SLOTS)
        assert (victim.outcome, victim.cause) == (SERVED if served else ENDINGS[cycle.deed])
    dropped = stage.counts("dropped").get("late", 0) - late
    if cycle.deed != "cancel":  # a cancel may come before what was told is read
        assert dropped == (told_late(cycle) if manner else 0)
    stage.settle()
    stage.serve_exact(3, route=cycle.route, chunk=chunk)


def told_late(cycle: Cycle) -> int:
    """What a deaf source tells after its attempt is over: the rest of its cells, and the final."""
    return 1 if cycle.place == "computed" else ROUTES[cycle.route] + 1


def test_sources_that_load_wait_or_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with marked(tmp_path, monkeypatch) as stations, Stage(tmp_path, stations) as stage:
        for cycle in in_random_order(LOADING):
            if cycle.place == "idle":
                idle(stage, cycle.deed)
            elif cycle.place == "close":
                at_close(stage, cycle.deed)
            else:
                loading(stage, stations, cycle)
            stage.settle()
            stage.serve_exact(3)


def idle(stage: Stage, deed: str) -> None:
    """Killed: forgotten. Stopped: the next request fails in time, and nobody gets what it gives."""
    pid = stage.handle.pid
    if deed == "kill":
        os.kill(pid, signal.SIGKILL)
        stage.until(lambda: not stage.owner._handles, "the source is forgotten")
        stage.attach()
        return
    os.kill(pid, signal.SIGSTOP)
    victim = stage.submit(prompt(1))
    stage.until_done(victim)
    assert (victim.outcome, victim.cause) == ENDINGS["stop"]
    stage.go_on()


def at_close(stage: Stage, deed: str) -> None:
    """A source that does not end when it is told to is ended, within the grace."""
    stage.stations.name("source close")
    handle = stage.new_handle()
    handle.start()
    assert handle.manifest.role == "source"
    if deed == "kill":
        threading.Thread(target=kill_when_stopped, args=(handle.pid,)).start()
    handle.close(5.0 if deed == "kill" else 0.1)
    stage.stations.clear()


def loading(stage: Stage, stations: Stations, cycle: Cycle) -> None:
    """The owner that waits for it hears of it, once, and serves on with the source it has."""
    stations.name(f"source {cycle.place}")
    handle = stage.new_handle(start_timeout_s=0.3 if cycle.deed == "stop" else 20.0)
    handle.start()
    if cycle.deed == "kill":
        threading.Thread(target=kill_when_stopped, args=(handle.pid,)).start()
    error, text = expected_error(cycle.deed)
    with pytest.raises(error, match=text):
        stage.owner.attach(handle)
    stations.clear()
    handle.close(0.0)


def expected_error(deed: str) -> tuple[type[HeadraceError], str]:
    return (PeerDied, "signal 9 while starting") if deed == "kill" else (Refused, "get ready in")


def kill_when_stopped(pid: int) -> None:
    wait_until(lambda: census.is_stopped(pid), f"process {pid} stands still")
    os.kill(pid, signal.SIGKILL)
