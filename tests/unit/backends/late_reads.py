"""Reads whose bytes come late: they are copied when their ticket says so, and no earlier."""

from __future__ import annotations

import random
from collections.abc import Callable


class LateRead:
    """A ticket that is done after `polls` calls of `done`, None for never.

    The bytes are copied no earlier than that, so that whoever announces them before is seen.
    """

    def __init__(self, copy: Callable[[], object], polls: int | None) -> None:
        self._copy: Callable[[], object] | None = copy
        self._polls = polls

    def done(self) -> bool:
        if self._polls is None:
            return False
        self._polls -= 1
        if self._polls < 0:
            self.finish()
        return self.over

    @property
    def over(self) -> bool:
        """Whether the bytes were copied."""
        return self._copy is None

    def finish(self) -> None:
        """Carry the copy out now, if it was not yet."""
        copy, self._copy = self._copy, None
        if copy is not None:
            copy()


class LateReads:
    """Makes tickets that are done after 0 to `most` polls, drawn from `rng`."""

    def __init__(self, most: int | None, rng: random.Random) -> None:
        self._most, self._rng = most, rng
        self.made: list[LateRead] = []

    def ticket(self, copy: Callable[[], object]) -> LateRead:
        polls = None if self._most is None else self._rng.randint(0, self._most)
        self.made.append(LateRead(copy, polls))
        return self.made[-1]

    def finish(self) -> None:
        """Carry out what was asked for."""
        for ticket in self.made:
            ticket.finish()

    def all_over(self) -> bool:
        """Whether nothing is in flight."""
        return all(ticket.over for ticket in self.made)
