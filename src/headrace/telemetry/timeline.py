"""The timeline of one request as lines of text: what each side did, and when it counted.

A bar is often far shorter than a column; each gets at least one, so that the lanes show where
something ran and not how long it took.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from headrace.messages import Interval, IntervalKind
from headrace.telemetry.claim import overlap_of
from headrace.telemetry.clocks import Aligned
from headrace.telemetry.times import Stretch

_SHADES: Final = "█▓"
_BARS: Final[dict[IntervalKind, tuple[str, str]]] = {  # the later ones are drawn over the others
    "drain": ("-", "drains"),
    "parked": ("░", "parked"),
    "neighbour": ("·", "others decode"),
    "import": ("▄", "imports"),
}
_MARKS: Final[dict[IntervalKind, tuple[str, str]]] = {
    "cancel": ("✕", "cancelled"),
    "ended": ("■", "ended"),
    "final": ("▲", "prefill ended"),
    "published": ("△", "published"),
}


def draw(run: Aligned, *, width: int = 72) -> list[str]:
    """Four lines: the source's layer groups, the owner's imports, the marks, the scale.

    From the first computing to publishing, or to the owner's last reading if that was not reached.
    """
    begun_ns, ended_ns = window = _window(run)

    def column(at_ns: int) -> int:
        return min(width - 1, max(0, (at_ns - begun_ns) * width // (ended_ns - begun_ns)))

    owner = [each for each in run.of(*_BARS) if _meets(each, window)]
    shown = [word for kind, word in _BARS.items() if any(each.kind == kind for each in owner)]
    instants = _instants(run)
    processes = "one process, one thread" if run.is_local else "two processes"
    milliseconds = f"{(ended_ns - begun_ns) / 1e6:.0f} ms"
    return [
        f"source  │{_source_lane(run, column, width)}│ layer groups computed and written",
        f"owner   │{_owner_lane(owner, column, width)}│ {_legend(shown)}",
        f"        │{_mark_lane(instants, column, width)}│ {_legend(_MARKS[k] for k in instants)}",
        f"        0 ms{milliseconds:>{width - 2}}   {overlap_of(run).evidence} clock, {processes}",
    ]


def _window(run: Aligned) -> Stretch:
    owner = [each for each in run.owner if each.kind != "drain"] or list(run.owner)
    first_ns = min((each.begun_ns for each in owner), default=0)
    last_ns = max((each.ended_ns for each in owner), default=0)
    begun_ns, published_ns = run.begun_ns, run.published_ns
    if begun_ns is None or not run.clock.comparable:
        begun_ns = first_ns
    ended_ns = last_ns if published_ns is None else published_ns
    return begun_ns, max(ended_ns, begun_ns + 1)


def _meets(interval: Interval, window: Stretch) -> bool:
    return interval.begun_ns <= window[1] and interval.ended_ns >= window[0]


def _source_lane(run: Aligned, column: Callable[[int], int], width: int) -> str:
    lane, group = [" "] * width, 0
    for each in run.of("compute", "write"):
        group += each.kind == "compute"
        for at in range(column(each.begun_ns), column(each.ended_ns) + 1):
            lane[at] = _SHADES[(group - 1) % len(_SHADES)]
    return "".join(lane)


def _owner_lane(bars: list[Interval], column: Callable[[int], int], width: int) -> str:
    lane = [" "] * width
    for kind, (sign, _) in _BARS.items():
        for each in bars:
            if each.kind == kind:
                for at in range(column(each.begun_ns), column(each.ended_ns) + 1):
                    lane[at] = sign
    return "".join(lane)


def _instants(run: Aligned) -> dict[IntervalKind, int]:
    """The marks to draw, in order of time."""
    over: tuple[IntervalKind, ...] = ("cancel", "ended")
    kinds = [kind for kind in _MARKS if run.published_ns is None or kind not in over]
    found = {kind: at_ns for kind in kinds if (at_ns := run.moment_ns(kind)) is not None}
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _mark_lane(instants: dict[IntervalKind, int], column: Callable[[int], int], width: int) -> str:
    """Each mark has a column of its own, in their order."""
    lane, at = [" "] * width, -1
    for left, (kind, at_ns) in zip(range(len(instants), 0, -1), instants.items(), strict=True):
        at = min(max(column(at_ns), at + 1), width - left)
        lane[at] = _MARKS[kind][0]
    return "".join(lane)


def _legend(signs: Iterable[tuple[str, str]]) -> str:
    return "  ".join(f"{sign} {word}" for sign, word in signs)
