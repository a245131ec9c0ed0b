"""Long texts are encoded one at a time, clients take turns, and who leaves is not waited for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("starlette")

from headrace.server.encoding import LONG_TEXT, Encoding
from headrace.server.http import Message, Receive
from headrace.server.terminals import Ending, Terminal


async def stays() -> Message:
    """The connection of a client that does not leave."""
    await asyncio.Event().wait()
    raise AssertionError


class Desk:
    """An encoding whose thread is held by a first text until `release`. begun: names in order."""

    def __init__(self) -> None:
        self.encoding = Encoding()
        self.begun: list[str] = []
        self.held = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._gate = threading.Event()
        self.first = self.ask("first", client="first")

    def ask(self, name: str, *, client: str, receive: Receive = stays) -> asyncio.Task[str]:
        def work() -> str:
            self.begun.append(name)
            if name == "first":
                self._loop.call_soon_threadsafe(self.held.set)
                assert self._gate.wait(10)
            return name

        return asyncio.ensure_future(self.encoding.run(work, LONG_TEXT, client, receive))

    async def quiet(self) -> None:
        """Let all that can happen happen."""
        for _ in range(20):
            await asyncio.sleep(0)

    def release(self) -> None:
        self._gate.set()


def run(test: Callable[[Desk], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        desk = Desk()
        await desk.held.wait()
        try:
            await test(desk)
        finally:
            desk.release()
            desk.encoding.close()

    asyncio.run(whole())


def test_clients_take_turns_however_many_texts_one_sends() -> None:
    async def test(desk: Desk) -> None:
        greedy = [desk.ask(f"greedy-{at}", client="greedy") for at in range(4)]
        await desk.quiet()
        others = [desk.ask(name, client=name) for name in ("modest", "late")]
        await desk.quiet()
        desk.release()
        assert await asyncio.gather(desk.first, *greedy, *others) == [
            "first",
            *(f"greedy-{at}" for at in range(4)),
            "modest",
            "late",
        ]
        order = ["first", "greedy-0", "modest", "late", "greedy-1", "greedy-2", "greedy-3"]
        assert desk.begun == order

    run(test)


@pytest.mark.parametrize("how", ["left", "cancelled"])
def test_a_text_of_who_left_is_not_begun(how: str) -> None:
    async def test(desk: Desk) -> None:
        gone = asyncio.Event()

        async def receive() -> Message:
            await gone.wait()
            return {"type": "http.disconnect"}

        leaver = desk.ask("leaver", client="leaver", receive=receive)
        after = desk.ask("after", client="leaver")
        await desk.quiet()
        if how == "left":
            gone.set()
            with pytest.raises(Ending) as told:
                await leaver  # while the thread is held
            assert told.value.terminal is Terminal.CLIENT_LEFT
        else:
            leaver.cancel()
            with suppress(asyncio.CancelledError):
                await leaver
        desk.release()
        assert await after == "after"
        assert desk.begun == ["first", "after"]

    run(test)


def test_what_was_begun_keeps_the_thread_until_it_is_done() -> None:
    """So that no more than one text is in memory whose client has left."""

    async def test(desk: Desk) -> None:
        desk.first.cancel()
        after = desk.ask("after", client="other")
        await desk.quiet()
        assert not desk.first.done()
        assert desk.begun == ["first"]
        desk.release()
        assert await after == "after"
        with pytest.raises(asyncio.CancelledError):
            await desk.first

    run(test)


def test_a_text_that_fails_is_told_and_frees_the_thread() -> None:
    async def test(desk: Desk) -> None:
        def boom() -> str:
            raise ZeroDivisionError

        failing = asyncio.ensure_future(desk.encoding.run(boom, LONG_TEXT, "me", stays))
        after = desk.ask("after", client="me")
        desk.release()
        with pytest.raises(ZeroDivisionError):
            await failing
        assert await after == "after"

    run(test)


def test_a_short_text_waits_for_nobody() -> None:
    async def test(desk: Desk) -> None:
        me = threading.current_thread
        assert await desk.encoding.run(me, LONG_TEXT - 1, "me", stays) is me()

    run(test)
