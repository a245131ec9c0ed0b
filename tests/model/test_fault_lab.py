"""The fault lab: schedules of the real machines obey the rules, and known bugs are found."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path

import pytest

from headrace.errors import Refused
from headrace.ids import AttemptId, SourceId
from headrace.protocol.commands import Cause
from headrace.testing.facts import Violation
from headrace.testing.fault_lab import faults
from headrace.testing.fault_lab.__main__ import main
from headrace.testing.fault_lab.bugs import ALL_BUGS, LAB_BUGS, find_bug, hunt, planted
from headrace.testing.fault_lab.choices import Choices, from_text, to_text
from headrace.testing.fault_lab.geometries import CONTEXT, GEOMETRIES, Geometry
from headrace.testing.fault_lab.report import Tally, never_taken, run_batch, run_record
from headrace.testing.fault_lab.safety import RULES, Broken, attributed
from headrace.testing.fault_lab.schedule import Lab, run_schedule
from headrace.testing.fault_lab.shrink import COMMAND, shrink
from headrace.testing.fault_lab.storage import (
    POISON,
    UNWRITTEN,
    WRONG,
    Copying,
    Device,
    SlotMemory,
    origin,
)
from headrace.testing.instances import EPOCH
from headrace.testing.mutants import EQUIVALENT
from headrace.testing.planting import Mutant

SEED = 1_000_000
NUM_SCHEDULES = 1200
FOUND_WITHIN = 400

# route, group_layers, chunk, prefill_chunk, emission: as `draw_request` picks them
ROUTES = [
    (0, 0, 0, 0, 0),
    (1, 0, 1, 0, 0),
    (1, 0, 2, 1, 0),
    (2, 0, 0, 0, 0),
    (2, 1, 1, 1, 0),
    (2, 2, 0, 2, 1),
    (2, 0, 1, 1, 1),
]

# A few of each machine, and what they break; all of them are hunted by `--mutants`.
MACHINE_BUGS = (
    "a cell may be told twice",
    "publish does not look at what landed",
    "storage ends while imports run",
    "a digest is not checked",
    "free without the write token",
    "free without the read tokens",
    "the generation is not raised",
    "a late message reaches a decided hand-off",
    "what waits for the last source waits on",
    "a wrong digest is right",
    "no cancel is sent",
    "the terminal is told twice",
    "a failed import gives its read token back",
    "a source that keeps its write token lives on",
    "a final leaves held spans behind",
)


ONE_LANE_BUGS = (
    "the last slot is parked in",
    "more is parked than the prefetch depth",
    "parked although one with storage lacks a slot",
    "a freed lane goes to a waiting hand-off first",
    "the youngest is served first",
    "a retry goes to the end of the queue",
    "who is parked waits on for a lane",
    "a lane is used twice",
)

# The lab's own mistake: a caller's cancel outran the end of an import whose digest nobody had asked
# for, since a forged message brought it.
SEEN_BROKEN = (
    "c0=5;c1=5.0.4.1.0.0.2.0*7.3;s=3.0.3.0.0.1.1.2.0.0.1*4.0.1.0.1.0.2.2;d=0.0.1.0*3.1;"
    "p1=0.2.1;l2=1.3.0.1.3.0.1.6.5;p2=0*19.1",
)


@cache
def ran() -> Tally:
    return run_batch(SEED, NUM_SCHEDULES)


def test_no_schedule_breaks_a_rule() -> None:
    tally = ran()
    print(f"{tally.num_schedules} schedules, {tally.num_steps} steps, {dict(tally.outcomes)}")
    for finding in tally.findings:
        with planted(None):
            small = shrink(run_schedule(finding.seed), budget_s=10.0)
        print(f"seed {finding.seed}: {small.broken}\n{small.command()}")
    assert not tally.findings
    assert len(tally.fingerprints) >= 0.98 * NUM_SCHEDULES
    assert tally.num_steps > 40 * NUM_SCHEDULES


def test_every_state_was_reached_and_every_transition_taken() -> None:
    assert not never_taken(ran().transitions)


def test_every_outcome_and_cause_was_reached() -> None:
    ends = {cause.value for cause in Cause} | {"published", "retried", "refused"}
    assert set(ran().outcomes) == ends


@pytest.mark.parametrize("group", faults.GROUPS)
def test_every_kind_of_fault_was_injected(group: faults.Group) -> None:
    assert set(faults.GROUPS[group]) <= set(ran().faults)


@cache
def ran_one_lane() -> Tally:
    return run_batch(SEED, NUM_SCHEDULES // 3, one_lane=True)


def test_no_schedule_of_one_lane_breaks_a_rule() -> None:
    tally = ran_one_lane()
    print(f"{tally.num_schedules} schedules, {dict(tally.parked)}")
    assert not tally.findings
    assert tally.num_schedules == len(tally.fingerprints)


def test_one_lane_is_parked_for_and_imported_after_in_every_way() -> None:
    parked = ran_one_lane().parked
    assert parked["parked"] > NUM_SCHEDULES // 4
    assert parked["got the lane"] > NUM_SCHEDULES // 6
    for word in ("some cells told", "all told", "imports", "then published", "then retried"):
        assert parked[word] >= NUM_SCHEDULES // 50, word
    for end in ("cancelled", "retried", "deadline", "source-failed", "no-storage"):
        assert parked[end], end
    ended = sum(count for word, count in parked.items() if word in ends_of_the_lab())
    assert parked["parked"] == parked["got the lane"] + ended
    assert not {f"then {word}" for word in ends_of_the_lab()}.isdisjoint(parked)


def ends_of_the_lab() -> set[str]:
    return {cause.value for cause in Cause} | {"published", "retried"}


def test_one_lane_draws_its_settings_and_a_replay_needs_no_word_of_it() -> None:
    with planted(None):
        for seed in range(SEED, SEED + 40):
            choices = Choices(seed)
            setting = Lab(choices, one_lane=True).setting
            assert setting.tiny.lanes == 1
            assert min(setting.slots) > 1 < len(setting.asked)
            assert Lab(Choices(recorded=choices.recorded())).setting == setting
        depths = {Lab(Choices(seed), one_lane=True).setting.tiny.depth for seed in range(40)}
        assert depths == {0, 1, 2}
        drawn = run_schedule(SEED, tracing=True, one_lane=True)
        again = run_schedule(recorded=from_text(to_text(drawn.recorded)), tracing=True)
        assert again.trace == drawn.trace


@pytest.mark.parametrize("text", ONE_LANE_BUGS)
def test_a_bug_of_one_lane_is_found_by_its_schedules(text: str) -> None:
    assert hunt(find_bug(text), FOUND_WITHIN, one_lane=True).at is not None


@pytest.mark.parametrize("text", SEEN_BROKEN)
def test_a_schedule_that_broke_a_rule_once_breaks_none(text: str) -> None:
    with planted(None):
        assert run_schedule(recorded=from_text(text)).broken is None


def test_messages_were_dropped_for_every_reason() -> None:
    reasons = {"dead", "late", "malformed", "stale", "undecodable", "unexpected"}
    assert set(ran().dropped) == reasons


def test_the_same_seed_gives_the_same_schedule() -> None:
    with planted(None):
        for seed in range(SEED, SEED + 20):
            one, other = (run_schedule(seed, tracing=True) for _ in range(2))
            assert one.trace == other.trace
            assert one.trace
            assert one.fingerprint == other.fingerprint


def test_a_recorded_schedule_replays_from_its_text() -> None:
    with planted(None):
        for seed in range(SEED, SEED + 20):
            drawn = run_schedule(seed, tracing=True)
            text = to_text(drawn.recorded)
            again = run_schedule(recorded=from_text(text), tracing=True)
            assert again.trace == drawn.trace
            assert to_text(again.recorded) == text


def test_no_choice_at_all_is_the_tamest_schedule() -> None:
    with planted(None):
        seen = run_schedule(recorded={}, tracing=True)
    assert seen.broken is None
    assert dict(seen.outcomes) == {"published": 1}
    assert not seen.faults
    assert not seen.dropped


@pytest.mark.parametrize(
    "text", ["s", "s=", "s=x", "s=1;s=2", "s=1*0", "s=1*9999999", "s=-1", "!=1"]
)
def test_a_text_that_is_no_schedule_is_refused(text: str) -> None:
    with pytest.raises(Refused):
        from_text(text)


def test_a_text_keeps_what_matters() -> None:
    recorded = {"s": (1, 0, 0, 0, 2, 2, 0), "c0": (0, 0), "d": (7,)}
    assert to_text(recorded) == "s=1.0*3.2.2;d=7"
    assert from_text(to_text(recorded)) == {"s": (1, 0, 0, 0, 2, 2), "d": (7,)}


@pytest.mark.parametrize(
    "geometry", GEOMETRIES, ids=lambda geometry: str(GEOMETRIES.index(geometry))
)
def test_every_route_publishes_the_same(geometry: Geometry) -> None:
    """Rule 5, for every cut of three prompts, without faults."""
    number = GEOMETRIES.index(geometry)
    published = set()
    with planted(None):
        for cut in ROUTES:
            asked = {f"c{at}": (0, 0, n - 1, *cut) for at, n in enumerate((1, 5, CONTEXT))}
            setting = (number, 3, 0, 3, *(0,) * 9, 2)
            lab = Lab(Choices(recorded={"s": setting, **asked}))
            lab.run()
            assert dict(lab.outcomes) == {"published": 3}
            published.add(
                tuple(tuple(sorted(lab.device.published[request].items())) for request in range(3))
            )
    assert len(published) == 1


@pytest.mark.parametrize("text", MACHINE_BUGS)
def test_a_bug_in_a_machine_is_found(text: str) -> None:
    found = hunt(find_bug(text), FOUND_WITHIN)
    assert found.at is not None


@pytest.mark.parametrize("bug", LAB_BUGS, ids=lambda bug: bug.text)
def test_a_bug_of_bytes_is_found(bug: Mutant) -> None:
    assert hunt(bug, FOUND_WITHIN).at is not None


def test_a_bug_that_changes_nothing_is_not_found() -> None:
    for bug in EQUIVALENT:
        assert hunt(bug, 30).seen is None


def test_the_known_bugs_have_names_of_their_own() -> None:
    texts = [bug.text for bug in (*ALL_BUGS, *EQUIVALENT)]
    assert len(texts) == len(set(texts))


def test_a_finding_is_shrunk_and_its_command_shows_it_again() -> None:
    bug = find_bug("free without the read tokens")
    found = hunt(bug, FOUND_WITHIN)
    assert found.seen is not None
    with planted(bug):
        small = shrink(found.seen, budget_s=8.0)
    assert small.num_steps <= min(12, found.seen.num_steps)
    command = shlex.split(small.command(bug.text))
    assert command[:3] == shlex.split(COMMAND)
    again = subprocess.run(
        [sys.executable, *command[1:]], capture_output=True, text=True, timeout=120, check=False
    )
    assert again.returncode == 1, again.stderr
    assert f"broken: {small.broken}" in again.stdout
    assert re.search(r"^ +1\. +0\.000 s +attach source 0", again.stdout, re.MULTILINE)


def test_a_schedule_without_the_bug_comes_to_rest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--replay", "s=0.0.1"]) == 0
    assert "no rule was broken" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [["--replay", "nonsense"], ["--bug", "no such bug"], ["--one-lane", "--replay", "s=0.0.1"]],
)
def test_misuse_is_told_and_not_raised(
    arguments: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(list(arguments)) == 2
    assert capsys.readouterr().err.startswith("fault lab: ")


def test_a_record_is_stamped_and_adds_up(tmp_path: Path) -> None:
    out = tmp_path / "record.jsonl"
    told: list[str] = []
    total = run_record(60, SEED, out=out, tell=told.append)
    first, *batches, last = [json.loads(line) for line in out.read_text().splitlines()]
    assert first["claim"] == "fault-lab"
    assert first["one_lane"] is False
    assert first["stamp"]["commit"] is not None
    assert (
        sum(batch["new"] for batch in batches) == last["distinct"] == len(total.fingerprints) >= 60
    )
    assert sum(batch["steps"] for batch in batches) == last["steps"]
    assert last["violations"] == []
    assert len(told) == len(batches)


def test_a_record_of_one_lane_tells_what_was_parked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "record.jsonl"
    asked = ["--one-lane", "--schedules", "60", "--seed", str(SEED), "--out", str(out)]
    assert main(asked) == 0
    first, *_, last = [json.loads(line) for line in out.read_text().splitlines()]
    assert first["one_lane"] is True
    told = re.search(
        r"^parked: .*\bparked (\d+), got the lane (\d+)", capsys.readouterr().out, re.M
    )
    assert told is not None
    assert [int(count) for count in told.groups()] == [
        last["parked"]["parked"],
        last["parked"]["got the lane"],
    ]
    assert last["parked"]["imports"] > 0


def test_jobs_run_the_same_schedules(tmp_path: Path) -> None:
    alone = run_record(40, SEED, tell=lambda text: None)
    together = run_record(40, SEED, jobs=2, tell=lambda text: None)
    assert alone.fingerprints <= together.fingerprints


def test_what_is_found_names_its_rule() -> None:
    assert attributed(Violation("Publish(attempt) twice")).number == 1
    assert attributed(Violation("no Report of x")).number == 4
    assert attributed(KeyError("x")).text == "KeyError: 'x'"
    assert set(RULES) == {0, 1, 2, 3, 4, 5}


# The bytes are watched without the machines: what must not happen to them is told by its rule.

OWN, OTHER = AttemptId(EPOCH, 0, 1), AttemptId(EPOCH, 1, 1)
PLACES = ((4096, 0), (4097, 1))  # two cells of a slot


@pytest.fixture
def device() -> Device:
    device = Device(1, GEOMETRIES[0])
    lane = device.reserve(0)
    assert lane is not None
    lane.cells = {key: origin(OWN) | key for key in GEOMETRIES[0].needed(3)}
    return device


@pytest.fixture
def slot() -> SlotMemory:
    slot = SlotMemory(SourceId(0), 0)
    slot.grant(OWN, 0, poison=True)
    slot.write(OWN, PLACES)
    return slot


def breaks(number: int) -> AbstractContextManager[object]:
    return pytest.raises(Broken, match=f"^rule {number} ")


def test_own_cells_are_published(device: Device) -> None:
    device.publish(OWN, 3)
    assert set(device.published[0]) == set(GEOMETRIES[0].needed(3))


@pytest.mark.parametrize(
    ("number", "value"),
    [
        (1, UNWRITTEN),
        (1, POISON),
        (1, origin(OWN) | WRONG),
        (1, origin(OWN.next)),
        (2, origin(OTHER)),
        (5, origin(OWN) | 1),
    ],
)
def test_a_cell_that_is_not_its_own_is_never_published(
    device: Device, number: int, value: int
) -> None:
    device.held(0).cells[0] = value
    with breaks(number):
        device.publish(OWN, 3)


def test_an_entry_is_published_once_and_stays_what_it_is(device: Device) -> None:
    device.publish(OWN, 3)
    with breaks(4):
        device.publish(OWN, 3)
    device.held(0).cells[0] = origin(OTHER)
    with breaks(2):
        device.free(0)


def test_storage_is_not_given_on_while_it_is_written(device: Device, slot: SlotMemory) -> None:
    copying = Copying(OWN, device.held(0), slot, PLACES)
    with breaks(1):
        device.publish(OWN, 3)
    with breaks(3):
        device.free(0)
    with breaks(3):
        device.pass_on(OWN)
    copying.land()
    device.free(0)
    assert device.reserve(1) is device.lanes[0]


def test_a_copy_touches_nothing_that_was_passed_on(device: Device, slot: SlotMemory) -> None:
    copying = Copying(OWN, device.held(0), slot, PLACES)
    device.held(0).serial += 1
    with breaks(3):
        copying.land()
    copying = Copying(OWN, device.held(0), slot, PLACES)
    slot.generation += 1
    with breaks(3):
        copying.land()


def test_a_slot_is_granted_only_when_nobody_writes_or_reads_it(
    device: Device, slot: SlotMemory
) -> None:
    with breaks(3):
        slot.grant(OTHER, 1, poison=False)
    slot.writing = False
    copying = Copying(OWN, device.held(0), slot, PLACES)
    with breaks(3):
        slot.grant(OTHER, 1, poison=False)
    copying.land()
    with breaks(3):
        slot.grant(OTHER, 0, poison=False)
    slot.grant(OTHER, 1, poison=True)
    assert slot.values(PLACES) == [POISON, POISON]
    with breaks(2):
        slot.write(OWN, PLACES)


def test_a_lane_that_is_lost_comes_back_by_an_operator_only(device: Device) -> None:
    device.lose(0)
    assert device.reserve(1) is None
    device.reinstate(0)
    assert device.reserve(1) is not None
