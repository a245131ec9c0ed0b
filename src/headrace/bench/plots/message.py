"""What a span costs at each end, a message's way, and what recording a trace adds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.bench.message import RECORDING_GOAL, median_interval, slow_downs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLES = {
    "span_cost": "a span at the owner",
    "announce": "a span at its source",
    "one_way": "a message's way",
}

SHOWN_PERCENT = 15  # on either side; a round that something else disturbed lies beyond


def figure(rows: list[dict[str, Any]]) -> Figure:
    """The share of samples up to each time, and of rounds up to each slow-down."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(12, 4), layout="constrained")
    times, added = picture.subplots(1, 2)
    for row in rows:
        if row["measure"] in TITLES:
            _shares(times, [ns / 1e3 for ns in row["ns"]], TITLES[row["measure"]])
        elif row["measure"] == "recording":
            _recording(added, row)
    times.set_xscale("log")
    times.set_xlabel("us")
    times.set_title("cost of a span and of a message")
    added.set_xlabel("added by a trace, %")
    added.set_title(f"recording; goal: median below {RECORDING_GOAL:.0%}")
    for panel in (times, added):
        panel.set_ylabel("share of samples")
        panel.grid(alpha=0.3)
        if panel.lines:
            panel.legend(fontsize="small")
    return picture


def _recording(panel: Axes, row: dict[str, Any]) -> None:
    for name in ("wall", "cpu"):
        percents = [100 * share for share in slow_downs(row[f"{name}_ns"])]
        median = median_interval(percents)
        label = f"{name}: median {median.median:+.2f} [{median.low:+.2f}, {median.high:+.2f}]"
        _shares(panel, percents, label)
    panel.set_xlim(-SHOWN_PERCENT, SHOWN_PERCENT)
    panel.axvline(100 * RECORDING_GOAL, color="grey", linewidth=0.8)


def _shares(panel: Axes, samples: list[float], label: str) -> None:
    ordered = sorted(samples)
    shares = [(at + 1) / len(ordered) for at in range(len(ordered))]
    panel.step(ordered, shares, where="post", label=label, linewidth=1)
