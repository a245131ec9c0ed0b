"""What a machine holds of a test: processes, descriptors, mappings, names in /dev/shm.

Two of these are taken around a test; whatever it did, they are equal. A process is found as a
descendant of this one, and by a variable in its environment, which it keeps if its parent dies.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAPPINGS_SLACK = 24
"""Mappings that the interpreter may add by itself: heap arenas and modules imported late."""

_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)


@dataclass(frozen=True)
class Census:
    """One count of everything that could be left behind.

    shm: names in /dev/shm. descendants: pids, zombies included. marked: pids that carry
    the marker. descriptors: of this process, by kind. slabs: mapped memfds. mappings: all of them.
    """

    shm: frozenset[str]
    descendants: frozenset[int]
    marked: frozenset[int]
    descriptors: dict[str, int]
    slabs: int
    mappings: int


def take(marker: str) -> Census:
    """Count now; `marker` is `NAME=value` of an environment variable."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return Census(
        shm=names_in_shm(),
        descendants=frozenset(descendants(os.getpid())),
        marked=frozenset(marked(marker)),
        descriptors=descriptors_of(os.getpid()),
        slabs=sum("/memfd:" in line for line in maps),
        mappings=len(maps),
    )


def assert_same(before: Census, after: Census) -> None:
    """Nothing was left behind, and nothing that was there is missing."""
    left = left_in_shm(before.shm)
    assert not left, f"left in /dev/shm: {left}"
    for kind in ("descendants", "marked", "descriptors", "slabs"):
        was, now = getattr(before, kind), getattr(after, kind)
        assert now == was, f"{kind}: {now}, and before {was}"
    grown = after.mappings - before.mappings
    assert grown <= MAPPINGS_SLACK, f"{grown} more mappings, of {after.mappings}"


def names_in_shm() -> frozenset[str]:
    """The names in /dev/shm."""
    return frozenset(os.listdir("/dev/shm"))


def left_in_shm(before: frozenset[str]) -> set[str]:
    """Names that are new and that no living process has mapped or open: others use /dev/shm too."""
    left = set(names_in_shm() - before)
    for pid in processes() if left else ():
        with contextlib.suppress(*_GONE):
            text = Path(f"/proc/{pid}/maps").read_text()
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(*_GONE):
                    text += os.readlink(entry) + "\n"
            left -= {name for name in left if f"/dev/shm/{name}" in text}
    return left & names_in_shm()


def descriptors_of(pid: int) -> dict[str, int]:
    """How many descriptors a process has open, by what they are open on."""
    kinds: Counter[str] = Counter()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(*_GONE):
            kinds[re.sub(r":\[\d+\]$", "", os.readlink(entry))] += 1
    return dict(kinds)


def descendants(pid: int) -> set[int]:
    """Pids of all children of `pid`, and of theirs, zombies included."""
    parents = {other: int(_stat(other)[1]) for other in processes() if _stat(other)}
    found: set[int] = set()
    fresh = {pid}
    while fresh:
        fresh = {child for child, parent in parents.items() if parent in fresh} - found
        found |= fresh
    return found


def children_of(pid: int) -> list[int]:
    """Pids of the children of one process, oldest first."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(*_GONE):
            found += [int(child) for child in (task / "children").read_text().split()]
    return sorted(found)


def marked(marker: str) -> set[int]:
    """Pids of living processes that were started with `marker` in their environment."""
    wanted = marker.encode()
    found: set[int] = set()
    for pid in processes():
        with contextlib.suppress(*_GONE):
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.add(pid)
    return found


def processes() -> Iterator[int]:
    """Pids of all processes."""
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())


def is_stopped(pid: int) -> bool:
    """Whether a process stands still by SIGSTOP."""
    return _stat(pid)[:1] == ["T"]


def is_gone(pid: int) -> bool:
    """Whether a process is dead, be it a zombie."""
    return _stat(pid)[:1] in ([], ["Z"], ["X"])


def dies_within(pidfd: int, seconds: float) -> bool:
    """Whether the process behind a pidfd is gone within the bound."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _stat(pid: int) -> list[str]:
    """State, parent and so on; empty if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except _GONE:
        return []
    return text.rpartition(")")[2].split()
