"""Two clocks are compared by the messages between them, and by nothing else."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from headrace.telemetry.clocks import ClockCheck, align, check_clocks, pairs
from headrace.telemetry.recording import Run
from tests.unit.telemetry.scenes import (
    US,
    at,
    cancelled,
    moved,
    on,
    parked,
    streamed,
    whole,
)

SECOND = 1_000_000_000
FORWARD_US, BACKWARD_US = 100, 30  # of `streamed`: grant to first computing, fastest message


def apart(by_ns: int) -> Run:
    run = streamed()
    return replace(run, source=moved(run.source, by_ns))


def test_one_clock() -> None:
    clock = align(streamed()).clock
    assert clock.verdict == "one"
    assert clock.offset_ns == (FORWARD_US - BACKWARD_US) // 2 * US
    assert clock.error_ns == (FORWARD_US + BACKWARD_US) // 2 * US
    assert clock.shift_ns == 0
    assert clock.comparable


@pytest.mark.parametrize("by_ns", [3 * SECOND, -3 * SECOND, 7_654_321_987, -101 * US, 66 * US])
def test_another_clock_is_found_and_taken_off(by_ns: int) -> None:
    run = align(apart(by_ns))
    clock = run.clock
    assert clock.verdict == "shifted"
    assert clock.shift_ns == clock.offset_ns
    assert abs(clock.offset_ns - by_ns) <= clock.error_ns == 65 * US
    for told, true in zip(run.source, streamed().source, strict=True):
        assert abs(told.begun_ns - true.begun_ns) <= clock.error_ns
        assert told.ended_ns - told.begun_ns == true.ended_ns - true.begun_ns
    assert run.owner == streamed().owner


@pytest.mark.parametrize("by_ns", [29 * US, -99 * US, 30 * US, -100 * US])
def test_within_the_error_it_is_one_clock(by_ns: int) -> None:
    run = align(apart(by_ns))
    assert run.clock.verdict == "one"
    assert run.source == apart(by_ns).source


def test_a_device_bounds_the_offset_by_no_more_than_its_error_allows() -> None:
    """It may have begun earlier or later than it is said to have."""
    run = on("device", streamed(), "compute", error_us=9)
    clock = align(run).clock
    assert clock.offset_ns == (FORWARD_US + 9 - BACKWARD_US) * US // 2
    assert clock.error_ns == (FORWARD_US + 9 + BACKWARD_US) * US // 2
    early = replace(run, source=moved(run.source[:1], -105 * US) + run.source[1:])
    assert align(early).clock.verdict == "one"  # though it is said to compute before the grant
    assert align(on("host", early, "compute")).clock.verdict == "shifted"


def test_an_odd_number_of_ns_keeps_both_bounds_within_the_error() -> None:
    source = [at("compute", 0.001), at("announced", 5, name="m")]
    owner = [at("granted", 0), at("validated", 5, name="m")]
    assert check_clocks(source, owner) == ClockCheck("one", 0, 1)


def test_readings_that_no_offset_fits() -> None:
    """The grant came after the work that it granted, and so did what the work told."""
    run = streamed()
    source = tuple(
        replace(each, begun_ns=each.begun_ns - 200 * US) if each.kind == "compute" else each
        for each in run.source
    )
    clock = align(replace(run, source=source)).clock
    assert clock == ClockCheck("contradictory", 0, 0)
    assert not clock.comparable
    assert align(replace(run, source=source)).tail is None


@pytest.mark.parametrize("missing", ["granted", "compute", "announced", "validated"])
def test_messages_of_one_direction_tell_nothing(missing: str) -> None:
    run = cancelled()
    source = [each for each in run.source if each.kind != missing]
    owner = [each for each in run.owner if each.kind != missing]
    clock = check_clocks(source, owner)
    assert clock == ClockCheck("unchecked", 0, 0)
    assert clock.comparable


def test_the_last_grant_counts() -> None:
    source = [at("compute", 50, 60), at("announced", 60)]
    owner = [at("granted", 0), at("granted", 40), at("validated", 70, name="announced")]
    assert check_clocks(source, owner).error_ns == 10 * US


def test_messages_are_paired_by_what_they_tell_in_order() -> None:
    source = [
        at("announced", 1, name="a", nbytes=1),
        at("announced", 2, name="a", nbytes=2),
        at("announced", 3, name="a", nbytes=1),
        at("announced", 4, name="lost", nbytes=1),
        at("final", 5, name="logits"),
    ]
    owner = [
        at("validated", 11, name="a", nbytes=1),
        at("import", 12, name="a", nbytes=1),
        at("validated", 13, name="a", nbytes=1),
        at("validated", 14, name="logits"),
        at("validated", 15, name="never sent", nbytes=2),
    ]
    assert list(pairs(source, owner)) == [
        (source[0], owner[0]),
        (source[2], owner[2]),
        (source[4], owner[3]),
    ]


def test_moments() -> None:
    run = align(streamed())
    first = streamed().source[0].begun_ns
    assert run.begun_ns == first
    assert run.last_group_ns == first + 3_110 * US
    assert run.tail == (first + 3_100 * US, first + 3_900 * US)
    assert [each.kind for each in run.of("published", "final")] == ["final", "published"]
    assert align(whole()).final_ns == first + 2_900 * US


def test_moments_that_were_not_reached() -> None:
    run = align(cancelled(source=()))
    assert (run.begun_ns, run.final_ns, run.last_group_ns, run.published_ns) == (None,) * 4
    assert run.tail is None


def test_there_is_no_tail_backwards() -> None:
    run = streamed()
    owner = [each for each in run.owner if each.kind != "published"]
    assert align(replace(run, owner=(*owner, at("published", 3_199)))).tail is None
    early = align(replace(run, owner=(*owner, at("published", 3_200))))
    assert early.tail is not None
    assert early.tail[0] == early.tail[1]


def test_a_tail_begins_when_there_is_storage() -> None:
    run = align(parked())
    assert run.parked is not None
    assert run.tail == (run.parked.ended_ns, run.published_ns)
    assert align(streamed()).parked is None
