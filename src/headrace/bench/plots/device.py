"""The device check's rows, one panel for each thing that was measured; the title says on what."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from headrace.bench.rows import Spread, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = list[dict[str, Any]]
Curves = dict[str, list[tuple[float, Spread]]]


def figure(rows: Rows) -> Figure:
    """Medians with their 10th and 90th percentile. Rows of a fake device are titled as such."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if "skipped" not in row]
    found = [name for name in _PANELS if any(row["measure"] == name for row in rows)]
    drawn = Figure(figsize=(6.5 * max(1, len(found)), 4.2), layout="constrained")
    drawn.suptitle(_title(rows))
    panels = drawn.subplots(1, max(1, len(found)), squeeze=False)[0]
    for axes, name in zip(panels, found, strict=False):
        _PANELS[name](axes, [row for row in rows if row["measure"] == name])
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    return drawn


def _title(rows: Rows) -> str:
    kinds = {row["device"] for row in rows}
    if kinds == {"real"}:
        return "on a real device"
    return "fake device: these figures say nothing about any device"


def _link(axes: Axes, rows: Rows) -> None:
    _draw(axes, _curves(rows, "slab", "size_gb", lambda row: row["nbytes"] / row["ns"]))
    axes.set_xscale("log")
    axes.set(title="plain copies to the device", xlabel="GB", ylabel="GB/s")


def _sweep(axes: Axes, rows: Rows) -> None:
    named = [{**row, "name": f"{row['slab']}, {row['in_flight']} in flight"} for row in rows]
    _draw(axes, _curves(named, "name", "chunk_mib", lambda row: row["nbytes_per_s"] / 1e9))
    axes.set_xscale("log", base=2)
    axes.set(title="chunks to the device", xlabel="MiB of a chunk", ylabel="GB/s")


def _hand_offs(axes: Axes, rows: Rows) -> None:
    named = [{**row, "name": f"{row['route']}, {row['slab']}"} for row in rows]
    _draw(axes, _curves(named, "name", "size_gb", lambda row: row["tail_ns"] / 1e6))
    axes.set_xscale("log")
    axes.set_yscale("log")
    setting = rows[0]["setting"]
    axes.set(title=f"transfer tail, {setting}", xlabel="GB of KV", ylabel="ms")


def _token(axes: Axes, rows: Rows) -> None:
    named = [{**row, "name": f"{_ARMS[row['arm']]} {row['route'] or ''}".strip()} for row in rows]
    names = list(dict.fromkeys(row["name"] for row in named))
    for at, name in enumerate(names):
        gaps = [ns / 1e6 for row in named if row["name"] == name for ns in row["gaps_ns"]]
        found = spread(gaps)
        axes.errorbar(
            [at],
            [found.median],
            yerr=[[found.median - found.p10], [found.p90 - found.median]],
            marker="o",
            capsize=3,
            label=name,
        )
    axes.set_xticks(range(len(names)), names, rotation=30, fontsize="small")
    axes.set(title="token time of neighbours, by what is imported", ylabel="ms")


def _ttft(axes: Axes, rows: Rows) -> None:
    _draw(axes, _curves(rows, "route", "prompt_tokens", lambda row: row["ttft_ns"] / 1e6))
    axes.set_xscale("log", base=2)
    axes.set(title=f"time to the first token, {rows[0]['model']}", xlabel="tokens", ylabel="ms")


# A row calls an arm whose imports are copied `real`, whatever the device is.
_ARMS: Final = {"real": "copied", "discarded": "discarded", "none": "no imports"}
_PANELS: Final[dict[str, Callable[[Axes, Rows], None]]] = {
    "link": _link,
    "sweep": _sweep,
    "hand-off": _hand_offs,
    "token": _token,
    "ttft": _ttft,
}
DRAWN: Final = frozenset(_PANELS)


def _curves(rows: Rows, name: str, at: str, value: Callable[[dict[str, Any]], float]) -> Curves:
    found: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        found.setdefault(row[name], {}).setdefault(row[at], []).append(value(row))
    return {
        each: [(x, spread(values)) for x, values in sorted(points.items())]
        for each, points in found.items()
    }


def _draw(axes: Axes, curves: Curves) -> None:
    for name, points in curves.items():
        medians = [each.median for _, each in points]
        axes.errorbar(
            [x for x, _ in points],
            medians,
            yerr=[
                [each.median - each.p10 for _, each in points],
                [each.p90 - each.median for _, each in points],
            ],
            label=name,
            marker="o",
            markersize=3,
            capsize=2,
        )
