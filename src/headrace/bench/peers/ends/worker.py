"""The process of one end: takes commands from the benchmark, one at a time, and answers each.

    INTERPRETER -m ends.worker ROLE TRANSPORT OPTIONS CONTROL PEER [CONTROL PEER]

ROLE is `source`, `target` or `both`; TRANSPORT a module or a file with `Source` and `Target`;
CONTROL and PEER are inherited sockets. `both` makes the source as a child of the target, for a
transport that joins only processes of one family; then the source's sockets come second.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import signal
import socket
import sys
import time
from importlib import metadata
from types import ModuleType
from typing import Any

from .base import Peer, SourceEnd, TargetEnd
from .memory import Pattern, Region, copy_pieces

MAX_COMMAND_NBYTES = 1 << 16
_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Serve one end until the benchmark closes its socket."""
    tie_to(int(os.environ["HEADRACE_PARENT_PID"]))
    role, transport, options_text, *fds = arguments
    options = json.loads(options_text)
    sockets = [socket.socket(fileno=int(fd)) for fd in fds]
    module = load(transport)
    if role == "both":
        options["shared"] = module.start_source(serve_child, transport, options, sockets[2:])
        for link in sockets[2:]:
            link.close()
    serve(role == "source", module, options, sockets[0], sockets[1])


def serve_child(
    parent_pid: int,
    transport: str,
    options: dict[str, Any],
    control: socket.socket,
    peer: socket.socket,
) -> None:
    """The source's main function where the target makes its process."""
    tie_to(parent_pid)
    serve(True, load(transport), options, control, peer)


def tie_to(parent_pid: int) -> None:
    """End with the parent, and leave an interrupt of the terminal to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    libc = ctypes.CDLL(None)
    libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(75)


def load(transport: str) -> ModuleType:
    """A transport's module: one of this package by name, or any file by its path."""
    if not transport.endswith(".py"):
        return importlib.import_module(f".{transport}", __package__)
    spec = importlib.util.spec_from_file_location("transport", transport)
    if spec is None or spec.loader is None:
        raise ImportError(f"{transport} is no module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def serve(
    is_source: bool,
    module: ModuleType,
    options: dict[str, Any],
    control: socket.socket,
    peer: socket.socket,
) -> None:
    """Answer commands until the benchmark's end of `control` is closed."""
    make = module.Source if is_source else module.Target
    office = _SourceOffice if is_source else _TargetOffice
    desk = office(make, Peer(peer), options, control)
    while payload := control.recv(MAX_COMMAND_NBYTES):
        command = json.loads(payload)
        try:
            answer = getattr(desk, f"do_{command.pop('do')}")(**command)
        except Exception as exc:  # a peer's library raises anything; the row tells it
            answer = {"error": f"{type(exc).__name__}: {exc}"[:500]}
        control.send(json.dumps({"pid": os.getpid(), **answer}).encode())
    desk.do_close()


class _Office:
    """What both ends do alike; an answer is what the benchmark needs to know."""

    def __init__(
        self, make: Any, peer: Peer, options: dict[str, Any], control: socket.socket
    ) -> None:
        self._make, self._peer, self._options, self._control = make, peer, options, control
        self._end: Any = None

    def do_hello(self, package: str) -> dict[str, Any]:
        return {"version": metadata.version(package) if package else ""}

    def do_open(self, nbytes: int) -> dict[str, Any]:
        self._end = self._make(nbytes, self._peer, self._options)
        return {}

    def do_fill(self, seed: int, nbytes: int) -> dict[str, Any]:
        self._end.fill(Pattern(seed), nbytes)
        return {}

    def do_prepare(self, nbytes: int) -> dict[str, Any]:
        self._end.prepare(nbytes)
        return {}

    def do_close(self) -> dict[str, Any]:
        end, self._end = self._end, None
        if end is not None:
            end.close()
        return {}


class _SourceOffice(_Office):
    _end: SourceEnd

    def do_go(self, nbytes: int) -> dict[str, Any]:
        before_ns = time.process_time_ns()
        begun_ns = time.monotonic_ns()
        self._end.send(nbytes)
        self._end.settle()
        return {"begun_ns": begun_ns, "cpu_ns": time.process_time_ns() - before_ns}


class _TargetOffice(_Office):
    _end: TargetEnd

    _reference: tuple[Region, Region] | None = None

    def do_memcpy(self, nbytes: int) -> dict[str, Any]:
        if self._reference is None:
            self._reference = Region(nbytes), Region(nbytes)
        target, source = self._reference
        copy_pieces(target.address, source.address, source.nbytes)  # warms what was evicted
        before_ns = time.monotonic_ns(), time.process_time_ns()
        copy_pieces(target.address, source.address, source.nbytes)
        wall_ns, cpu_ns = time.monotonic_ns(), time.process_time_ns()
        return {"wall_ns": wall_ns - before_ns[0], "cpu_ns": cpu_ns - before_ns[1]}

    def do_receive(self, nbytes: int) -> dict[str, Any]:
        self._control.send(json.dumps({"pid": os.getpid()}).encode())
        before_ns = time.process_time_ns()
        self._end.receive(nbytes)
        landed_ns = time.monotonic_ns()
        self._end.settle()
        return {"landed_ns": landed_ns, "cpu_ns": time.process_time_ns() - before_ns}

    def do_check(self, seed: int, nbytes: int) -> dict[str, Any]:
        return {"wrong_nbytes": Pattern(seed).wrong_nbytes(self._end.memory.address, 0, nbytes)}

    def do_close(self) -> dict[str, Any]:
        self._reference = None
        return super().do_close()


if __name__ == "__main__":
    main(sys.argv[1:])
