"""A served decoder over a scripted link: a test says what its owner says."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, cast

import pytest
from msgspec.structs import replace

from headrace.errors import (
    HeadraceError,
    WouldBlock,
)
from headrace.ids import AttemptId
from headrace.messages import (
    Inspected,
    LaneHeld,
    SourceHeld,
    Up,
)
from headrace.runtime.config import OwnerConfig, SourceConfig
from headrace.runtime.supervisor import RestartPolicy
from headrace.server import decoders, events
from headrace.server.choices import Choice
from headrace.server.decoder_settings import DecoderSettings
from headrace.server.decoders import ServedDecoder
from tests.unit.server.test_saying import choice_of

TURNS = 4000


class Link:
    """An owner that says what the test has it say, and takes what it is told while it has room."""

    made: list[Link]
    refuses: HeadraceError | None = None  # of the check, for all that are made

    def __init__(self, config: OwnerConfig, *, interpreter: str | None = None) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.heard: deque[Any] = deque()
        self.told: list[Any] = []
        self.room: int | None = None
        self.fails: Exception | None = None  # of the next submit
        self.close_fails: HeadraceError | None = None
        self.held: threading.Event | None = None  # what its close waits for
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

    def exit_text(self, timeout_s: float) -> str:
        return "died (status -9)"

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
        if self.held is not None:
            self.held.wait(10.0)
        self.closed.append(grace_s)
        self.ours.close()
        self.theirs.close()
        if self.close_fails is not None:
            raise self.close_fails


class Fix:
    """One decoder, its links, and what it said."""

    def __init__(self, **more: Any) -> None:
        settings: dict[str, Any] = {
            "restart": RestartPolicy(first_delay_s=30.0, max_failures=3),
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

    async def again(self) -> None:
        """It is time for the restart: another owner is started."""
        assert self.decoder.state == "waiting"
        for timer in self.decoder._timers:
            timer.cancel()
        self.decoder._start_again()
        await self.until(lambda: self.decoder._link is not None)

    def submit(self, num_tokens: int = 5, *, deadline_ns: int | None = None) -> Choice:
        choice = choice_of()
        facts = {"num_prompt_tokens": num_tokens, "deadline_ns": deadline_ns}
        choice.job = replace(choice.job, **facts)
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


def scripted_links(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Decoders get these links while the test runs."""
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
