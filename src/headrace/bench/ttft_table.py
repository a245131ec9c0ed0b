"""What the rows of `bench ttft` say, route by route and against the goals, from rows alone.

T is the median time in which the whole route imports at the same point: what the same import takes
alone. The hidden share of a route is 1 - tail / T and its bound 1 - last group / all bytes; it is
told where T is above timer noise and shorter than the prefill, since there is nothing else to hide
behind. `saved` stands beside it: by how much the route's TTFT is below that of the whole route, as
a share of that one's tail, which holds the writing too. It is not told where the whole route's own
TTFT varies by more than that tail.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from headrace.bench.curve_table import (
    GROUPS_JUDGED,
    auto_figure,
    saved_share,
    share_wanted,
)
from headrace.bench.faults.table import Figure
from headrace.bench.rows import Spread, pairs, spread
from headrace.bench.ttft_points import AUTO

Rows = list[dict[str, Any]]

SLOW_DOWN_ALLOWANCE = 1.01
TIMER_NOISE_NS = 500_000  # of two wake-ups: a shorter T says nothing


class PointKey(NamedTuple):
    """Which rows are compared with each other."""

    model: str
    prompt_tokens: int
    link_mb_s: float
    prefill_chunk: int

    def __str__(self) -> str:
        link = f", emulated link of {self.link_mb_s:g} MB/s" if self.link_mb_s else ""
        chunk = f", prefill chunk {self.prefill_chunk}" if self.prefill_chunk else ""
        return f"{self.model}, {self.prompt_tokens} tokens{link}{chunk}"


@dataclass(frozen=True)
class Line:
    """One route at one point. hidden, saved: None where no share can be told. ttft_ratio: to the
    whole route of the same repeat and run. early: the share of KV bytes that was imported before
    the prefill ended. note: what `auto` came to.
    """

    label: str
    groups: int
    prefill_ms: Spread
    tail_ms: Spread
    ttft_ms: Spread
    ttft_ratio: Spread | None
    hidden: float | None
    saved: float | None
    bound: float
    early: float
    note: str


class PointRows:
    """The rows of one point by label."""

    def __init__(self, key: PointKey) -> None:
        self.key = key
        self.labels: dict[str, Rows] = {}

    @property
    def alone_ns(self) -> float | None:
        """T; None where the whole route was not measured."""
        return self._median("whole", "import_ns") if "whole" in self.labels else None

    @property
    def repeats(self) -> int:
        """Rows of the route that has most."""
        return max(map(len, self.labels.values()))

    def lines(self) -> Iterator[Line]:
        """One for each route."""
        for label, mine in self.labels.items():
            yield Line(
                label,
                max(row["groups"] for row in mine),
                self.in_ms(label, "prefill_ns"),
                self.in_ms(label, "tail_ns"),
                self.in_ms(label, "ttft_ns"),
                self.ratio(label, "whole"),
                self.hidden(label),
                self.saved(label),
                1 - self._last_share(label),
                statistics.median(row["nbytes_before_final"] / row["kv_nbytes"] for row in mine),
                _choices(mine),
            )

    def in_ms(self, label: str, name: str) -> Spread:
        """One time of a label's rows, in ms."""
        return spread([row[name] / 1e6 for row in self.labels[label]])

    def ratios(self, label: str, base: str, name: str) -> list[float]:
        """One time of a label over that of another in the same repeat and run."""
        met = pairs(self.labels.get(label, []), self.labels.get(base, []), "repeat")
        return [row[name] / other[name] for row, other in met]

    def ratio(self, label: str, base: str) -> Spread | None:
        """TTFT of a label over that of another; None where they share no repeat."""
        ratios = self.ratios(label, base, "ttft_ns")
        return spread(ratios) if ratios else None

    def hidden(self, label: str) -> float | None:
        """The hidden share, from medians; None where none can be told."""
        alone_ns = self.alone_ns
        if alone_ns is None or alone_ns < TIMER_NOISE_NS:
            return None
        if alone_ns >= self._median("whole", "prefill_ns"):
            return None
        return 1 - self._median(label, "tail_ns") / alone_ns

    def saved(self, label: str) -> float | None:
        """What of the whole route's tail is no longer in the TTFT of another, from medians."""
        if self.hidden(label) is None:
            return None
        return saved_share(self.labels[label], self.labels["whole"])

    def best_fixed(self) -> str | None:
        """The fixed route with the lowest median TTFT."""
        fixed = [label for label in self.labels if label != AUTO]
        return min(fixed, key=lambda label: self._median(label, "ttft_ns"), default=None)

    def figures(self) -> Iterator[Figure]:
        """The point's routes against the goals."""
        for label, mine in self.labels.items():
            hidden = self.hidden(label) if label.startswith("streamed") else None
            if hidden is not None and max(row["groups"] for row in mine) >= GROUPS_JUDGED:
                last = self._last_share(label)
                wanted = share_wanted(last)
                goal = f">= {wanted:.4f} (bound {1 - last:.4f})"
                name = f"hidden share, {self.key}, {label}"
                yield Figure(name, goal, f"{hidden:.4f}", hidden >= wanted)
        best = self.best_fixed()
        for base in dict.fromkeys(("whole", best or "whole")):
            if AUTO in self.labels and base in self.labels:
                words = f"auto to {base}" + (", the best fixed" if base == best else "")
                name = f"TTFT, {self.key}, {words}"
                yield auto_figure(name, self.labels[AUTO], self.labels[base])

    def _median(self, label: str, name: str) -> float:
        return spread([row[name] for row in self.labels[label]]).median

    def _last_share(self, label: str) -> float:
        mine = self.labels[label]
        return spread([row["last_group_nbytes"] / row["kv_nbytes"] for row in mine]).median


def points(rows: Iterable[dict[str, Any]]) -> list[PointRows]:
    """The rows sorted into points, in their order."""
    found: dict[PointKey, PointRows] = {}
    for row in (each for each in rows if "skipped" not in each):
        key = PointKey(*(row[name] for name in PointKey._fields))
        point = found.setdefault(key, PointRows(key))
        point.labels.setdefault(row["label"], []).append(row)
    return list(found.values())


def figures(rows: Iterable[dict[str, Any]]) -> Iterator[Figure]:
    """Every goal that the rows can be held against."""
    found = points(rows)
    for point in found:
        yield from point.figures()
    for where, ratios in _pooled(found, "prefill_ns"):
        yield _at_most(f"prefill, {where}", spread(ratios), SLOW_DOWN_ALLOWANCE)
    for where, ratios in _pooled(found, "source_cpu_ns"):
        yield Figure(f"CPU time of the source, {where}", "stated", _spelled(spread(ratios)), None)
    yield from _noise(found)


def _pooled(found: list[PointRows], name: str) -> Iterator[tuple[str, list[float]]]:
    """A time by streaming over that by the whole route, of all lengths of a model together.

    One ratio says little, since two prefills of the same prompt differ by some percent. Without a
    link and over links apart: an owner that waits for a link keeps looking at its fences.
    """
    pooled: dict[str, list[float]] = {}
    for point in found:
        key = point.key
        for label in (label for label in point.labels if label.startswith("streamed")):
            where = f"{key.model}, {label} to whole, {'over links' if key.link_mb_s else 'no link'}"
            where += f", prefill chunk {key.prefill_chunk}" if key.prefill_chunk else ""
            pooled.setdefault(where, []).extend(point.ratios(label, "whole", name))
    return ((where, ratios) for where, ratios in pooled.items() if ratios)


def _noise(found: list[PointRows]) -> Iterator[Figure]:
    """How far the same route is from itself a repeat later: what a ratio near 1 can mean."""
    apart: dict[str, list[float]] = {}
    for point in found:
        whole = sorted(point.labels.get("whole", []), key=lambda row: int(row["repeat"]))
        mine = apart.setdefault(point.key.model, [])
        same_run = [(a, b) for a, b in pairwise(whole) if a.get("run") == b.get("run")]
        mine += [abs(b["ttft_ns"] / a["ttft_ns"] - 1) for a, b in same_run]
    for model, differences in apart.items():
        if differences:
            name = f"TTFT, {model}, whole to itself a repeat later, difference"
            yield Figure(name, "stated", _spelled(spread(differences)), None)


def _choices(rows: Rows) -> str:
    counted = Counter(_choice(row["choice"]) for row in rows if row["choice"])
    return ", ".join(f"{n} x {words}" for words, n in counted.most_common())


def _choice(choice: dict[str, Any]) -> str:
    route, cut = str(choice["route"]), choice["chunk"]
    words = f"{route}-{choice['group_layers']}" if route == "streamed" else route
    return f"{words} by {cut}" if cut else words


def _at_most(name: str, ratio: Spread, bound: float) -> Figure:
    return Figure(name, f"<= {bound:g}", _spelled(ratio), ratio.median <= bound)


def _spelled(ratio: Spread) -> str:
    return f"{ratio.median:.4f} [{ratio.p10:.4f}, {ratio.p90:.4f}] n={ratio.samples}"
