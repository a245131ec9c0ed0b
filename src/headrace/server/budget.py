"""How many bytes of bodies a server holds at once, before they are in the queue."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from headrace.server.terminals import Ending, Terminal


class Held:
    """The bytes of one body, which grow as it comes."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.nbytes = 0

    def grow(self, nbytes: int) -> None:
        """Hold more. Raises: Ending: there is no room for it now."""
        self._budget.take(nbytes)
        self.nbytes += nbytes


class Budget:
    """Room for bodies that are being read, of all requests together."""

    def __init__(self, max_nbytes: int) -> None:
        self._max_nbytes = max_nbytes
        self.nbytes = 0

    @contextmanager
    def of_one(self) -> Iterator[Held]:
        """What one body holds, which is given back at the end of the block."""
        held = Held(self)
        try:
            yield held
        finally:
            self.nbytes -= held.nbytes

    def take(self, nbytes: int) -> None:
        """Hold more. Raises: Ending: there is no room for it now."""
        if self.nbytes + nbytes > self._max_nbytes:
            text = f"bodies of {self.nbytes} bytes are being read; come again"
            raise Ending(Terminal.QUEUE_FULL, text, retry_after_s=1.0)
        self.nbytes += nbytes
