"""What a process leaves behind: children, descriptors, names in /dev/shm."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def nothing_more(what: str) -> Iterator[dict[str, int]]:
    """No child, descriptor or name in /dev/shm is left that was not there before."""
    before = leftovers()
    counted: dict[str, int] = {}
    yield counted
    after = leftovers()
    counted.update({name: len(after[name]) - len(before[name]) for name in before})
    children = after["children"] - before["children"]
    names = after["shm"] - before["shm"]
    if children or names or len(after["descriptors"]) > len(before["descriptors"]):
        raise AssertionError(
            f"{what} left {len(children)} children, {len(names)} names in /dev/shm and "
            f"{counted['descriptors']} descriptors behind"
        )


def leftovers() -> dict[str, set[str]]:
    """Children of this process, its descriptors, and this user's names in /dev/shm."""
    children = set()
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdecimal():
                fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == os.getpid():
                    children.add(entry)
    return {
        "children": children,
        "descriptors": set(os.listdir("/proc/self/fd")),
        "shm": set(_own_names(Path("/dev/shm"))),
    }


def _own_names(directory: Path) -> Iterator[str]:
    """Names of this user, since others make and remove theirs meanwhile."""
    for path in directory.iterdir() if directory.is_dir() else ():
        with contextlib.suppress(OSError):
            if path.stat().st_uid == os.getuid():
                yield path.name
