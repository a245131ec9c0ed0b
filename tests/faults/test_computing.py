"""An engine that computes for long and has nothing to write: it is heard, and it hears."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from headrace.messages import Route
from tests.faults.lab import GEOMETRY, LAYERS, Lab, prompt

CHATTY = "tests.faults.engines:open_chatty"
PACED = "tests.faults.engines:open_paced"  # as it is: a word every five seconds
LAYER_S = 0.25
SLOW: dict[str, Any] = {**GEOMETRY, "layer_ms": LAYER_S * 1000}


@pytest.mark.parametrize("route", ["whole", "chunked", "streamed"])
@pytest.mark.parametrize("layers_done", [0, 2])
def test_a_cancel_is_heard_within_one_layer(tmp_path: Path, route: Route, layers_done: int) -> None:
    """The slot is free about one layer later, the source lives, and the next request is exact."""
    with Lab(tmp_path, engine=PACED, options=SLOW) as lab:
        pid = lab.handle.pid
        victim = lab.submit(prompt(1), route=route, group_layers=LAYERS)
        begun_s = time.monotonic()
        lab.until(lambda: time.monotonic() - begun_s > (layers_done + 0.5) * LAYER_S, "it computes")
        lab.owner.cancel(victim)
        cancelled_s = time.monotonic()
        assert victim.outcome == "cancelled"
        assert lab.counts("slots")["draining"] == 1
        lab.until_count("slots", "draining", 0)
        assert time.monotonic() - cancelled_s < 2.5 * LAYER_S
        lab.settle()
        lab.serve_exact(2, route=route)
        assert lab.handle.pid == pid
        assert not lab.handle.died()


def test_a_prefill_longer_than_the_progress_deadline_finishes(tmp_path: Path) -> None:
    """Nothing can be told before the end of a whole prefill, and its source says that it works."""
    with Lab(tmp_path, engine=CHATTY, options=SLOW, progress_timeout_s=2.5 * LAYER_S) as lab:
        begun_s = time.monotonic()
        request = lab.submit(prompt(1), route="whole", hold=True)
        lab.until_done(request)
        assert (request.outcome, request.reason) == ("finished", "")
        assert time.monotonic() - begun_s > LAYERS * LAYER_S
        lab.assert_exact(request, prompt(1))
        lab.owner.release(request)
        lab.settle()


def test_one_that_says_nothing_is_given_up(tmp_path: Path) -> None:
    """The same without a word: the deadline passes, the cancel is heard, the source lives."""
    with Lab(tmp_path, engine=PACED, options=SLOW, progress_timeout_s=2.5 * LAYER_S) as lab:
        request = lab.submit(prompt(1), route="whole")
        lab.until_done(request)
        assert request.outcome == "failed"
        assert request.reason == "the source made no progress in time"
        lab.settle()
        assert not lab.handle.died()
