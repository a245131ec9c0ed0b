"""Whether another environment's interpreter can run this headrace, asked of a child."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Final

from headrace.errors import SHORTAGES, Refused
from headrace.version import VERSION

PROBE_TIMEOUT_S: Final = 60.0

# `headrace.process`: what a Python that is too old for headrace cannot import.
_TELL: Final = (
    "import msgspec, headrace.process; from headrace.version import VERSION; "
    "print('headrace', VERSION)"
)


def check_interpreter(interpreter: str, flag: str) -> None:
    """Refuse an interpreter that cannot run headrace, or whose headrace is another version.

    `flag` is what names another one.

    Raises:
        Refused: it is missing, is no Python, has no headrace or no msgspec, or another headrace; or
            this host lacks what it takes to ask it.
    """
    if shutil.which(interpreter) is None:
        raise Refused(
            f"interpreter {interpreter!r} is missing or not executable; give {flag} the path of a "
            "Python that has headrace installed, such as ENVIRONMENT/bin/python",
            field="interpreter",
        )
    found, said = _ask(interpreter)
    if not found:
        raise Refused(
            f"{interpreter} is not a Python that has headrace installed{said}; give {flag} the "
            f"path of one, or run: {interpreter} -m pip install headrace",
            field="interpreter",
        )
    if found != VERSION:
        raise Refused(
            f"the headrace of {interpreter} is {found}, and this one is {VERSION}; install this "
            f"version there, or give {flag} another Python",
            field="interpreter",
        )


def _ask(interpreter: str) -> tuple[str, str]:
    """The version of its headrace, or nothing; then what it said in place of one, in brackets."""
    try:
        done = subprocess.run(
            [interpreter, "-c", _TELL],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except OSError as exc:
        if exc.errno in SHORTAGES:
            text = f"cannot run {interpreter} just now: {exc.strerror}"
            raise Refused(text, field="interpreter", shortage=True) from exc
        return "", f" ({exc.strerror})"
    except subprocess.TimeoutExpired:
        return "", f" (it was silent for {PROBE_TIMEOUT_S:.0f} s)"
    said = _last_line(done.stderr)
    match _last_line(done.stdout).split():
        case ["headrace", version] if not done.returncode:
            return version, ""
    return "", f" ({said})" if said else ""


def _last_line(text: bytes) -> str:
    return text.decode(errors="replace").strip().rpartition("\n")[2]
