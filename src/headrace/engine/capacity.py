"""How much memory there is to take, so that a request for too much is refused and not killed.

Needs the standard library only. A process that takes more than there is is ended by the kernel
without a word, so what is about to be touched is asked for first.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from headrace.errors import Refused

MEMORY_MARGIN_NBYTES = 256 << 20
"""Kept free beside what is asked for: page tables, sockets, the interpreters' own growth."""

MORE_MEMORY = "Free memory, raise the container's limit, or use fewer or smaller slots"
_MEMINFO = Path("/proc/meminfo")
_OWN_CGROUP = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")


def require_memory(nbytes: int, what: str) -> None:
    """Refuse `what` unless `nbytes` and MEMORY_MARGIN_NBYTES are available.

    Raises: Refused; for a shortage where the host has that much, and not just now.
    """
    available = available_nbytes()
    if nbytes + MEMORY_MARGIN_NBYTES > available:
        raise Refused(
            f"{what}: needs {nbytes} bytes and a margin of {MEMORY_MARGIN_NBYTES}, "
            f"{available} bytes available. {MORE_MEMORY}",
            shortage=nbytes + MEMORY_MARGIN_NBYTES <= total_nbytes(),
        )


def available_nbytes() -> int:
    """Bytes that can be allocated now: MemAvailable, or less where a cgroup (v1 or v2) allows less.

    Raises: Refused when /proc/meminfo has no MemAvailable.
    """
    return min([_meminfo("MemAvailable"), *_cgroup_headrooms()])


def total_nbytes() -> int:
    """Bytes that could be allocated if nothing else ran: MemTotal, or a cgroup's smaller limit.

    Raises: Refused when /proc/meminfo has no MemTotal.
    """
    limits = [(level / names.limit).read_text().strip() for level, names in _cgroups()]
    return min([_meminfo("MemTotal"), *(int(limit) for limit in limits if limit != "max")])


def _meminfo(wanted: str) -> int:
    for line in _MEMINFO.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == wanted:
            return int(value.split()[0]) * 1024
    raise Refused(f"{_MEMINFO} has no {wanted}: mount /proc, or use Linux 3.14 or newer")


def _cgroup_headrooms() -> list[int]:
    """Limit minus usage of each memory cgroup above this process, in bytes, where one is set."""
    found = [_headroom(level, names) for level, names in _cgroups()]
    return [headroom for headroom in found if headroom >= 0]


class _Names(NamedTuple):
    """What the files of a cgroup are called, and the cold page cache in its memory.stat."""

    limit: str
    usage: str
    inactive: str


def _cgroups() -> Iterator[tuple[Path, _Names]]:
    """The memory cgroups (v1 or v2) above this process."""
    for line in _OWN_CGROUP.read_text().splitlines() if _OWN_CGROUP.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = _CGROUP_ROOT, _Names("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = _CGROUP_ROOT / "memory"
            names = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # A container may be told a host's path that it has no directory for: skip those levels.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        levels = [root.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]
        yield from ((level, names) for level in levels if (level / names.limit).exists())


def _headroom(level: Path, names: _Names) -> int:
    """Bytes below this cgroup's limit, cold page cache counted as free; -1 without a limit."""
    limit = (level / names.limit).read_text().strip()
    if limit == "max":
        return -1
    usage = int((level / names.usage).read_text())
    stat = (line.split() for line in (level / "memory.stat").read_text().splitlines())
    inactive = sum(int(value) for name, value in stat if name == names.inactive)
    return max(0, int(limit) - max(0, usage - inactive))
