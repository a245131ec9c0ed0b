"""A raw AF_UNIX stream: the kernel copies in at one end and out at the other."""

from __future__ import annotations

import socket
from typing import Any

from .base import Peer, SourceEnd, TargetEnd


class Source(SourceEnd):
    """Writes all into the socket; `buffer_nbytes` sets its buffer."""

    def __init__(self, nbytes: int, peer: Peer, options: dict[str, Any]) -> None:
        super().__init__(nbytes, peer, options)
        self._stream, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        if wanted := options.get("buffer_nbytes"):
            self._stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, wanted)
        peer.tell(None, (theirs.fileno(),))
        theirs.close()

    def send(self, nbytes: int) -> None:
        self._stream.sendall(self.memory.view[:nbytes])

    def close(self) -> None:
        self._stream.close()


class Target(TargetEnd):
    """Reads straight into its memory."""

    def __init__(self, nbytes: int, peer: Peer, options: dict[str, Any]) -> None:
        super().__init__(nbytes, peer, options)
        self._stream = socket.socket(fileno=peer.hear_fds()[1][0])

    def receive(self, nbytes: int) -> None:
        at = 0
        while at < nbytes:
            got = self._stream.recv_into(self.memory.view[at:nbytes])
            if not got:
                raise EOFError("the stream ended early")
            at += got

    def close(self) -> None:
        self._stream.close()
