"""What an owner holds, as it tells it: all of it, as far as a message carries, and in words."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.cli import run_command
from headrace.errors import LocalProtocolError
from headrace.ids import AttemptId, Span
from headrace.messages import (
    Inspected,
    LaneHeld,
    RequestHeld,
    SlotHeld,
    SourceHeld,
    encode,
)
from headrace.runtime.control import inspected
from headrace.runtime.requests import RequestOptions
from tests.faults.lab import CONTEXT, LAYERS, NUM_TOKENS, Lab, prompt
from tests.faults.test_operator import DRAIN_S, broken


def test_everything_that_is_held_is_shown(tmp_path: Path) -> None:
    with Lab(tmp_path, lanes=2, slots=1) as lab:
        requests = [lab.submit(prompt(seed)) for seed in (1, 2, 3)]
        attempts = [AttemptId(*request.request, 1) for request in requests]
        report = inspected(lab.owner)
        assert (report.context, report.lanes_free, report.truncated) == (CONTEXT, 0, False)
        assert report.lanes == tuple(LaneHeld(each, "reserved", "", 0) for each in attempts[:2])
        assert report.slots == (SlotHeld(0, 0, 0, "leased", attempts[0], ("write",), 0),)
        name, pid = lab.handle.engine, lab.handle.pid
        assert report.sources == (SourceHeld(0, name, "in service", "", pid, 0),)
        assert [each.attempt for each in report.requests] == attempts
        assert [each.phase for each in report.requests] == ["streaming", "reserved", "waiting"]
        total = lab.owner.plan_of(requests[0]).nbytes
        assert [each.nbytes_total for each in report.requests] == [total, 0, 0]
        assert {each.num_tokens for each in report.requests} == {NUM_TOKENS}
        assert ("lanes", "free", 0) in report.statistics
        assert ("source 0", "alive", 1) in report.statistics
        lab.gate.open()
        lab.until_done(*requests)
        lab.settle()
        assert inspected(lab.owner).requests == ()


def test_how_far_a_request_has_come_is_shown(tmp_path: Path) -> None:
    """Its bytes as they are imported, its tokens as they are decoded, under its caller's label."""
    with Lab(tmp_path, lanes=1) as lab:
        options = RequestOptions(route="streamed", max_tokens=9)
        request = lab.owner.submit(prompt(1), options, label=77)
        plan = lab.owner.plan_of(request)
        first = plan.span_nbytes(Span(0, 1, 0, NUM_TOKENS))
        lab.gate.allow(1)
        lab.until(lambda: shown(lab).nbytes_imported > 0, "a layer is imported")
        assert (shown(lab).label, shown(lab).phase) == (77, "streaming")
        assert (shown(lab).nbytes_imported, shown(lab).nbytes_total) == (first, plan.nbytes)
        lab.gate.open()
        lab.until(lambda: shown(lab).num_generated >= 2, "two tokens are there")
        assert shown(lab).phase == "published"
        assert shown(lab).nbytes_imported == plan.nbytes
        lab.until_done(request)
        counts = lab.counts("imported")
        assert (counts["imports"], counts["nbytes"]) == (LAYERS, plan.nbytes)
        assert first <= counts["nbytes_before_final"] <= plan.nbytes
        lab.settle()


def shown(lab: Lab) -> RequestHeld:
    """The one request that is held."""
    (request,) = inspected(lab.owner).requests
    return request


def test_a_request_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As is each slot; with what was left out of the report, if something was."""
    attempt = AttemptId(16, 2, 1)
    report = Inspected(
        (),
        (),
        64,
        0,
        (LaneHeld(attempt, "reserved", "", 0),),
        (SlotHeld(3, 0, 5, "draining", attempt, ("write", "read 7"), 2_000_000_000),),
        (SourceHeld(1, "a", "waiting to restart", "it died", 0, 2),),
        (RequestHeld(8, attempt, "streaming", 40, 1, 512, 1024, time.monotonic_ns()),),
        True,
    )
    monkeypatch.setattr("headrace.cli.owner.ask", lambda *_: report)
    assert run_command(["owner", "status", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "source a is waiting to restart, restarted 2 times: it died",
        "lanes of 64 positions: 0 free",
        "lane reserved, attempt 10.2/1",
        "slot 0 of source 3, generation 5: draining, attempt 10.2/1, tokens out: write, read 7, "
        "for 2.0 s",
        "request 8, attempt 10.2/1: streaming, 40 prompt tokens, 512 of 1024 bytes imported, "
        "1 tokens generated, 0.0 s old",
        "nothing is quarantined",
        "there is more, which did not fit into one message",
    ]


def test_a_report_fits_into_its_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests go first, then slots, lanes, what is quarantined, counts, and sources last."""
    limit = "headrace.runtime.control.MAX_MESSAGE_NBYTES"
    order = ("requests", "slots", "lanes", "quarantined", "statistics", "sources")
    with Lab(tmp_path, lanes=2, drain_timeout_s=DRAIN_S) as lab:
        lab.gate.open()
        broken(lab)
        held = lab.submit(prompt(2), hold=True)
        lab.until_done(held)
        whole = inspected(lab.owner)
        assert all(getattr(whole, name) for name in order)
        assert not whole.truncated
        for at, name in enumerate(order):
            left_out: dict[str, Any] = dict.fromkeys(order[: at + 1], ())
            room = len(encode(replace(whole, truncated=True, **left_out))) + 16  # ages grow
            monkeypatch.setattr(limit, room)
            shorter = inspected(lab.owner)
            assert shorter.truncated
            assert len(encode(shorter)) <= room
            assert [len(getattr(shorter, each)) for each in order[at + 1 :]] == [
                len(getattr(whole, each)) for each in order[at + 1 :]
            ], name
        monkeypatch.setattr(limit, 8)
        with pytest.raises(LocalProtocolError, match="whatever is left out"):
            inspected(lab.owner)
        lab.owner.release(held)
