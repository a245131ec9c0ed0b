"""Children that a command runs in another environment, and what their ends come to."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from headrace.errors import HeadraceError
from headrace.process import PARENT_PID_VARIABLE

TIED_MODULE = "headrace.runtime.tied"
NOTHING_DONE = 2
"""The exit status of a child that has said why it did nothing."""


def run_tied(interpreter: str, module: str, arguments: list[str]) -> tuple[int, bytes]:
    """Run a module there, in a child that ends with this process; its status and what it printed.

    What it says meanwhile, on standard error, is shown.
    """
    own = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", PARENT_PID_VARIABLE: str(os.getpid())}
    done = subprocess.run(
        [interpreter, "-m", TIED_MODULE, module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env={**os.environ, **own},
        check=False,
    )
    return done.returncode, done.stdout


def show_record(name: str, status: int, printed: bytes, out: Path | None) -> int:
    """Print the path of the record that a probe wrote; returns its status.

    It is the last line that names a file: a vendor's library may print as the process ends.

    0: what was found can be used. 1: it cannot. 2: nothing could be probed.
    """
    if status == NOTHING_DONE:
        return status  # it has said why
    if status not in (0, 1):
        record = f", and its record so far is {out}" if out is not None and out.is_file() else ""
        raise HeadraceError(f"the probe of {name} {ended(status)}{record}")
    told = printed.decode(errors="replace").splitlines()
    path = next((line for line in reversed(told) if os.path.isfile(line)), None)
    if path is None:
        raise HeadraceError(f"the probe of {name} wrote no record")
    print(path)
    return status


def ended(status: int) -> str:
    """How a child ended, in words."""
    if status < 0:
        return f"ended with signal {-status}"
    return f"ended with exit status {status}; it said why above"
