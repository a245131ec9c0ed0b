"""The API keys of a server, which are read once: what was checked is what is asked for."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from headrace.errors import Refused
from headrace.server.config import HttpConfig

KEY_VARIABLE: Final = "HEADRACE_API_KEY"
MAX_KEYS_NBYTES: Final = 1 << 16

_PLACE = "http.api_key_file"
_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK  # a pipe is not waited for


def read_keys(http: HttpConfig) -> tuple[str, ...]:
    """The keys of the file and of the environment; none only if neither was configured.

    Raises:
        Refused: what was configured holds no key, or others may use the file.
    """
    found = [] if http.api_key_file is None else keys_of(Path(http.api_key_file))
    key = os.environ.get(KEY_VARIABLE)
    if key is not None:
        if not key.strip():
            raise Refused(f"{KEY_VARIABLE} is set and empty; give it a key, or unset it")
        if not key.isascii():
            raise Refused(f"{KEY_VARIABLE} is no ASCII text; give it a key that is")
        found.append(key.strip())
    return tuple(dict.fromkeys(found))


def take_keys(http: HttpConfig) -> tuple[str, ...]:
    """As `read_keys`, and the key leaves the environment, which what is started here inherits."""
    keys = read_keys(http)
    os.environ.pop(KEY_VARIABLE, None)
    return keys


def keys_of(path: Path, name: str = _PLACE) -> list[str]:
    """The keys of a file, one a line. name: what a refusal calls it, which never repeats the path.

    Its group may read it, as secrets that a container is given can be; others may not.

    Raises:
        Refused: it is missing or no regular file, others may use it, there is no key in it, or one
            of its lines is no key.
    """
    status, text = _read(path, name)
    if not stat.S_ISREG(status.st_mode):
        raise Refused(
            f"{name} names no regular file; put one key a line into a file and name that",
            field="api_key_file",
        )
    if status.st_mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise Refused(
            f"{name} names a file that other users may read or write (mode "
            f"{stat.S_IMODE(status.st_mode):04o}); run: chmod 600 on it",
            field="api_key_file",
        )
    lines = text.splitlines() if len(text) <= MAX_KEYS_NBYTES and text.isascii() else []
    for number, line in enumerate(lines, start=1):
        if line.strip().startswith(b"#") or len(line.split()) > 1:
            raise Refused(
                f"line {number} of the file that {name} names begins with # or holds a space; "
                "there are no comments in it, and a key has no space: take that line out",
                field="api_key_file",
            )
    keys = [line.strip().decode() for line in lines if line.strip()]
    if not keys:
        raise Refused(
            f"{name} names a file that holds no keys; put one key a line into it, in ASCII",
            field="api_key_file",
        )
    return keys


def _read(path: Path, name: str) -> tuple[os.stat_result, bytes]:
    """What a path is, and what is in it if it is a regular file: both of the same one."""
    try:
        descriptor = os.open(path, _OPEN)
        try:
            status = os.fstat(descriptor)
            regular = stat.S_ISREG(status.st_mode)
            return status, os.read(descriptor, MAX_KEYS_NBYTES + 1) if regular else b""
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "it is no path"
        raise Refused(
            f"{name} names a file that cannot be read ({why}); put one key a line into a file and "
            "name that",
            field="api_key_file",
        ) from exc
