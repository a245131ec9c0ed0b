"""How a prompt is cut into what is computed at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from headrace.errors import LocalProtocolError


def pieces(num_tokens: int, prefill_chunk: int, cuts: Sequence[int] = ()) -> list[tuple[int, int]]:
    """The half-open ranges of positions that are computed at once.

    `prefill_chunk` positions each, 0 for all, counted anew from each of `cuts`.

    Raises:
        LocalProtocolError: `cuts` do not ascend, or one lies outside the prompt.
    """
    edges = [0, *cuts, num_tokens]
    if any(stop <= start for start, stop in pairwise(edges)):
        raise LocalProtocolError(
            f"cuts at {list(cuts)} of {num_tokens} tokens; each must lie inside, and they ascend"
        )
    ranges = []
    for first, last in pairwise(edges):
        step = prefill_chunk or last - first
        ranges += [(at, min(at + step, last)) for at in range(first, last, step)]
    return ranges
