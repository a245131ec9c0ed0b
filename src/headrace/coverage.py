"""Exact cover of cells: which (layer, position) cells of a transfer set have been accepted.

A cell's parts (K and V) travel together, so a cell is a layer and a position. The transfer set
gives each layer one window of positions [lo, hi), empty where the layer owns no cells. Per layer
the accepted cells are kept as sorted, disjoint, merged intervals: a set, never a count, so that a
span told twice cannot stand in for one that is missing.

A batch of spans is checked whole against the state and against itself; then all of it is applied,
or none.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from headrace.errors import RemoteProtocolError
from headrace.ids import Span

Window = tuple[int, int]
Intervals = tuple[Window, ...]


class Coverage:
    """The union of the accepted cells of one transfer set."""

    def __init__(self, windows: Sequence[Window], num_positions: int) -> None:
        """`windows[layer]` = positions [lo, hi) of that layer; spans may reach over [0,
        num_positions).
        """
        self._windows = tuple(windows)
        self._num_positions = num_positions
        self._have: list[Intervals] = [()] * len(self._windows)
        self._open = {layer for layer, (lo, hi) in enumerate(self._windows) if lo < hi}

    @property
    def complete(self) -> bool:
        """Whether the accepted cells equal the transfer set."""
        return not self._open

    def add(self, spans: Iterable[Span]) -> None:
        """Accept the cells of all `spans`, or none.

        Raises:
            RemoteProtocolError: a span is empty, reaches outside the model or the prompt, or holds
            a cell twice.
        """
        for layer, intervals in self._stage(spans).items():
            self._have[layer] = intervals
            if intervals[0] == self._windows[layer]:
                self._open.discard(layer)

    def check(self, spans: Iterable[Span]) -> None:
        """Raise what `add` would, and accept nothing."""
        self._stage(spans)

    def first_missing(self) -> Span | None:
        """The first run of cells still missing, lowest layer first; None when complete."""
        if not self._open:
            return None
        layer = min(self._open)
        start, stop = self._windows[layer]
        if self._have[layer]:
            (first, reached), *later = self._have[layer]
            if start < first:
                stop = first
            else:
                start = reached
                stop = later[0][0] if later else stop
        return Span(layer, layer + 1, start, stop)

    def _stage(self, spans: Iterable[Span]) -> dict[int, Intervals]:
        staged: dict[int, list[tuple[int, int]]] = {}  # changed in place: one copy for all spans
        for span in spans:
            self._check(span)
            for layer in range(span.layer_start, span.layer_stop):
                lo, hi = self._windows[layer]
                start, stop = max(lo, span.start), min(hi, span.stop)
                if start < stop:
                    if layer not in staged:
                        staged[layer] = list(self._have[layer])
                    _insert(staged[layer], start, stop, layer)
        return {layer: tuple(intervals) for layer, intervals in staged.items()}

    def _check(self, span: Span) -> None:
        if not 0 <= span.layer_start < span.layer_stop <= len(self._windows):
            raise RemoteProtocolError(
                f"{span} outside the model's layers [0, {len(self._windows)})"
            )
        if not 0 <= span.start < span.stop <= self._num_positions:
            raise RemoteProtocolError(
                f"{span} outside the prompt's positions [0, {self._num_positions})"
            )


def _insert(have: list[tuple[int, int]], start: int, stop: int, layer: int) -> None:
    """Merge [start, stop) into `have`; the two must be disjoint."""
    at = bisect_left(have, (start, start))
    if (at and have[at - 1][1] > start) or (at < len(have) and have[at][0] < stop):
        raise RemoteProtocolError(
            f"layer {layer} positions [{start}, {stop}) hold a cell told before"
        )
    first, last = at, at
    if at and have[at - 1][1] == start:
        first, start = at - 1, have[at - 1][0]
    if at < len(have) and have[at][0] == stop:
        last, stop = at + 1, have[at][1]
    have[first:last] = [(start, stop)]
