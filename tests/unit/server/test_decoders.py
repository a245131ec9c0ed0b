"""A decoder as it is served: its owner's life and end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from headrace.errors import (
    BackendUnavailable,
    DeviceError,
    PeerDied,
    Refused,
    RemoteProtocolError,
)
from headrace.messages import (
    Events,
    Inspect,
    Interval,
    Token,
)
from headrace.runtime.owner_link import OwnerFailed
from headrace.runtime.supervisor import RestartPolicy
from headrace.server import decoders, events
from headrace.server.terminals import Terminal
from tests.server_stand import ended
from tests.unit.server.decoder_stand import Fix, Link, report, room, run, scripted_links, up


@pytest.fixture(autouse=True)
def _links(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from scripted_links(monkeypatch)


def test_it_starts_and_is_ready_when_its_owner_is_up() -> None:
    async def test() -> None:
        fix = Fix()
        assert not room(fix.decoder)
        await fix.decoder.start()
        assert (fix.decoder.state, fix.decoder.ready, fix.decoder.hopeless) == (
            "starting",
            False,
            False,
        )
        await fix.say(up())
        assert (fix.decoder.ready, fix.decoder.lanes, fix.decoder.sources) == (True, 2, 1)
        assert fix.link.told == [Inspect()]
        changed = [each for each in fix.events if isinstance(each, events.DecoderChanged)]
        assert [(each.state, each.incarnation, each.pid) for each in changed] == [
            ("starting", 0, 0),
            ("ready", 0, 100),
        ]
        await fix.end()
        assert fix.states() == ["starting", "ready", "stopped"]

    run(test)


def test_after_a_death_what_ran_fails_and_another_owner_is_started() -> None:
    async def test() -> None:
        fix = Fix()
        await fix.up()
        choices = [fix.submit(), fix.submit()]
        await fix.say(Token(0, 65), PeerDied("gone"))
        assert fix.decoder.state == "waiting"
        for choice in choices:
            assert choice.failure is not None
            assert choice.failure.terminal is Terminal.OWNER_DIED
            assert "decoder left" in choice.failure.text
            assert choice.failure.retry_after_s
        assert fix.over == choices
        assert (choices[0].num_tokens, choices[1].num_tokens) == (1, 0)
        assert not room(fix.decoder)
        await fix.again()
        assert Link.made[0].closed == [0.0]
        await fix.say(up())
        assert (fix.decoder.incarnation, room(fix.decoder)) == (1, True)
        await fix.end()

    run(test)


def test_another_owner_is_started_when_the_delay_has_passed() -> None:
    async def test() -> None:
        fix = Fix(restart=RestartPolicy(first_delay_s=0.0))
        await fix.up()
        await fix.say(PeerDied("gone"))
        await fix.until(lambda: len(Link.made) == 2)
        await fix.until(lambda: fix.decoder._link is not None)  # it was checked
        assert fix.decoder.state == "starting"
        await fix.end()

    run(test)


def test_late_messages_of_a_dead_owner_and_of_unknown_labels_change_nothing() -> None:
    async def test() -> None:
        fix = Fix()
        first = await fix.up()
        old = fix.submit()
        first.say(PeerDied("gone"), Token(0, 65), ended())
        await fix.until(lambda: fix.decoder.state == "waiting")
        await fix.again()
        assert len(first.heard) == 2  # nobody reads there any more
        await fix.say(up())
        new = fix.submit()
        label = fix.link.told[-1][1]
        assert label == 1  # labels are never used again
        interval = Interval("compute", "layer", 1, 2, 0, "host")
        await fix.say(
            Token(0, 66), Events(0, "source", (interval,)), ended(), replace(ended(), label=99)
        )
        assert (old.num_tokens, new.num_tokens, new.over) == (0, 0, False)
        await fix.say(Token(label, 67), replace(ended(), label=label))
        await fix.say(Token(label, 68), replace(ended("failed"), label=label))
        assert (new.num_tokens, new.over, new.failure) == (1, True, None)
        assert fix.over == [old, new]
        await fix.end()

    run(test)


def test_one_that_keeps_dying_is_set_aside_and_hopeless() -> None:
    async def test() -> None:
        fix = Fix()
        await fix.decoder.start()
        for number in range(3):
            if number:
                await fix.again()
            await fix.say(OwnerFailed("no device"))
        assert (fix.decoder.state, fix.decoder.hopeless) == ("set aside", True)
        assert fix.decoder.reason.startswith("decoder left died 3 times within")
        assert fix.decoder.reason.endswith("the last: no device")
        assert not fix.decoder.mistake
        await fix.end()
        assert fix.states() == [*["starting", "waiting"] * 2, "starting", "set aside", "stopped"]

    run(test)


def test_a_request_that_finished_lets_it_begin_anew() -> None:
    async def test() -> None:
        fix = Fix()
        for number in range(5):
            await (fix.again() if number else fix.decoder.start())
            await fix.say(up())
            fix.submit()
            label = fix.link.told[-1][1]
            await fix.say(replace(ended(), label=label), PeerDied("gone"))
            assert fix.decoder.state == "waiting"
        await fix.end()

    run(test)


@pytest.mark.parametrize("where", ["check", "down"])
def test_a_mistake_at_the_first_start_is_told_and_not_tried_again(where: str) -> None:
    async def test() -> None:
        fix = Fix()
        if where == "check":
            Link.refuses = Refused("--decoder-python is no Python")
        await fix.decoder.start()
        if where == "down":
            await fix.say(Refused("unknown option"))
        assert (fix.decoder.state, fix.decoder.mistake) == ("set aside", True)
        await fix.decoder.stop(0.0)

    run(test)


@pytest.mark.parametrize("where", ["check", "down"])
def test_a_shortage_at_the_first_start_is_tried_again(where: str) -> None:
    async def test() -> None:
        fix = Fix()
        short = Refused("4 lanes: needs 9 bytes, 8 bytes available", shortage=True)
        if where == "check":
            Link.refuses = short
        await fix.decoder.start()
        if where == "down":
            await fix.say(short)
        assert (fix.decoder.state, fix.decoder.mistake) == ("waiting", False)
        assert fix.decoder.reason == str(short)
        await fix.decoder.stop(0.0)

    run(test)


@pytest.mark.parametrize("when", ["ready", "later"])
def test_what_is_lacking_after_the_first_start_is_no_mistake(when: str) -> None:
    async def test() -> None:
        fix = Fix()
        await fix.up()
        if when == "later":
            await fix.say(PeerDied("gone"))
            await fix.again()
        await fix.say(Refused("no memory just now"))
        assert (fix.decoder.state, fix.decoder.mistake) == ("waiting", False)
        await fix.end()

    run(test)


def test_a_missing_environment_is_tried_again() -> None:
    async def test() -> None:
        fix = Fix()
        Link.refuses = BackendUnavailable("rngd", "import", "import x", "no", "install it")
        await fix.decoder.start()
        assert (fix.decoder.state, fix.decoder.mistake) == ("waiting", False)
        await fix.decoder.stop(0.0)

    run(test)


def test_one_that_is_not_ready_in_time_is_ended() -> None:
    async def test() -> None:
        fix = Fix(start_s=0.0)
        await fix.decoder.start()
        await fix.until(lambda: fix.decoder.state == "waiting")
        assert "not ready within" in fix.decoder.reason
        await fix.end()

    run(test)


def test_one_that_leaves_questions_unanswered_is_ended() -> None:
    async def test() -> None:
        fix = Fix(look_every_s=0.0, silence_s=0.0)
        await fix.up()
        choice = fix.submit()
        await fix.until(lambda: fix.decoder.state == "waiting")
        assert "did not answer" in fix.decoder.reason
        assert choice.over
        await fix.end()

    run(test)


def test_one_that_answers_is_asked_again_and_again() -> None:
    async def test() -> None:
        fix = Fix(look_every_s=0.0, silence_s=60.0)
        link = await fix.up()
        for count in range(1, 5):
            await fix.until(lambda n=count: link.told.count(Inspect()) == n)  # type: ignore[misc]
            await fix.say(report())
        looked = [each for each in fix.events if isinstance(each, events.Looked)]
        assert len(looked) == 4
        await fix.end()

    run(test)


def test_what_is_no_message_is_logged_and_no_end(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        fix = Fix()
        await fix.up()
        choice = fix.submit()
        await fix.say(RemoteProtocolError("garbage"), Token(0, 65))
        assert (fix.decoder.state, choice.num_tokens) == ("ready", 1)
        await fix.end()

    run(test)
    assert "garbage" in caplog.text


def test_a_flood_of_one_owner_is_read_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "RECEIVED_AT_ONCE", 2)

    async def test() -> None:
        fix = Fix()
        await fix.up()
        choice = fix.submit()
        fix.link.heard.extend([Token(0, 65)] * 6)
        fix.decoder._readable()
        assert choice.num_tokens == 2
        await fix.end()

    run(test)


# Stopping.


def test_stop_fails_what_runs_and_may_be_called_again() -> None:
    async def test() -> None:
        fix = Fix()
        link = await fix.up()
        choice = fix.submit()
        await fix.decoder.stop(3.0)
        assert choice.failure is not None
        assert choice.failure.terminal is Terminal.SHUTTING_DOWN
        assert (link.closed, fix.over) == ([3.0], [choice])
        await fix.decoder.stop(3.0)
        assert (link.closed, fix.over) == ([3.0], [choice])
        await fix.end()
        assert fix.states().count("stopped") == 1

    run(test)


def test_an_owner_that_cannot_be_asked_to_end_is_not_waited_for() -> None:
    async def test() -> None:
        fix = Fix()
        link = await fix.up()
        link.can_be_told = False
        await fix.decoder.stop(3.0)
        assert link.closed == [0.0]

    run(test)


@pytest.mark.parametrize("how", ["stop", "lost"])
def test_an_owner_that_cannot_be_ended_is_logged(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        fix = Fix()
        link = await fix.up()
        link.close_fails = DeviceError("it hangs in the kernel")
        if how == "lost":
            await fix.say(PeerDied("gone"))
        await fix.end()

    run(test)
    assert "it hangs in the kernel" in caplog.text


@pytest.mark.parametrize("how", ["stop", "lost"])
def test_a_stop_does_not_wait_for_ever(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "CLOSE_WITHIN_S", 0.05)
    held = threading.Event()

    async def test() -> None:
        fix = Fix()
        link = await fix.up()
        link.held = held
        if how == "lost":
            await fix.say(PeerDied("gone"))
        await fix.decoder.stop(3.0)
        assert (fix.decoder.state, link.closed) == ("stopped", [])
        (closing,) = fix.decoder._closings
        held.set()
        await closing
        assert link.closed == [3.0 if how == "stop" else 0.0]
        await fix.end()

    run(test)


def test_none_is_started_after_a_stop() -> None:
    async def test() -> None:
        fix = Fix()
        starting = asyncio.ensure_future(fix.decoder.start())
        await asyncio.sleep(0)
        await fix.decoder.stop(0.0)
        await starting
        assert fix.decoder._link is None
        assert fix.decoder.state == "stopped"
        fix = Fix()
        await fix.up()
        await fix.say(PeerDied("gone"))
        num_made = len(Link.made)
        await fix.decoder.stop(0.0)
        fix.decoder._start_again()
        assert len(Link.made) == num_made
        assert fix.decoder.state == "stopped"

    run(test)


@pytest.mark.parametrize(
    "error",
    [
        OSError(24, "Too many open files"),
        MemoryError(),
        RuntimeError("can't start new thread"),
        Refused("cannot run python: Cannot allocate memory", shortage=True),
    ],
)
def test_what_this_host_lacks_for_a_start_is_tried_again(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        fix = Fix()

        def fails(link: Link) -> None:
            link.pid = 0  # there is nothing to close
            raise error

        monkeypatch.setattr(Link, "spawn", fails)
        await fix.decoder.start()
        assert fix.decoder.state == "waiting"
        assert fix.decoder.reason
        await fix.end()

    run(test)
