"""What a transport implements: the end that has the bytes, and the end that wants them.

One transfer: both ends `prepare`, which is not timed. The clock starts when the source is told to
go and calls `send`; it stops when the target's `receive` returns, which is when all bytes lie in
the target's memory and can be read. `settle` gives back what one transfer took: it costs CPU time
but no wall time.
"""

from __future__ import annotations

import json
import socket
from typing import Any

from .memory import Pattern, Region

MAX_NOTE_NBYTES = 1 << 16
MAX_FDS = 4


class Peer:
    """The other end, reached by short notes on a SEQPACKET socket that both ends inherit."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link

    def tell(self, note: Any = None, fds: tuple[int, ...] = ()) -> None:
        """Send a note of JSON, and descriptors with it."""
        socket.send_fds(self.link, [json.dumps(note).encode()], list(fds))

    def hear(self) -> Any:
        """Wait for a note."""
        return self.hear_fds()[0]

    def hear_fds(self) -> tuple[Any, list[int]]:
        """Wait for a note and the descriptors that came with it. Raises EOFError."""
        payload, fds, _, _ = socket.recv_fds(self.link, MAX_NOTE_NBYTES, MAX_FDS)
        if not payload:
            raise EOFError("the other end is gone")
        return json.loads(payload), fds


class SourceEnd:
    """The end whose private memory holds the bytes."""

    def __init__(self, nbytes: int, peer: Peer, options: dict[str, Any]) -> None:
        self.peer, self.options = peer, options
        self.memory = Region(nbytes)

    def fill(self, pattern: Pattern, nbytes: int) -> None:
        """Write a transfer's bytes, where the transport wants them."""
        pattern.write(self.memory.address, 0, nbytes)

    def prepare(self, nbytes: int) -> None:
        """What can be done before the bytes are there, such as making a descriptor list."""

    def send(self, nbytes: int) -> None:
        """Move the first `nbytes`, or tell the target that it may."""
        raise NotImplementedError

    def settle(self) -> None:
        """Give back what this transfer took, once the target has the bytes."""

    def close(self) -> None:
        """Leave nothing behind but memory, which goes with the process."""


class TargetEnd:
    """The end whose private memory is reserved for the bytes."""

    def __init__(self, nbytes: int, peer: Peer, options: dict[str, Any]) -> None:
        self.peer, self.options = peer, options
        self.memory = Region(nbytes)

    def fill(self, pattern: Pattern, nbytes: int) -> None:
        """Nothing: the bytes are the source's. The copy within one process overrides it."""

    def prepare(self, nbytes: int) -> None:
        """What can be done before the bytes are there."""

    def receive(self, nbytes: int) -> None:
        """Return when the first `nbytes` of this end's memory hold the source's bytes."""
        raise NotImplementedError

    def settle(self) -> None:
        """Give back what this transfer took."""

    def close(self) -> None:
        """Leave nothing behind but memory, which goes with the process."""
