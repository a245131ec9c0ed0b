"""A decoder as it is served: what it takes, and what its owner is told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.errors import (
    LocalProtocolError,
    PeerDied,
    Refused,
    RemoteProtocolError,
)
from headrace.ids import SourceId
from headrace.messages import (
    Ended,
    Events,
    Inspect,
    Interval,
    SourceHeld,
    Token,
    Withdraw,
)
from headrace.runtime.restarts import Line
from headrace.runtime.roster import Roster
from headrace.runtime.supervisor import RestartPolicy
from headrace.server import decoders, events
from headrace.server.label_words import outcome_of
from headrace.server.terminals import BUG_TEXT, Terminal
from tests.server_stand import ended
from tests.unit.server.decoder_stand import Fix, report, room, run, scripted_links, source, up


@pytest.fixture(autouse=True)
def _links(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from scripted_links(monkeypatch)


def test_a_choice_is_submitted_with_the_decoders_own_options() -> None:
    async def test() -> None:
        fix = Fix()
        link = await fix.up()
        choice = fix.submit()
        _, label, options = link.told[-1]
        assert (label, options.prefill_chunk) == (0, 16)
        dispatched = [each for each in fix.events if isinstance(each, events.Dispatched)]
        assert [(each.decoder, each.label) for each in dispatched] == [("left", 0)]
        choice.drop()
        choice.drop()
        assert link.told.count(Withdraw(0)) == 1
        await fix.say(replace(ended("cancelled", cause="cancelled"), label=0))
        assert choice.over
        await fix.end()

    run(test)


def test_a_full_channel_keeps_the_order_and_is_told_when_there_is_room() -> None:
    async def test() -> None:
        fix = Fix(prefetch_depth=8)
        link = await fix.up()
        link.told.clear()
        link.room = 1
        choices = [fix.submit() for _ in range(3)]
        choices[0].drop()
        assert [each[1] for each in link.told] == [0]
        await asyncio.sleep(0)
        link.room = None
        await fix.until(lambda: len(link.told) == 4)
        told = [each[1] if isinstance(each, tuple) else each for each in link.told]
        assert told == [0, 1, 2, Withdraw(0)]
        await fix.end()

    run(test)


def test_what_was_not_told_yet_dies_with_the_owner() -> None:
    async def test() -> None:
        fix = Fix()
        link = await fix.up()
        link.told.clear()
        link.room = 0
        choice = fix.submit()
        await fix.say(PeerDied("gone"))
        assert choice.over
        await fix.again()
        await fix.say(up())
        assert (link.told, fix.link.told) == ([], [Inspect()])
        await fix.end()

    run(test)


@pytest.mark.parametrize(
    ("error", "terminal", "field"),
    [
        (Refused("chunk is -1", field="chunk"), Terminal.INVALID, "chunk"),
        (Refused("memfd_create failed: Too many open files"), Terminal.NOT_READY, None),
        (RemoteProtocolError("it cannot be read"), Terminal.BUG, None),
        (LocalProtocolError("a message is too long"), Terminal.BUG, None),
        (MemoryError("no room for the prompt"), Terminal.BUG, None),
    ],
)
def test_a_choice_that_cannot_be_told_fails_alone(
    error: Exception, terminal: Terminal, field: str | None
) -> None:
    async def test() -> None:
        fix = Fix()
        link = await fix.up()
        link.fails = error
        first, second = fix.submit(), fix.submit()
        assert first.failure is not None
        assert (first.failure.terminal, first.failure.field) == (terminal, field)
        assert fix.over == [first]
        (told,) = [each for each in fix.events if isinstance(each, events.ChoiceEnded)]
        assert (told.choice, told.ended.outcome) == (0, "failed")
        assert told.ended.reason == first.failure.text
        refused = terminal is not Terminal.BUG
        assert (outcome_of(told.ended) == "refused") == refused
        assert link.told[-1][1] == 1
        await fix.say(replace(ended(), label=1))
        assert second.failure is None
        await fix.end()

    run(test)


def test_a_death_that_is_noticed_by_a_send_waits_for_what_was_said_before() -> None:
    async def test() -> None:
        fix = Fix()
        link = await fix.up()
        choice = fix.submit()
        link.fails = PeerDied("gone")
        other = fix.submit()
        assert fix.decoder.state == "ready"
        await fix.say(Token(0, 65), replace(ended(), label=0), PeerDied("gone"))
        assert choice.failure is None
        assert other.failure is not None
        await fix.end()

    run(test)


@pytest.mark.parametrize("begun", [False, True])
def test_an_owner_that_is_stuck_holds_up_no_deadline(
    begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner keeps deadlines; what it does not tell of ends here, and stays the owner's."""
    monkeypatch.setattr(decoders, "OVERDUE_S", 0.0)

    async def test() -> None:
        fix = Fix()
        link = await fix.up()
        choice = fix.submit(deadline_ns=time.monotonic_ns() + 1_000_000)
        if begun:
            await fix.say(Token(0, 65))
        await asyncio.sleep(0.02)
        if begun:  # a deadline is of what comes before the first token
            assert not choice.over
            await fix.end()
            return
        assert choice.failure is not None
        assert choice.failure.terminal is Terminal.DEADLINE
        assert link.told[-1] == Withdraw(0)
        assert (fix.over, fix.decoder.load) == ([], 0.5)
        await fix.say(replace(ended("cancelled", cause="cancelled"), label=0))
        assert choice.failure.terminal is Terminal.DEADLINE
        assert (fix.over, fix.decoder.load) == ([choice], 0.0)
        await fix.end()

    run(test)


def test_an_end_leaves_no_timer_of_a_deadline() -> None:
    async def test() -> None:
        fix = Fix()
        await fix.up()
        choices = [fix.submit(deadline_ns=time.monotonic_ns() + 10**15) for _ in range(2)]
        assert all(each.deadline is not None for each in choices)
        await fix.say(replace(ended(), label=0), PeerDied("gone"))
        assert [each.deadline for each in choices] == [None, None]
        await fix.end()

    run(test)


def test_an_owner_without_a_lane_is_ended_and_started_again() -> None:
    """Its death proves quiet what was quarantined; not before what runs is over."""

    async def test() -> None:
        fix = Fix()
        link = await fix.up()
        choice = fix.submit()
        await fix.say(report(quarantined=2))
        assert (fix.decoder.state, fix.decoder.ready) == ("ready", False)
        await fix.say(replace(ended(), label=0), report(quarantined=2))
        assert choice.failure is None
        assert fix.decoder.state == "waiting"
        assert "quarantined" in fix.decoder.reason
        await fix.until(lambda: bool(link.closed))
        await fix.again()
        await fix.say(up())
        assert fix.decoder.ready
        await fix.end()

    run(test)


# What it takes.


@pytest.mark.parametrize(
    ("lanes", "slots", "depth", "most"),
    [
        (1, 2, 1, 2),  # one in the lane and one ahead
        (1, 2, 0, 1),
        (1, 1, 4, 1),  # one slot: none ahead
        (2, 4, 1, 3),
        (4, 2, 0, 2),  # not more than there are slots for at once
    ],
)
def test_it_takes_what_lanes_and_slots_hold(lanes: int, slots: int, depth: int, most: int) -> None:
    async def test() -> None:
        fix = Fix(prefetch_depth=depth)
        await fix.up(lanes=lanes, num_slots=slots)
        taken = 0
        while room(fix.decoder):
            fix.submit()
            taken += 1
        assert taken == most
        assert fix.decoder.load == most / lanes
        await fix.end()

    run(test)


def test_a_first_token_and_an_end_make_room() -> None:
    async def test() -> None:
        fix = Fix(prefetch_depth=0)
        await fix.up(lanes=2, num_slots=1)
        fix.submit()
        assert not room(fix.decoder)  # its slot
        changes = fix.changes
        await fix.say(Token(0, 65))
        assert room(fix.decoder)
        fix.submit()
        await fix.say(Token(1, 65))
        assert not room(fix.decoder)  # both lanes
        await fix.say(replace(ended(), label=0))
        assert room(fix.decoder)
        assert fix.changes >= changes + 3
        await fix.end()

    run(test)


def test_long_prompts_leave_a_lane_free() -> None:
    async def test() -> None:
        fix = Fix(prefetch_depth=0)
        await fix.up(lanes=3, num_slots=6)
        for _ in range(2):
            assert room(fix.decoder, 50, long_from=50)
            fix.submit(50)
        assert not room(fix.decoder, 50, long_from=50)
        assert room(fix.decoder, 49, long_from=50)
        assert room(fix.decoder, 50, long_from=0)
        await fix.end()
        fix = Fix(prefetch_depth=0)
        await fix.up(lanes=1)
        assert room(fix.decoder, 50, long_from=50)  # there is one lane only
        await fix.end()

    run(test)


def test_quarantined_lanes_and_dead_sources_leave_less_room() -> None:
    async def test() -> None:
        fix = Fix(prefetch_depth=0)
        await fix.up(lanes=3, num_slots=4, num_sources=2)
        dead = source("waiting to restart", "it died")
        await fix.say(report(source(), dead, quarantined=1))
        assert (fix.decoder.lanes, fix.decoder.sources) == (2, 1)
        fix.submit()
        fix.submit()
        assert not room(fix.decoder)
        await fix.say(report(dead, dead, quarantined=1))
        assert (fix.decoder.ready, fix.decoder.hopeless) == (False, False)
        await fix.say(report(source(), source(), quarantined=3))
        assert (fix.decoder.ready, fix.decoder.hopeless) == (False, False)
        await fix.end()

    run(test)


def test_an_owner_whose_sources_are_gone_for_good_is_started_again() -> None:
    async def test() -> None:
        fix = Fix()
        await fix.up()
        gone = source("set aside", "it died 5 times")
        choice = fix.submit()
        await fix.say(report(gone))
        # No more is sent there, what runs ends first, and what waits is not refused.
        assert (fix.decoder.ready, fix.decoder.hopeless) == (False, False)
        assert fix.states()[-1] == "ready"
        await fix.say(replace(ended(), label=0), report(gone))
        assert choice.failure is None
        assert fix.decoder.state == "waiting"
        assert "it died 5 times" in fix.decoder.reason
        await fix.end()

    run(test)


@pytest.mark.parametrize("local", [False, True])
def test_an_idle_owner_outlives_a_source_that_is_being_ended(local: bool) -> None:
    """From its kill to its death, of which a large one takes seconds, its successor is expected."""
    handle: Any = SimpleNamespace(name="replay", manifest=None, layout="", maker="", running_pid=7)
    line = Line(handle, RestartPolicy(), 0)
    roster = Roster()
    roster.entered(SourceId(0), handle, line)

    async def test() -> None:
        fix = Fix(local=local)
        await fix.up()
        roster.lost(SourceId(0), "slot 0 was not given back in time")
        await fix.say(report(*roster.held((), None)))
        assert fix.states()[-1] == "ready"
        assert (fix.decoder.ready, fix.decoder.hopeless) == (False, False)
        line.aside, line.reason = True, "it died 5 times"
        await fix.say(report(*roster.held((), None)))
        assert fix.decoder.ready is local
        assert fix.states()[-1] == ("ready" if local else "waiting")
        await fix.end()

    run(test)


def test_an_owner_that_computes_by_itself_serves_on_without_sources() -> None:
    """One prompt after the other, since it has one slot of its own."""

    async def test() -> None:
        fix = Fix(local=True)
        await fix.up()
        await fix.say(report(source("waiting to restart", "it died")))
        assert (fix.decoder.ready, fix.decoder.hopeless) == (False, False)
        await fix.say(report(source("set aside", "it died 5 times")))
        assert fix.states()[-1] == "ready"
        assert (fix.decoder.ready, fix.decoder.hopeless) == (True, False)
        assert room(fix.decoder)
        fix.submit()
        assert not room(fix.decoder)
        await fix.say(Token(0, 65))
        assert room(fix.decoder)
        await fix.end()

    run(test)


def test_an_owners_own_engine_is_none_of_its_sources() -> None:
    async def test() -> None:
        fix = Fix(prefetch_depth=0, local=True)
        await fix.up(lanes=4, num_slots=2)
        own = SourceHeld(2, "owner", "in service", "", 0, 0)
        await fix.say(report(source(), own))
        assert fix.decoder.sources == 1
        fix.submit()
        fix.submit()
        assert not room(fix.decoder)
        await fix.say(report(source("waiting to restart", "it died"), own))
        assert (fix.decoder.sources, fix.decoder.ready) == (0, False)
        await fix.end()

    run(test)


def test_a_report_that_had_no_room_for_the_sources_ends_nothing() -> None:
    async def test() -> None:
        fix = Fix()
        await fix.up()
        await fix.say(replace(report(), sources=(), truncated=True))
        assert fix.decoder.state == "ready"
        assert not fix.decoder.hopeless
        await fix.end()

    run(test)


def test_a_failure_has_the_owner_asked_what_is_left() -> None:
    async def test() -> None:
        fix = Fix()
        link = await fix.up()
        await fix.say(report())
        fix.submit()
        asked = link.told.count(Inspect())
        await fix.say(replace(ended("failed", cause="source-died"), label=0))
        assert link.told.count(Inspect()) == asked + 1
        await fix.end()

    run(test)


def test_an_end_is_told_with_its_intervals() -> None:
    async def test() -> None:
        fix = Fix()
        await fix.up()
        choice = fix.submit()
        of_source = Interval("compute", "layer", 1, 2, 0, "host")
        of_owner = Interval("import", "piece", 2, 3, 8, "host")
        await fix.say(Events(0, "source", (of_source,)), Events(0, "owner", (of_owner,)))
        last: Ended = replace(ended(), label=0)
        await fix.say(Token(0, 65), last)
        (told,) = [each for each in fix.events if isinstance(each, events.ChoiceEnded)]
        assert (told.source_intervals, told.owner_intervals) == ((of_source,), (of_owner,))
        assert (told.num_tokens, told.ended, choice.ended) == (1, last, last)
        await fix.end()

    run(test)


def test_a_bug_in_telling_a_choice_is_logged_and_not_told_to_its_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        fix = Fix()
        link = await fix.up()
        link.fails = TypeError("of the inside")
        choice = fix.submit()
        assert choice.failure is not None
        assert (choice.failure.terminal, choice.failure.text) == (Terminal.BUG, BUG_TEXT)
        assert "of the inside" in caplog.text
        await fix.end()

    run(test)


def test_being_up_for_long_without_a_source_is_no_health() -> None:
    """Else an owner whose sources die again and again would be started for ever."""

    async def test() -> None:
        restart = RestartPolicy(first_delay_s=30.0, max_failures=3, healthy_after_s=0.0)
        fix = Fix(restart=restart)
        await fix.decoder.start()
        gone = source("set aside", "it died 5 times")
        for _ in range(2):
            await fix.say(up(), report(gone))
            assert fix.decoder.state == "waiting"
            await fix.again()
        await fix.say(up(), report(gone))
        assert fix.decoder.state == "set aside"
        assert fix.decoder.reason.startswith("decoder left died 3 times")
        await fix.end()

    run(test)
