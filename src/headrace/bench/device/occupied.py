"""Whether others use the GPU: asked before anything is started on it, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

from headrace.engine.gpu_users import users
from headrace.errors import HeadraceError, Refused


def ask_users() -> list[str]:
    """What `users` tells, asked in a process of its own: this one takes nothing of the GPU.

    Raises:
        Refused: there is no GPU that torch can use; the text says what is missing.
    """
    command = [sys.executable, "-m", "headrace.bench.device.occupied"]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    if done.returncode:
        word = (lines or done.stderr.splitlines() or ["it said nothing"])[-1]
        raise Refused(f"there is no GPU to check: {word}")
    return lines


if __name__ == "__main__":
    try:
        print("\n".join(users()), end="")
    except HeadraceError as exc:
        print(exc)
        sys.exit(1)
