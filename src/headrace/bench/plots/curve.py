"""Tail, hidden share and TTFT against the size of the KV, one row of panels per geometry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.bench.curve_table import CellRows, cells
from headrace.bench.rows import Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class _Point(NamedTuple):
    size_gb: float
    spread: Spread


def figure(rows: list[dict[str, Any]]) -> Figure:
    """Medians with their 10th and 90th percentile; sizes on a logarithmic axis."""
    from matplotlib.figure import Figure

    by_curve: dict[tuple[str, float, float], list[CellRows]] = {}
    for cell in sorted(cells(rows), key=lambda cell: (-cell.key.pace_gb_per_s, cell.key)):
        key = cell.key.geometry, cell.key.pace_gb_per_s, cell.key.link_gb_per_s
        by_curve.setdefault(key, []).append(cell)
    picture = Figure(figsize=(15, 0.8 + 3.2 * max(1, len(by_curve))), layout="constrained")
    panels = picture.subplots(max(1, len(by_curve)), 3, squeeze=False)
    for (tail, hidden, ttft), mine in zip(panels, by_curve.values(), strict=False):
        name = str(mine[0].key._replace(size_gb=0)).replace(" 0 GB", "")
        _curves(tail, _tails(mine), f"{name}: transfer tail, ms")
        tail.set_yscale("log")
        _curves(hidden, _shares(mine), "hidden share")
        hidden.set_ylim(-0.1, 1.05)
        _curves(ttft, _ratios(mine), "TTFT, to whole")
        ttft.axhline(1, color="grey", linewidth=0.8)
        tail.legend(fontsize="small")
    return picture


def _tails(mine: list[CellRows]) -> dict[str, list[_Point]]:
    return {
        route: [
            _Point(cell.key.size_gb, Spread(s.median / 1e6, s.p10 / 1e6, s.p90 / 1e6, s.samples))
            for cell in mine
            if route in cell.routes
            for s in (cell.tail(route),)
        ]
        for route in _routes(mine)
    }


def _shares(mine: list[CellRows]) -> dict[str, list[_Point]]:
    """The share of the median tail; its ends are those of the tail's percentiles."""
    found: dict[str, list[_Point]] = {}
    for route in _routes(mine):
        for cell in mine:
            share = cell.hidden(route) if route in cell.routes and route != "whole" else None
            alone_ns = cell.alone_ns
            if share is not None and alone_ns is not None:
                tail = cell.tail(route)
                ends = 1 - tail.p90 / alone_ns, 1 - tail.p10 / alone_ns
                point = _Point(cell.key.size_gb, Spread(share, *ends, tail.samples))
                found.setdefault(route, []).append(point)
    return found


def _ratios(mine: list[CellRows]) -> dict[str, list[_Point]]:
    found: dict[str, list[_Point]] = {}
    for route in _routes(mine):
        for cell in mine:
            ratio = cell.ratio(route, "whole")
            if ratio is not None:
                found.setdefault(route, []).append(_Point(cell.key.size_gb, ratio))
    return found


def _routes(mine: list[CellRows]) -> list[str]:
    return sorted({route for cell in mine for route in cell.routes}, key=_place)


def _place(route: str) -> tuple[int, str, int]:
    """Whole first and auto last; the others by name and number, and so with a colour each."""
    name, _, number = route.partition("-")
    return {"whole": 0, "auto": 2}.get(name, 1), name, int(number or 0)


def _curves(panel: Axes, curves: dict[str, list[_Point]], title: str) -> None:
    for route, points in curves.items():
        medians = [point.spread.median for point in points]
        below = [max(0.0, point.spread.median - point.spread.p10) for point in points]
        above = [max(0.0, point.spread.p90 - point.spread.median) for point in points]
        panel.errorbar(
            [point.size_gb for point in points],
            medians,
            yerr=[below, above],
            label=route,
            color=_COLOURS.get(route.partition("-")[0]) or f"C{_number(route)}",
            marker="o",
            markersize=3,
            linewidth=1,
            capsize=2,
        )
    panel.set_title(title, fontsize="medium")
    panel.set_xlabel("KV, GB")
    panel.set_xscale("log")
    panel.grid(alpha=0.3)


_COLOURS = {"whole": "black", "auto": "magenta"}


def _number(route: str) -> int:
    """A colour of the cycle, the same for a route wherever it is drawn."""
    known = ("chunked-256", "chunked-1024", "streamed-1", "streamed-2", "streamed-4")
    return known.index(route) if route in known else len(known)
