"""The lanes of one run as inline SVG, to scale, with labels beside and below it.

Across, the drawing is stretched to the page's width, so that a phone shows all of it; down, its
units are pixels. Text is no part of the SVG, or it would be stretched as well.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from headrace.messages import Interval, IntervalKind
from headrace.telemetry.chrome import Side, side_of, tracks
from headrace.telemetry.clocks import Aligned, pairs
from headrace.telemetry.report import computes_too
from headrace.telemetry.tail import LABELS, Piece, pieces
from headrace.telemetry.times import Stretch

BAR_PX: Final = 18
ROW_PX: Final = 24
MESSAGES_PX: Final = 30
WIDTH: Final = 1000
MAX_TICKS: Final = 6

MARKS: Final[dict[IntervalKind, str]] = {
    "granted": "prefill granted",
    "final": "prefill ended",
    "published": "published",
    "first_token": "first token",
    "cancel": "cancel",
    "ended": "ended",
}

_BOTH: Final = "computes + writes"
_ROWS: Final[tuple[tuple[str, Side | None, tuple[IntervalKind, ...]], ...]] = (
    ("source computes", "host", ("compute",)),  # None: of whatever clock
    ("device computes", "device", ("compute",)),
    (_BOTH, "host", ("write",)),
    ("source writes", "host", ("write",)),
    ("device copies out", "device", ("write",)),
    ("messages", None, ("announced", "validated")),
    ("parked", None, ("parked",)),
    ("owner imports", "host", ("import",)),
    ("device imports", "device", ("import",)),
    ("others decode", None, ("neighbour",)),
    ("own step, drain", None, ("decode", "drain")),
)
_ALWAYS: Final = ("source computes", "source writes", "messages", "owner imports")
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")


def escape(text: str) -> str:
    """`text` as HTML and XML may hold it; what neither can hold becomes a replacement mark."""
    return html.escape(_CONTROL.sub("\ufffd", text))


@dataclass(frozen=True, slots=True)
class Row:
    """A row of bars: its label, where it begins from the top, px, and what is in it."""

    label: str
    top_px: int
    height_px: int
    bars: tuple[Interval, ...]


@dataclass(frozen=True, slots=True)
class Frame:
    """What a drawing shows, [begun, ended) ns, and where its times count from."""

    begun_ns: int
    ended_ns: int
    origin_ns: int

    def x(self, at_ns: int) -> float:
        """Across, in units of the SVG; what lies outside is drawn at the edge."""
        share = (at_ns - self.begun_ns) / (self.ended_ns - self.begun_ns)
        return round(WIDTH * min(1.0, max(0.0, share)), 3)

    def meets(self, begun_ns: int, ended_ns: int) -> bool:
        """Whether any of [begun, ended] is in the frame."""
        return begun_ns <= self.ended_ns and max(begun_ns, ended_ns) >= self.begun_ns

    def clock(self, at_ns: int) -> str:
        """A time as it is written."""
        return f"{(at_ns - self.origin_ns) / 1e6:.3f} ms"


def rows_of(run: Aligned) -> list[Row]:
    """The rows that a run needs, from the top down; bars that overlap have rows of their own."""
    found: list[Row] = []
    top_px = 0
    for label, clock, kinds in _ROWS:
        if label == "messages":
            lanes = [run.of(*kinds)]
        else:
            of_kinds = run.of(*kinds)
            bars_of = [
                each
                for each in of_kinds
                if clock in (None, side_of(each)) and _belongs(run, label, each)
            ]
            lanes = tracks(bars_of)
            if label in _ALWAYS and not of_kinds:
                lanes = [[]]
        height_px = MESSAGES_PX if label == "messages" else ROW_PX
        for number, bars in enumerate(lanes):
            found.append(Row("" if number else label, top_px, height_px, tuple(bars)))
            top_px += height_px
    if run.tail is not None:
        found.append(Row("the tail", top_px, ROW_PX, ()))
    return found


def _belongs(run: Aligned, label: str, each: Interval) -> bool:
    """Writes are in a row of their own only where a source wrote and did nothing else."""
    return each.kind != "write" or computes_too(run, each) == (label == _BOTH)


def draw_lanes(run: Aligned, frame: Frame) -> str:
    """A figure's drawing: labels, the SVG, the axis. Everything that meets the frame is in it."""
    rows = rows_of(run)
    height_px = rows[-1].top_px + rows[-1].height_px
    labels = "".join(
        f'<span style="top:{row.top_px}px;height:{row.height_px}px">{escape(row.label)}</span>'
        for row in rows
    )
    shapes = "\n".join(_shapes(run, frame, rows, height_px))
    return (
        f'<div class="lanes"><div class="labels" style="height:{height_px}px">{labels}</div>'
        f'<div class="drawing"><svg role="img" aria-label="lanes of source and owner" '
        f'viewBox="0 0 {WIDTH} {height_px}" style="height:{height_px}px" '
        f'preserveAspectRatio="none">\n{shapes}\n</svg>{_axis(frame)}</div></div>'
    )


def _shapes(run: Aligned, frame: Frame, rows: Iterable[Row], height_px: int) -> Iterator[str]:
    tail = run.tail
    if tail is not None and frame.meets(*tail):
        yield _rect("tail", frame, tail, 0, height_px, f"transfer tail: {_ms(tail[1] - tail[0])}")
    for row in rows:
        if row.label == "messages":
            yield from _messages(run, frame, row)
        elif row.label == "the tail":
            yield from _pieces(frame, row, pieces(run))
        else:
            yield from _bars(run, frame, row)
    for each in run.of(*MARKS):
        if frame.meets(each.begun_ns, each.begun_ns):
            x = frame.x(each.begun_ns)
            says = f"{MARKS[each.kind]} at {frame.clock(each.begun_ns)}: {each.name}"
            yield _line(f"mark {each.kind}", (x, 0), (x, height_px), says)


def _bars(run: Aligned, frame: Frame, row: Row) -> Iterator[str]:
    for number, each in enumerate(row.bars):
        if frame.meets(each.begun_ns, each.ended_ns):
            both = computes_too(run, each)
            on_device = " device" * (side_of(each) == "device")
            name = ("write both" if both else each.kind) + on_device + " odd" * (number % 2)
            stretch = each.begun_ns, max(each.begun_ns, each.ended_ns)
            says = _title(each, frame, "compute and write" if both else each.kind)
            yield _rect(name, frame, stretch, row.top_px, BAR_PX, says)


def _messages(run: Aligned, frame: Frame, row: Row) -> Iterator[str]:
    top, bottom = row.top_px, row.top_px + MESSAGES_PX - 6
    for sent, heard in pairs(run.source, run.owner):
        if frame.meets(sent.begun_ns, heard.begun_ns):
            begun, ended = frame.x(sent.begun_ns), frame.x(heard.begun_ns)
            took = _ms(heard.begun_ns - sent.begun_ns)
            says = f"message of {sent.name}: under way for {took}"
            yield _line("message", (begun, top + 4), (ended, bottom - 4), says)
    for each in row.bars:
        if frame.meets(each.begun_ns, each.begun_ns):
            x = frame.x(each.begun_ns)
            y = top if each.kind == "announced" else bottom - 4
            yield _line(each.kind, (x, y), (x, y + 4), _title(each, frame, each.kind))


def _pieces(frame: Frame, row: Row, found: Iterable[Piece]) -> Iterator[str]:
    for part, begun_ns, ended_ns in found:
        if frame.meets(begun_ns, ended_ns):
            says = f"{LABELS[part]}: {_ms(ended_ns - begun_ns)}"
            stretch = begun_ns, ended_ns
            yield _rect(f"part {part}", frame, stretch, row.top_px, BAR_PX, says)


def _title(each: Interval, frame: Frame, what: str) -> str:
    took = max(0, each.ended_ns - each.begun_ns)
    lasting = f", {_ms(took)}" if took else ""
    moved = f", {each.nbytes} bytes" if each.nbytes else ""
    begun = frame.clock(each.begun_ns)
    error = f", within {each.error_ns / 1e3:.1f} us" if side_of(each) == "device" else ""
    return f"{what} {each.name}: at {begun}{lasting}{moved} ({each.clock} clock{error})"


def _rect(name: str, frame: Frame, stretch: Stretch, top: int, height: int, says: str) -> str:
    begun, ended = frame.x(stretch[0]), frame.x(stretch[1])
    return (
        f'<rect class="{name}" x="{begun:g}" y="{top}" width="{ended - begun:g}" '
        f'height="{height}"><title>{escape(says)}</title></rect>'
    )


def _line(name: str, begun: tuple[float, int], ended: tuple[float, int], says: str) -> str:
    return (
        f'<line class="{name}" x1="{begun[0]:g}" y1="{begun[1]}" x2="{ended[0]:g}" '
        f'y2="{ended[1]}"><title>{escape(says)}</title></line>'
    )


def _axis(frame: Frame) -> str:
    """Ticks at round times within the frame, ms."""
    step_ns = _step_ns((frame.ended_ns - frame.begun_ns) // (MAX_TICKS - 1))
    digits = max(0, 6 - (len(str(step_ns)) - 1))
    first_ns = -((frame.origin_ns - frame.begun_ns) // step_ns) * step_ns
    spans = []
    for since_ns in range(first_ns, frame.ended_ns - frame.origin_ns + 1, step_ns):
        left = frame.x(frame.origin_ns + since_ns) * 100 / WIDTH
        spans.append(f'<span style="left:{left:g}%">{since_ns / 1e6:.{digits}f}</span>')
    return f'<div class="axis">{"".join(spans)}</div>'


def _step_ns(least_ns: int) -> int:
    """The first of 1, 2, 5, 10, 20, ... ns that is not below `least_ns`."""
    power: int = 10 ** max(0, len(str(least_ns)) - 1)
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least_ns)


def _ms(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:.3f} ms"
