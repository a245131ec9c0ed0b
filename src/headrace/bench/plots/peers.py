"""Ratio to a hot memcpy of every transport, one panel per size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.bench.peers.table import Line, lines
from headrace.bench.peers.transports import HEADRACE, REFERENCE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def figure(rows: list[dict[str, Any]]) -> Figure:
    """Medians as bars, with the 10th and 90th percentile; what was not measured says so."""
    from matplotlib.figure import Figure

    found = lines(rows)
    sizes_mib = sorted({line.size_mib for line in found})
    names = list(dict.fromkeys(line.transport for line in found))
    height = 1.2 + 0.28 * len(names)
    picture = Figure(figsize=(2.5 + 3.2 * len(sizes_mib), height), layout="constrained")
    panels = picture.subplots(1, len(sizes_mib), squeeze=False, sharey=True)[0]
    for panel, size_mib in zip(panels, sizes_mib, strict=True):
        _bars(panel, names, {line.transport: line for line in found if line.size_mib == size_mib})
        panel.set_title(f"{size_mib} MiB", fontsize="medium")
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    picture.supxlabel("speed, 1 = hot memcpy of the same bytes in the same run", fontsize="medium")
    return picture


def _bars(panel: Axes, names: list[str], found: dict[str, Line]) -> None:
    for place, name in enumerate(names):
        wall = found[name].wall if name in found else None
        if wall is None:
            panel.text(0.02, place, "not measured", va="center", fontsize="small", color="grey")
            continue
        colour = "C0" if name in HEADRACE else "grey" if name == REFERENCE else "C1"
        ends = [[max(0.0, wall.median - wall.p10)], [max(0.0, wall.p90 - wall.median)]]
        panel.barh(place, wall.median, color=colour, xerr=ends, capsize=2, height=0.7)
    panel.axvline(1, color="black", linewidth=0.8)
    panel.set_xlim(left=0)
    panel.grid(axis="x", alpha=0.3)
