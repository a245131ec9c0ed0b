"""A decoder over a scripted link: its owner's life, what it takes, and what it is told."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest
from msgspec.structs import replace

from headrace.errors import (
    BackendUnavailable,
    DeviceError,
    HeadraceError,
    LocalProtocolError,
    PeerDied,
    Refused,
    RemoteProtocolError,
    WouldBlock,
)
from headrace.ids import AttemptId
from headrace.messages import (
    Ended,
    Events,
    Inspect,
    Inspected,
    Interval,
    LaneHeld,
    SourceHeld,
    Token,
    Up,
    Withdraw,
)
from headrace.runtime.config import OwnerConfig, SourceConfig
from headrace.runtime.owner_link import OwnerFailed
from headrace.runtime.supervisor import RestartPolicy
from headrace.server import decoders, events
from headrace.server.choices import Choice
from headrace.server.decoders import DecoderSettings, ServedDecoder
from headrace.server.terminals import Terminal
from tests.server_stand import ended
from tests.unit.server.test_saying import choice_of

TURNS = 400


class Link:
    """An owner that says what the test has it say, and takes what it is told while it has room."""

    made: list[Link]
    refuses: HeadraceError | None = None  # of the check, for all that are made

    def __init__(self, config: OwnerConfig, *, interpreter: str | None = None) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.heard: deque[Any] = deque()
        self.told: list[Any] = []
        self.room: int | None = None
        self.fails: HeadraceError | None = None  # of the next submit
        self.close_fails: HeadraceError | None = None
        self.pid = 100 + len(Link.made)
        self.closed: list[float] = []
        self.can_be_told = True
        Link.made.append(self)

    def check(self) -> None:
        if Link.refuses is not None:
            raise Link.refuses

    def spawn(self) -> None:
        pass

    def fileno(self) -> int:
        return self.ours.fileno()

    def say(self, *messages: Any) -> None:
        """The owner says these; an error is raised by `receive`."""
        self.heard.extend(messages)
        self.theirs.send(b"x")

    def receive(self) -> Any:
        if not self.heard:
            self.ours.recv(4096)
            raise WouldBlock("no message is waiting")
        message = self.heard.popleft()
        if isinstance(message, HeadraceError):
            raise message
        return message

    def send(self, message: Any) -> None:
        if self.room == 0:
            raise WouldBlock("no room")
        if self.room is not None:
            self.room -= 1
        self.told.append(message)

    def submit(self, label: int, tokens: Any, options: Any) -> None:
        if self.fails is not None:
            fails, self.fails = self.fails, None
            raise fails
        self.send(("submit", label, options))

    def ask_to_end(self) -> bool:
        return self.can_be_told

    def close(self, grace_s: float = 0.0) -> None:
        self.closed.append(grace_s)
        self.ours.close()
        self.theirs.close()
        if self.close_fails is not None:
            raise self.close_fails


class Fix:
    """One decoder, its links, and what it said."""

    def __init__(self, **more: Any) -> None:
        settings: dict[str, Any] = {
            "restart": RestartPolicy(first_delay_s=0.0, max_failures=3),
            "look_every_s": 60.0,
            "prefill_chunk": 16,
        }
        depth = more.pop("prefetch_depth", 1)
        local = more.pop("local", False)
        sources = (SourceConfig("replay", {}),)
        owner = OwnerConfig("null", {}, sources, 64, prefetch_depth=depth, local=local)
        made = DecoderSettings("left", ("letters",), owner, **(settings | more))
        told = events.Events()
        self.events: list[events.Event] = []
        told.listen(self.events.append)
        self.over: list[Choice] = []
        self.changes = 0
        self.decoder = ServedDecoder(made, told, self._changed, self.over.append)
        self.complaints: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: self.complaints.append(context)
        )

    def _changed(self) -> None:
        self.changes += 1

    @property
    def link(self) -> Link:
        return Link.made[-1]

    async def up(self, **more: Any) -> Link:
        """Start it and have its owner be ready."""
        await self.decoder.start()
        await self.say(up(**more))
        assert self.decoder.state == "ready"
        return self.link

    async def say(self, *messages: Any) -> None:
        """The owner says these, and the decoder has heard it."""
        link = self.link
        link.say(*messages)
        await self.until(lambda: not link.heard)

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(TURNS):
            if condition():
                return
            await asyncio.sleep(0.001 if self.decoder._closings else 0)
        raise AssertionError(f"{self.decoder.state}: {self.decoder.reason}")

    def submit(self, num_tokens: int = 5) -> Choice:
        choice = choice_of()
        choice.job = replace(choice.job, num_prompt_tokens=num_tokens)
        self.decoder.submit(choice)
        return choice

    def states(self) -> list[str]:
        return [each.state for each in self.events if isinstance(each, events.DecoderChanged)]

    async def end(self) -> None:
        await self.decoder.stop(0.0)
        assert self.decoder.state == "stopped"
        assert all(link.closed for link in Link.made if link.pid)
        assert not asyncio.all_tasks() - {asyncio.current_task()}
        assert not self.complaints, self.complaints


@pytest.fixture(autouse=True)
def _links(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(decoders, "OwnerLink", Link)
    Link.made = []
    Link.refuses = None
    yield
    for link in Link.made:
        link.ours.close()
        link.theirs.close()


def up(lanes: int = 2, num_slots: int = 4, num_sources: int = 1) -> Up:
    return Up(cast(Any, None), lanes, num_slots, 0, 64, num_sources)


def source(state: str = "in service", reason: str = "") -> SourceHeld:
    return SourceHeld(1, "replay", cast(Any, state), reason, 1, 0)


def report(*sources: SourceHeld, quarantined: int = 0) -> Inspected:
    lanes = tuple(
        LaneHeld(AttemptId(1, at, 1), "quarantined", "a fence was lost", 1)
        for at in range(quarantined)
    )
    return Inspected((), (), 64, 0, lanes, (), sources or (source(),), ())


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


def room(decoder: ServedDecoder, num_tokens: int = 5, long_from: int = 0) -> bool:
    return decoder.has_room(num_tokens, long_from)


# Its life.


def test_it_starts_and_is_ready_when_its_owner_is_up() -> None:
    async def test() -> None:
        fix = Fix()
        assert not room(fix.decoder)
        await fix.decoder.start()
        assert (fix.decoder.state, fix.decoder.ready, fix.decoder.hopeless) == ("starting", False, False)
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
        await fix.until(lambda: len(Link.made) == 2)
        await fix.until(lambda: fix.decoder.state == "starting")
        assert Link.made[0].closed == [0.0]
        await fix.say(up())
        assert (fix.decoder.incarnation, room(fix.decoder)) == (1, True)
        await fix.end()

    run(test)


def test_late_messages_of_a_dead_owner_and_of_unknown_labels_change_nothing() -> None:
    async def test() -> None:
        fix = Fix()
        first = await fix.up()
        old = fix.submit()
        first.say(PeerDied("gone"), Token(0, 65), ended())
        await fix.until(lambda: len(Link.made) == 2 and fix.decoder.state == "starting")
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
            await fix.until(lambda n=number: len(Link.made) == n + 1)  # type: ignore[misc]
            await fix.until(lambda: fix.decoder.state == "starting" and fix.decoder._link is not None)
            await fix.say(OwnerFailed("no device"))
        assert (fix.decoder.state, fix.decoder.hopeless) == ("set aside", True)
        assert fix.decoder.reason == "no device"
        assert not fix.decoder.mistake
        await fix.end()
        assert fix.states() == [*["starting", "waiting"] * 2, "starting", "set aside", "stopped"]

    run(test)


def test_a_request_that_finished_lets_it_begin_anew() -> None:
    async def test() -> None:
        fix = Fix()
        for number in range(5):
            if not number:
                await fix.decoder.start()
            await fix.until(lambda n=number: len(Link.made) == n + 1)  # type: ignore[misc]
            await fix.until(lambda: fix.decoder.state == "starting" and fix.decoder._link is not None)
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


@pytest.mark.parametrize("when", ["ready", "later"])
def test_what_is_lacking_after_the_first_start_is_no_mistake(when: str) -> None:
    async def test() -> None:
        fix = Fix()
        await fix.up()
        if when == "later":
            await fix.say(PeerDied("gone"))
            await fix.until(lambda: len(Link.made) == 2 and fix.decoder._link is not None)
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


def test_none_is_started_after_a_stop() -> None:
    async def test() -> None:
        fix = Fix()
        starting = asyncio.ensure_future(fix.decoder.start())
        await asyncio.sleep(0)
        await fix.decoder.stop(0.0)
        await starting
        assert fix.decoder._link is None
        assert fix.decoder.state == "stopped"
        fix = Fix(restart=RestartPolicy(first_delay_s=30.0))
        await fix.up()
        await fix.say(PeerDied("gone"))
        num_made = len(Link.made)
        await fix.decoder.stop(0.0)
        fix.decoder._start_again()
        assert len(Link.made) == num_made
        assert fix.decoder.state == "stopped"

    run(test)


# What it is told.


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
        await fix.until(lambda: len(Link.made) == 2 and fix.decoder._link is not None)
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
    ],
)
def test_a_choice_that_cannot_be_told_fails_alone(
    error: HeadraceError, terminal: Terminal, field: str | None
) -> None:
    async def test() -> None:
        fix = Fix()
        link = await fix.up()
        link.fails = error
        first, second = fix.submit(), fix.submit()
        assert first.failure is not None
        assert (first.failure.terminal, first.failure.field) == (terminal, field)
        assert fix.over == [first]
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
        assert (fix.decoder.ready, fix.decoder.hopeless) == (False, True)
        await fix.end()

    run(test)


def test_an_owner_whose_sources_are_gone_for_good_is_started_again() -> None:
    async def test() -> None:
        fix = Fix()
        await fix.up()
        gone = source("set aside", "it died 5 times")
        choice = fix.submit()
        await fix.say(report(gone))
        assert fix.decoder.hopeless  # no more is sent there, and what runs ends first
        assert fix.decoder.state == "ready"
        await fix.say(replace(ended(), label=0), report(gone))
        assert choice.failure is None
        assert fix.decoder.state == "waiting"
        assert "it died 5 times" in fix.decoder.reason
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
