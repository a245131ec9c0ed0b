"""A kept prompt's time to the first token, as a share of a cold one's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.bench.prefix_table import GOAL, lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure(rows: list[dict[str, Any]]) -> Figure:
    """One bar per owner and label; bars are medians, lines go from the 10th to the 90th percentile.

    The cold ones are left out: they are 1.
    """
    from matplotlib.figure import Figure

    shown = [line for line in lines(rows) if not line.label.startswith("cold")]
    names = [f"{line.kind}, {line.rest} more: {line.label}" for line in shown]
    drawn = Figure(figsize=(8, 0.34 * len(shown) + 1.5), layout="constrained")
    axes = drawn.subplots()
    axes.barh(
        range(len(shown)),
        [line.ratio.median for line in shown],
        xerr=(
            [line.ratio.median - line.ratio.p10 for line in shown],
            [line.ratio.p90 - line.ratio.median for line in shown],
        ),
    )
    axes.axvline(1.0, color="grey", linewidth=0.8)
    axes.axvline(GOAL, color="grey", linewidth=0.8, linestyle="dotted")
    axes.set_yticks(range(len(shown)), names)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("TTFT, of a cold one of the same repeat (dotted: goal of a repeated prompt)")
    first = shown[0] if shown else None
    if first is not None:
        axes.set_title(f"{first.model}, {first.prompt_tokens} tokens")
    return drawn
