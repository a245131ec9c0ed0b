"""A recording as one self-contained page: nothing is fetched, no script runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from headrace.messages import Interval, IntervalKind
from headrace.telemetry.chrome import side_of
from headrace.telemetry.clocks import Aligned, align
from headrace.telemetry.drawing import MARKS, Frame, draw_lanes, escape
from headrace.telemetry.recording import Recording
from headrace.telemetry.report import Report, computes_too, reports_of
from headrace.telemetry.style import STYLE
from headrace.telemetry.tail import LABELS, PARTS
from headrace.telemetry.words import figures, parts, title

LONG_AFTER: Final = 1.3  # what follows the first token may stretch a drawing by this much

_BARS: Final[dict[IntervalKind, str]] = {
    "compute": "the source computes a layer group",
    "write": "it writes the group into the slot",
    "parked": "parked: it holds its slot and waits for the lane",
    "import": "the owner imports a piece",
    "neighbour": "the owner decodes a step of others",
    "decode": "its own first decode step",
    "drain": "the storage drains",
}
_DEVICE_BARS: Final[dict[IntervalKind, str]] = {
    "compute": "the source's device computes a layer group",
    "write": "it copies the group into the slot",
    "import": "the owner's device imports a piece",
}


def page(recording: Recording, name: str) -> str:
    """The page as text; `name` is what its heading calls the file."""
    runs = [align(run) for run in recording.runs]
    sections = "\n".join(_section(*each) for each in zip(runs, reports_of(runs), strict=True))
    stamp = ", ".join(f"{key}: {value}" for key, value in recording.stamp.items())
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<meta name="color-scheme" content="light dark"/>
<title>{escape(name)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(name)}</h1>
<p>Drawn to scale; what is thinner than a pixel is one pixel wide. Point at a shape to read it.
Times count from the grant of the prefill, on the owner's clock.</p>
{sections}
<footer>{escape(stamp)}</footer>
</body>
</html>
"""


def _section(run: Aligned, report: Report) -> str:
    drawings = "\n".join(
        f"<figure><figcaption>{escape(caption)}</figcaption>{draw_lanes(run, frame)}</figure>"
        for caption, frame in frames(run)
    )
    return (
        f"<section>\n<h2>{escape(title(report))}</h2>\n{drawings}\n{_legend(run)}\n"
        f"{_figures(report)}\n{_parts(report)}\n</section>"
    )


def frames(run: Aligned) -> Iterator[tuple[str, Frame]]:
    """What is drawn of a run: all of it; up to its first token; its tail alone."""
    compared = (*run.source, *run.owner) if run.clock.comparable else run.owner
    times = [at_ns for each in compared for at_ns in (each.begun_ns, each.ended_ns)]
    begun_ns, ended_ns = min(times, default=0), max(times, default=0)
    origin_ns = run.moment_ns("granted")
    origin_ns = begun_ns if origin_ns is None else origin_ns
    yield "the whole request, ms", _frame(begun_ns, ended_ns, origin_ns)
    if run.published_ns is None:
        return
    decoded = [each.ended_ns for each in run.of("published", "first_token", "decode")]
    if ended_ns - begun_ns > LONG_AFTER * (max(decoded) - begun_ns):
        yield "to the first decode step, ms", _frame(begun_ns, max(decoded), origin_ns)
    if run.tail is not None:
        around_ns = (run.tail[1] - run.tail[0]) // 4
        tail = run.tail[0] - around_ns, run.tail[1] + around_ns
        yield "the tail, magnified, ms", _frame(*tail, origin_ns)


def _frame(begun_ns: int, ended_ns: int, origin_ns: int) -> Frame:
    return Frame(begun_ns, max(ended_ns, begun_ns + 1), origin_ns)


def _legend(run: Aligned) -> str:
    items = [f'<li><i class="{kind}"></i>{escape(word)}</li>' for kind, word in _bars(run)]
    if run.tail is not None:
        items.append('<li><i class="tail"></i>the transfer tail, and what it was made of:</li>')
        items += [f'<li><i class="part {part}"></i>{escape(LABELS[part])}</li>' for part in PARTS]
    origin_ns = run.moment_ns("granted")
    for kind, word in MARKS.items():
        at_ns = run.moment_ns(kind)
        if at_ns is not None:
            at = "" if origin_ns is None else f" at {(at_ns - origin_ns) / 1e6:.3f} ms"
            items.append(f'<li><i class="mark {kind}"></i>{escape(word)}{at}</li>')
    return f'<ul class="legend">{"".join(items)}</ul>'


def _bars(run: Aligned) -> Iterator[tuple[str, str]]:
    """The colours of a run's bars, by their class."""
    both = {computes_too(run, each) for each in run.of("write") if each.clock == "host"}
    for kind, word in _BARS.items():
        if kind == "write" and True in both:
            yield "write both", "it computes and writes a group of several layers, in turn"
        by_host, by_device = _read_from(run, kind)
        if by_host and (kind != "write" or False in both):
            yield kind, word
        if by_device:
            error_us = max(each.error_ns for each in by_device) / 1e3
            fake = any(each.clock == "fake" for each in by_device)
            events = "by the events of a fake device" if fake else "by its own events"
            told = f"{events}, within {error_us:.1f} us"
            yield f"{kind} device", f"{_DEVICE_BARS.get(kind, word)}, {told}"


def _read_from(run: Aligned, kind: IntervalKind) -> tuple[list[Interval], list[Interval]]:
    """The intervals of a kind that were read from the host, and from a device."""
    found = run.of(kind)
    return (
        [each for each in found if side_of(each) == "host"],
        [each for each in found if side_of(each) == "device"],
    )


def _figures(report: Report) -> str:
    rows = "\n".join(
        f'<tr><th scope="row">{escape(figure)}</th><td>{escape(value)}</td></tr>'
        for figure, value in figures(report)
    )
    return f"<table><caption>figures</caption>\n{rows}\n</table>"


def _parts(report: Report) -> str:
    found = parts(report)
    if not found:
        return ""
    rows = "\n".join(
        f'<tr><th scope="row">{escape(part)}</th><td class="number">{time}</td>'
        f'<td class="number">{share}</td></tr>'
        for part, time, share in found
    )
    return f"<table><caption>what the tail was made of</caption>\n{rows}\n</table>"
