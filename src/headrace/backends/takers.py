"""What becomes of a prefill's cache on each route: when it is carried into the slot and announced.

What the three routes share is the computation; they differ only in when a layer's states, final at
its cache update, are carried there and committed.
"""

from __future__ import annotations

from typing import assert_never

import torch

from headrace.backends.base import PrefillSink
from headrace.backends.carriers import Carrier, HostCarrier
from headrace.backends.groups import Group, LayerGroups, cut
from headrace.engine.prefill import States, TakenCache, Taker
from headrace.geometry import Full, Sliding
from headrace.ids import Span


def taker_of(sink: PrefillSink, start: int, carrier: Carrier | None = None) -> _Streamed | _Kept:
    """The taker of the route that the sink's attempt was granted, for positions [start, n).

    carrier: by default one for states that lie in host memory.
    """
    carrier = carrier or HostCarrier(sink)
    match sink.options.route:
        case "streamed":
            return _Streamed(sink, start, carrier)
        case "chunked":
            return _Kept(sink, start, carrier, by_chunk=True)
        case "whole":
            return _Kept(sink, start, carrier, by_chunk=False)
        case unknown:
            assert_never(unknown)


class _Streamed(Taker):
    """Each layer is carried at its cache update, each layer group committed with its last layer."""

    keep_full = False

    def __init__(self, sink: PrefillSink, start: int, carrier: Carrier) -> None:
        self._sink = sink
        self._carrier = carrier
        self._layer_groups = LayerGroups(sink, start)
        self._computed = 0
        self._group_of: dict[int, Group] = {}

    def begin(self, start: int, stop: int) -> None:
        self._computed = start
        self._group_of = self._layer_groups.of(start, stop)

    def take(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._carrier.computed()
        group = self._group_of.get(layer)
        if group is None:
            return
        for batch in group.batches:
            if batch.writer is None:
                batch.writer = self._sink.write(*batch.spans)
            self._carrier.carry(batch.writer, layer, (keys, values), self._computed)
            if layer == group.last:
                self._carrier.commit(batch.writer)
                batch.writer = None

    def end(self, start: int, stop: int, cache: TakenCache) -> None:
        self._group_of = {}

    def finish(self) -> None:
        """All is computed: commit the rest, and have all of it announced."""
        self._carrier.settle()


class _Kept(Taker):
    """States are kept and all layers are emitted by position, when computed or at the very end."""

    keep_full = True

    def __init__(self, sink: PrefillSink, start: int, carrier: Carrier, *, by_chunk: bool) -> None:
        self._sink = sink
        self._start = start
        self._carrier = carrier
        self._by_chunk = by_chunk
        self._computed = 0
        self._tails: dict[int, list[tuple[int, States]]] = {}
        self._full: dict[int, States] = {}

    def begin(self, start: int, stop: int) -> None:
        self._computed = start

    def take(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._carrier.computed()
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
            for first, last in cut(self._sink, max(start, self._start), stop):
                self._emit(first, last)
            self._tails.clear()
            self._full.clear()

    def finish(self) -> None:
        """All is computed: commit the rest, and have all of it announced."""
        if not self._by_chunk:
            self._emit(self._start, self._sink.plan.num_tokens)
        self._carrier.settle()

    def _emit(self, first: int, last: int) -> None:
        span = Span(0, len(self._sink.plan.layers), first, last)
        if not self._sink.plan.span_nbytes(span):
            return
        writer = self._sink.write(span)
        for layer in range(len(self._sink.plan.layers)):
            if layer in self._full:
                self._carrier.carry(writer, layer, self._full[layer], 0)
            for start, states in self._tails.get(layer, ()):
                self._carrier.carry(writer, layer, states, start)
        self._carrier.commit(writer)
