"""Whether a vendor's backend can run here: its probes, made in a child process.

A vendor's library may abort or hang, so nothing is asked of it in the process that decides. The
child, `INTERPRETER -m MODULE`, says on a line of JSON that a probe begins and on another how it
ended, and stops at the first that fails. So the probe that it died or hung at is known, and becomes
the same typed error as one that failed. What is probed, and in which words, is the vendor's.
"""

from __future__ import annotations

import ctypes
import math
import os
import select
import shlex
import signal
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Final, Generic, Literal

import msgspec
from msgspec import Struct

from headrace.engine.faults import line_of
from headrace.engine.probing import HEADRACE, Asked, Probe
from headrace.errors import BackendUnavailable, HeadraceError
from headrace.version import VERSION

KILL_WAIT_S: Final = 5.0

PARENT_PID_VARIABLE: Final = "HEADRACE_PARENT_PID"
"""As `headrace.process` has it, which lies above this."""

ORPHAN_STATUS: Final = 75
_PR_SET_PDEATHSIG: Final = 1


class Told(Struct, frozen=True, omit_defaults=True):
    """A line of the child: a probe begins, went well, or failed; `detail` is what was found."""

    probe: str
    stage: str
    state: Literal["begins", "ok", "failed"]
    detail: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Preflight(Generic[Asked]):
    """A vendor's preflight.

    module: what the child runs, whose `main` calls this one's. side: whose headrace the child's is.
    setup: what to do where the environment is wrong. no_headrace: what to do where the child says
    nothing. probes: what is looked at for what is asked. flags: what is asked, as arguments of the
    child; add_flags and read_flags take those apart again.
    """

    vendor: str
    module: str
    side: Literal["source", "decoder"]
    setup: str
    no_headrace: str
    probes: Callable[[Asked], Sequence[Probe[Asked]]]
    flags: Callable[[Asked], list[str]]
    add_flags: Callable[[ArgumentParser], None]
    read_flags: Callable[[Namespace], Asked]

    def check(self, interpreter: str, asked: Asked, timeout_s: float) -> list[Told]:
        """Make every probe in a child that `interpreter` runs, and return how they went.

        Raises:
            BackendUnavailable: of the first probe that failed, or that the child died or hung at.
        """
        deadline = f"--deadline={math.ceil(timeout_s) + 5}"
        command = [interpreter, "-m", self.module, "--json", *self.flags(asked), deadline]
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            try:
                status = _run(command, out, err, timeout_s)
            except OSError as exc:
                text = f"it cannot be run: {exc.strerror}"
                raise self._failed("sdk_missing", interpreter, text, self.setup) from exc
            told = list(_told_in(_all(out)))
            said = _last_line(_all(err))
        ended = self._ended(told)
        names = [each.name for each in self.probes(asked)]
        if status == 0 and [each.probe for each in ended] == names:
            return ended
        how = _how(status, timeout_s) + (f", after: {said}" if said else "")
        raise self._unfinished(interpreter, asked, told, how)

    def tell(self, asked: Asked) -> Iterator[Told]:
        """Make the probes up to the first that fails; tell each as it begins and as it ends."""
        for probe in self.probes(asked):
            yield Told(probe.name, probe.stage, "begins")
            try:
                found = probe.look(asked)
            except BackendUnavailable as exc:
                yield Told(exc.probe, exc.stage, "failed", exc.detail, exc.hint)
                return
            except HeadraceError as exc:
                yield Told(probe.name, probe.stage, "failed", str(exc), probe.hint)
                return
            except Exception as exc:  # whatever a vendor's library raises is what there is to tell
                yield Told(probe.name, probe.stage, "failed", line_of(exc), probe.hint)
                return
            yield Told(probe.name, probe.stage, "ok", found)

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Make the probes and print how each went; exits 0 if all went well, else 1."""
        _end_with_starter()
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # started by hand it looks at the same
        parser = ArgumentParser(prog=self.module)
        parser.add_argument("--json", action="store_true")
        parser.add_argument("--deadline", type=int, default=0)
        self.add_flags(parser)
        parsed = parser.parse_args(arguments)
        signal.alarm(parsed.deadline)  # also if whoever waits for this process has died
        failed = False
        for told in self.tell(self.read_flags(parsed)):
            failed |= told.state == "failed"
            # A banner may have left a line open.
            print(f"\n{_encoded(told)}" if parsed.json else _shown(told), flush=True)
        return 1 if failed else 0

    def _ended(self, told: list[Told]) -> list[Told]:
        """The probes that ended, all of them well."""
        ended = [each for each in told if each.state != "begins"]
        for each in ended:
            if each.probe == HEADRACE and each.state == "ok":
                self._check_version(each.detail)
            if each.state == "failed":
                raise self._failed(each.stage, each.probe, each.detail, each.hint)
        return ended

    def _unfinished(
        self, interpreter: str, asked: Asked, told: list[Told], how: str
    ) -> BackendUnavailable:
        """All went well only if each probe that was asked for says so: a status says little."""
        if not told:
            child = f"{interpreter} -m {self.module}"
            return self._failed("sdk_missing", child, how, self.no_headrace)
        last = told[-1]
        command = shlex.join([interpreter, "-m", self.module, *self.flags(asked)])
        return self._failed(last.stage, last.probe, how, f"See all that `{command}` says")

    def _check_version(self, found: str) -> None:
        if found != VERSION:
            text = f"the {self.side}'s headrace is {found}, and this one is {VERSION}"
            raise self._failed("api_missing", HEADRACE, text, self.setup)

    def _failed(self, stage: str, probe: str, detail: str, hint: str) -> BackendUnavailable:
        return BackendUnavailable(self.vendor, stage, probe, detail, hint)


def _run(command: Sequence[str], out: IO[bytes], err: IO[bytes], timeout_s: float) -> int | None:
    """The child's exit status, or None if it was ended after `timeout_s` seconds.

    It writes into files: a pipe would be held open by whatever a library starts in the background.
    That is in the child's session, and is ended with it.
    """
    own = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", PARENT_PID_VARIABLE: str(os.getpid())}
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        env={**os.environ, **own},
        start_new_session=True,
    )
    pidfd = os.pidfd_open(child.pid)
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        ended = bool(poll.poll(timeout_s * 1000))
    finally:
        os.close(pidfd)
        with suppress(ProcessLookupError):  # not reaped yet, so that the number is still its own
            os.killpg(child.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # one that hangs in a driver cannot be ended
            child.wait(KILL_WAIT_S)
    return child.returncode if ended else None


def _all(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


def _last_line(said: bytes) -> str:
    lines = [line.strip() for line in said.decode(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")


def _told_in(said: bytes) -> Iterator[Told]:
    for line in said.splitlines():
        try:
            yield msgspec.json.decode(line, type=Told)
        except msgspec.MsgspecError:
            continue  # something that a library printed


def _how(status: int | None, timeout_s: float) -> str:
    if status is None:
        return f"it hung, and was ended after {timeout_s:g} s"
    if status >= 0:
        return f"the process ended with exit status {status}"
    try:
        return f"the process was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"the process was ended by signal {-status}"


def _end_with_starter() -> None:
    """Have the kernel end this process when the one that started it dies; none is named by hand.

    A script that stands between the two is tied to in its place.
    """
    starter = os.environ.get(PARENT_PID_VARIABLE, "")
    if not starter.isdecimal():
        return
    libc = ctypes.CDLL(None)
    libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        os.kill(int(starter), 0)
    except ProcessLookupError:  # it died before the kernel was asked
        sys.exit(ORPHAN_STATUS)


def _encoded(told: Told) -> str:
    return msgspec.json.encode(told).decode()


def _shown(told: Told) -> str:
    if told.state == "begins":
        return f"{told.probe}"
    hint = f". {told.hint}" if told.hint else ""
    return f"  {told.state if told.state == 'ok' else told.stage}: {told.detail}{hint}"
