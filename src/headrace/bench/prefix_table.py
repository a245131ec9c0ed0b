"""What the rows of `bench prefix` come to: medians, and ratios to a cold prompt of one repeat."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from headrace.bench.rows import Spread, pairs, spread

COLD = {"cold": "cold", "first": "cold", "identical": "cold", "identical-copied": "cold"}
GOAL = 0.05  # of the cold TTFT: what a repeated prompt may take


class Line(NamedTuple):
    """One label of one kind. ratio: of its TTFT to the cold one of the same repeat; taken: how
    often each remainder was, with the positions that were kept.
    """

    model: str
    prompt_tokens: int
    rest: int
    kind: str
    label: str
    ttft_ms: Spread
    ratio: Spread
    taken: str


def lines(rows: Iterable[Mapping[str, Any]]) -> Iterator[Line]:
    """One line for each label, in the order in which they were measured."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        names = ("model", "prompt_tokens", "rest", "kind", "label")
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    for (model, tokens, rest, kind, label), mine in groups.items():
        cold = groups.get((model, tokens, rest, kind, COLD.get(label, "cold-longer")), [])
        ratios = [row["ttft_ns"] / other["ttft_ns"] for row, other in pairs(mine, cold, "repeat")]
        if not ratios:
            continue
        ttft = spread([row["ttft_ns"] / 1e6 for row in mine])
        yield Line(model, tokens, rest, kind, label, ttft, spread(ratios), _taken(mine))


def worst_identical(rows: Iterable[Mapping[str, Any]]) -> Spread | None:
    """The ratio of an identical prompt where its median is largest; None without one."""
    found = [line.ratio for line in lines(rows) if line.label.startswith("identical")]
    return max(found, key=lambda ratio: ratio.median, default=None)


def _taken(rows: Iterable[Mapping[str, Any]]) -> str:
    counts = Counter(
        f"{row['kept_positions']} kept, rest by {row['remainder']}" if row["kept_positions"] else ""
        for row in rows
    )
    return ", ".join(f"{count} x {text}" for text, count in counts.items() if text)
