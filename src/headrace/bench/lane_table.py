"""What the rows of `bench lane` come to: medians, ratios to no prefetch, and the goal by row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from headrace.bench.faults.table import Figure
from headrace.bench.rows import Spread, pairs, spread

Row = Mapping[str, Any]


class Line(NamedTuple):
    """One mode at one share. ratio: to `off` in the same half of a repeat, None without one.

    met: rows that keep the goal, and of how many; None where there is no goal.
    """

    setting: str
    prompt_tokens: int
    share: float
    mode: str
    gap_ms: Spread
    ratio: Spread | None
    parked_ms: Spread
    parked_mb: Spread
    ended_at: Spread
    bound_ms: Spread | None
    met: tuple[int, int] | None


def lines(rows: Iterable[Row]) -> Iterator[Line]:
    """One line for each mode at each share, in the order in which they were measured."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        names = ("setting", "prompt_tokens", "share", "mode")
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    for (setting, tokens, share, mode), mine in groups.items():
        off = groups.get((setting, tokens, share, "off"), [])
        ratios = [row["gap_ns"] / other["gap_ns"] for row, other in pairs(mine, off, *_HALF)]
        has_goal = mode == "streamed"
        kept = sum(row["gap_ns"] <= row["bound_ns"] for row in mine)
        yield Line(
            setting,
            tokens,
            share,
            mode,
            gap_ms=_in_ms(mine, "gap_ns"),
            ratio=spread(ratios) if ratios else None,
            parked_ms=_in_ms(mine, "parked_ns"),
            parked_mb=_in_ms(mine, "parked_nbytes"),
            ended_at=spread([row["ended_at_share"] for row in mine]),
            bound_ms=_in_ms(mine, "bound_ns") if has_goal else None,
            met=(kept, len(mine)) if has_goal else None,
        )


def figures(rows: Iterable[Row]) -> Iterator[Figure]:
    """The goal of the streamed mode at each share, judged in every row."""
    for line in lines(rows):
        if line.met is None or line.bound_ms is None:
            continue
        kept, of = line.met
        yield Figure(
            f"{line.setting}, A ends at {line.share:g} of B's prefill: streamed with prefetch",
            "the longer of the import and of what stays of the prefill, + one layer group + slack: "
            f"{line.bound_ms.median:.1f} ms",
            f"{line.gap_ms} ms, {kept} of {of} rows within their own bound",
            kept == of,
        )


_HALF = ("repeat", "half")


def _in_ms(rows: Iterable[Row], name: str) -> Spread:
    """Nanoseconds in ms, or bytes in MB."""
    return spread([row[name] / 1e6 for row in rows])
