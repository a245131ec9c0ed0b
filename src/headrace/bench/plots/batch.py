"""Batched decode against one sequence per forward, by batch and by how many entries decode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.bench.batch import gains

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure(rows: list[dict[str, Any]]) -> Figure:
    """Bars are medians of ratios, lines go from the 10th to the 90th percentile."""
    from matplotlib.figure import Figure

    measured = gains(rows)
    entries = sorted({active for active, _ in measured})
    batches = sorted({batch for _, batch in measured})
    drawn = Figure(figsize=(1.6 + 1.5 * len(entries), 3.6), layout="constrained")
    axes = drawn.subplots()
    width = 0.8 / max(1, len(batches))
    for nth, batch in enumerate(batches):
        ratios = [measured[active, batch].ratio for active in entries]
        axes.bar(
            [at + (nth - (len(batches) - 1) / 2) * width for at in range(len(entries))],
            [each.median for each in ratios],
            width=width * 0.92,
            yerr=(
                [each.median - each.p10 for each in ratios],
                [each.p90 - each.median for each in ratios],
            ),
            label=f"batch {batch}",
        )
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(entries)), [str(active) for active in entries])
    axes.set_xlabel("entries that decode at once")
    axes.set_ylabel("tokens/s, batched / exact")
    axes.legend(fontsize="small")
    return drawn
