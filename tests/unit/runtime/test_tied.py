"""A module run in a child that does not outlive its parent."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.errors import LocalProtocolError
from headrace.process import PARENT_PID_VARIABLE
from headrace.runtime import tied

TOLD = """
import sys

def main(arguments):
    print(*arguments)
    return 7
"""
WAITS = """
import sys, time

def main(arguments):
    print("here", flush=True)
    time.sleep(600)
"""
STARTS = """
import os, subprocess, sys

child = subprocess.Popen(
    [sys.executable, "-m", "headrace.runtime.tied", "waiting"],
    stdout=subprocess.PIPE,
    env={**os.environ, "HEADRACE_PARENT_PID": str(os.getpid())},
)
child.stdout.readline()
print(child.pid, flush=True)
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), *sys.path])
    own = {"PYTHONPATH": path, PARENT_PID_VARIABLE: str(os.getpid())}
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_its_arguments_and_its_status_are_the_modules(tmp_path: Path) -> None:
    (tmp_path / "telling.py").write_text(TOLD)
    done = run(tmp_path, "-m", "headrace.runtime.tied", "telling", "--a", "b")
    assert (done.returncode, done.stdout) == (7, "--a b\n")


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "waiting.py").write_text(WAITS)
    (tmp_path / "starting.py").write_text(STARTS)
    started = run(tmp_path, "-m", "starting")
    child = int(started.stdout)
    try:
        pidfd = os.pidfd_open(child)
    except ProcessLookupError:
        return  # it is gone already
    try:
        poll = select.poll()
        poll.register(pidfd)
        assert poll.poll(30_000), "the child outlived its parent"
    finally:
        os.close(pidfd)


def test_it_takes_a_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PARENT_PID_VARIABLE, raising=False)
    with pytest.raises(LocalProtocolError, match=PARENT_PID_VARIABLE):
        tied.main(["telling"])
