"""What an interval's name tells of the cells that it is about."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence

from headrace.ids import Span

NAMED_SPANS = 4  # of a progress message; a longer one says how many more it has

_SPAN = re.compile(r"layers \[(\d+), (\d+)\) x positions \[(\d+), (\d+)\)")
_MORE = re.compile(r", and \d+ more$")


def name_of(spans: Sequence[Span]) -> str:
    """The spans of one progress message as the name of its intervals."""
    left_out = len(spans) - NAMED_SPANS
    named = ", ".join(map(str, spans[:NAMED_SPANS]))
    return f"{named}, and {left_out} more" if left_out > 0 else named


def spans_of(name: str) -> list[Span]:
    """The spans that a name tells; those that it only counts are not among them."""
    return [Span(*map(int, match.groups())) for match in _SPAN.finditer(name)]


class Starts:
    """Which of many spans lie in another, found by where they start, without trying them all."""

    def __init__(self, spans: Iterable[Span]) -> None:
        starts: dict[int, list[tuple[int, int]]] = defaultdict(list)  # by layer: position, number
        self._spans = list(spans)
        for number, span in enumerate(self._spans):
            starts[span.layer_start].append((span.start, number))
        self._starts = {layer: sorted(starts[layer]) for layer in sorted(starts)}
        self._layers = list(self._starts)

    def inside(self, outer: Span) -> list[int]:
        """The numbers of those all of whose cells are of `outer`, ascending."""
        first = bisect_left(self._layers, outer.layer_start)
        last = bisect_left(self._layers, outer.layer_stop)
        found = []
        for layer in self._layers[first:last]:
            starts = self._starts[layer]
            begun, ended = (bisect_left(starts, (at, -1)) for at in (outer.start, outer.stop))
            found += [number for _, number in starts[begun:ended]]
        return sorted(number for number in found if within(self._spans[number], outer))


def within(inner: Span, outer: Span) -> bool:
    """Whether all cells of `inner` are among those of `outer`."""
    return (
        outer.layer_start <= inner.layer_start
        and inner.layer_stop <= outer.layer_stop
        and outer.start <= inner.start
        and inner.stop <= outer.stop
    )


def of_one_layer(name: str) -> bool:
    """Whether all cells that a name tells are of one layer; spans left out may be of another."""
    layers = {(span.layer_start, span.layer_stop) for span in spans_of(name)}
    alone = len(layers) <= 1 and all(stop - start <= 1 for start, stop in layers)
    return alone and _MORE.search(name) is None
