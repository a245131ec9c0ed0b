"""What the rows of the size curve say, route by route and against the goals, from rows alone.

T is the median time in which the whole route of the same cell imports: what the same import takes
alone. The hidden share of a route is 1 - tail / T and its bound is 1 - last group / all bytes. Both
are told only where the import is shorter than the computing, and only of paced cells: without a
pace there is nothing to hide behind. `saved` stands beside it, since a tail can also be short
because work was moved to before it: by how much the route's TTFT is below that of the whole route,
as a share of that one's tail. It is not told where the whole route's own TTFT varies by more.

`auto` is judged by the median TTFT of all its rows over that of a fixed route's; its first request,
which knew nothing yet, is told beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from headrace.bench.faults.table import Figure
from headrace.bench.rows import Spread, pairs, spread

Rows = list[dict[str, Any]]

TAIL_ALLOWANCE = 1.25
SHARE_OF_BOUND = 0.95
GROUPS_JUDGED = 8  # the share's goal is for this many layer groups and more
AUTO, AUTO_ALLOWANCE = "auto", 1.02


class CellKey(NamedTuple):
    """Which rows are compared with each other."""

    geometry: str
    size_gb: float
    pace_gb_per_s: float
    link_gb_per_s: float

    def __str__(self) -> str:
        pace = f"{self.pace_gb_per_s:g} GB/s" if self.pace_gb_per_s else "unpaced"
        link = f", link {self.link_gb_per_s:g} GB/s" if self.link_gb_per_s else ""
        return f"{self.geometry} {self.size_gb:g} GB, {pace}{link}"


@dataclass(frozen=True)
class Line:
    """One route of one cell: medians with their spread.

    hidden, saved: None where no share can be told. ttft_ratio: to the whole route of the same
    repeat and run.
    """

    cell: CellKey
    route: str
    groups: int
    tail_ms: Spread
    hidden: float | None
    saved: float | None
    bound: float
    ttft_ms: Spread
    ttft_ratio: Spread | None
    cpu_s: Spread | None


class CellRows:
    """The rows of one cell by route, and the fixed cost of its setting."""

    def __init__(self, key: CellKey, rows: Rows, fixed: Rows) -> None:
        self.key = key
        self.routes: dict[str, Rows] = {}
        for row in rows:
            self.routes.setdefault(row["route"], []).append(row)
        self.fixed_ns = spread([row["tail_ns"] for row in fixed]).median if fixed else None

    @property
    def alone_ns(self) -> float | None:
        """T; None where the whole route was not measured."""
        return self._median("whole", "import_ns") if "whole" in self.routes else None

    @property
    def hides(self) -> bool:
        """Whether there is something to hide the import behind: it is the shorter of the two."""
        if self.alone_ns is None or not self.key.pace_gb_per_s:
            return False
        return self.alone_ns < self._median("whole", "prefill_ns")

    def hidden(self, route: str) -> float | None:
        """The hidden share of a route, from medians."""
        if self.alone_ns is None or not self.hides:
            return None
        return 1 - self.tail(route).median / self.alone_ns

    def saved(self, route: str) -> float | None:
        """What of the whole route's tail is no longer in the TTFT of another, from medians."""
        if not self.hides:
            return None
        return saved_share(self.routes[route], self.routes["whole"])

    def tail(self, route: str) -> Spread:
        """The tail of a route in ns."""
        return spread([row["tail_ns"] for row in self.routes[route]])

    def ratio(self, route: str, base: str) -> Spread | None:
        """TTFT of a route over that of another in the same repeat; None where they never met."""
        met = pairs(self.routes.get(route, []), self.routes.get(base, []), "repeat")
        return spread([a["ttft_ns"] / b["ttft_ns"] for a, b in met]) if met else None

    def last_share(self, route: str) -> float:
        """The last group's share of all bytes; a route may be cut differently by `auto`."""
        mine = self.routes[route]
        return spread([row["last_group_nbytes"] / row["kv_nbytes"] for row in mine]).median

    def lines(self) -> Iterator[Line]:
        """One for each route."""
        for route, mine in self.routes.items():
            cpu = [
                (row["owner_cpu_ns"] + row["source_cpu_ns"]) / 1e9
                for row in mine
                if row["owner_cpu_ns"] is not None
            ]
            tail = self.tail(route)
            yield Line(
                self.key,
                route,
                max(row["groups"] for row in mine),
                Spread(tail.median / 1e6, tail.p10 / 1e6, tail.p90 / 1e6, tail.samples),
                self.hidden(route),
                self.saved(route),
                1 - self.last_share(route),
                spread([row["ttft_ns"] / 1e6 for row in mine]),
                self.ratio(route, "whole"),
                spread(cpu) if cpu else None,
            )

    def figures(self) -> Iterator[Figure]:
        """The cell's routes against the goals."""
        for route in self.routes:
            if route.startswith("streamed"):
                yield from self._streamed(route)
        yield from self._auto()

    def _streamed(self, route: str) -> Iterator[Figure]:
        hidden = self.hidden(route)
        if hidden is None or self.alone_ns is None:
            return
        last, name = self.last_share(route), f"{self.key}, {route}"
        if self.fixed_ns is not None:
            allowed_ns = tail_allowed_ns(self.alone_ns, last, self.fixed_ns)
            yield _at_most(f"tail, {name}, ms", self.tail(route).median / 1e6, allowed_ns / 1e6)
        if max(row["groups"] for row in self.routes[route]) >= GROUPS_JUDGED:
            wanted = share_wanted(last)
            text = f">= {SHARE_OF_BOUND:g} x {1 - last:.4f} = {wanted:.4f}"
            yield Figure(f"hidden share, {name}", text, f"{hidden:.4f}", hidden >= wanted)

    def _auto(self) -> Iterator[Figure]:
        if AUTO not in self.routes:
            return
        best = best_fixed(self.routes)
        for base in dict.fromkeys(("whole", *([best] if best else []))):
            if base in self.routes:
                name = f"TTFT, {self.key}, auto to {base}" + (", the best fixed" * (base == best))
                yield auto_figure(name, self.routes[AUTO], self.routes[base])

    def _median(self, route: str, name: str) -> float:
        return spread([row[name] for row in self.routes[route]]).median


def cells(rows: Iterable[dict[str, Any]]) -> list[CellRows]:
    """The rows sorted into cells, in their order; those that were skipped are left out."""
    handoffs: dict[CellKey, Rows] = {}
    fixed: dict[tuple[str, float, float], Rows] = {}
    for row in rows:
        key = CellKey(row["geometry"], row["size_gb"], row["pace_gb_per_s"], row["link_gb_per_s"])
        setting = (key.geometry, key.pace_gb_per_s, key.link_gb_per_s)
        if row["measure"] == "hand-off":
            handoffs.setdefault(key, []).append(row)
        elif row["measure"] == "fixed":
            fixed.setdefault(setting, []).append(row)
    return [
        CellRows(key, mine, fixed.get((key.geometry, key.pace_gb_per_s, key.link_gb_per_s), []))
        for key, mine in handoffs.items()
    ]


def figures(rows: Iterable[dict[str, Any]]) -> Iterator[Figure]:
    """Every goal that the rows can be held against."""
    for cell in cells(rows):
        yield from cell.figures()


def tail_allowed_ns(whole_ns: float, last_share: float, fixed_ns: float) -> float:
    """The longest tail that meets the goal of a streamed route."""
    return TAIL_ALLOWANCE * (whole_ns * last_share + fixed_ns)


def share_wanted(last_share: float) -> float:
    """The smallest hidden share that meets the goal."""
    return SHARE_OF_BOUND * (1 - last_share)


def best_fixed(routes: dict[str, Rows]) -> str | None:
    """The fixed route with the lowest median TTFT of those that `auto` may take.

    A prefill chunk is part of the pairing, so the chunked routes that need one are not among them.
    """
    medians = {
        route: spread([row["ttft_ns"] for row in mine]).median
        for route, mine in routes.items()
        if route != AUTO and not any(row["prefill_chunk"] for row in mine)
    }
    return min(medians, key=lambda route: medians[route]) if medians else None


def saved_share(mine: Rows, whole: Rows) -> float | None:
    """What of the whole route's tail is not in the TTFT of `mine`; None where noise is larger."""
    tail_ns = spread([row["tail_ns"] for row in whole]).median
    ttft = spread([row["ttft_ns"] for row in whole])
    if ttft.p90 - ttft.p10 >= tail_ns:
        return None
    return (ttft.median - spread([row["ttft_ns"] for row in mine]).median) / tail_ns


def auto_figure(name: str, auto: Rows, base: Rows) -> Figure:
    """TTFT of auto over that of a fixed route: of all its rows, and of first requests beside it."""
    base_ns = spread([row["ttft_ns"] for row in base]).median
    ratio = spread([row["ttft_ns"] / base_ns for row in auto])
    first = [row["ttft_ns"] / base_ns for row in auto if row.get("nth") == 1]
    result = f"{ratio.median:.4f} [{ratio.p10:.4f}, {ratio.p90:.4f}] n={ratio.samples}"
    result += "".join(f"; first request {each:.4f}" for each in first)
    return Figure(name, f"<= {AUTO_ALLOWANCE:g}", result, ratio.median <= AUTO_ALLOWANCE)


def _at_most(name: str, result: float, bound: float) -> Figure:
    return Figure(name, f"<= {bound:.4g}", f"{result:.4g}", result <= bound)
