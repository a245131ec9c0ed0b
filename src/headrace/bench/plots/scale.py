"""The owner's cost against the number of layer groups, slots and requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.bench.rows import spread
from headrace.bench.scale import AXES, COST_OF, medians

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure(rows: list[dict[str, Any]]) -> Figure:
    """Medians with their 10th and 90th percentile; the dashed line grows linearly."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(14, 4), layout="constrained")
    panels = picture.subplots(1, len(AXES), squeeze=False)[0]
    for panel, axis in zip(panels, AXES, strict=True):
        costs = medians(rows, axis)
        if not costs:
            continue
        numbers = list(costs)
        samples = [
            spread([r["owner_ns"] / 1e3 for r in rows if (r["axis"], r["number"]) == (axis, n)])
            for n in numbers
        ]
        middles = [each.median for each in samples]
        below = [each.median - each.p10 for each in samples]
        above = [each.p90 - each.median for each in samples]
        panel.errorbar(numbers, middles, yerr=[below, above], marker="o", markersize=3, capsize=2)
        linear = [middles[0] * number / numbers[0] for number in numbers]
        panel.plot(numbers, linear, linestyle="--", color="grey", linewidth=0.8)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_title(f"{axis.replace('_', ' ')}: owner's CPU for {COST_OF[axis]}, us")
        panel.title.set_fontsize("small")
        panel.grid(alpha=0.3)
    return picture
