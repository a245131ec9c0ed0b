"""The layer groups of the positions that are being computed: which spans are announced together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from headrace.backends.base import PrefillSink, SpanWriter
from headrace.ids import Span
from headrace.plan import Plan


@dataclass
class Batch:
    """The spans of one layer group and one transfer chunk, announced together."""

    spans: tuple[Span, ...]
    writer: SpanWriter | None = None


@dataclass
class Group:
    """One layer group of the positions being computed; final when layer `last` is."""

    last: int
    batches: list[Batch] = field(default_factory=list)


class LayerGroups:
    """The layer groups that an attempt was asked to be streamed by, for positions from `start`."""

    def __init__(self, sink: PrefillSink, start: int) -> None:
        self._sink = sink
        self._start = start
        plan, options = sink.plan, sink.options
        size = options.group_layers or len(plan.layers)
        self._runs = plan.layer_groups(size, options.emission)

    def of(self, start: int, stop: int) -> dict[int, Group]:
        """The group of each layer that has cells at positions [start, stop), by layer."""
        plan, groups = self._sink.plan, {}
        first = max(start, self._start)
        for runs in self._runs:
            members = [
                layer for run in runs for layer in run if _has_cells(plan, layer, first, stop)
            ]
            if members:
                group = Group(members[-1])
                for at, until in cut(self._sink, first, stop):
                    spans = (Span(run.start, run.stop, at, until) for run in runs)
                    batch = tuple(span for span in spans if plan.span_nbytes(span))
                    if batch:
                        group.batches.append(Batch(batch))
                groups.update(dict.fromkeys(members, group))
        return groups


def cut(sink: PrefillSink, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Positions [start, stop) by the transfer chunk."""
    step = sink.options.chunk or max(1, stop - start)
    for at in range(start, stop, step):
        yield at, min(at + step, stop)


def _has_cells(plan: Plan, layer: int, start: int, stop: int) -> bool:
    lo, hi = plan.windows[layer]
    return max(lo, start) < min(hi, stop)
