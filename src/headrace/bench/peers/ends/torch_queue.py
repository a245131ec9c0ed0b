"""torch.multiprocessing.Queue: a tensor's memory is shared, its descriptor passed, then copied.

Option `in_shared_memory`: the source's bytes lie in a tensor that is shared already; else each
request puts a private tensor, whose bytes torch copies into a new segment.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

from .base import Peer, SourceEnd, TargetEnd
from .memory import Pattern, Region


def start_source(
    serve: Callable[..., None],
    transport: str,
    options: dict[str, Any],
    links: list[socket.socket],
) -> Any:
    """Make the source as a child of this process, as the queue wants it; returns the queue."""
    import torch.multiprocessing as mp

    context = mp.get_context("spawn")
    queue = context.Queue()
    arguments = (os.getpid(), transport, {**options, "queue": queue}, *links)
    context.Process(target=serve, args=arguments, daemon=True).start()
    return queue


def _over(memory: Region) -> Any:
    import numpy as np
    import torch

    return torch.from_numpy(np.frombuffer(memory.view, dtype=np.uint8))


class Source(SourceEnd):
    """Puts one tensor, and keeps it until the target has copied it."""

    def __init__(self, nbytes: int, peer: Peer, options: dict[str, Any]) -> None:
        import torch

        in_shared_memory = options["in_shared_memory"]
        super().__init__(1 if in_shared_memory else nbytes, peer, options)
        self._shared: Any = None
        if in_shared_memory:
            made: Any = torch.zeros(nbytes, dtype=torch.uint8)
            self._shared = made.share_memory_()
        self._sent: Any = None

    def fill(self, pattern: Pattern, nbytes: int) -> None:
        if self._shared is None:
            super().fill(pattern, nbytes)
        else:
            pattern.write(self._shared.data_ptr(), 0, nbytes)

    def send(self, nbytes: int) -> None:
        whole = _over(self.memory) if self._shared is None else self._shared
        self._sent = whole[:nbytes]
        self.options["queue"].put(self._sent)

    def settle(self) -> None:
        self.peer.hear()
        self._sent = None


class Target(TargetEnd):
    """Takes the tensor and copies it into its reservation."""

    def __init__(self, nbytes: int, peer: Peer, options: dict[str, Any]) -> None:
        super().__init__(nbytes, peer, options)
        self._reserved = _over(self.memory)
        self._got: Any = None

    def receive(self, nbytes: int) -> None:
        self._got = self.options["shared"].get()
        self._reserved[:nbytes].copy_(self._got)

    def settle(self) -> None:
        self._got = None
        self.peer.tell()
