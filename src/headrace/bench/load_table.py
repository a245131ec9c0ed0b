"""What the rows of `bench load` say, and how they do against the goals, from rows alone.

Ratios are taken within a block or repeat of one run: of two arms that were looked at within
seconds. The mean counts every import that fell between two tokens, the median the usual gap; the
goal holds for both. `auto` is judged by the median TTFT of all its requests over that of a fixed
route; beside it stands the first request that it served at this many in flight, over the first ones
of that route's rows.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from headrace.bench.curve_table import AUTO, AUTO_ALLOWANCE
from headrace.bench.faults.table import Figure
from headrace.bench.rows import Spread, pairs, percentile, spread

Rows = list[dict[str, Any]]

TOKEN_ALLOWANCE = 1.02
MEASURES: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "p90": lambda gaps: percentile(gaps, 90),
    "p99": lambda gaps: percentile(gaps, 99),
}


class ServingKey(NamedTuple):
    """Which serving rows are compared with each other."""

    model: str
    source: str
    rate_mb_s: float
    in_flight: int

    def __str__(self) -> str:
        pace = f" at {self.rate_mb_s:g} MB/s" if self.rate_mb_s else ""
        return f"{self.model}, {self.source} source{pace}, {self.in_flight} in flight"


class TokenKey(NamedTuple):
    """Which token rows are compared with each other."""

    model: str
    rate_mb_s: float
    neighbours: int
    route: str

    def __str__(self) -> str:
        pace = f"KV paced at {self.rate_mb_s:g} MB/s and {self.route}"
        return f"{self.model}, {pace}, {self.neighbours} decoding"


@dataclass(frozen=True)
class ServingLine:
    """One route at one number in flight; times of all its requests."""

    key: ServingKey
    route: str
    requests_per_s: Spread
    mb_per_s: Spread
    ttft_ms: Spread
    tail_ms: Spread
    step_in_the_way_ms: Spread
    note: str


@dataclass(frozen=True)
class TokenLine:
    """One arm beside some neighbours; gaps of all its blocks, and MB/s of KV that was imported."""

    key: TokenKey
    arm: str
    gap_ms: Spread
    mean_ms: float
    p99_ms: float
    mb_per_s: Spread


def serving_lines(rows: Iterable[dict[str, Any]]) -> Iterator[ServingLine]:
    """One for each number in flight and route."""
    for key, mine in _serving(rows).items():
        for route, these in mine.items():
            yield ServingLine(
                key,
                route,
                spread([row["requests_per_s"] for row in these]),
                spread([row["kv_nbytes_per_s"] / 1e6 for row in these]),
                _all_ms(these, "ttft_ns"),
                _all_ms(these, "tail_ns"),
                _all_ms(these, "decode_in_the_way_ns"),
                _choices(these),
            )


def token_lines(rows: Iterable[dict[str, Any]]) -> Iterator[TokenLine]:
    """One for each pace, number of neighbours and arm."""
    for key, arms in _token(rows).items():
        for arm, these in arms.items():
            gaps = [ns / 1e6 for row in these for ns in row["gaps_ns"]]
            speeds = [row["imported_nbytes"] / row["span_ns"] * 1e3 for row in these]
            yield TokenLine(
                key,
                arm,
                spread(gaps),
                statistics.fmean(gaps),
                percentile(gaps, 99),
                spread(speeds),
            )


def figures(rows: Iterable[dict[str, Any]]) -> Iterator[Figure]:
    """Every goal that the rows can be held against, and what is stated beside it."""
    rows = list(rows)
    for key, arms in _token(rows).items():
        for base in ("discarded", "none"):
            for name in MEASURES:
                ratios = token_ratios(arms, base, name)
                if ratios:
                    goal = base == "discarded" and name in ("mean", "median")
                    what = f"token time, {name}, {key}, real to {base}"
                    yield _at_most(what, spread(ratios), TOKEN_ALLOWANCE if goal else None)
        same = _paired(arms, "discarded", _nbytes_per_token)
        if same:
            name = f"KV imported per token, {key}, real to discarded"
            yield _at_most(name, spread(same), None)
    for serving, routes in _serving(rows).items():
        yield from _auto(serving, routes)
        for what, route in (
            ("ttft_ns", "streamed"),
            ("elapsed_ns", AUTO),
            ("elapsed_ns", "streamed"),
        ):
            ratios = _to_whole(routes, route, what)
            if ratios:
                words = "TTFT" if what == "ttft_ns" else "time for all requests"
                yield _at_most(f"{words}, {serving}, {route} to whole", spread(ratios), None)


def token_ratios(arms: dict[str, Rows], base: str, name: str) -> list[float]:
    """A measure of the gaps with real imports over the same of another arm, block by block."""
    return _paired(arms, base, lambda row: MEASURES[name](row["gaps_ns"]))


def by_arm(rows: Iterable[dict[str, Any]]) -> dict[TokenKey, dict[str, Rows]]:
    """The token rows by what they are compared with, and by arm."""
    return _token(rows)


def _paired(
    arms: dict[str, Rows], base: str, measure: Callable[[Mapping[str, Any]], float]
) -> list[float]:
    met = pairs(arms.get("real", []), arms.get(base, []), "block")
    measured = [(measure(row), measure(other)) for row, other in met]
    return [mine / its for mine, its in measured if its]


def _nbytes_per_token(row: Mapping[str, Any]) -> float:
    return float(row["imported_nbytes"] / max(1, len(row["gaps_ns"])))


def _to_whole(routes: dict[str, Rows], route: str, what: str) -> list[float]:
    """Medians of a repeat's requests, of one route over the whole route."""

    def value(row: Mapping[str, Any]) -> float:
        found = row[what]
        return statistics.median(found) if isinstance(found, list) else float(found)

    met = pairs(routes.get(route, []), routes.get("whole", []), "repeat")
    return [value(row) / value(other) for row, other in met]


def _auto(serving: ServingKey, routes: dict[str, Rows]) -> Iterator[Figure]:
    """`auto` to whole and to the fixed route with the lowest median."""
    medians = {
        route: statistics.median(ns for row in mine for ns in row["ttft_ns"])
        for route, mine in routes.items()
    }
    best = min((route for route in medians if route != AUTO), key=medians.__getitem__, default="")
    for base in dict.fromkeys(("whole", best)):
        if AUTO not in routes or base not in routes:
            continue
        name = f"TTFT, {serving}, auto to {base}" + (", the best fixed" if base == best else "")
        ratio = spread([ns / medians[base] for row in routes[AUTO] for ns in row["ttft_ns"]])
        figure = _at_most(name, ratio, AUTO_ALLOWANCE)
        first_ns = statistics.median(row["ttft_ns"][0] for row in routes[base])
        firsts = [row["ttft_ns"][0] for row in routes[AUTO] if row.get("nth") == 1]
        told = "".join(f"; first request {ns / first_ns:.4f}" for ns in firsts)
        yield figure._replace(result=figure.result + told)


def _serving(rows: Iterable[dict[str, Any]]) -> dict[ServingKey, dict[str, Rows]]:
    found: dict[ServingKey, dict[str, Rows]] = {}
    for row in rows:
        if row["measure"] == "serving" and "skipped" not in row:
            key = ServingKey(*(row[name] for name in ServingKey._fields))
            found.setdefault(key, {}).setdefault(row["route"], []).append(row)
    return found


def _token(rows: Iterable[dict[str, Any]]) -> dict[TokenKey, dict[str, Rows]]:
    """Where nothing arrived, a row stands beside the arrivals of every route."""
    mine = [row for row in rows if row["measure"] == "token"]
    routes = list(dict.fromkeys(row["route"] for row in mine if row["route"]))
    found: dict[TokenKey, dict[str, Rows]] = {}
    for row in mine:
        for route in [row["route"]] if row["route"] else routes:
            key = TokenKey(row["model"], row["rate_mb_s"], row["neighbours"], route)
            found.setdefault(key, {}).setdefault(row["arm"], []).append(row)
    return found


def _all_ms(rows: Rows, name: str) -> Spread:
    return spread([ns / 1e6 for row in rows for ns in row[name]])


def _choices(rows: Rows) -> str:
    counted = Counter(choice["route"] for row in rows for choice in row["choices"])
    return ", ".join(f"{n} x {route}" for route, n in counted.most_common())


def _at_most(name: str, ratio: Spread, bound: float | None) -> Figure:
    result = f"{ratio.median:.4f} [{ratio.p10:.4f}, {ratio.p90:.4f}] n={ratio.samples}"
    if bound is None:
        return Figure(name, "stated", result, None)
    return Figure(name, f"<= {bound:g}", result, ratio.median <= bound)
