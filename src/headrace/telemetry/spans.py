"""What an interval's name tells of the cells that it is about."""

from __future__ import annotations

import re
from collections.abc import Sequence

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


def of_one_layer(name: str) -> bool:
    """Whether all cells that a name tells are of one layer; spans left out may be of another."""
    layers = {(span.layer_start, span.layer_stop) for span in spans_of(name)}
    alone = len(layers) <= 1 and all(stop - start <= 1 for start, stop in layers)
    return alone and _MORE.search(name) is None
