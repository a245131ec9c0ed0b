"""Throughput and TTFT against the requests in flight; token time beside imports, block by block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.bench.load_table import TOKEN_ALLOWANCE, by_arm, serving_lines, token_ratios
from headrace.bench.rows import Spread, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {"whole": "black", "auto": "magenta", "streamed": "C0"}


def figure(rows: list[dict[str, Any]]) -> Figure:
    """Medians with their 10th and 90th percentile."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(11, 7), layout="constrained")
    (rate, ttft), (mean, median) = picture.subplots(2, 2)
    lines = list(serving_lines(rows))
    for panel, title, name in (
        (rate, "requests per second", "requests_per_s"),
        (ttft, "TTFT, ms", "ttft_ms"),
    ):
        curves: dict[str, list[tuple[float, Spread]]] = {}
        for line in lines:
            curves.setdefault(line.route, []).append((line.key.in_flight, getattr(line, name)))
        _curves(panel, curves, title, "requests in flight")
    for panel, name in ((mean, "mean"), (median, "median")):
        _curves(panel, _token_curves(rows, name), f"token time, {name}, ratio", "decoding")
        panel.axhline(1, color="grey", linewidth=0.8)
        panel.axhline(TOKEN_ALLOWANCE, color="red", linewidth=0.8, linestyle="--")
    return picture


def _token_curves(rows: list[dict[str, Any]], name: str) -> dict[str, list[tuple[float, Spread]]]:
    curves: dict[str, list[tuple[float, Spread]]] = {}
    for key, arms in sorted(by_arm(rows).items()):
        for base in ("discarded", "none"):
            ratios = token_ratios(arms, base, name)
            if ratios:
                label = f"real to {base}, {key.rate_mb_s:g} MB/s, {key.route}"
                curves.setdefault(label, []).append((key.neighbours, spread(ratios)))
    return curves


def _curves(
    panel: Axes, curves: dict[str, list[tuple[float, Spread]]], title: str, x_name: str
) -> None:
    for number, (label, values) in enumerate(curves.items()):
        shift = 1 + 0.02 * number  # so that bars at one number do not hide each other
        panel.errorbar(
            [x * shift for x, _ in values],
            [value.median for _, value in values],
            yerr=[
                [max(0.0, value.median - value.p10) for _, value in values],
                [max(0.0, value.p90 - value.median) for _, value in values],
            ],
            label=label,
            color=_COLOURS.get(label, f"C{number}"),
            marker="o",
            markersize=3,
            linewidth=1,
            capsize=2,
        )
    panel.set_title(title, fontsize="medium")
    panel.set_xlabel(x_name)
    panel.set_xscale("log", base=2)
    ticks = sorted({x for values in curves.values() for x, _ in values})
    panel.set_xticks(ticks, [f"{x:g}" for x in ticks])
    panel.grid(alpha=0.3)
    if curves:
        panel.legend(fontsize="small")
