"""Whether memory and descriptors are flat, and whether a server at rest is as it was before."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import linear_regression, median
from typing import Any, Final, NamedTuple

from headrace.bench.faults.table import Figure

Rows = list[dict[str, Any]]
SLACK_NBYTES: Final = 4 << 20
SLACK: Final = 0.02


class Trend(NamedTuple):
    """Medians of the first and the last quarter of a run, and the slope of its second half.

    The first half has what grows once: caches that fill, pages that are touched for the first time.
    """

    first: float
    last: float
    per_minute: float


def trend(points: list[tuple[float, float]]) -> Trend:
    """Of (s, value) in order of time; at least one."""
    quarter = max(1, len(points) // 4)
    values = [value for _, value in points]
    half = points[len(points) // 2 :]
    slope = 0.0
    if len({at_s for at_s, _ in half}) > 1:
        slope = linear_regression(*zip(*half, strict=True)).slope
    return Trend(median(values[:quarter]), median(values[-quarter:]), slope * 60)


def is_flat(found: Trend) -> bool:
    """Whether the last quarter is at most 2 %, or 4 MiB if that is more, above the first."""
    return found.last - found.first <= max(SLACK_NBYTES, SLACK * found.first)


def memory_figures(rows: Rows) -> Iterator[Figure]:
    """Resident bytes and descriptors of each process."""
    for role in dict.fromkeys(row["role"] for row in rows):
        mine = [row for row in rows if row["role"] == role]
        found = trend([(row["at_s"], row["rss_nbytes"]) for row in mine])
        told = (
            f"{found.first / 2**20:.1f} to {found.last / 2**20:.1f}, "
            f"{found.per_minute / 2**20:+.3f} a minute in the second half, n={len(mine)}"
        )
        goal = "last quarter at most 2 % or 4 MiB above the first"
        yield Figure(f"RSS of {role}, MiB", goal, told, is_flat(found))
        fds = trend([(row["at_s"], row["fds"]) for row in mine])
        yield Figure(f"descriptors of {role}", "stated", f"{fds.first:g} to {fds.last:g}", None)


def rest_figures(rows: Rows) -> Iterator[Figure]:
    """The server at rest before and after; how long until it was so."""
    starts, ends = ([row for row in rows if row["when"] == when] for when in ("start", "end"))
    for start, end in zip(starts, ends, strict=False):
        same = end["ledger_s"] is not None
        told = f"after {end['ledger_s']:.2f} s" if same else f"not: {end['ledger']}"
        yield Figure("ledger as at the start", "soon", told, same)
        same = end["fds_s"] is not None
        told = f"after {end['fds_s']:.2f} s" if same else f"not: {start['fds']}, {end['fds']}"
        yield Figure("descriptors as at the start", "soon", told, same)
