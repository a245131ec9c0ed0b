"""Open files: what a server needs for its connections, taken before it listens."""

from __future__ import annotations

import resource
from typing import Final

from headrace.errors import Refused

ACCEPTED_AT_ONCE: Final = 64
"""Connections that asyncio accepts in one turn of its loop, before one of them is looked at."""

OTHER_DESCRIPTORS: Final = 512
"""For all that is no served connection: owners, files, and connections on their way out.

Those are what is turned away and what four turns of the loop accept meanwhile.
"""


def descriptors_needed(max_connections: int) -> int:
    """Open files of a server with so many connections at once."""
    return max_connections + OTHER_DESCRIPTORS


def check_descriptors(max_connections: int) -> None:
    """Look whether this process may have so many open files.

    Raises:
        Refused: the hard limit is below what is needed.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = descriptors_needed(max_connections)
    if hard == resource.RLIM_INFINITY or hard >= needed:
        return
    fewer = hard - OTHER_DESCRIPTORS
    advice = f", or http.max_connections to at most {fewer}" if fewer > 0 else ""
    raise Refused(
        f"{max_connections} connections need {needed} open files, and this process may have {hard} "
        f"at most: set `ulimit -n` to {needed}{advice}",
        field="http.max_connections",
    )


def raise_descriptors(max_connections: int) -> None:
    """Raise the soft limit of open files to what is needed.

    Raises:
        Refused: the hard limit is below it.
    """
    check_descriptors(max_connections)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = descriptors_needed(max_connections)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
