"""Child processes: started by exec in any environment, watched by pidfd, never left behind.

A pidfd becomes readable when the whole thread group is gone, and from then on no store of that
process can follow: it is the proof of death that storage is reused on. A pipe's end or a sentinel
is not, since a grandchild may hold it open. The other direction, a child that must not outlive its
parent, is `die_with_parent`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO, NoReturn, Self

from headrace.errors import (
    SHORTAGES,
    Closed,
    DeviceError,
    LocalProtocolError,
    Refused,
    WouldBlock,
)

PARENT_PID_VARIABLE = "HEADRACE_PARENT_PID"
ORPHAN_STATUS = 75
"""Exit status of a child that found its parent gone before it could be tied to it."""

KILL_WAIT_S = 30.0
"""From SIGKILL to death, in seconds: freeing touched memory alone takes about 0.3 s for each GB."""

_REMEDIES = {
    errno.EMFILE: "Raise `ulimit -n`",
    errno.ENFILE: "The system has no descriptor left: raise fs.file-max",
    errno.EAGAIN: "Raise `ulimit -u` or the container's limit of processes",
    errno.ENOMEM: "Free memory or raise `ulimit -v`",
}

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]


class ChildProcess:
    """One child, held by one object from `spawn` to `close`; one thread uses it.

    Leaving a `with` block kills it: `close` with a grace first where it should end by itself.
    """

    def __init__(self, popen: subprocess.Popen[bytes], pidfd: int) -> None:
        self.pid = popen.pid
        self._popen = popen
        self._pidfd: int | None = pidfd

    @classmethod
    def spawn(
        cls,
        module: str,
        arguments: Sequence[str],
        *,
        interpreter: str | None = None,
        inherit: Sequence[int] = (),
        env: Mapping[str, str] | None = None,
        stderr: IO[bytes] | int | None = None,
    ) -> ChildProcess:
        """Run `INTERPRETER -m module arguments...`, by default with this process's interpreter.

        Call it from a thread that lives as long as the child: the kernel takes the end of the
        spawning *thread* for the parent's death, and `die_with_parent` then kills the child.

        The child inherits the descriptors in `inherit` under their own numbers and no others. Its
        environment is this process's with `TORCH_DEVICE_BACKEND_AUTOLOAD=0`, then `env`, then the
        parent's pid. `stderr` is a file or descriptor (default: this process's); standard output
        goes there too, so that a vendor's banner never mixes with what this process prints, and
        standard input is empty.

        Raises: Refused when the interpreter is missing or cannot be run, or the child cannot be
        watched; LocalProtocolError when `stderr` is `PIPE`, which nobody would read.
        """
        if stderr == subprocess.PIPE:
            raise LocalProtocolError(f"{module}: stderr takes a file or a descriptor, not PIPE")
        popen = _start(
            [_executable(interpreter), "-m", module, *arguments],
            inherit,
            _environment(env),
            2 if stderr is None else stderr,
        )
        return cls(popen, _watch(popen))

    def fileno(self) -> int:
        """The pidfd, for a selector: readable when the whole thread group is dead.

        Raises: Closed.
        """
        if self._pidfd is None:
            raise Closed(f"child {self.pid} is closed")
        return self._pidfd

    def died(self) -> bool:
        """Whether the whole thread group is gone; never blocks."""
        return self.wait(0.0)

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds (negative: none) for death; True when dead."""
        if self._pidfd is None:
            return True
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(max(0.0, timeout_s) * 1000))

    def exit_status(self) -> int | None:
        """The exit status, or minus the signal that killed the child; None while it lives."""
        return self.reap() if self.died() else None

    def reap(self) -> int:
        """Collect a dead child's exit status, leaving no zombie; once more is harmless.

        Raises: WouldBlock when the child is alive.
        """
        if not self.died():
            raise WouldBlock(f"child {self.pid} is alive")
        return self._popen.wait()

    def statistics(self) -> dict[str, int]:
        """Its pid, and whether it is alive and whether it is watched (0 or 1)."""
        return {
            "pid": self.pid,
            "alive": int(not self.died()),
            "watched": int(self._pidfd is not None),
        }

    def terminate(self) -> None:
        """Send SIGTERM; nothing happens to a child that is dead. Raises: Closed."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, which ends a stopped child too, and does nothing to a dead one.

        Raises: Closed.
        """
        self._signal(signal.SIGKILL)

    def close(self, grace_s: float = 0.0) -> None:
        """End the child: no process, zombie or descriptor is left. Once more is harmless.

        Waits `grace_s` seconds for the exit that the caller has asked for (by message, or by
        closing the channel), then SIGKILL; with no grace at once. An interrupt while waiting goes
        on to SIGKILL before it is raised.

        Raises: DeviceError when the child is not dead KILL_WAIT_S after SIGKILL, which means that
        it is stuck in a driver; it stays watched, and `close` may be called again.
        """
        try:
            if grace_s > 0:
                self.wait(grace_s)
        finally:
            self._end()

    def _end(self) -> None:
        if self._pidfd is None:
            return
        self.kill()
        if not self.wait(KILL_WAIT_S):
            raise DeviceError(
                f"child {self.pid} is alive {KILL_WAIT_S} s after SIGKILL: stuck in a device driver"
            )
        self.reap()
        pidfd, self._pidfd = self._pidfd, None
        os.close(pidfd)

    def _signal(self, number: signal.Signals) -> None:
        # By pidfd: the number of a reaped child may belong to another process by now.
        pidfd = self.fileno()
        try:
            signal.pidfd_send_signal(pidfd, number)
        except ProcessLookupError:
            return  # dead and reaped, which is what a signal was for

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
            warnings.warn(
                f"child {self.pid} dropped open", ResourceWarning, stacklevel=2, source=self
            )


def _executable(interpreter: str | None) -> str:
    wanted = sys.executable if interpreter is None else interpreter
    found = shutil.which(wanted)
    if found is None:
        raise Refused(
            f"interpreter {wanted!r} is missing or not executable. Give the path of a Python "
            "that has headrace installed, such as ENVIRONMENT/bin/python",
            field="interpreter",
        )
    return found


def _environment(overrides: Mapping[str, str] | None) -> dict[str, str]:
    return {
        **os.environ,
        # Torch would load every vendor's plug-in beside it, and each claims the same device slot.
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        **(overrides or {}),
        PARENT_PID_VARIABLE: str(os.getpid()),
    }


def _start(
    command: list[str], inherit: Sequence[int], env: dict[str, str], output: IO[bytes] | int
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            close_fds=True,
            pass_fds=inherit,
            env=env,
        )
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, f"Check that `{command[0]} -V` works")
        raise Refused(
            f"cannot run {command[0]}: {error.strerror}. {remedy}",
            field="interpreter",
            shortage=error.errno in SHORTAGES,
        ) from error


def _watch(popen: subprocess.Popen[bytes]) -> int:
    try:
        return os.pidfd_open(popen.pid)
    except OSError as error:
        popen.kill()  # by number, which is safe here alone: the child is not reaped yet
        popen.wait()
        raise Refused(
            f"cannot watch a child process: pidfd_open: {error.strerror}. This needs Linux 5.3 or "
            "newer, a sandbox that allows pidfd_open, and a free descriptor (`ulimit -n`)",
            shortage=error.errno in SHORTAGES,
        ) from error


def die_with_parent() -> None:
    """Tie this process to the one that spawned it: the kernel kills it when its parent dies.

    Call it in the child before anything else. A parent that is gone already ends this process at
    once, with ORPHAN_STATUS and no clean-up, since nobody is left to clean up for.

    Raises: LocalProtocolError when this process was not started by `ChildProcess.spawn`; Refused
    when the kernel will not tie it.
    """
    text = os.environ.get(PARENT_PID_VARIABLE, "")
    if not text.isdecimal():
        raise LocalProtocolError(
            f"{PARENT_PID_VARIABLE} is {text!r}, expected the pid that ChildProcess.spawn sets"
        )
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise Refused(
            f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}. "
            "Allow prctl in the sandbox"
        )
    # The parent may have died before the request above; then the signal never comes.
    if os.getppid() != int(text):
        _exit_orphaned(int(text))


def leave_ending_to_parent() -> None:
    """Do nothing on SIGINT and SIGTERM from here on: what is sent to the group, the parent heeds.

    It ends this process in good order, or by SIGKILL. Processes that an engine starts do as they
    would on SIGTERM, since a handler is not inherited, as ignoring is.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)


def _exit_orphaned(parent_pid: int) -> NoReturn:
    if _is_alive(parent_pid):  # else it died, which whoever waits for it tells
        _say_orphaned(parent_pid)
    os._exit(ORPHAN_STATUS)


def _is_alive(pid: int) -> bool:
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    try:
        return not poll.poll(0)
    finally:
        os.close(pidfd)


def _say_orphaned(parent_pid: int) -> None:
    line = (
        f"headrace: parent {parent_pid} is gone, or the interpreter is a wrapper that does not "
        f"exec; this process has parent {os.getppid()} and exits\n"
    )
    os.write(2, line.encode())
