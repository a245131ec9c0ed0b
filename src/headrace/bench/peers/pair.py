"""The two processes of a peer: started, asked with a deadline, and never left behind."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import headrace.bench.peers.ends as ends
from headrace.bench.peers.environments import Environment
from headrace.bench.peers.transports import Transport
from headrace.errors import HeadraceError
from headrace.process import KILL_WAIT_S, ChildProcess

START_TIMEOUT_S = 60.0  # importing torch on a busy machine, and two GiB made ready
MAX_ANSWER_NBYTES = 1 << 16
MAX_LOG_NBYTES = 1 << 20
END_GRACE_S = 1.0


class TransferFailed(HeadraceError):
    """A transfer did not come to its end; the text is why, and becomes the row's `failed`."""


class Moved(NamedTuple):
    """One transfer: from the word to go until the target has the bytes, in ns; both sides' CPU."""

    wall_ns: int
    cpu_ns: int
    wrong_nbytes: int


class Copied(NamedTuple):
    """The reference, hot, in ns."""

    wall_ns: int
    cpu_ns: int


class _Worker(NamedTuple):
    role: str
    control: socket.socket
    child: ChildProcess


class Pair:
    """A source and a target of one transport, from `start` to `end`.

    Between, `open` and `close` make and give back the memory of one size.
    """

    def __init__(
        self, transport: Transport, environment: Environment, deadline_s: float = 30.0
    ) -> None:
        """`deadline_s`: how long one transfer may take."""
        self._transport = transport
        self._environment = environment
        self._deadline_s = deadline_s
        self._stack = ExitStack()
        self._log: int | None = None
        self._source: _Worker | None = None
        self._target: _Worker | None = None
        self._pids: set[int] = set()
        self._grace_s = END_GRACE_S

    @property
    def processes(self) -> frozenset[int]:
        """The pids of all that answered, a source that the target made among them."""
        return frozenset(self._pids)

    def start(self) -> str:
        """Start both processes; returns the version of the package that is measured.

        Raises:
            TransferFailed: one did not come up. Refused: its interpreter is missing.
        """
        self._log = os.memfd_create("headrace-peer-log", os.MFD_CLOEXEC)
        self._stack.callback(os.close, self._log)
        if self._transport.one_family:
            self._start_family()
        else:
            self._start_two()
        try:
            answer = self._ask({"do": "hello", "package": self._transport.package})
        except TransferFailed:
            self.end()
            raise
        return str(answer["target"]["version"])

    def open(self, nbytes: int) -> None:
        """Make both ends ready for transfers of up to `nbytes`. Raises: TransferFailed."""
        self._ask({"do": "open", "nbytes": nbytes}, timeout_s=START_TIMEOUT_S)

    def memcpy(self, nbytes: int) -> Copied:
        """The reference in the target's process, opened or not. Raises: TransferFailed."""
        answer = self._ask({"do": "memcpy", "nbytes": nbytes}, roles=("target",))["target"]
        return Copied(answer["wall_ns"], answer["cpu_ns"])

    def transfer(self, nbytes: int, seed: int) -> Moved:
        """Move a fresh pattern, then compare all of it where it landed.

        Raises:
            TransferFailed: an end failed, died, or was not done in time.
        """
        self._ask({"do": "fill", "seed": seed, "nbytes": nbytes})
        self._ask({"do": "prepare", "nbytes": nbytes})
        until_s = time.monotonic() + self._deadline_s
        self._tell("target", {"do": "receive", "nbytes": nbytes})
        self._answers({"target"}, until_s)
        self._tell("source", {"do": "go", "nbytes": nbytes})
        answers = self._answers({"source", "target"}, until_s)
        check = {"do": "check", "seed": seed, "nbytes": nbytes}
        found = self._ask(check, roles=("target",))["target"]
        return Moved(
            answers["target"]["landed_ns"] - answers["source"]["begun_ns"],
            answers["source"]["cpu_ns"] + answers["target"]["cpu_ns"],
            found["wrong_nbytes"],
        )

    def close(self) -> None:
        """Give back the memory; the processes stay. Raises: TransferFailed."""
        self._ask({"do": "close"})

    def end(self) -> None:
        """End both processes, whatever they do. Idempotent."""
        self._source = self._target = None
        self._stack.close()

    def _start_two(self) -> None:
        ours, theirs = self._link()
        self._source = self._spawn("source", ours)
        self._target = self._spawn("target", theirs)

    def _start_family(self) -> None:
        ours, theirs = self._link()
        control, their_control = self._link()
        self._target = self._spawn("both", ours, their_control, theirs)
        self._source = _Worker("source", control, self._target.child)
        their_control.close()  # or its end would go unseen

    def _link(self) -> tuple[socket.socket, socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._stack.callback(ours.close)
        self._stack.callback(theirs.close)
        return ours, theirs

    def _spawn(self, role: str, *links: socket.socket) -> _Worker:
        control, theirs = self._link()
        inherited = [theirs.fileno(), *(link.fileno() for link in links)]
        options = json.dumps(dict(self._transport.options))
        child = ChildProcess.spawn(
            "ends.worker",
            [role, self._transport.module, options, *map(str, inherited)],
            interpreter=self._environment.interpreter,
            inherit=inherited,
            env=_variables(self._environment.env, self._transport.env),
            stderr=self._log,
        )
        self._stack.callback(self._end, child, control)
        theirs.close()
        return _Worker(role if role != "both" else "target", control, child)

    def _ask(
        self,
        command: dict[str, Any],
        *,
        roles: tuple[str, ...] = ("source", "target"),
        timeout_s: float = START_TIMEOUT_S,
    ) -> dict[str, dict[str, Any]]:
        until_s = time.monotonic() + timeout_s
        for role in roles:
            self._tell(role, command)
        return self._answers(set(roles), until_s)

    def _tell(self, role: str, command: dict[str, Any]) -> None:
        worker = self._worker(role)
        try:
            worker.control.send(json.dumps(command).encode())
        except OSError as exc:
            raise self._death_of(worker) from exc

    def _answers(self, waited: set[str], until_s: float) -> dict[str, dict[str, Any]]:
        """One answer of each role in `waited`; the first that tells of an error ends it."""
        answers: dict[str, dict[str, Any]] = {}
        while waited - answers.keys():
            workers = [self._worker(role) for role in sorted(waited - answers.keys())]
            poll = select.poll()
            for worker in workers:
                poll.register(worker.control, select.POLLIN)
            ready = {fd for fd, _ in poll.poll(max(0.0, until_s - time.monotonic()) * 1000)}
            if not ready:
                silent = " and ".join(worker.role for worker in workers)
                raise self._failure(f"no answer in time from the {silent}")
            for worker in workers:
                if worker.control.fileno() in ready:
                    answers[worker.role] = self._answer_of(worker)
        return answers

    def _answer_of(self, worker: _Worker) -> dict[str, Any]:
        try:
            payload = worker.control.recv(MAX_ANSWER_NBYTES)
        except ConnectionResetError:
            payload = b""
        if not payload:
            raise self._death_of(worker)
        answer: dict[str, Any] = json.loads(payload)
        if "error" in answer:
            raise self._failure(f"{worker.role}: {answer['error']}")
        self._know(worker, answer["pid"])
        return answer

    def _know(self, worker: _Worker, pid: int) -> None:
        if pid not in self._pids and pid != worker.child.pid:  # the target's child, not ours
            self._stack.callback(self._end_other, os.pidfd_open(pid), worker.control)
        self._pids.add(pid)

    def _worker(self, role: str) -> _Worker:
        worker = self._source if role == "source" else self._target
        if worker is None:
            raise TransferFailed(f"the {role} was ended")
        return worker

    def _death_of(self, worker: _Worker) -> TransferFailed:
        worker.child.wait(END_GRACE_S)
        status = worker.child.exit_status()
        how = "closed its socket" if status is None else f"ended with status {status}"
        return self._failure(f"the {worker.role} {how}: {self._last_words()}")

    def _failure(self, text: str) -> TransferFailed:
        self._grace_s = 0.0  # who waits for the other end would wait for ever
        return TransferFailed(text)

    def _last_words(self) -> str:
        if self._log is None:
            return ""
        written = os.pread(self._log, MAX_LOG_NBYTES, 0).decode(errors="replace")
        return written.strip().rpartition("\n")[2][-300:]

    def _end(self, child: ChildProcess, control: socket.socket) -> None:
        """A worker ends when its socket does; one that hangs is killed."""
        with suppress(OSError):
            control.shutdown(socket.SHUT_RDWR)
        child.close(self._grace_s)

    def _end_other(self, pidfd: int, control: socket.socket) -> None:
        """The same for a worker that is no child of this process."""
        try:
            with suppress(OSError):
                control.shutdown(socket.SHUT_RDWR)
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if not poll.poll(self._grace_s * 1000):
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                poll.poll(KILL_WAIT_S * 1000)
        finally:
            os.close(pidfd)


def _variables(*settings: Mapping[str, str]) -> dict[str, str]:
    """What a worker's environment has over this process's; the ends are found by path alone."""
    merged = {"PYTHONPATH": str(Path(ends.__file__).parent.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    for each in settings:
        merged.update(each)
    return merged
