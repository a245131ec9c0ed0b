"""pyzmq PAIR sockets over ipc, without copies on the sending side, in messages of 4 MiB."""

from __future__ import annotations

import importlib
import os
from typing import Any

from .base import Peer, SourceEnd, TargetEnd

_MESSAGE_NBYTES = 4 << 20


class Source(SourceEnd):
    """Sends views of its private memory."""

    def __init__(self, nbytes: int, peer: Peer, options: dict[str, Any]) -> None:
        super().__init__(nbytes, peer, options)
        zmq = importlib.import_module("zmq")
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(peer.hear())

    def send(self, nbytes: int) -> None:
        step = self.options.get("message_nbytes", _MESSAGE_NBYTES)
        for at in range(0, nbytes, step):
            self._socket.send(self.memory.view[at : min(at + step, nbytes)], copy=False)

    def settle(self) -> None:
        self.peer.hear()  # zmq sends from a thread of its own, out of memory that is filled next

    def close(self) -> None:
        self._context.destroy(linger=0)


class Target(TargetEnd):
    """Takes each message into its place."""

    def __init__(self, nbytes: int, peer: Peer, options: dict[str, Any]) -> None:
        super().__init__(nbytes, peer, options)
        zmq = importlib.import_module("zmq")
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        endpoint = f"ipc://@headrace-bench-{os.getpid()}-{id(self)}"  # no name in a file system
        self._socket.bind(endpoint)
        peer.tell(endpoint)

    def receive(self, nbytes: int) -> None:
        at = 0
        while at < nbytes:
            at += self._socket.recv_into(self.memory.view[at:nbytes])

    def settle(self) -> None:
        self.peer.tell()

    def close(self) -> None:
        self._context.destroy(linger=0)
