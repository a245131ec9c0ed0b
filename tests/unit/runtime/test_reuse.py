"""Who computes the rest of a prompt: the way that is expected to publish first, and why."""

from __future__ import annotations

from array import array

import pytest

from headrace.backends.base import Kept
from headrace.geometry import Full
from headrace.messages import MAX_CHOICE_TEXT
from headrace.runtime.prefix import Found, KeptPrompt, Schedule
from headrace.runtime.reuse import (
    MOST_OWNER_BESIDE_NS,
    MOST_OWNER_NS,
    MOST_RECOMPUTED_CUTS,
    NOTHING,
    Sides,
    Speeds,
    Way,
    as_told,
    choose,
    ways,
)
from tests.unit.protocol.builders import make_plan

N = 1000
ROW = 100.0
UNKNOWN = Speeds(None, None, None, None)
SPEEDS = Speeds(source_ns=1e9, position_ns=1e6, carry_ns_per_byte=100.0, copy_ns_per_byte=10.0)


def found(positions: int, num_tokens: int | None = None) -> Found:
    kept = Kept(1, num_tokens or positions, 0, 1000, 0)
    schedule = Schedule("model", "float32", "torch {}", 0, ())
    tokens = array("I", range(kept.num_tokens))
    return Found(KeptPrompt(kept, schedule, tokens, make_plan(4, Full()), b"", None), positions)


def taken(positions: int, sides: Sides, speeds: Speeds = SPEEDS) -> tuple[Way, str]:
    offers = [found(positions)] if positions else []
    return choose(ways(offers, sides, speeds, N, ROW))


def test_a_prompt_that_is_all_kept_needs_nobody() -> None:
    for sides in (Sides("none", False), Sides("own_cache", True)):
        way, reason = taken(N, sides, UNKNOWN)
        assert (way.remainder, way.found is not None) == ("none", True)
        assert reason == "all 1000 positions are kept"


def test_without_anything_kept_all_is_prefilled() -> None:
    way, reason = taken(0, Sides("own_cache", True))
    assert (way.found, way.remainder, reason) == (None, "source", NOTHING)


def test_a_source_that_can_do_neither_prefills_all() -> None:
    way, _ = taken(900, Sides("none", False))
    assert way.found is None


def test_to_recompute_saves_the_transfer_only() -> None:
    recompute, again, cold = [
        *ways([found(900)], Sides("recompute", False), SPEEDS, N, ROW),
        *ways([], Sides("recompute", False), SPEEDS, N, ROW),
    ]
    assert again.ns == cold.ns == 1e9 + 100.0 * ROW * N
    assert recompute.ns == 1e9 + 100.0 * ROW * 100
    way, reason = taken(900, Sides("recompute", False))
    assert way.remainder == "source"
    assert "computes all 1000 again and sends 100" in reason
    assert "1001.0 ms" in reason
    assert "1010.0 ms" in reason


def test_an_own_cache_saves_compute_too() -> None:
    (way, _), (other, _) = (taken(900, Sides(use, False)) for use in ("own_cache", "recompute"))
    assert way.ns is not None
    assert other.ns is not None
    assert way.ns < 0.2 * other.ns


@pytest.mark.parametrize(("positions", "who"), [(999, "owner"), (900, "owner"), (100, "source")])
def test_the_owner_computes_what_is_short_enough(positions: int, who: str) -> None:
    speeds = SPEEDS._replace(position_ns=2e6)
    way, reason = taken(positions, Sides("recompute", True), speeds)
    assert (way.remainder, way.found is not None) == (who, True), reason


def test_what_costs_more_than_it_saves_is_left() -> None:
    """A copy within the decoder that is slower than the source's way to it."""
    offers = [found(900, num_tokens=950)]
    speeds = SPEEDS._replace(copy_ns_per_byte=1000.0)
    way, reason = choose(ways(offers, Sides("recompute", False), speeds, N, ROW))
    assert way.found is None
    assert "a prefill of all 1000" in reason


def test_what_is_taken_over_as_it_lies_costs_no_copy() -> None:
    speeds = SPEEDS._replace(copy_ns_per_byte=1000.0)
    way, _ = choose(ways([found(900)], Sides("recompute", False), speeds, N, ROW))
    assert way.found is not None


def test_of_what_is_unknown_a_source_that_sends_less_is_taken_and_an_owner_is_not() -> None:
    way, reason = taken(900, Sides("recompute", True), UNKNOWN)
    assert (way.remainder, "nothing is known of its speed yet" in reason) == ("source", True)
    way, reason = taken(900, Sides("none", True), UNKNOWN)
    assert (way.found, "nothing is known yet" in reason) == (None, True)


def test_an_owner_of_unknown_speed_is_not_assumed_to_be_fast() -> None:
    way, _ = taken(999, Sides("recompute", True), SPEEDS._replace(position_ns=None))
    assert way.remainder == "source"


def test_an_owner_that_was_not_measured_is_tried_where_it_cannot_cost_much() -> None:
    for steps_ns, tried in ((15e6, True), (25e6, False)):  # 100 of them against about 1 s
        speeds = SPEEDS._replace(position_ns=steps_ns)
        offers = ways([found(900)], Sides("recompute", True), speeds, N, ROW)
        way, reason = choose(offers, owner_is_measured=False)
        assert (way.remainder == "owner", "to be measured" in reason) == (tried, tried)
        assert choose(offers)[0].remainder == "source"


def test_an_owner_does_not_compute_for_longer_than_others_can_wait() -> None:
    for beside, most_ns in ((False, MOST_OWNER_NS), (True, MOST_OWNER_BESIDE_NS)):
        speeds = SPEEDS._replace(source_ns=1e11, most_owner_ns=most_ns)
        for position_ns, taken_by in ((most_ns / 101, "owner"), (most_ns / 99, "source")):
            offers = ways(
                [found(900)],
                Sides("recompute", True),
                speeds._replace(position_ns=position_ns),
                N,
                ROW,
            )
            assert choose(offers)[0].remainder == taken_by, beside


def test_a_source_that_runs_from_0_goes_on_from_few_cuts_only() -> None:
    """A conversation adds one with each turn, and each costs a forward."""
    often, seldom = found(900), found(800)
    cuts = tuple(range(1, MOST_RECOMPUTED_CUTS + 1))
    often.prompt.schedule = often.prompt.schedule._replace(cuts=cuts)
    for offered, positions in (([often, seldom], 800), ([often], 0)):
        way, _ = choose(ways(offered, Sides("recompute", False), SPEEDS, N, ROW))
        assert (0 if way.found is None else way.found.positions) == positions
    way, _ = choose(ways([often, seldom], Sides("own_cache", False), SPEEDS, N, ROW))
    assert way.found is often


def test_a_source_that_was_slower_at_remainders_than_expected_is_expected_to_be_so_again() -> None:
    fast, _ = taken(900, Sides("recompute", False))
    assert fast.found is not None
    slow, reason = taken(900, Sides("recompute", False), SPEEDS._replace(recompute_off=3.0))
    assert slow.found is None, reason
    slow, reason = taken(900, Sides("own_cache", False), SPEEDS._replace(own_cache_off=30.0))
    assert slow.found is None, reason


def test_what_is_told_fits_its_message() -> None:
    way, _ = taken(900, Sides("recompute", False))
    told = as_told(way, "x" * 1000)
    assert (told.positions, told.remainder) == (900, "source")
    assert len(told.reason) == MAX_CHOICE_TEXT
    assert as_told(taken(0, Sides("none", False))[0], "").positions == 0
