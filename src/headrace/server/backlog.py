"""Work that must not hold up the server's loop: done in order, in a thread, and bounded."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

_log = logging.getLogger("headrace.server")

_Item = TypeVar("_Item")


class Backlog(Generic[_Item]):
    """Hands what it is offered to `act`, in a thread of its own.

    At most `max_items` and `max_weight` are held, what is being done included; what comes beyond
    them is dropped and counted.
    """

    def __init__(
        self, name: str, act: Callable[[_Item], None], *, max_items: int, max_weight: int
    ) -> None:
        self._act = act
        self._max_items, self._max_weight = max_items, max_weight
        self._items: deque[tuple[_Item, int]] = deque()
        self._weight = 0
        self._dropped = 0
        self._closed = self._complained = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """How many there was no room for."""
        return self._dropped

    def offer(self, item: _Item, weight: int) -> bool:
        """Take it, if there is room; never waits for what is done."""
        with self._changed:
            full = len(self._items) >= self._max_items or self._weight + weight > self._max_weight
            if self._closed or full:
                self._dropped += 1
                return False
            self._items.append((item, weight))
            self._weight += weight
            self._changed.notify_all()
            return True

    def wait(self, timeout_s: float) -> bool:
        """Whether all that was taken is done, within `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._items, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Take no more; what is not done within `timeout_s` is dropped. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: not self._items, timeout_s)
            while len(self._items) > 1:  # the first of them is being done
                self._items.pop()
                self._dropped += 1
            return done

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._items) or self._closed)
                if not self._items:
                    return
                item, weight = self._items[0]
            try:
                self._act(item)
            except Exception:
                if not self._complained:
                    self._complained = True
                    _log.exception("%s failed", self._thread.name)
            with self._changed:
                self._items.popleft()
                self._weight -= weight
                self._changed.notify_all()
