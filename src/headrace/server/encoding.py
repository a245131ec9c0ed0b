"""Where texts are turned into ids: short ones at once, long ones in a thread of their own.

One thread, so that long texts take one core and the memory of one text at a time. Clients take
turns at it, a text each, so that none waits for all that another one sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

from headrace.server.http import Receive, until_left
from headrace.server.terminals import Ending, Terminal

T = TypeVar("T")

LONG_TEXT: Final = 1 << 13  # characters from which a text goes to the thread


class Encoding:
    """The thread, and who is next."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "headrace-encoding")
        self._free = asyncio.Lock()  # in whose line each client stands once
        self._lines: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def run(
        self, work: Callable[[], T], num_characters: int, client: str, receive: Receive
    ) -> T:
        """What `work` returns, of a client's text of so many characters.

        receive: of its request, whose body must have been read.

        Raises:
            Ending: its client left before it was done.
        """
        if num_characters < LONG_TEXT:
            return work()
        encoded = asyncio.ensure_future(self._in_turn(work, client))
        left = asyncio.ensure_future(until_left(receive))
        both: list[asyncio.Future[Any]] = [encoded, left]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not encoded.done():
                raise Ending(Terminal.CLIENT_LEFT, "the client left before its text was encoded")
            return encoded.result()
        finally:
            for task in both:
                task.cancel()
            await asyncio.wait(both)

    def close(self) -> None:
        """Take no more; what runs is not waited for. Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _in_turn(self, work: Callable[[], T], client: str) -> T:
        """What was begun is waited for in any case: until then the thread is not free."""
        line = self._lines.setdefault(client, asyncio.Lock())
        async with line, self._free:
            begun = asyncio.get_running_loop().run_in_executor(self._thread, work)
            try:
                return await asyncio.shield(begun)
            finally:
                await asyncio.wait({begun})
