"""What a transfer tail was made of: every nanosecond of it belongs to one part, and to one only."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, TypeAlias, get_args

from headrace.telemetry.clocks import Aligned, pairs
from headrace.telemetry.times import Union, length_ns, overlap, union, union_of, without

Part: TypeAlias = Literal["importing", "neighbours", "source", "messages", "rest"]

PARTS: Final[tuple[Part, ...]] = get_args(Part)  # where two are at once, the first of them counts

LABELS: Final[dict[Part, str]] = {
    "importing": "importing",
    "neighbours": "decode steps of others",
    "source": "the source still at work",
    "messages": "message under way",
    "rest": "the rest: the owner wakes, checks, publishes",
}


class Piece(NamedTuple):
    """A stretch of the tail, ns on the owner's clock, and what it belongs to."""

    part: Part
    begun_ns: int
    ended_ns: int


def pieces(run: Aligned) -> list[Piece]:
    """The tail in order of time, without a gap; empty where there is no tail."""
    tail = run.tail
    if tail is None:
        return []
    left: Union = union([tail])
    found: list[Piece] = []
    for part in PARTS:
        mine = overlap(left, _candidates(run, part)) if part != "rest" else left
        found += [Piece(part, begun_ns, ended_ns) for begun_ns, ended_ns in mine]
        left = without(left, mine)
    return sorted(found, key=lambda piece: piece.begun_ns)


def length_of(part: Part, of: list[Piece]) -> int:
    """The time of one part, ns."""
    return length_ns([piece[1:] for piece in of if piece.part == part])


def _candidates(run: Aligned, part: Part) -> Union:
    match part:
        case "importing":
            return union_of(run.of("import"))
        case "neighbours":
            return union_of(run.of("neighbour"))
        case "source":
            return union_of(run.of("compute", "write"))
        case _:
            under_way = pairs(run.source, run.owner)
            return union((sent.begun_ns, heard.begun_ns) for sent, heard in under_way)
