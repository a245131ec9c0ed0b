"""Every ending of a request, as its caller meets it: once, in time, with nothing left behind.

Here are those of `headrace run`, those of pools that are full, and those that only a timer tells.
Cancels are in `test_cancel`, a source's endings in `test_source_death` and `test_bad_sources`.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.cli.run import WITHDRAWN_WITHIN_S
from headrace.errors import Refused
from tests.faults import census
from tests.faults.lab import CONTEXT, LAYERS, WITHIN_S, Lab, prompt
from tests.faults.stage import marked, run, standing
from tests.faults.stations import FAILS

AT = {
    "loading, source": "source load",
    "loading, owner": "owner load",
    "prefill": "source written 2",
    "importing": "owner begin_import 0 after",
    "fencing": "owner fence 1",
    "decoding": "owner decode_step 1 before",
}


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit status and what was said on stderr."""
    _, complaint = process.communicate(timeout=WITHIN_S)
    return process.returncode, complaint


# `headrace run`.


@pytest.mark.parametrize("moment", AT)
def test_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """As a terminal sends it, to the whole group."""
    with marked(tmp_path, monkeypatch) as stations:
        stations.name(AT[moment])
        with run() as process:
            pid = standing(stations)
            os.killpg(process.pid, signal.SIGINT)
            os.kill(pid, signal.SIGCONT)
            assert ended(process) == (130, "headrace: interrupted\n")


@pytest.mark.parametrize("moment", ["loading, source", "prefill"])
def test_ctrl_c_when_a_source_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """It is not waited for: it is ended with its owner."""
    with marked(tmp_path, monkeypatch) as stations:
        stations.name(AT[moment])
        with run() as process:
            standing(stations)
            os.killpg(process.pid, signal.SIGINT)
            assert ended(process) == (130, "headrace: interrupted\n")


def test_ctrl_c_when_the_owner_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if its device hung: it cannot end the request, and is ended itself."""
    with marked(tmp_path, monkeypatch) as stations:
        stations.name(AT["decoding"])
        with run() as process:
            standing(stations)
            begun_s = time.monotonic()
            os.killpg(process.pid, signal.SIGINT)
            assert ended(process) == (130, "headrace: interrupted\n")
            assert time.monotonic() - begun_s < WITHDRAWN_WITHIN_S + 5.0


@pytest.mark.parametrize("moment", AT)
def test_the_owner_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    with marked(tmp_path, monkeypatch) as stations:
        stations.name(AT[moment])
        with run() as process:
            standing(stations)
            (owner,) = census.children_of(process.pid)
            os.kill(owner, signal.SIGKILL)
            complaint = "headrace: the owner process died (status -9)\n"
            assert ended(process) == (1, complaint)


@pytest.mark.parametrize("moment", ["loading, source", "prefill"])
def test_its_source_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    with marked(tmp_path, monkeypatch) as stations:
        stations.name(AT[moment])
        with run() as process:
            os.kill(standing(stations), signal.SIGKILL)
            status, complaint = ended(process)
            assert status == 1
            assert "died: signal 9" in complaint
            assert complaint.count("\n") == 1


def test_its_source_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with marked(tmp_path, monkeypatch) as stations:
        stations.name(AT["prefill"])
        with run("--progress-timeout", "0.3") as process:
            standing(stations)
            status, complaint = ended(process)
            assert status == 1
            assert complaint.startswith("headrace: the streamed route failed (stalled): ")
            assert complaint.count("\n") == 1


@pytest.mark.parametrize("method", ["reserve", "begin_import", "publish", "decode_step"])
def test_its_device_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    with marked(tmp_path, monkeypatch):
        monkeypatch.setenv(FAILS, method)
        with run() as process:
            status, complaint = ended(process)
    assert status == 1
    told = f"headrace: the streamed route failed (device): the device is on fire in {method}"
    *logged, last = complaint.splitlines()
    assert last == told
    assert all("out of service" in line for line in logged)  # the operator's log


def test_a_prompt_is_longer_than_a_lane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with marked(tmp_path, monkeypatch):
        with run("--context", "42") as process:
            status, complaint = ended(process)
        assert status == 2
        assert "needs 43 positions, and --context is 42" in complaint
        assert complaint.count("\n") == 1


# Pools that are full.


def test_no_lane_is_free(tmp_path: Path) -> None:
    """Who waits longer than its deadline fails; who has none is served when a lane is free."""
    with Lab(tmp_path, lanes=1, slots=1) as lab:
        lab.gate.open()
        holder = lab.submit(prompt(1), hold=True)
        lab.until_done(holder)
        hasty = lab.submit(prompt(2), deadline_s=0.1)
        patient = lab.submit(prompt(3), hold=True)
        turn_when_told(lab, lambda: hasty.done)
        assert (hasty.outcome, hasty.cause) == ("failed", "deadline")
        assert lab.counts("handoffs") == {"published": 1, "waiting": 1}
        lab.assert_exact(holder, prompt(1))
        lab.owner.release(holder)
        lab.until_done(patient)
        lab.assert_exact(patient, prompt(3))
        lab.owner.release(patient)
        lab.settle()


def test_no_slot_is_free(tmp_path: Path) -> None:
    """The same for the slots of a source that stands at its gate."""
    with Lab(tmp_path, lanes=3, slots=1) as lab:
        running = lab.submit(prompt(1), hold=True)
        hasty = lab.submit(prompt(2), deadline_s=0.1)
        patient = lab.submit(prompt(3), hold=True)
        turn_when_told(lab, lambda: hasty.done)
        assert (hasty.outcome, hasty.cause) == ("failed", "deadline")
        assert lab.counts("handoffs") == {"streaming": 1, "reserved": 1}
        lab.gate.open()
        lab.until_done(running, patient)
        for request, seed in ((running, 1), (patient, 3)):
            lab.assert_exact(request, prompt(seed))
            lab.owner.release(request)
        lab.settle()


def test_what_can_never_fit_is_refused_at_once(tmp_path: Path) -> None:
    """Before anything is held, whatever else is running."""
    with Lab(tmp_path) as lab:
        running = lab.submit(prompt(1), hold=True)
        before = lab.owner.statistics()
        for num_tokens, max_tokens in ((CONTEXT + 1, 0), (CONTEXT, 2), (2, CONTEXT)):
            with pytest.raises(Refused, match=f"and it is {CONTEXT}") as caught:
                lab.submit(prompt(2, num_tokens), max_tokens=max_tokens)
            assert caught.value.field == "context"
        assert lab.owner.statistics() == before
        lab.gate.open()
        lab.until_done(running)
        lab.assert_exact(running, prompt(1))
        lab.owner.release(running)
        lab.settle()


# A caller that turns only when it is told to, and submits nothing more.


def turn_when_told(lab: Lab, done: Callable[[], bool]) -> int:
    """Turn when the owner's descriptor is readable or its time has come; returns the turns."""
    owner = lab.owner
    give_up_s = time.monotonic() + WITHIN_S
    turns = 0
    while not done():
        assert time.monotonic() < give_up_s, f"nobody told to turn; {owner.statistics()}"
        due_s = owner.next_turn_s()
        select.select([owner.fileno()], [], [], WITHIN_S if due_s is None else due_s)
        owner.turn(0.0)
        turns += 1
    return turns


FEW = 60
"""Turns that a few messages and deadlines take; a caller that spins makes thousands."""


def test_a_timer_ends_a_request_at_its_deadline(tmp_path: Path) -> None:
    with Lab(tmp_path, lanes=1, slots=2) as lab:
        begun_s = time.monotonic()
        streaming = lab.submit(prompt(1), deadline_s=0.3)
        parked = lab.submit(prompt(2), deadline_s=0.2)
        assert turn_when_told(lab, lambda: streaming.done and parked.done) < FEW
        assert time.monotonic() - begun_s < 1.0
        assert lab.counts("lanes")["free"] == 1
        lab.gate.open()
        assert turn_when_told(lab, lambda: lab.owner.idle) < FEW
        lab.settle()


def test_a_timer_ends_a_source_that_stands_still(tmp_path: Path) -> None:
    """Progress deadline, drain deadline, kill, burial: nobody asks for anything meanwhile."""
    with Lab(tmp_path, progress_timeout_s=0.2, drain_timeout_s=0.2) as lab:
        begun_s = time.monotonic()
        request = lab.submit(prompt(1))
        os.kill(lab.handle.pid, signal.SIGSTOP)
        assert turn_when_told(lab, lambda: request.done) < FEW
        assert (request.outcome, request.cause) == ("failed", "stalled")
        assert turn_when_told(lab, lambda: not lab.owner._handles) < FEW
        assert time.monotonic() - begun_s < 1.5
        assert lab.handle.died()
        assert lab.owner.next_turn_s() is None
        lab.settle()


def test_a_timer_ends_an_import_without_a_fence(tmp_path: Path) -> None:
    with Lab(tmp_path, drain_timeout_s=0.3) as lab:
        lab.gate.open()
        lab.decoder.hold_fences = True
        request = lab.submit(prompt(1))
        turn_when_told(lab, lambda: request.done)
        assert (request.outcome, request.cause) == ("failed", "device")
        assert turn_when_told(lab, lambda: lab.counts("slots")["quarantined"] == 1) < FEW
        assert lab.counts("lanes") == {"free": 1, "quarantined": 1, "held": 0}
        lab.owner.check_integrity()
        lab.decoder.hold_fences = False


@pytest.mark.parametrize("spans", [None, 2])
def test_a_death_is_told_to_a_caller_that_waits(tmp_path: Path, spans: int | None) -> None:
    with Lab(tmp_path) as lab:
        request = None if spans is None else lab.submit(prompt(1))
        lab.gate.allow(spans or 0)
        os.kill(lab.handle.pid, signal.SIGKILL)
        assert turn_when_told(lab, lambda: not lab.owner._handles) < FEW
        assert request is None or (request.outcome, request.cause) == ("failed", "source-died")
        assert lab.owner.next_turn_s() is None
        lab.settle()


def test_a_caller_that_waits_is_served(tmp_path: Path) -> None:
    with Lab(tmp_path) as lab:
        lab.gate.allow(LAYERS + 2)
        request = lab.submit(prompt(1), hold=True)
        turn_when_told(lab, lambda: request.done)
        lab.assert_exact(request, prompt(1))
        lab.owner.release(request)
        turn_when_told(lab, lambda: lab.owner.idle)
        assert lab.owner.next_turn_s() is None
