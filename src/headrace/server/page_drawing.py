"""The swimlanes of one traced choice, few enough bars for a page that asks every second."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from headrace.messages import Interval, IntervalKind
from headrace.server.page_state import Bar, Drawing, Mark
from headrace.telemetry.claim import overlap_of
from headrace.telemetry.clocks import Aligned, align
from headrace.telemetry.recording import Run
from headrace.telemetry.report import computes_too
from headrace.telemetry.spans import spans_of

MAX_BARS: Final = 200
"""Of one kind in one drawing; what is more stands as one bar with what it touches."""

_SOURCE: Final[tuple[IntervalKind, ...]] = ("compute", "write")
_OWNER: Final[tuple[IntervalKind, ...]] = ("import", "parked", "neighbour", "decode")
_MARKS: Final[tuple[IntervalKind, ...]] = (
    "granted",
    "final",
    "published",
    "first_token",
    "cancel",
    "ended",
)


def draw(request: int, choice: int, run: Run) -> Drawing:
    """What is drawn of a run: up to its first decode step, or all of it if it published nothing."""
    aligned = align(run)
    comparable = aligned.clock.comparable
    begun_ns, ended_ns = _frame(aligned)
    granted_ns = aligned.moment_ns("granted")
    origin_ns = begun_ns if granted_ns is None else granted_ns
    tail = aligned.tail if aligned.of("import") and not aligned.is_local else None

    def us(at_ns: int) -> float:
        return (at_ns - origin_ns) / 1e3

    def bars(kinds: Iterable[IntervalKind]) -> Iterator[Bar]:
        for kind in kinds:
            of_kind = aligned.of(kind)
            shown = [e for e in of_kind if e.begun_ns <= ended_ns and e.ended_ns >= begun_ns]
            for stretch in _merged(shown, ended_ns - begun_ns):
                first, last = stretch[0], max(each.ended_ns for each in stretch)
                both = len(stretch) == 1 and computes_too(aligned, first)
                name = "write both" if both else kind
                times = us(max(first.begun_ns, begun_ns)), us(min(last, ended_ns))
                yield Bar(name, *times, _layers(stretch), len(stretch))

    return Drawing(
        request=request,
        choice=choice,
        route=run.route,
        begun_us=us(begun_ns),
        ended_us=us(ended_ns),
        evidence=overlap_of(aligned).evidence,
        clocks=aligned.clock.verdict,
        source=tuple(bars(_SOURCE)) if comparable else (),
        owner=tuple(bars(_OWNER)),
        marks=tuple(_marks(aligned, origin_ns, ended_ns)),
        tail=None if tail is None else (us(tail[0]), us(tail[1])),
    )


def _frame(run: Aligned) -> tuple[int, int]:
    """From the grant: what the owner did for others before is no part of it."""
    compared = (*run.source, *run.owner) if run.clock.comparable else run.owner
    own = [each.begun_ns for each in compared if each.kind != "neighbour"]
    begun_ns = min(own, default=0)
    if run.published_ns is None:
        ended_ns = max((each.ended_ns for each in compared), default=0)
    else:
        ended_ns = max(each.ended_ns for each in run.of("published", "first_token", "decode"))
    return begun_ns, max(ended_ns, begun_ns + 1)


def _marks(run: Aligned, origin_ns: int, ended_ns: int) -> Iterator[Mark]:
    for kind in _MARKS:
        at_ns = run.moment_ns(kind)
        remote = kind == "final" and not run.clock.comparable
        if at_ns is not None and at_ns <= ended_ns and not remote:
            yield Mark(kind, (at_ns - origin_ns) / 1e3)


def _merged(intervals: list[Interval], length_ns: int) -> Iterator[list[Interval]]:
    """Each interval by itself, or those that are nearest together if there are too many."""
    ordered = sorted(intervals, key=lambda each: (each.begun_ns, each.ended_ns))
    if len(ordered) <= MAX_BARS:
        yield from ([each] for each in ordered)
        return
    step_ns = length_ns // MAX_BARS + 1
    group: list[Interval] = []
    for each in ordered:
        if group and each.begun_ns - group[0].begun_ns >= step_ns:
            yield group
            group = []
        group.append(each)
    yield group


def _layers(stretch: list[Interval]) -> str:
    spans = [span for each in stretch for span in spans_of(each.name)]
    if not spans:
        return ""
    first = min(span.layer_start for span in spans)
    last = max(span.layer_stop for span in spans) - 1
    return f"layer {first}" if first == last else f"layers {first} to {last}"
