"""What is to be told to an owner, in order, without waiting for room in its channel."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from headrace.errors import PeerDied, WouldBlock
from headrace.runtime.owner_link import OwnerLink

Send: TypeAlias = Callable[[OwnerLink], None]


class Outbox:
    """The queue of one link; used in its event loop."""

    def __init__(self, link: OwnerLink) -> None:
        self._link = link
        self._waiting: deque[Send] = deque()
        self._closed = False

    def send(self, send: Send) -> None:
        """Send now, or behind what waits, as soon as there is room."""
        self._waiting.append(send)
        if len(self._waiting) == 1:
            self._flush()

    def close(self) -> None:
        """Send nothing more; call it before the link is closed."""
        self._closed = True
        self._waiting.clear()

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting and not self._closed:
            send = self._waiting[0]
            try:
                send(self._link)
            except WouldBlock:
                loop.add_writer(self._link.fileno(), self._flush)
                return
            except PeerDied:  # who reads the channel hears of it, after what the peer said before
                return
            except BaseException:
                self._waiting.popleft()
                raise
            if self._waiting:  # it may have been closed meanwhile
                self._waiting.popleft()
        if not self._closed:
            loop.remove_writer(self._link.fileno())
