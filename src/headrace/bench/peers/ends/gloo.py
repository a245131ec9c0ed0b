"""torch.distributed send and recv over gloo, which is TCP loopback on one host."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from .base import Peer, SourceEnd, TargetEnd
from .memory import Region


def _tensor(memory: Region) -> Any:
    import numpy as np
    import torch

    return torch.from_numpy(np.frombuffer(memory.view, dtype=np.uint8))


def _join(rank: int, port: int) -> Any:
    """This process's place in the group of two; the target, rank 0, holds the store."""
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    return dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, 2, rank == 0, wait_for_workers=False
    )


def _begin(store: Any, rank: int) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )


class Source(SourceEnd):
    """Rank 1."""

    def __init__(self, nbytes: int, peer: Peer, options: dict[str, Any]) -> None:
        import torch.distributed as dist

        super().__init__(nbytes, peer, options)
        port = peer.hear()
        if not dist.is_initialized():
            _begin(_join(1, port), 1)
        self._tensor = _tensor(self.memory)

    def send(self, nbytes: int) -> None:
        import torch.distributed as dist

        dist.send(self._tensor[:nbytes], dst=0)


class Target(TargetEnd):
    """Rank 0."""

    def __init__(self, nbytes: int, peer: Peer, options: dict[str, Any]) -> None:
        import torch.distributed as dist

        super().__init__(nbytes, peer, options)
        if dist.is_initialized():
            peer.tell(0)
        else:
            store = _join(0, 0)
            peer.tell(store.port)
            _begin(store, 0)
        self._tensor = _tensor(self.memory)

    def receive(self, nbytes: int) -> None:
        import torch.distributed as dist

        dist.recv(self._tensor[:nbytes], src=1)
