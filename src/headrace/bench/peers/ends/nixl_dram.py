"""NIXL over UCX, from host memory to host memory.

Options: `operation` READ (the target pulls, as serving engines do) or WRITE (the source pushes);
`progress_thread`, on by default in NIXL; `poll_us`, how long the side that waits for the
notification sleeps between looks, 0 = not at all.
"""

from __future__ import annotations

import base64
import importlib
import time
from typing import Any

from .base import Peer, SourceEnd, TargetEnd
from .memory import Region

_PIECE_NBYTES = 4 << 20  # of one descriptor


class _Agent:
    """One agent with one registered region, which knows the other end's."""

    def __init__(self, name: str, memory: Region, peer: Peer, options: dict[str, Any]) -> None:
        api = importlib.import_module("nixl_cu12._api")
        settings = api.nixl_agent_config(enable_prog_thread=options["progress_thread"])
        self._agent = api.nixl_agent(name, settings)
        self._memory, self._poll_s = memory, options["poll_us"] / 1e6
        self._piece_nbytes = options.get("piece_nbytes", _PIECE_NBYTES)
        whole = [(memory.address, memory.nbytes, 0, "")]
        self._registered = self._agent.register_memory(whole, "DRAM")
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        peer.tell([metadata, memory.address])
        theirs, self._origin = peer.hear()
        self._other = self._agent.add_remote_agent(base64.b64decode(theirs))
        self._handles: dict[int, Any] = {}

    def prepare(self, operation: str, nbytes: int) -> None:
        if nbytes in self._handles:
            return
        descriptors = (
            self._agent.get_xfer_descs(self._pieces(base, nbytes), "DRAM")
            for base in (self._memory.address, self._origin)
        )
        self._handles[nbytes] = self._agent.initialize_xfer(
            operation, *descriptors, self._other, b"done"
        )

    def transfer(self, nbytes: int) -> None:
        """Post the transfer and poll until it is done; the one who asked has nothing else to do."""
        state = self._agent.transfer(self._handles[nbytes])
        while state == "PROC":
            if self._poll_s:
                time.sleep(self._poll_s)
            state = self._agent.check_xfer_state(self._handles[nbytes])
        if state != "DONE":
            raise RuntimeError(f"the transfer ended as {state}")

    def wait_notified(self) -> None:
        while not self._agent.get_new_notifs():
            if self._poll_s:
                time.sleep(self._poll_s)

    def close(self) -> None:
        for handle in self._handles.values():
            self._agent.release_xfer_handle(handle)
        self._handles.clear()
        self._agent.remove_remote_agent(self._other)
        self._agent.deregister_memory(self._registered)
        self._agent = None

    def _pieces(self, base: int, nbytes: int) -> list[tuple[int, int, int]]:
        step = self._piece_nbytes
        return [(base + at, min(step, nbytes - at), 0) for at in range(0, nbytes, step)]


class Source(SourceEnd):
    """Pushes, or gives the word and serves the target's read."""

    def __init__(self, nbytes: int, peer: Peer, options: dict[str, Any]) -> None:
        super().__init__(nbytes, peer, options)
        self._agent = _Agent("source", self.memory, peer, options)
        self._pushes = options["operation"] == "WRITE"

    def prepare(self, nbytes: int) -> None:
        if self._pushes:
            self._agent.prepare("WRITE", nbytes)

    def send(self, nbytes: int) -> None:
        if self._pushes:
            self._agent.transfer(nbytes)
        else:
            self.peer.tell()
            self._agent.wait_notified()

    def close(self) -> None:
        self._agent.close()


class Target(TargetEnd):
    """Pulls, or waits for the notification that comes after the bytes."""

    def __init__(self, nbytes: int, peer: Peer, options: dict[str, Any]) -> None:
        super().__init__(nbytes, peer, options)
        self._agent = _Agent("target", self.memory, peer, options)
        self._pulls = options["operation"] == "READ"

    def prepare(self, nbytes: int) -> None:
        if self._pulls:
            self._agent.prepare("READ", nbytes)

    def receive(self, nbytes: int) -> None:
        if self._pulls:
            self.peer.hear()
            self._agent.transfer(nbytes)
        else:
            self._agent.wait_notified()

    def close(self) -> None:
        self._agent.close()
