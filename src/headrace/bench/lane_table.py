"""What the rows of `bench lane` come to: medians, ratios to no prefetch, and the goal by row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from headrace.bench.faults.table import Figure
from headrace.bench.rows import Spread, pairs, spread

Row = Mapping[str, Any]


class Line(NamedTuple):
    """One mode at one share. ratio: to `off` in the same half of a repeat, None without one.

    to_whole: of the streamed mode, to `whole`. kept, met: rows within what can be kept, and within
    the goal. over: rows in which B's prefill was over. rows: of all.
    """

    setting: str
    prompt_tokens: int
    share: float
    mode: str
    gap_ms: Spread
    ratio: Spread | None
    to_whole: Spread | None
    parked_ms: Spread
    parked_mb: Spread
    ended_at: Spread
    bound_ms: Spread
    goal_ms: Spread
    kept: int
    met: int
    over: int
    rows: int


def lines(rows: Iterable[Row]) -> Iterator[Line]:
    """One line for each mode at each share, in the order in which they were measured."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        names = ("setting", "prompt_tokens", "share", "mode")
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    for (setting, tokens, share, mode), mine in groups.items():
        kept = sum(row["gap_ns"] <= row["bound_ns"] for row in mine)
        place = (setting, tokens, share)
        yield Line(
            *place,
            mode,
            gap_ms=_in_ms(mine, "gap_ns"),
            ratio=_ratio(mine, groups.get((*place, "off"), [])),
            to_whole=_ratio(mine, groups.get((*place, "whole"), [])),
            parked_ms=_in_ms(mine, "parked_ns"),
            parked_mb=_in_ms(mine, "parked_nbytes"),
            ended_at=spread([row["ended_at_share"] for row in mine]),
            bound_ms=_in_ms(mine, "bound_ns"),
            goal_ms=_in_ms(mine, "goal_ns"),
            kept=kept,
            met=sum(row["gap_ns"] <= row["goal_ns"] for row in mine),
            over=sum(row["rest_ns"] == 0 for row in mine),
            rows=len(mine),
        )


def figures(rows: Iterable[Row]) -> Iterator[Figure]:
    """The streamed mode at each share, judged row by row.

    The goal where B's prefill was over in all rows when A ended; elsewhere what can be kept.
    """
    for line in lines(rows):
        if line.mode != "streamed":
            continue
        name = f"{line.setting}, A ends at {line.share:g} of B's prefill: streamed with prefetch"
        if line.over == line.rows:
            goal = f"the import of what was parked + one group: {line.goal_ms.median:.1f} ms"
            within = line.met
        else:
            goal = (
                "what stays of the prefill, or the import of what was parked, + one group: "
                f"{line.bound_ms.median:.1f} ms (without that rest {line.goal_ms.median:.1f} ms, "
                f"kept by {line.met})"
            )
            within = line.kept
        result = f"{line.gap_ms} ms, {within} of {line.rows} rows within their own bound"
        if line.to_whole is not None:
            result += f"; x{line.to_whole.median:.3g} of the whole route's"
        yield Figure(name, goal, result, within == line.rows)


def _ratio(mine: Sequence[Row], others: Sequence[Row]) -> Spread | None:
    ratios = [row["gap_ns"] / other["gap_ns"] for row, other in pairs(mine, others, *_HALF)]
    return spread(ratios) if ratios else None


_HALF = ("repeat", "half")


def _in_ms(rows: Iterable[Row], name: str) -> Spread:
    """Nanoseconds in ms, or bytes in MB."""
    return spread([row[name] / 1e6 for row in rows])
