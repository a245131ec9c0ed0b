"""Open files: what a server needs for its connections, taken before it listens."""

from __future__ import annotations

import resource
from typing import Final

from headrace.errors import Refused

SPARE_CONNECTIONS: Final = 64
"""Above `http.max_connections`: their requests are answered 503, except how the server fares."""

MAX_REFUSED: Final = 32
"""Connections above those that are told so before they are closed; more are closed at once."""

ACCEPTED_AT_ONCE: Final = 32
"""Connections that asyncio accepts in one turn of its loop; it looks at them some turns later."""

OTHER_DESCRIPTORS: Final = 512
"""For all that is not in `max_connections`: the above, four turns of the loop, files and owners."""


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
