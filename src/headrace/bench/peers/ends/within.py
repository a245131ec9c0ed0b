"""A hot copy within the target's process: the reference once more, as if it were a transport.

Its ratio to the reference is 1 but for noise; its spread says how far the others can be trusted.
"""

from __future__ import annotations

from typing import Any

from .base import Peer, SourceEnd, TargetEnd
from .memory import Pattern, Region, copy_pieces


class Source(SourceEnd):
    """Gives the word and no bytes."""

    def send(self, nbytes: int) -> None:
        self.peer.tell()


class Target(TargetEnd):
    """Copies from memory of its own."""

    def __init__(self, nbytes: int, peer: Peer, options: dict[str, Any]) -> None:
        super().__init__(nbytes, peer, options)
        self._origin = Region(nbytes)

    def fill(self, pattern: Pattern, nbytes: int) -> None:
        pattern.write(self._origin.address, 0, nbytes)

    def receive(self, nbytes: int) -> None:
        self.peer.hear()
        copy_pieces(self.memory.address, self._origin.address, nbytes)
