"""Descriptors that one thread waits for, each with what is to be done when it is readable."""

from __future__ import annotations

import selectors
from collections.abc import Callable


class Watch:
    """A selector whose actions may add and remove descriptors while it calls them."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def __contains__(self, fd: int) -> bool:
        return fd in self._selector.get_map()

    def add(self, fd: int, act: Callable[[], None]) -> None:
        """Call `act` whenever `fd` is readable."""
        self._selector.register(fd, selectors.EVENT_READ, act)

    def remove(self, fd: int) -> None:
        """Watch it no longer; once more is harmless."""
        if fd in self:
            self._selector.unregister(fd)

    def take_in(self, timeout_s: float) -> None:
        """Wait up to `timeout_s`, then call the action of each descriptor that is readable."""
        for key, _ in self._selector.select(timeout_s):
            if self._selector.get_map().get(key.fd) is key:  # else an earlier action removed it
                key.data()

    def is_ready(self) -> bool:
        """Whether `take_in` would call something now."""
        return bool(self._selector.select(0))

    def fileno(self) -> int:
        """A descriptor that is readable when one of those watched is."""
        return self._selector.fileno()

    def close(self) -> None:
        self._selector.close()
