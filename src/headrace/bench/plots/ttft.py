"""Tail and TTFT of every route on models that compute: against the prompt, and against the link."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.bench.rows import Spread
from headrace.bench.ttft_table import PointRows, points

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {"whole": "black", "chunked": "C1", "auto": "magenta"}


def figure(rows: list[dict[str, Any]]) -> Figure:
    """Medians with their 10th and 90th percentile; one row of panels for each model and axis."""
    from matplotlib.figure import Figure

    groups: dict[tuple[str, int, bool], list[PointRows]] = {}
    for point in points(rows):
        key = point.key
        group = (key.model, key.prefill_chunk, bool(key.link_mb_s))
        groups.setdefault(group, []).append(point)
    picture = Figure(figsize=(11, 0.8 + 3.2 * max(1, len(groups))), layout="constrained")
    panels = picture.subplots(max(1, len(groups)), 2, squeeze=False)
    for (tail, ttft), ((model, chunk, link), mine) in zip(panels, groups.items(), strict=False):
        pairing = f", prefill chunk {chunk}" if chunk else ""
        where = ", emulated links" if link else ""
        name = f"{model}{where}{pairing}"
        x_name = "link, MB/s" if link else "prompt, tokens"
        _curves(tail, _curve(mine, link=link, ratio=False), x_name)
        tail.set_title(f"{name}: transfer tail, ms", fontsize="medium")
        tail.set_yscale("log")
        tail.legend(fontsize="small")
        _curves(ttft, _curve(mine, link=link, ratio=True), x_name)
        ttft.set_title("TTFT, to whole", fontsize="medium")
        ttft.axhline(1, color="grey", linewidth=0.8)
    return picture


def _curve(
    mine: list[PointRows], *, link: bool, ratio: bool
) -> dict[str, list[tuple[float, Spread]]]:
    found: dict[str, list[tuple[float, Spread]]] = {}
    for point in sorted(mine, key=lambda each: each.key):
        x = point.key.link_mb_s if link else float(point.key.prompt_tokens)
        for label in point.labels:
            value = point.ratio(label, "whole") if ratio else point.in_ms(label, "tail_ns")
            if value is not None:
                found.setdefault(label, []).append((x, value))
    return dict(sorted(found.items(), key=lambda item: _place(item[0])))


def _place(label: str) -> tuple[int, str]:
    return {"whole": 0, "chunked": 1, "auto": 3}.get(label, 2), label


def _curves(panel: Axes, curves: dict[str, list[tuple[float, Spread]]], x_name: str) -> None:
    streamed = [label for label in curves if label.startswith("streamed")]
    for label, values in curves.items():
        medians = [value.median for _, value in values]
        below = [max(0.0, value.median - value.p10) for _, value in values]
        above = [max(0.0, value.p90 - value.median) for _, value in values]
        colour = _COLOURS.get(label) or ("C0", "C2", "C3")[streamed.index(label) % 3]
        panel.errorbar(
            [x for x, _ in values],
            medians,
            yerr=[below, above],
            label=label,
            color=colour,
            marker="o",
            markersize=3,
            linewidth=1,
            capsize=2,
        )
    panel.set_xlabel(x_name)
    panel.set_xscale("log")
    ticks = sorted({x for values in curves.values() for x, _ in values})
    panel.set_xticks(ticks, [f"{x:g}" for x in ticks])
    panel.set_xticks([], minor=True)
    panel.grid(alpha=0.3)
