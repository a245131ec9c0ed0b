"""How many bytes of bodies a server holds at once, before they are in the queue.

One client has half of the room at most, so that it does not keep all others out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from headrace.server.terminals import Ending, Terminal


class Held:
    """The bytes of one body, which grow as it comes."""

    def __init__(self, budget: Budget, client: str) -> None:
        self._budget = budget
        self.client = client
        self.nbytes = 0

    def grow(self, nbytes: int) -> None:
        """Hold more. Raises: Ending: there is no room for it now."""
        self._budget.take(self.client, nbytes)
        self.nbytes += nbytes


class Budget:
    """Room for bodies that are being read, of all requests together."""

    def __init__(self, max_nbytes: int) -> None:
        self._max_nbytes = max_nbytes
        self._by_client: dict[str, int] = {}

    @contextmanager
    def of_one(self, client: str) -> Iterator[Held]:
        """What one body of a client holds, which is given back at the end of the block."""
        held = Held(self, client)
        try:
            yield held
        finally:
            left = self._by_client.get(client, 0) - held.nbytes
            if left:
                self._by_client[client] = left
            else:
                self._by_client.pop(client, None)

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return sum(self._by_client.values())

    def take(self, client: str, nbytes: int) -> None:
        """Hold more. Raises: Ending: there is no room for it now."""
        of_client = self._by_client.get(client, 0) + nbytes
        if self.nbytes + nbytes > self._max_nbytes or of_client > self._max_nbytes // 2:
            text = f"bodies of {self.nbytes} bytes are being read; come again"
            raise Ending(Terminal.QUEUE_FULL, text, retry_after_s=1.0)
        self._by_client[client] = of_client
