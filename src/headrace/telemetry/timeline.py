"""The timeline of one request: two lanes of host intervals, drawn in a terminal or as a trace.

All readings are CLOCK_MONOTONIC of one host, by two processes. They show that the source computed
while the owner imported; they are host intervals and say nothing about kernels on a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.messages import Interval, Measured


def overlap_ns(source: Sequence[Interval], owner: Sequence[Interval]) -> int:
    """Host time in which an import ran while the source computed or wrote, in ns.

    Imports may overlap each other, on a device that copies by itself: no time counts twice.
    """
    total = 0
    for ours_begun, ours_ended in _union(owner):
        for begun, ended in _union(source):
            total += max(0, min(ours_ended, ended) - max(ours_begun, begun))
    return total


def draw(
    source: Sequence[Interval], owner: Sequence[Interval], measured: Measured, *, width: int = 72
) -> list[str]:
    """Lines of text: the source's layer groups, the owner's imports, the prefill's end, publish.

    An import is often far shorter than a column; each gets at least one, so the lane shows where
    imports ran and not how long they took.
    """
    begun = measured.prefill_begun_ns
    ended = max(measured.published_ns, begun + 1)
    scale = width / (ended - begun)

    def column(at_ns: int) -> int:
        return min(width - 1, max(0, int((at_ns - begun) * scale)))

    source_lane = [" "] * width
    for number, interval in enumerate(source):
        shade = "▓" if number % 2 else "█"
        for at in range(column(interval.begun_ns), column(interval.ended_ns) + 1):
            source_lane[at] = shade
    owner_lane = [" "] * width
    for interval in owner:
        for at in range(column(interval.begun_ns), column(interval.ended_ns) + 1):
            owner_lane[at] = "▄"
    marks = [" "] * width
    final_at = min(column(measured.source_final_ns), width - 2)
    marks[final_at] = "▲"
    marks[max(column(measured.published_ns), final_at + 1)] = "△"
    milliseconds = (ended - begun) / 1e6
    return [
        f"source  │{''.join(source_lane)}│ layer groups computed and written",
        f"owner   │{''.join(owner_lane)}│ imports (each at least one column)",
        f"        │{''.join(marks)}│ ▲ prefill ended  △ published",
        f"        0 ms{f'{milliseconds:.0f} ms':>{width - 2}}   host clock, two processes",
    ]


def chrome_trace(
    runs: Sequence[tuple[str, Sequence[Interval], Sequence[Interval], Measured]],
) -> dict[str, Any]:
    """The runs (name, source intervals, owner intervals, measured) as a Chrome trace object.

    It opens in Perfetto; times are in microseconds of the host's CLOCK_MONOTONIC.
    """
    events: list[dict[str, Any]] = []
    for pid, (name, source, owner, measured) in enumerate(runs, 1):
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}})
        for tid, (lane, intervals) in enumerate((("source", source), ("owner", owner)), 1):
            label = {"name": f"{lane} (host clock)"}
            events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": label})
            events += [_slice(pid, tid, interval) for interval in intervals]
        instants = (
            ("prefill ended", measured.source_final_ns, 1),
            ("published", measured.published_ns, 2),
        )
        for mark, at_ns, tid in instants:
            events.append(
                {"ph": "i", "s": "p", "pid": pid, "tid": tid, "ts": at_ns / 1e3, "name": mark}
            )
    return {"traceEvents": events, "otherData": {"clock": "CLOCK_MONOTONIC", "evidence": "host"}}


def _union(intervals: Sequence[Interval]) -> list[tuple[int, int]]:
    """The intervals' times, merged where they touch."""
    merged: list[tuple[int, int]] = []
    for begun, ended in sorted((each.begun_ns, each.ended_ns) for each in intervals):
        if merged and begun <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], ended)
        else:
            merged.append((begun, ended))
    return merged


def _slice(pid: int, tid: int, interval: Interval) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": interval.name,
        "ts": interval.begun_ns / 1e3,
        "dur": (interval.ended_ns - interval.begun_ns) / 1e3,
        "args": {"bytes": interval.nbytes, "clock": "host"},
    }
