"""Traced requests over the wire: what follows on an end costs no result and leaves nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import pytest

from headrace.channel import MAX_MESSAGE_NBYTES, Channel, socket_pair
from headrace.errors import PeerDied
from headrace.ids import Span
from headrace.messages import (
    MAX_TEXT,
    Down,
    Ended,
    Events,
    FromOwner,
    Interval,
    ToOwner,
    decode_from_owner,
    decode_to_owner,
    encode,
)
from headrace.process import ChildProcess
from headrace.runtime import router
from headrace.runtime.owner_link import OwnerFailed
from headrace.runtime.owner_main import batches
from headrace.runtime.requests import RequestOptions
from headrace.runtime.router import OwnerClient
from headrace.telemetry.claim import overlap_of
from headrace.telemetry.clocks import align
from headrace.telemetry.recording import Run
from headrace.telemetry.report import report_of
from tests.faults.lab import Gate, prompt
from tests.faults.local import LocalEngine, alone, ask
from tests.faults.test_owner_process import config, watched

TRACED = RequestOptions(route="streamed", max_tokens=1, trace=True)

RouterEnd: TypeAlias = Channel[ToOwner, FromOwner]
OwnerEnd: TypeAlias = Channel[FromOwner, ToOwner]


@contextmanager
def played(directory: Path) -> Iterator[tuple[OwnerClient, OwnerEnd]]:
    """A client, and the channel of its owner, which the test plays."""
    gate = Gate(directory / "gate")
    gate.open()
    client = OwnerClient(config(gate))
    ours, theirs = socket_pair(64, 1024)
    channel: RouterEnd = Channel(ours, encode, decode_from_owner)
    owner: OwnerEnd = Channel(theirs, encode, decode_to_owner)
    with channel, owner, ChildProcess.spawn("headrace", ["--version"]) as child:
        client._link._channel, client._link._child = channel, child
        yield client, owner


def finished(label: int) -> Ended:
    return Ended(label, "finished", "", "", None, "", (), "", (), None)


STEP = Interval("neighbour", "decode step of another", 1, 2, 0, "host")
DRAIN = Interval("drain", "storage", 3, 4, 0, "host")


def test_a_traced_request_that_is_refused_waits_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds no storage, so that nothing is told of a drain."""
    monkeypatch.setattr(router, "DRAIN_WITHIN_S", 600.0)
    with watched(tmp_path) as w:
        w.gate.open()
        options = RequestOptions(max_tokens=2, trace=True)
        result = w.client.result(w.client.submit(prompt(1), options))
        assert (result.ended.outcome, result.ended.mistake) == ("failed", "max_tokens")
        assert w.client.statistics()["kept"] == 0
        assert not w.client._traced


def test_an_owner_that_dies_after_the_end_costs_a_trace_its_drain_alone(tmp_path: Path) -> None:
    """What came is returned; the next calls hear that the owner is gone."""
    with played(tmp_path) as (client, owner):
        label = client.submit(prompt(1), TRACED)
        owner.send(Events(label, "owner", (STEP,)))
        owner.send(finished(label))
        owner.close()
        result = client.result(label)
        assert (result.ended, result.owner_intervals) == (finished(label), [STEP])
        for _ in range(2):
            with pytest.raises(PeerDied, match="the owner process died"):
                client.result(label)


def test_why_an_owner_ended_is_told_after_the_result_that_it_had_given(tmp_path: Path) -> None:
    with played(tmp_path) as (client, owner):
        label = client.submit(prompt(1), TRACED)
        owner.send(finished(label))
        owner.send(Down(False, "the device is on fire"))
        assert client.result(label).ended == finished(label)
        with pytest.raises(OwnerFailed, match="the device is on fire"):
            client.inspect()


def test_a_killed_owner_keeps_back_no_result_that_had_come(tmp_path: Path) -> None:
    with watched(tmp_path) as w:
        label = w.client.submit(prompt(1), TRACED)
        w.client.withdraw(label)
        inbox = w.client._inbox[label]
        while not (inbox and isinstance(inbox[-1], Ended)):
            w.client._keep(w.client._next())
        os.kill(w.owner_pid, signal.SIGKILL)
        assert w.client.result(label).ended.outcome == "cancelled"
        with pytest.raises(PeerDied, match=r"the owner process died \(status -9\)"):
            w.client.result(label)


def test_a_trace_waits_no_longer_than_asked_for_and_what_is_late_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "DRAIN_WITHIN_S", 600.0)
    with played(tmp_path) as (client, owner):
        label = client.submit(prompt(1), TRACED)
        owner.send(finished(label))
        owner.send(Events(label, "owner", (STEP,)))
        result = client.result(label, within_s=0.05)
        assert result.owner_intervals == [STEP]
        again = client.submit(prompt(1), TRACED)
        for late in (Events(label, "owner", (DRAIN,)), Events(label, "owner", ())):
            owner.send(late)
        owner.send(finished(again))
        owner.send(Events(again, "owner", ()))
        assert client.result(again).owner_intervals == []
        assert (client._inbox, client._traced) == ({}, set())
        assert client.statistics()["kept"] == 0
        assert client.statistics()["ended"] == 2


def test_all_that_follows_on_an_end_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be told in several messages; the last of them has no interval."""
    monkeypatch.setattr(router, "DRAIN_WITHIN_S", 600.0)
    with played(tmp_path) as (client, owner):
        label = client.submit(prompt(1), TRACED)
        for message in (
            finished(label),
            Events(label, "owner", (STEP,) * 256),
            Events(label, "owner", (STEP, DRAIN)),
            Events(label, "owner", ()),
        ):
            owner.send(message)
        assert client.result(label).owner_intervals == [STEP] * 257 + [DRAIN]
        assert client.statistics()["kept"] == 0


def test_a_drain_is_the_last_of_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "DRAIN_WITHIN_S", 600.0)  # that it is over is told
    with watched(tmp_path) as w:
        withdrawn = w.client.submit(prompt(1), TRACED)
        w.client.withdraw(withdrawn)
        w.gate.open()
        served = w.client.submit(prompt(2), TRACED)
        for label, outcome in ((served, "finished"), (withdrawn, "cancelled")):
            result = w.client.result(label)
            assert result.ended.outcome == outcome
            assert result.owner_intervals[-1].kind == "drain"
        assert (w.client._inbox, w.client._traced) == ({}, set())


def test_what_the_owner_computed_by_itself_overlaps_nothing() -> None:
    """Its imports are run in between, so that they lie within its computing."""
    with alone(LocalEngine()) as owner:
        asked = ask(route="streamed", group_layers=2, max_tokens=0, trace=True)
        request = owner.submit(prompt(1), asked)
        owner.run_until_done(request)
    run = align(
        Run(
            name="streamed",
            route="streamed",
            num_tokens=request.num_tokens,
            outcome=request.outcome,
            source=tuple(request.source_intervals),
            owner=tuple(request.owner_intervals),
            measured=request.measured,
        )
    )
    report = report_of(run)
    assert report.outcome == "finished"
    assert report.local
    assert (report.overlap_ns, report.hidden_share) == (None, None)
    assert overlap_of(run).length_ns > 0  # what two processes would be said to have overlapped


def test_a_batch_of_intervals_fits_a_message_whatever_their_names() -> None:
    long = ", ".join(str(Span(100, 200, 10_000_000 + n, 20_000_000 + n)) for n in range(4))
    big = 2**62
    intervals = [Interval("validated", long, big + n, big + n, big, "host") for n in range(600)]
    widest = [Interval("ended", "\u2603" * MAX_TEXT, n, n, 0, "host") for n in range(40)]
    short = [Interval("neighbour", "", n, n, 0, "host") for n in range(600)]
    told: list[Interval] = []
    for batch in batches([*intervals, *widest, *short]):
        payload = encode(Events(big, "source", batch))
        assert len(payload) <= MAX_MESSAGE_NBYTES
        assert decode_from_owner(payload) == Events(big, "source", batch)
        told += batch
    assert told == [*intervals, *widest, *short]
    assert [len(batch) for batch in batches(short)] == [256, 256, 88]
    assert list(batches([])) == []
