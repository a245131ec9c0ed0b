"""Runs the steps one after another, each in a process of its own with its own time limit.

What a step left behind when its time was up is kept: its rows are written one by one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

from headrace.bench.device.plan import GRACE_S, TOTAL_S, Kind, Step
from headrace.errors import Refused

State: TypeAlias = Literal["done", "failed", "timed out", "left out"]

RESULTS: Final = "/benchmarks/results/"
REFUSED: Final = 2
"""The exit status of a step that cannot be done here; its last word says why."""
_LAST_WORD_NBYTES: Final = 4096
_TREE: Final = Path(__file__).parents[4]  # whose commit the stamps tell


class Done(NamedTuple):
    """What became of a step; `note` says why where it was not done."""

    step: str
    state: State
    seconds: float
    note: str = ""


Command: TypeAlias = Callable[[Step], Sequence[str]]


def run_steps(
    steps: Sequence[Step],
    command: Command,
    folder: Path,
    say: Callable[[str], None],
    *,
    total_s: float = TOTAL_S,
) -> list[Done]:
    """Run them; one whose limit does not fit into what is left of `total_s` is left out.

    An interrupt ends the step that runs, and leaves out the others.
    """
    begun_s = time.monotonic()
    results: list[Done] = []
    interrupted = False
    for step in steps:
        left_s = total_s - (time.monotonic() - begun_s)
        if interrupted:
            done = Done(step.name, "left out", 0.0, "interrupted")
        elif step.limit_s + GRACE_S > left_s:
            note = f"it may take {step.limit_s:g} s, and {max(0.0, left_s):.0f} s are left in all"
            done = Done(step.name, "left out", 0.0, note)
        else:
            say(f"{step.name}: {step.does} (at most {step.limit_s:g} s)")
            try:
                done = run_step(step, command(step), folder / f"{step.name}.log")
            except KeyboardInterrupt:
                interrupted = True
                done = Done(step.name, "failed", 0.0, "interrupted")
        say(_told(done))
        results.append(done)
    return results


def run_step(step: Step, command: Sequence[str], log: Path) -> Done:
    """Run one step; what it prints goes into its log."""
    begun_s = time.monotonic()
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            cwd=_TREE,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that all that it started can be ended with it
        )
        try:
            status = child.wait(step.limit_s)
        except subprocess.TimeoutExpired:
            _end(child)
            note = f"ended after {step.limit_s:g} s; its last word: {_last_word(log)}"
            return Done(step.name, "timed out", time.monotonic() - begun_s, note)
        except BaseException:
            _end(child)
            raise
    seconds = time.monotonic() - begun_s
    if status == 0:
        return Done(step.name, "done", seconds)
    if status == REFUSED:
        return Done(step.name, "left out", seconds, _last_word(log))
    how = f"signal {-status}" if status < 0 else f"status {status}"
    return Done(step.name, "failed", seconds, f"{how}; its last word: {_last_word(log)}")


def command_for(kind: Kind, folder: Path, *, share_device: bool) -> Command:
    """How a step's process is started: with this interpreter."""
    more = ["--fake"] if kind == "fake" else []
    more += ["--share-device"] if share_device else []

    def command(step: Step) -> Sequence[str]:
        here = [sys.executable, "-m", "headrace.bench.device"]
        return [*here, str(folder), "--step", step.name, *more]

    return command


def check_folder(folder: Path, kind: Kind) -> None:
    """Make the folder.

    Raises:
        Refused: it holds something or cannot be made, or a dry run's rows would lie with results.
    """
    if kind == "fake" and RESULTS in folder.resolve().as_posix() + "/":
        raise Refused(f"{folder} is for results, and a dry run has none; name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = any(folder.iterdir())
    except OSError as exc:
        raise Refused(f"{folder} cannot be used: {exc.strerror}; name another folder") from exc
    if held:
        raise Refused(f"{folder} is not empty; name a new folder")


def _end(child: subprocess.Popen[bytes]) -> None:
    """Interrupt it, which lets it write what it has; then kill all of its session's group."""
    child.send_signal(signal.SIGINT)
    try:
        child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with suppress(ProcessLookupError):  # all of it is gone
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _last_word(log: Path) -> str:
    """The last line of a log that says something."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LAST_WORD_NBYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "nothing")


def _told(done: Done) -> str:
    why = f": {done.note}" if done.note else ""
    return f"  {done.step} {done.state} in {done.seconds:.1f} s{why}"
