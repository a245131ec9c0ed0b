"""What the rows of `peers` come to: ratios to memcpy by size, and who is ahead of whom."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

from headrace.bench.faults.table import Figure
from headrace.bench.peers.transports import HEADRACE, NAMES, REFERENCE
from headrace.bench.rows import Spread, spread

Round = tuple[int, int]  # the number of its run, and its own in it

GOAL_SIZES_MIB = (128, 1024)
ONE_COPY_GOAL = 0.9
IDLE_BUSY_SHARE = 0.1
"""Busy share of all CPUs before a transfer, up to which the machine counts as idle."""


class Line(NamedTuple):
    """One transport at one size; without a spread where no transfer came to its end."""

    transport: str
    size_mib: int
    copies: int
    wall: Spread | None
    cpu: Spread | None
    wall_ms: float
    num_wrong: int
    note: str


class Comparison(NamedTuple):
    """A form of headrace against the peer whose median ratio is the highest, in the same rounds.

    num_ahead: rounds in which it was ahead of every peer of that round. missing: peers that were
    not measured at this size.
    """

    form: str
    size_mib: int
    wall: Spread
    best_peer: str
    best_wall: Spread
    num_ahead: int
    num_rounds: int
    missing: tuple[str, ...] = ()

    @property
    def ahead(self) -> bool | None:
        """Whether its median is above that of every peer; None if so, but some are missing."""
        if self.wall.median <= self.best_wall.median:
            return False
        return None if self.missing else True


def lines(rows: list[dict[str, Any]]) -> list[Line]:
    """One for each size and transport, by size, then in the order that transports are named."""
    cells: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["size_mib"], row["transport"]), []).append(row)
    ordered = sorted(cells, key=lambda cell: (cell[0], _place(cell[1])))
    return [_line(cell[1], cell[0], cells[cell]) for cell in ordered]


def comparisons(rows: list[dict[str, Any]]) -> list[Comparison]:
    """Each form of headrace against the peers, at each size at which both were measured."""
    found = []
    for size_mib in sorted({row["size_mib"] for row in rows}):
        ratios: dict[str, dict[Round, float]] = {}
        for row in rows:
            if row["size_mib"] == size_mib and "wall_ratio" in row:
                number = row.get("run", 0), row["round"]
                ratios.setdefault(row["transport"], {})[number] = row["wall_ratio"]
        peers = {name: by for name, by in ratios.items() if name not in (*HEADRACE, REFERENCE)}
        for form in HEADRACE:
            if form in ratios and peers:
                found.append(_compare(form, size_mib, ratios[form], peers))
    return found


def figures(rows: list[dict[str, Any]]) -> Iterator[Figure]:
    """The goals of the local hand-off, and whether every byte was right."""
    for each in comparisons(rows):
        name = f"{each.size_mib} MiB, {each.form}"
        has_goal = each.size_mib in GOAL_SIZES_MIB
        if each.form == HEADRACE[0]:
            idle = _idle_ratios(rows, each.form, each.size_mib)
            result = f"{spread(idle)}" if idle else "no round began on an idle machine"
            met = spread(idle).median >= ONE_COPY_GOAL if idle and has_goal else None
            goal = f"at least {ONE_COPY_GOAL}" if has_goal else ""
            yield Figure(f"{name}, x of memcpy, idle rounds", goal, result, met)
        missing = f"; not measured: {', '.join(each.missing)}" if each.missing else ""
        yield Figure(
            f"{name}, against {each.best_peer}",
            "ahead of every peer" if has_goal else "",
            f"{each.wall} to {each.best_wall}; ahead of all in {each.num_ahead} of "
            f"{each.num_rounds} rounds{missing}",
            each.ahead if has_goal else None,
        )
    wrong = sorted({row["transport"] for row in rows if row.get("wrong_nbytes")})
    yield Figure("transfers with wrong bytes", "none", ", ".join(wrong) or "none", not wrong)


def _line(transport: str, size_mib: int, mine: list[dict[str, Any]]) -> Line:
    whole = [row for row in mine if "wall_ratio" in row]
    reasons = [row.get("skipped") or row.get("failed") for row in mine]
    return Line(
        transport,
        size_mib,
        mine[0]["copies"],
        spread([row["wall_ratio"] for row in whole]) if whole else None,
        spread([row["cpu_ratio"] for row in whole]) if whole else None,
        statistics.median([row["wall_ns"] / 1e6 for row in whole]) if whole else 0.0,
        sum(bool(row["wrong_nbytes"]) for row in whole),
        next((reason for reason in reasons if reason), ""),
    )


def _compare(
    form: str, size_mib: int, ours: dict[Round, float], peers: dict[str, dict[Round, float]]
) -> Comparison:
    best = max(peers, key=lambda name: spread(list(peers[name].values())).median)
    rivals = [
        max((by[number] for by in peers.values() if number in by), default=0.0) for number in ours
    ]
    return Comparison(
        form,
        size_mib,
        spread(list(ours.values())),
        best,
        spread(list(peers[best].values())),
        sum(mine > rival for mine, rival in zip(ours.values(), rivals, strict=True)),
        len(ours),
        tuple(name for name in NAMES if name not in (*HEADRACE, REFERENCE, *peers)),
    )


def _idle_ratios(rows: list[dict[str, Any]], form: str, size_mib: int) -> list[float]:
    return [
        row["wall_ratio"]
        for row in rows
        if (row["transport"], row["size_mib"]) == (form, size_mib)
        and row.get("busy_before", 1.0) <= IDLE_BUSY_SHARE
    ]


def _place(transport: str) -> int:
    return NAMES.index(transport) if transport in NAMES else len(NAMES)
