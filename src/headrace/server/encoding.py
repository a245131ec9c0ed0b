"""Where texts are turned into ids: short ones at once, long ones in a thread of their own.

One thread, so that a client with long texts takes one core and the memory of one text at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

T = TypeVar("T")

LONG_TEXT: Final = 1 << 13  # characters from which a text goes to the thread


class Encoding:
    """The thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "headrace-encoding")

    async def run(self, work: Callable[[], T], num_characters: int) -> T:
        """What `work` returns, of a text of so many characters."""
        if num_characters < LONG_TEXT:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        """Take no more; what runs is not waited for. Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)
