"""An owner process with several sources, and what a withdrawn request gives back in it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import Refused
from headrace.messages import Inspected, RequestHeld, SourceHeld
from headrace.runtime.config import OwnerConfig, SourceConfig
from headrace.runtime.owner_link import OwnerFailed
from headrace.runtime.requests import RequestOptions
from headrace.runtime.router import OwnerClient
from headrace.runtime.supervisor import RestartPolicy
from tests.faults.lab import CONTEXT, GATED, GEOMETRY, LAYERS, WITHIN_S, Gate, prompt

FAULTY = "tests.faults.failing_engines"
ENGINES = "tests.faults.engines"
PUBLISHED = RequestOptions(route="streamed", max_tokens=1)


def config(*sources: SourceConfig, **changes: Any) -> OwnerConfig:
    facts: dict[str, Any] = {
        "decoder": "null",
        "decoder_options": {"context": CONTEXT, "lanes": 2},
        "context": CONTEXT,
        "start_timeout_s": 20.0,
    }
    return OwnerConfig(sources=sources, **facts | changes)


def gated(gate: Gate, **changes: Any) -> SourceConfig:
    return SourceConfig(GATED, {**GEOMETRY, "gate": str(gate.path)}, **changes)


@contextmanager
def running(config: OwnerConfig) -> Iterator[OwnerClient]:
    client = OwnerClient(config)
    try:
        client.start()
        yield client
    finally:
        client.close()


def until(client: OwnerClient, holds: Callable[[Inspected], bool]) -> Inspected:
    """Ask what is held until it is as `holds` says."""
    end_s = time.monotonic() + WITHIN_S
    while True:
        report = client.inspect()
        if holds(report):
            return report
        assert time.monotonic() < end_s, report


def requests_of(report: Inspected) -> dict[int | None, RequestHeld]:
    return {each.label: each for each in report.requests}


def sources_of(report: Inspected) -> dict[str, SourceHeld]:
    return {each.name: each for each in report.sources}


# Several sources.


def test_all_of_them_load_at_the_same_time(tmp_path: Path) -> None:
    """Neither of the two is ready before the other has begun."""
    os.mkfifo(tmp_path / "meeting")
    meet = {**GEOMETRY, "meeting": str(tmp_path / "meeting")}
    sides = (SourceConfig(f"{FAULTY}:open_meeting", {**meet, "side": s}) for s in ("read", "write"))
    client = OwnerClient(config(*sides))
    try:
        assert client.start().num_sources == 2
        assert client.result(client.submit(prompt(1), PUBLISHED)).ended.outcome == "finished"
    finally:
        client.close()


def test_each_serves_while_the_other_is_held_up(tmp_path: Path) -> None:
    gates = Gate(tmp_path / "a"), Gate(tmp_path / "b")
    sources = gated(gates[0], name="left", num_slots=1), gated(gates[1], num_slots=3)
    client = OwnerClient(config(*sources))
    try:
        up = client.start()
        assert (up.num_sources, up.num_slots) == (2, 4)
        labels = [client.submit(prompt(seed), PUBLISHED) for seed in (1, 2)]
        report = client.inspect()
        assert [each.name for each in report.sources] == ["left", f"{GATED}-2"]
        assert [each.state for each in report.sources] == ["in service"] * 2
        for each in report.sources:
            assert b"headrace.runtime.source_main" in Path(f"/proc/{each.pid}/cmdline").read_bytes()
        leased = [(each.source, each.holder) for each in report.slots if each.state == "leased"]
        assert len(leased) == 2
        second = requests_of(report)[labels[1]].attempt
        at = next(source for source, holder in leased if holder == second)
        gates[at].open()
        assert client.result(labels[1]).ended.outcome == "finished"
        assert requests_of(client.inspect())[labels[0]].phase == "streaming"
        gates[1 - at].open()
        assert client.result(labels[0]).ended.outcome == "finished"
    finally:
        client.close()


def test_one_that_dies_comes_back_under_its_name_while_the_other_serves(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    gate.open()
    policy = RestartPolicy(first_delay_s=0.01)
    sources = gated(gate, name="a"), gated(gate, name="b")
    with running(config(*sources, restart=policy)) as client:
        before = sources_of(client.inspect())
        os.kill(before["b"].pid, signal.SIGKILL)
        assert client.result(client.submit(prompt(1), PUBLISHED)).ended.outcome == "finished"
        after = sources_of(until(client, lambda r: sources_of(r)["b"].restarts == 1))
        assert after["a"] == before["a"]
        assert after["b"].state == "in service"
        assert after["b"].pid not in (0, before["b"].pid)


def test_one_that_is_gone_for_good_says_why(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    gate.open()
    with running(config(gated(gate, name="a"), gated(gate, name="b"))) as client:
        pid = sources_of(client.inspect())["b"].pid
        os.kill(pid, signal.SIGKILL)
        why = f"source b (pid {pid}) died: signal 9"  # before that: it closed its channel
        gone = sources_of(until(client, lambda r: sources_of(r)["b"].reason == why))["b"]
        assert (gone.state, gone.pid, gone.restarts) == ("gone", 0, 0)
        assert client.result(client.submit(prompt(1), PUBLISHED)).ended.outcome == "finished"


OTHERS: dict[str, Any] = {"layers": LAYERS + 1}


@pytest.mark.parametrize(
    ("bad", "failure", "text"),
    [
        (
            SourceConfig(f"{ENGINES}:open_dying", {}),
            OwnerFailed,
            r"{} \(pid .*\) died: exit status 9",
        ),
        (SourceConfig("replay", {"lairs": 3}), Refused, "{}: .*unknown field `lairs`"),
        (SourceConfig("replay", OTHERS), Refused, "{}: .*layers"),
        (SourceConfig("replay", {}, python="/nowhere/python"), Refused, "{}: interpreter"),
        (SourceConfig("replay", {}, num_slots=0), Refused, "slots is 0"),
        (SourceConfig("nowhere", {}), Refused, "unknown source 'nowhere'"),
        (SourceConfig("replay", {}, name="first"), Refused, "two sources are named first"),
    ],
)
def test_if_one_cannot_start_none_is_left(
    tmp_path: Path, bad: SourceConfig, failure: type[Exception], text: str
) -> None:
    """The owner says which, by its name."""
    gate = Gate(tmp_path / "gate")
    gate.open()
    name = bad.name or bad.source
    begun_s = time.monotonic()
    with (
        pytest.raises(failure, match=text.format(f"source {name}")) as caught,
        running(config(gated(gate, name="first"), bad)),
    ):
        pass
    assert "\n" not in str(caught.value)
    assert time.monotonic() - begun_s < 5.0


# A request that is withdrawn.


@contextmanager
def two_sources(directory: Path) -> Iterator[tuple[OwnerClient, Gate, list[Gate]]]:
    """An owner of one lane whose decoder waits before each step, and its sources before each."""
    steps, gates = Gate(directory / "steps"), [Gate(directory / name) for name in "ab"]
    made = config(
        *(gated(gate) for gate in gates),
        decoder=f"{FAULTY}:open_stepped_decoder",
        decoder_options={"context": CONTEXT, "lanes": 1, "steps": str(steps.path)},
        prefetch_depth=1,
    )
    with running(made) as client:
        yield client, steps, gates
        for gate in (steps, *gates):
            gate.open()


def all_free(report: Inspected) -> bool:
    """Whether nothing is held."""
    slots = {each.state for each in report.slots}
    return slots == {"free"} and not report.requests and report.lanes_free == 1


def gate_of(report: Inspected, label: int, gates: list[Gate]) -> Gate:
    attempt = requests_of(report)[label].attempt
    return next(gates[each.source] for each in report.slots if each.holder == attempt)


@pytest.mark.parametrize("told", [0, 2])
@pytest.mark.parametrize("phase", ["streaming", "parked"])
def test_the_source_of_a_withdrawn_request_stops_at_its_next_sink_call(
    tmp_path: Path, phase: str, told: int
) -> None:
    """Two steps at its gate are enough: the one that it waits at, and its return."""
    with two_sources(tmp_path) as (client, _, gates):
        first = client.submit(prompt(1), PUBLISHED)
        second = client.submit(prompt(2), PUBLISHED)
        report = client.inspect()
        assert [each.phase for each in report.requests] == ["streaming", "parked"]
        label, other = (first, second) if phase == "streaming" else (second, first)
        mine, others = gate_of(report, label, gates), gate_of(report, other, gates)
        mine.allow(told)
        client.withdraw(label)
        ended = client.result(label).ended
        assert (ended.outcome, ended.cause) == ("cancelled", "cancelled")
        mine.allow(2)
        others.open()
        assert client.result(other).ended.outcome == "finished"
        until(client, all_free)


def test_a_request_that_is_withdrawn_while_it_waits_was_never_there(tmp_path: Path) -> None:
    with two_sources(tmp_path) as (client, _, gates):
        labels = [client.submit(prompt(seed), PUBLISHED) for seed in (1, 2, 3)]
        assert requests_of(client.inspect())[labels[2]].phase == "waiting"
        client.withdraw(labels[2])
        assert client.result(labels[2]).ended.outcome == "cancelled"
        assert labels[2] not in requests_of(client.inspect())
        for gate in gates:
            gate.open()
        assert {client.result(each).ended.outcome for each in labels[:2]} == {"finished"}
        until(client, all_free)


def test_a_request_that_is_withdrawn_while_it_decodes_ends_by_the_next_step(
    tmp_path: Path,
) -> None:
    with two_sources(tmp_path) as (client, steps, gates):
        for gate in gates:
            gate.open()
        label = client.submit(prompt(1), RequestOptions(route="streamed", max_tokens=20))
        steps.allow(2)
        tokens = []

        def stop(token: int) -> bool:
            tokens.append(token)
            if len(tokens) == 2:
                client.withdraw(label)
                steps.allow(2)  # it may have begun one step more
            return False

        result = client.result(label, stop)
        assert result.ended.outcome == "cancelled"
        assert 2 <= len(result.tokens) <= 4
        until(client, all_free)
