"""A fence that never comes: its import is given up, and what it touches is not used again."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.faults.lab import LAYERS, Lab, prompt

DRAIN_S = 0.3


@pytest.mark.parametrize("route", ["whole", "streamed"])
def test_an_import_that_is_never_fenced_fails_its_request(tmp_path: Path, route: str) -> None:
    with Lab(tmp_path, lanes=2, slots=2, drain_timeout_s=DRAIN_S) as lab:
        lab.gate.open()
        lab.decoder.hold_fences = True
        begun_s = time.monotonic()
        request = lab.submit(prompt(1), route=route)
        lab.until(lambda: lab.counts("handoffs").get("sealed") == 1, "all told, nothing fenced")
        fences = [flight.fence for flight in lab.owner._flights.values()]
        assert len(fences) == (1 if route == "whole" else LAYERS)
        lab.until_done(request)
        assert time.monotonic() - begun_s >= DRAIN_S
        assert (request.outcome, request.reason) == ("failed", "an import was not fenced in time")
        assert request.kv_digests == ()
        lab.until(lambda: not lab.owner._flights, "no fence is asked for any more")
        lab.until_count("slots", "quarantined", 1)
        assert lab.counts("lanes") == {"free": 1, "quarantined": 1, "held": 0}
        lab.owner.check_integrity()
        # The device comes round at last: it reads the slot and writes the lane that are set apart.
        lab.decoder.hold_fences = False
        after = lab.submit(prompt(2), hold=True)
        lab.until_done(after)
        assert all(fence.done() for fence in fences)
        lab.assert_exact(after, prompt(2))
        lab.owner.release(after)
        lab.until_count("slots", "free", 1)
        assert lab.counts("slots")["quarantined"] == 1
        assert lab.counts("lanes") == {"free": 1, "quarantined": 1, "held": 0}
        lab.owner.check_integrity()


def test_a_cancelled_request_waits_for_its_fences_no_longer_than_that(tmp_path: Path) -> None:
    """It was told at once; its storage is set apart when the fence does not come."""
    with Lab(tmp_path, lanes=2, slots=2, drain_timeout_s=DRAIN_S) as lab:
        lab.gate.open()
        lab.decoder.hold_fences = True
        request = lab.submit(prompt(1))
        lab.until(lambda: lab.counts("handoffs").get("sealed") == 1, "all told, nothing fenced")
        lab.owner.cancel(request)
        assert lab.counts("lanes")["held"] == 1
        lab.until(lambda: lab.counts("lanes")["quarantined"] == 1, "the lane is set apart")
        assert (request.outcome, request.reason) == ("cancelled", "cancelled by the caller")
        lab.until_count("slots", "quarantined", 1)
        lab.owner.check_integrity()


def test_a_fence_in_time_is_none_the_worse(tmp_path: Path) -> None:
    with Lab(tmp_path, drain_timeout_s=60.0) as lab:
        lab.gate.open()
        lab.decoder.hold_fences = True
        request = lab.submit(prompt(1), hold=True)
        lab.until(lambda: lab.counts("handoffs").get("sealed") == 1, "all told, nothing fenced")
        due_s = lab.owner._machine.next_deadline_ns()
        assert due_s is not None  # an event loop is told when the import would be given up
        lab.decoder.hold_fences = False
        lab.until_done(request)
        lab.assert_exact(request, prompt(1))
        lab.owner.release(request)
        lab.settle()
