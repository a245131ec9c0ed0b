"""Ways to import, each as a ratio to a hot memcpy, plain and with stores that bypass the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.bench.rows import spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure(rows: list[dict[str, Any]]) -> Figure:
    """One panel per size; bars are medians, lines go from the 10th to the 90th percentile."""
    from matplotlib.figure import Figure

    sizes = sorted({row["size_mb"] for row in rows})
    ways = list(dict.fromkeys(row["way"] for row in rows))
    drawn = Figure(figsize=(5.5 * len(sizes), 0.36 * len(ways) + 1.4), layout="constrained")
    for axes, size_mb in zip(drawn.subplots(1, len(sizes), squeeze=False)[0], sizes, strict=True):
        for tuned, shift in ((False, -0.2), (True, 0.2)):
            found = [
                spread([r["ratio"] for r in rows if _is(r, size_mb, way, tuned=tuned)])
                for way in ways
            ]
            axes.barh(
                [at + shift for at in range(len(ways))],
                [each.median for each in found],
                height=0.38,
                xerr=(
                    [each.median - each.p10 for each in found],
                    [each.p90 - each.median for each in found],
                ),
                label="bypassing the cache" if tuned else "plain",
            )
        axes.axvline(1.0, color="grey", linewidth=0.8)
        axes.set_yticks(range(len(ways)), ways)
        axes.invert_yaxis()
        axes.set_title(f"{size_mb} MiB")
        axes.set_xlabel("speed against a hot memcpy of the same process")
    axes.legend(loc="lower right", fontsize="small")
    return drawn


def _is(row: dict[str, Any], size_mb: int, way: str, *, tuned: bool) -> bool:
    return (row["size_mb"], row["way"], row["tuned"]) == (size_mb, way, tuned)
