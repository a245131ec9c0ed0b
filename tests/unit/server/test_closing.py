"""Owners are ended side by side, and none of them holds up the end of the server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from headrace.errors import DeviceError
from headrace.server.closing import closed

NUM = 64  # more than any executor of asyncio's has threads
WITHIN_S = 10.0


class Link:
    """An owner whose end takes what the test has it take."""

    def __init__(self, close: Callable[[float], object]) -> None:
        self.close = close


def closing(close: Callable[[float], object], grace_s: float = 0.0) -> Any:
    return closed("left", cast(Any, Link(close)), grace_s)


def test_none_waits_for_another() -> None:
    """Each is over when all of them are being ended."""
    all_of_them = threading.Barrier(NUM)

    async def test() -> None:
        await asyncio.gather(
            *(closing(lambda grace_s: all_of_them.wait(WITHIN_S)) for _ in range(NUM))
        )

    asyncio.run(test())
    assert not all_of_them.broken


def test_it_is_over_when_the_owner_is_ended(caplog: pytest.LogCaptureFixture) -> None:
    given: list[float] = []
    asyncio.run(closing(given.append, 3.0))
    assert given == [3.0]

    def fail(grace_s: float) -> None:
        raise DeviceError("it is stuck in a driver")

    asyncio.run(closing(fail))
    assert "the owner of left was not ended: it is stuck in a driver" in caplog.text


def test_without_a_thread_of_its_own_it_is_ended_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = threading.Thread.start

    def none_left(thread: threading.Thread) -> None:
        if thread.name.startswith("headrace-close-"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", none_left)
    given: list[float] = []
    asyncio.run(closing(given.append, 3.0))
    assert given == [3.0]


def test_one_that_hangs_does_not_hold_up_the_end() -> None:
    held = threading.Event()
    threads: list[threading.Thread] = []

    def hang(grace_s: float) -> None:
        threads.append(threading.current_thread())
        held.wait(WITHIN_S)

    async def test() -> None:
        task = asyncio.ensure_future(closing(hang))
        await asyncio.wait([task], timeout=0.05)
        assert not task.done()

    asyncio.run(test())  # as the server's end: it returns, and the thread goes on
    (thread,) = threads
    assert thread.daemon
    held.set()
    thread.join(WITHIN_S)
    assert not thread.is_alive()
