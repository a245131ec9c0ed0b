"""What all tests share: children that find the tree, and a look at what a test left behind."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.engine import environments
from headrace.errors import BackendUnavailable

ROOT = Path(__file__).parents[1]

# What a shell starts in the background ignores SIGINT, and so would every command that is tested.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _children_find_the_tree() -> Iterator[None]:
    """Source and owner processes import `tests` and `headrace` from here, wherever pytest runs."""
    before = os.environ.get("PYTHONPATH")
    paths = [str(ROOT), str(ROOT / "src"), *([before] if before else [])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    yield
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture(scope="session", autouse=True)
def _no_python_off_the_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What `python` and `python3` are on PATH differs between machines, so here neither will do."""
    directory = tmp_path_factory.mktemp("path")
    for name in ("python", "python3"):
        (directory / name).write_text("#!/bin/sh\necho a test names its Python >&2\nexit 1\n")
        (directory / name).chmod(0o755)
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{directory}{os.pathsep}{before}"
    yield
    os.environ["PATH"] = before


@pytest.fixture
def other_python(tmp_path: Path) -> str:
    """An interpreter that is not `sys.executable` and has all that it has."""
    path = tmp_path / "other-python"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="session", autouse=True)
def _no_log_file() -> None:
    """pytest's log handlers open no file for as long as the tests run.

    Its handler of a log file that nobody asked for holds the null device open, and whichever test
    first has a command configure logging in this process closes it: one descriptor less is left.
    """
    root = logging.getLogger()
    for handler in root.handlers[:]:
        if isinstance(handler, logging.FileHandler) and handler.baseFilename == os.devnull:
            root.removeHandler(handler)
            handler.close()


def children() -> set[int]:
    """Pids of this process's children, zombies included."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has ended since
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


def open_fds() -> int:
    """Descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """No child, no descriptor and no name in /dev/shm is left behind."""
    before = children(), open_fds(), sorted(os.listdir("/dev/shm"))
    yield
    assert (children(), open_fds(), sorted(os.listdir("/dev/shm"))) == before


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch computes in one thread: many of them make small kernels slow on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def rngd_python() -> str:
    """The interpreter of the vendor's environment, for tests marked `rngd_emulation`."""
    try:
        return environments.find(environments.RNGD)
    except BackendUnavailable as exc:
        pytest.skip(f"no vendor kernels here: {exc}")
