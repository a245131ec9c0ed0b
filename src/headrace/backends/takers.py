"""What becomes of a prefill's cache on each route: when it is copied into the slot and announced.

What the three routes share is the computation; they differ only in when a layer's states, final at
its cache update, are copied and announced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import assert_never

import torch

from headrace.backends.base import Cells, PrefillSink, SpanWriter
from headrace.engine.prefill import TakenCache, Taker
from headrace.engine.tensors import copy_in
from headrace.geometry import Full, Sliding
from headrace.ids import Span
from headrace.plan import Plan

States = tuple[torch.Tensor, torch.Tensor]


def taker_of(sink: PrefillSink, start: int) -> _Streamed | _Kept:
    """The taker of the route that the sink's attempt was granted, for positions [start, n)."""
    match sink.options.route:
        case "streamed":
            return _Streamed(sink, start)
        case "chunked":
            return _Kept(sink, start, by_chunk=True)
        case "whole":
            return _Kept(sink, start, by_chunk=False)
        case unknown:
            assert_never(unknown)


@dataclass
class _Batch:
    """The spans of one layer group and one transfer chunk, announced together."""

    spans: tuple[Span, ...]
    writer: SpanWriter | None = None


@dataclass
class _Group:
    """One layer group of the positions being computed; final when layer `last` is."""

    last: int
    batches: list[_Batch] = field(default_factory=list)


class _Streamed(Taker):
    """Each layer is copied at its cache update, each layer group announced with its last layer."""

    keep_full = False

    def __init__(self, sink: PrefillSink, start: int) -> None:
        self._sink = sink
        self._start = start
        plan, options = sink.plan, sink.options
        size = options.group_layers or len(plan.layers)
        self._layer_groups = plan.layer_groups(size, options.emission)
        self._computed = 0
        self._group_of: dict[int, _Group] = {}

    def begin(self, start: int, stop: int) -> None:
        self._computed = start
        self._group_of = {}
        plan = self._sink.plan
        for runs in self._layer_groups:
            members = [
                layer
                for run in runs
                for layer in run
                if _has_cells(plan, layer, max(start, self._start), stop)
            ]
            if members:
                group = _Group(members[-1])
                for first, last in _cut(self._sink, max(start, self._start), stop):
                    spans = (Span(run.start, run.stop, first, last) for run in runs)
                    batch = tuple(span for span in spans if plan.span_nbytes(span))
                    if batch:
                        group.batches.append(_Batch(batch))
                self._group_of.update(dict.fromkeys(members, group))

    def take(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._sink.check()
        group = self._group_of.get(layer)
        if group is None:
            return
        for batch in group.batches:
            if batch.writer is None:
                batch.writer = self._sink.write(*batch.spans)
            _fill(self._sink, batch.writer.cells(layer), (keys, values), self._computed)
            if layer == group.last:
                batch.writer.commit()
                batch.writer = None

    def end(self, start: int, stop: int, cache: TakenCache) -> None:
        self._group_of = {}

    def finish(self) -> None:
        pass


class _Kept(Taker):
    """States are kept and all layers are emitted by position, when computed or at the very end."""

    keep_full = True

    def __init__(self, sink: PrefillSink, start: int, *, by_chunk: bool) -> None:
        self._sink = sink
        self._start = start
        self._by_chunk = by_chunk
        self._computed = 0
        self._tails: dict[int, list[tuple[int, States]]] = {}
        self._full: dict[int, States] = {}

    def begin(self, start: int, stop: int) -> None:
        self._computed = start

    def take(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._sink.check()
        # A sliding layer's cache may keep fewer rows than the transfer set asks for, and a view of
        # them would pin the storage of all rows: its live rows are copied out now.
        plan = self._sink.plan
        if isinstance(plan.layers[layer].kind, Sliding):
            first = max(plan.windows[layer][0], self._computed)
            at = first - self._computed
            if at < keys.shape[1]:
                tail = keys[:, at:].clone(), values[:, at:].clone()
                self._tails.setdefault(layer, []).append((first, tail))

    def end(self, start: int, stop: int, cache: TakenCache) -> None:
        plan = self._sink.plan
        if self._by_chunk or stop == plan.num_tokens:
            for layer in plan.layers:
                if isinstance(layer.kind, Full):
                    self._full[layer.index] = cache.states(layer.index)
        if self._by_chunk:
            for first, last in _cut(self._sink, max(start, self._start), stop):
                self._emit(first, last)
            self._tails.clear()
            self._full.clear()

    def finish(self) -> None:
        if not self._by_chunk:
            self._emit(self._start, self._sink.plan.num_tokens)

    def _emit(self, first: int, last: int) -> None:
        span = Span(0, len(self._sink.plan.layers), first, last)
        if not self._sink.plan.span_nbytes(span):
            return
        writer = self._sink.write(span)
        for layer in range(len(self._sink.plan.layers)):
            cells = writer.cells(layer)
            if layer in self._full:
                _fill(self._sink, cells, self._full[layer], 0)
            for start, states in self._tails.get(layer, ()):
                _fill(self._sink, cells, states, start)
        writer.commit()


def _fill(sink: PrefillSink, cells: Sequence[Cells], states: States, start: int) -> None:
    for place in cells:
        parts = sink.plan.layers[place.layer].parts
        copy_in(place, parts, sink.plan.layout, states[place.part], start)


def _cut(sink: PrefillSink, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Positions [start, stop) by the transfer chunk."""
    step = sink.options.chunk or max(1, stop - start)
    for at in range(start, stop, step):
        yield at, min(at + step, stop)


def _has_cells(plan: Plan, layer: int, start: int, stop: int) -> bool:
    lo, hi = plan.windows[layer]
    return max(lo, start) < min(hi, stop)
