"""Stretches of time as half-open [begun, ended) in ns: their union, overlap, rest and length.

A union is sorted, free of overlap and free of empty stretches; whatever no time lies in is dropped,
also what claims to have ended before it began.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from headrace.messages import Interval

Stretch: TypeAlias = tuple[int, int]
Union: TypeAlias = list[Stretch]


def union(stretches: Iterable[Stretch]) -> Union:
    """The instants that are in any of `stretches`."""
    merged: Union = []
    for begun, ended in sorted(stretches):
        if ended <= begun:
            continue
        if merged and begun <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], ended)
        else:
            merged.append((begun, ended))
    return merged


def union_of(intervals: Iterable[Interval]) -> Union:
    """The instants that are in any of `intervals`."""
    return union((each.begun_ns, each.ended_ns) for each in intervals)


def overlap(one: Union, other: Union) -> Union:
    """The instants that are in both unions."""
    return list(_overlap(one, other))


def without(one: Union, other: Union) -> Union:
    """The instants of the union `one` that are not in the union `other`."""
    if not one:
        return []
    edges = [one[0][0], *(edge for stretch in other for edge in stretch), one[-1][1]]
    gaps = zip(edges[::2], edges[1::2], strict=True)
    return overlap(one, union(gaps))


def length_ns(stretches: Sequence[Stretch]) -> int:
    """The time in a union, ns."""
    return sum(ended - begun for begun, ended in stretches)


def _overlap(one: Union, other: Union) -> Iterator[Stretch]:
    mine = theirs = 0
    while mine < len(one) and theirs < len(other):
        begun = max(one[mine][0], other[theirs][0])
        ended = min(one[mine][1], other[theirs][1])
        if begun < ended:
            yield begun, ended
        if one[mine][1] <= other[theirs][1]:
            mine += 1
        else:
            theirs += 1
