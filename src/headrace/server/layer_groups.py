"""The layer groups of one traced hand-off, each from its first computing to its last import."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from headrace.ids import Span
from headrace.messages import Interval
from headrace.telemetry.clocks import Aligned, align
from headrace.telemetry.recording import Run
from headrace.telemetry.spans import Starts, spans_of, within


@dataclass(slots=True)
class LayerGroup:
    """What one progress message told of, and the imports of its cells; times in ns.

    name: its cells, as its intervals are called.
    """

    name: str
    spans: Sequence[Span]
    intervals: list[Interval] = field(default_factory=list)

    @property
    def begun_ns(self) -> int:
        """When the first of it began."""
        return min(each.begun_ns for each in self.intervals)

    @property
    def ended_ns(self) -> int:
        """When the last of it ended."""
        return max(each.ended_ns for each in self.intervals)

    @property
    def nbytes(self) -> int:
        """Bytes of its cells that were imported."""
        return sum(each.nbytes for each in self.intervals if each.kind == "import")

    @property
    def clocks(self) -> dict[str, str]:
        """On which clock each side was read; several are named together."""
        sides: dict[str, set[str]] = {}
        for each in self.intervals:
            side = "owner" if each.kind == "import" else "source"
            sides.setdefault(side, set()).add(each.clock)
        return {side: ", ".join(sorted(clocks)) for side, clocks in sides.items()}

    def holds(self, spans: Sequence[Span]) -> bool:
        """Whether all cells of `spans` are among those that its name tells."""
        return bool(spans) and all(
            any(within(inner, outer) for outer in self.spans) for inner in spans
        )


def layer_groups(
    source: Sequence[Interval], owner: Sequence[Interval]
) -> tuple[list[LayerGroup], bool]:
    """The groups in order of their beginning, and whether both sides' times may be compared.

    Times are the owner's. Where the two clocks contradict each other a group has only what its
    source did, as its own clock read it, and the imports are left out.
    """
    aligned = align(_run_of(source, owner))
    groups: dict[str, LayerGroup] = {}
    for each in aligned.of("compute", "write"):
        found = groups.setdefault(each.name, LayerGroup(each.name, spans_of(each.name)))
        found.intervals.append(each)
    if aligned.clock.comparable:
        for piece, group in _imports(aligned, groups):
            group.intervals.append(piece)
    ordered = sorted(groups.values(), key=lambda group: group.begun_ns)
    return ordered, aligned.clock.comparable


def _imports(run: Aligned, groups: dict[str, LayerGroup]) -> Iterator[tuple[Interval, LayerGroup]]:
    """Each import with the group of its cells: by name, or where it is a piece, by its spans.

    Where groups tell of the same cells, the first of them has the piece.
    """
    named = [(piece, spans_of(piece.name)) for piece in run.of("import")]
    pieces = [each for each in named if each[1] and each[0].name not in groups]
    starts = Starts(spans[0] for _, spans in pieces)
    of_piece: dict[str, LayerGroup] = {}
    for group in groups.values():
        for number in (number for outer in group.spans for number in starts.inside(outer)):
            piece, spans = pieces[number]
            if piece.name not in of_piece and group.holds(spans):
                of_piece[piece.name] = group
    for piece, _ in named:
        found = groups.get(piece.name) or of_piece.get(piece.name)
        if found is not None:
            yield piece, found


def _run_of(source: Sequence[Interval], owner: Sequence[Interval]) -> Run:
    return Run(
        name="",
        route="",
        num_tokens=0,
        outcome="",
        source=tuple(source),
        owner=tuple(owner),
        measured=None,
    )
