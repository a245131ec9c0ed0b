"""Mooncake's transfer engine over TCP loopback; it has no local shared-memory path.

Its slice size is the variable MC_TCP_SLICE_SIZE of the process. The engine lives as long as the
process; memory is registered and given back with each end.
"""

from __future__ import annotations

import importlib
from typing import Any

from .base import Peer, SourceEnd, TargetEnd

_engines: list[Any] = []


def _engine() -> Any:
    if not _engines:
        engine = importlib.import_module("mooncake.engine").TransferEngine()
        if status := engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError(f"initialize gave {status}")
        _engines.append(engine)
    return _engines[0]


def _register(memory_address: int, nbytes: int) -> None:
    if status := _engine().register_memory(memory_address, nbytes):
        raise RuntimeError(f"register_memory gave {status}")


class Source(SourceEnd):
    """Writes into the target's memory, then says so."""

    def __init__(self, nbytes: int, peer: Peer, options: dict[str, Any]) -> None:
        super().__init__(nbytes, peer, options)
        _register(self.memory.address, nbytes)
        self._host, self._target = peer.hear()

    def send(self, nbytes: int) -> None:
        status = _engine().transfer_sync_write(
            self._host, self.memory.address, self._target, nbytes
        )
        if status:
            raise RuntimeError(f"transfer_sync_write gave {status}")
        self.peer.tell()

    def close(self) -> None:
        _engine().unregister_memory(self.memory.address)


class Target(TargetEnd):
    """Gives its address and waits for the word."""

    def __init__(self, nbytes: int, peer: Peer, options: dict[str, Any]) -> None:
        super().__init__(nbytes, peer, options)
        _register(self.memory.address, nbytes)
        peer.tell([f"127.0.0.1:{_engine().get_rpc_port()}", self.memory.address])

    def receive(self, nbytes: int) -> None:
        self.peer.hear()

    def close(self) -> None:
        _engine().unregister_memory(self.memory.address)
