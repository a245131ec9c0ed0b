"""CPU time of a process that has one busy thread."""

from __future__ import annotations


def first_thread_ns(pid: int) -> int:
    """Time that a process's first thread has run, in ns: a source's only busy one."""
    with open(f"/proc/{pid}/schedstat") as line:
        return int(line.read().split()[0])
