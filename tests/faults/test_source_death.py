"""A source is killed or stopped at every point of an attempt; the owner lives on and is exact."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from headrace.errors import Refused
from headrace.ids import SourceId
from tests.conftest import open_fds
from tests.faults.lab import LAYERS, Lab, prompt

AFTER_SPANS = (1, 2, LAYERS - 1, LAYERS)  # the last: all spans told, no final


def kill(lab: Lab) -> None:
    os.kill(lab.handle.pid, signal.SIGKILL)


def assert_new_source_serves(lab: Lab, seed: int = 50) -> None:
    """The owner takes a new source, and the next request is exact."""
    lab.attach()
    lab.gate.open()
    lab.serve_exact(seed)


def test_killed_at_idle(tmp_path: Path) -> None:
    with Lab(tmp_path) as lab:
        lab.gate.allow(LAYERS + 2)
        lab.serve_exact(1)
        kill(lab)
        lab.until(lambda: not lab.owner._handles, "buried and forgotten")
        with pytest.raises(Refused, match="no prefill source"):
            lab.submit(prompt(2))
        lab.settle()
        assert_new_source_serves(lab)


def test_killed_before_the_first_span(tmp_path: Path) -> None:
    with Lab(tmp_path) as lab:
        request = lab.submit(prompt(1))
        kill(lab)
        lab.until_done(request)
        assert request.outcome == "failed"
        assert "signal 9" in request.reason
        lab.settle()
        assert_new_source_serves(lab)


@pytest.mark.parametrize("spans", AFTER_SPANS)
def test_killed_after_some_spans(tmp_path: Path, spans: int) -> None:
    """Waiting requests fail with it, since no source is left; storage and slot are free."""
    with Lab(tmp_path, lanes=1, slots=1) as lab:
        request = lab.submit(prompt(1))
        waiting = lab.submit(prompt(2))
        lab.gate.allow(spans)
        lab.until_told(request, spans)
        kill(lab)
        lab.until_done(request, waiting)
        assert (request.outcome, waiting.outcome) == ("failed", "failed")
        assert "signal 9" in request.reason
        assert request.tokens == []
        assert request.kv_digests == ()
        lab.settle()
        assert_new_source_serves(lab)


def test_killed_after_its_final(tmp_path: Path) -> None:
    """The final is there and all cells: the request is served; the death frees the slot."""
    with Lab(tmp_path) as lab:
        request = lab.submit(prompt(1), hold=True)
        lab.gate.allow(LAYERS + 1)
        lab.until_done(request)
        assert request.outcome == "finished"
        assert lab.counts("slots")["draining"] == 1  # the source has not returned
        kill(lab)
        lab.until_count("slots", "draining", 0)
        lab.assert_exact(request, prompt(1))
        lab.owner.release(request)
        lab.settle()


def test_a_parked_request_is_sealed_when_its_source_dies(tmp_path: Path) -> None:
    """It needs nothing more of the source: its cells lie in the slab, which the owner holds."""
    with Lab(tmp_path, lanes=1) as lab:
        lab.gate.open()
        first = lab.submit(prompt(1), hold=True)
        lab.until_done(first)
        parked = lab.submit(prompt(2), hold=True)
        lab.until(lambda: lab.counts("slots")["ready"] == 1, "prefilled and returned")
        kill(lab)
        lab.until(lambda: lab.handle.died(), "the source is dead")
        lab.assert_exact(first, prompt(1))
        lab.owner.release(first)
        lab.until_done(parked)
        lab.assert_exact(parked, prompt(2))
        lab.owner.release(parked)
        lab.settle()


@pytest.mark.parametrize("after", ["released", "killed", "silent"])
def test_stopped_past_the_progress_deadline(tmp_path: Path, after: str) -> None:
    """The hand-off fails, the slot stays with its source, and only proof frees it.

    One that stays silent past the drain deadline as well is ended, since its death is a proof.
    """
    drain_timeout_s = 0.2 if after == "silent" else 30.0
    with Lab(tmp_path, progress_timeout_s=0.3, drain_timeout_s=drain_timeout_s) as lab:
        lab.fill_canaries()
        request = lab.submit(prompt(1))
        lab.gate.allow(2)
        lab.until_told(request, 2)
        os.kill(lab.handle.pid, signal.SIGSTOP)
        lab.gate.open()
        lab.until_done(request)
        assert (request.outcome, request.reason) == (
            "failed",
            "the source made no progress in time",
        )
        lab.owner.check_integrity()
        assert lab.counts("lanes")["free"] == 2
        assert lab.decoder.statistics()["free"] == 2
        if after != "silent":
            assert (lab.counts("slots")["draining"], lab.counts("slots")["free"]) == (1, 1)
        if after == "released":
            os.kill(lab.handle.pid, signal.SIGCONT)
            lab.settle()
            lab.serve_exact(3)
        else:
            if after == "killed":
                kill(lab)
            lab.settle()
            assert lab.handle.died()
            assert_new_source_serves(lab)
        lab.assert_canaries(slots=[], lanes=[1])


def test_sources_that_are_replaced_leave_nothing(tmp_path: Path) -> None:
    """Twenty deaths, half of them while they run: descriptors and counts stay flat."""
    with Lab(tmp_path) as lab:
        known: list[SourceId] = []
        flat: list[tuple[object, ...]] = []
        for at in range(20):
            (source,) = lab.owner._handles
            known.append(source)
            if at % 2:
                request = lab.submit(prompt(at))
                lab.gate.allow(2)
                lab.until_told(request, 2)
                kill(lab)
                lab.until_done(request)
                assert "signal 9" in request.reason
            else:
                lab.gate.open()
                lab.serve_exact(at)
                kill(lab)
            lab.until(lambda: not lab.owner._handles, "forgotten")
            assert not lab.owner._sources.plans
            lab.gate.open()  # closes this side's end
            lab.owner.check_integrity()
            counts = [lab.counts(name) for name in ("lanes", "slots", "handoffs", "decoder")]
            flat.append((*counts, open_fds()))
            lab.attach()
        assert flat == [flat[0]] * 20
        assert known == sorted(set(known))  # an id is never used again
        lab.gate.open()
        lab.serve_exact(2)


def test_a_dead_source_is_kept_while_its_slot_is_read(tmp_path: Path) -> None:
    """Its slab is let go only once the last import from it is fenced."""
    with Lab(tmp_path) as lab:
        lab.gate.open()
        lab.decoder.hold_fences = True
        request = lab.submit(prompt(1), hold=True)
        lab.until(lambda: lab.counts("handoffs").get("sealed") == 1, "all told, nothing fenced")
        kill(lab)
        lab.until(lambda: bool(lab.owner._sources._dead), "buried")
        lab.owner.turn(0.0)
        assert len(lab.owner._handles) == 1
        lab.decoder.hold_fences = False
        lab.until_done(request)
        lab.until(lambda: not lab.owner._handles, "forgotten")
        lab.assert_exact(request, prompt(1))
        lab.owner.release(request)
        lab.settle()
        assert_new_source_serves(lab)
