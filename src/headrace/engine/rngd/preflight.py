"""Whether an RNGD source can run here: the probes, made in a child process.

A vendor's library may abort or hang, so nothing is asked of it in the process that decides. The
child, `INTERPRETER -m headrace.engine.rngd.preflight`, says on a line of JSON that a probe begins
and on another how it ended, and stops at the first that fails. So the probe that it died or hung at
is known, and becomes the same typed error as one that failed.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import select
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import IO, Final, Literal

import msgspec
from msgspec import Struct

from headrace.engine.rngd.probes import (
    FAMILIES,
    HEADRACE,
    PES_PER_CARD,
    SETUP,
    Asked,
    one_line,
    probes,
)
from headrace.engine.rngd.sdk import VENDOR
from headrace.errors import BackendUnavailable, HeadraceError
from headrace.version import VERSION

MODULE: Final = "headrace.engine.rngd.preflight"
TIMEOUT_S: Final = 60.0
KILL_WAIT_S: Final = 5.0
VERSION_TIMEOUT_S: Final = 20.0

PARENT_PID_VARIABLE: Final = "HEADRACE_PARENT_PID"
"""As `headrace.process` has it, which lies above this."""

ORPHAN_STATUS: Final = 75
_PR_SET_PDEATHSIG: Final = 1
_TELL_VERSION: Final = "from headrace.version import VERSION; print(VERSION)"

_NO_HEADRACE = (
    "Give an environment that has headrace and msgspec (headrace rngd setup makes one), and leave "
    "it a minute where its disk is slow"
)


class Told(Struct, frozen=True, omit_defaults=True):
    """A line of the child: a probe begins, went well, or failed; `detail` is what was found."""

    probe: str
    stage: str
    state: Literal["begins", "ok", "failed"]
    detail: str = ""
    hint: str = ""


def check(
    interpreter: str,
    *,
    emulate: bool,
    device: int = 0,
    compile: bool = True,
    share: bool = False,
    fusion: int = PES_PER_CARD,
    families: Sequence[str] = FAMILIES,
    timeout_s: float = TIMEOUT_S,
) -> list[Told]:
    """Make every probe in a child that `interpreter` runs, and return how they went.

    emulate: ask for what a CPU needs, not for a card. compile: whether kernels must be compiled.
    share: go on although a card's cores are occupied. families: whose kernels must be there.

    Raises:
        BackendUnavailable: of the first probe that failed, or that the child died or hung at.
    """
    asked = Asked(emulate, device, compile, share, fusion, tuple(families))
    arguments = ["-m", MODULE, "--json", *_flags(asked), f"--deadline={math.ceil(timeout_s) + 5}"]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            status = _run([interpreter, *arguments], out, err, timeout_s)
        except OSError as exc:
            raise BackendUnavailable(
                VENDOR, "sdk_missing", interpreter, f"it cannot be run: {exc.strerror}", SETUP
            ) from exc
        told = list(_told_in(_all(out)))
        said = _last_line(_all(err))
    return _judged(interpreter, asked, told, status, said, timeout_s)


def check_version(interpreter: str) -> None:
    """Refuse an interpreter whose headrace is of another version; quick, and loads no vendor.

    One that does not run, or has no headrace, is not told here: who starts it finds that.

    Raises:
        BackendUnavailable: api_missing.
    """
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [interpreter, "-c", _TELL_VERSION],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            timeout=VERSION_TIMEOUT_S,
            check=True,
        )
        if found := _last_line(done.stdout):
            _check_version(found)


def _check_version(found: str) -> None:
    if found != VERSION:
        text = f"the source's headrace is {found}, and this one is {VERSION}"
        raise BackendUnavailable(VENDOR, "api_missing", HEADRACE, text, SETUP)


def _flags(asked: Asked) -> list[str]:
    return [
        f"--device={asked.device}",
        f"--fusion={asked.fusion}",
        f"--families={','.join(asked.families)}",
        *(["--emulate"] if asked.emulate else []),
        *(["--compile"] if asked.compiles else []),
        *(["--share"] if asked.share else []),
    ]


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


def _judged(
    interpreter: str,
    asked: Asked,
    told: list[Told],
    status: int | None,
    said: str,
    timeout_s: float,
) -> list[Told]:
    """All went well only if each probe that was asked for says so: a status says little."""
    ended = [each for each in told if each.state != "begins"]
    for each in ended:
        if each.probe == HEADRACE and each.state == "ok":
            _check_version(each.detail)
        if each.state == "failed":
            raise BackendUnavailable(VENDOR, each.stage, each.probe, each.detail, each.hint)
    if status == 0 and [each.probe for each in ended] == [each.name for each in probes(asked)]:
        return ended
    how = _how(status, timeout_s) + (f", after: {said}" if said else "")
    if not told:
        raise BackendUnavailable(
            VENDOR, "sdk_missing", f"{interpreter} -m {MODULE}", how, _NO_HEADRACE
        )
    last = told[-1]
    command = shlex.join([interpreter, "-m", MODULE, *_flags(asked)])
    hint = f"See all that `{command}` says"
    raise BackendUnavailable(VENDOR, last.stage, last.probe, how, hint)


def _how(status: int | None, timeout_s: float) -> str:
    if status is None:
        return f"it hung, and was ended after {timeout_s:g} s"
    if status >= 0:
        return f"the process ended with exit status {status}"
    try:
        return f"the process was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"the process was ended by signal {-status}"


def tell(asked: Asked) -> Iterator[Told]:
    """Make the probes up to the first that fails, and tell each as it begins and as it ends."""
    for probe in probes(asked):
        yield Told(probe.name, probe.stage, "begins")
        try:
            found = probe.look(asked)
        except BackendUnavailable as exc:
            yield Told(exc.probe, exc.stage, "failed", exc.detail, exc.hint)
            return
        except HeadraceError as exc:
            yield Told(probe.name, probe.stage, "failed", str(exc), probe.hint)
            return
        except Exception as exc:  # whatever a vendor's library raises is what there is to report
            yield Told(probe.name, probe.stage, "failed", one_line(exc), probe.hint)
            return
        yield Told(probe.name, probe.stage, "ok", found)


def main(arguments: list[str] | None = None) -> int:
    """Make the probes and print how each went; exits 0 if all went well, else 1."""
    _end_with_starter()
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # started by hand it looks at the same
    parser = argparse.ArgumentParser(prog=MODULE)
    parser.add_argument("--json", action="store_true")
    for flag in ("--emulate", "--compile", "--share"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--fusion", type=int, default=PES_PER_CARD)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--deadline", type=int, default=0)
    parsed = parser.parse_args(arguments)
    signal.alarm(parsed.deadline)  # also if whoever waits for this process has died
    families = tuple(filter(None, parsed.families.split(",")))
    asked = Asked(
        parsed.emulate, parsed.device, parsed.compile, parsed.share, parsed.fusion, families
    )
    failed = False
    for told in tell(asked):
        failed |= told.state == "failed"
        line = msgspec.json.encode(told).decode() if parsed.json else _shown(told)
        print(
            f"\n{line}" if parsed.json else line, flush=True
        )  # a banner may have left a line open
    return 1 if failed else 0


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


def _shown(told: Told) -> str:
    if told.state == "begins":
        return f"{told.probe}"
    hint = f". {told.hint}" if told.hint else ""
    return f"  {told.state if told.state == 'ok' else told.stage}: {told.detail}{hint}"


if __name__ == "__main__":
    sys.exit(main())
