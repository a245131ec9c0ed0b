"""A recording as a Chrome trace: a process per run, lanes of slices, arrows, counters of bytes.

Perfetto and chrome://tracing draw it. Times are us of the owner's CLOCK_MONOTONIC. An instant is an
arrow's end only on a slice, so messages are slices of 1 us in lanes of their own. What devices tell
by their events has lanes of its own too, and the error that it has on that clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from itertools import count
from typing import Any, Final, Literal, TypeAlias

import msgspec

from headrace.messages import Interval, IntervalKind
from headrace.telemetry.clocks import Aligned, align, pairs
from headrace.telemetry.recording import Recording
from headrace.telemetry.report import computes_too, reports_of
from headrace.telemetry.spans import Starts, spans_of
from headrace.telemetry.words import as_object

Event: TypeAlias = dict[str, Any]
Side: TypeAlias = Literal["host", "device"]

MESSAGE_US: Final = 1.0

_MESSAGES: Final[tuple[IntervalKind, ...]] = ("announced", "final", "validated")
_LANES: Final[tuple[tuple[str, Side | None, tuple[IntervalKind, ...]], ...]] = (
    ("source", "host", ("compute", "write")),  # None: of whatever clock
    ("source's device, computing", "device", ("compute",)),
    ("source's device, copying", "device", ("write",)),
    ("source, messages", None, ("announced", "final")),
    ("owner, messages", None, ("validated",)),
    ("owner, parked", None, ("parked",)),
    ("owner", "host", ("import", "neighbour", "decode", "drain")),
    ("owner's device", "device", ("import", "neighbour", "decode", "drain")),
)
_INSTANTS: Final[dict[IntervalKind, str]] = {
    "granted": "prefill granted",
    "final": "prefill ended",
    "published": "published",
    "first_token": "first token",
    "cancel": "cancel",
    "ended": "ended",
}
_COUNTERS: Final[tuple[tuple[IntervalKind, str], ...]] = (
    ("write", "bytes written by the source"),
    ("import", "bytes imported by the owner"),
)


def encode(recording: Recording) -> bytes:
    """The trace file: what Perfetto draws, and the recording itself for `recording.read`."""
    aligned = [align(run) for run in recording.runs]
    ids, encoder = count(1), msgspec.json.Encoder()
    events = (event for pid, run in enumerate(aligned, 1) for event in _events(pid, run, ids))
    file = {
        # One by one: a call that encodes all of them lets no other thread run meanwhile.
        "traceEvents": [msgspec.Raw(encoder.encode(event)) for event in events],
        "displayTimeUnit": "ms",
        "otherData": {
            "clock": "CLOCK_MONOTONIC of the owner's host",
            "device_clock": "events of the device, brought to it; off by at most args.error_us",
            "figures": [as_object(report) for report in reports_of(aligned)],
        },
        "headrace": recording,
    }
    return encoder.encode(file)


def side_of(interval: Interval) -> Side:
    """Whose reading an interval is; that of a fake device is drawn like a device's."""
    return "host" if interval.clock == "host" else "device"


def tracks(intervals: Iterable[Interval]) -> list[list[Interval]]:
    """The intervals in as few rows as it takes for none to overlap another of its row."""
    rows: list[list[Interval]] = []
    busy: list[tuple[int, int]] = []  # until when, which row; the first to end at the front
    free: list[int] = []  # the uppermost at the front
    for each in sorted(intervals, key=lambda one: (one.begun_ns, one.ended_ns)):
        while busy and busy[0][0] <= each.begun_ns:
            heappush(free, heappop(busy)[1])
        if not free:
            rows.append([])
            free.append(len(rows) - 1)
        row = heappop(free)
        rows[row].append(each)
        heappush(busy, (each.ended_ns, row))
    return rows


def _events(pid: int, run: Aligned, ids: Iterator[int]) -> Iterator[Event]:
    named = f"{run.run.name} (one thread)" if run.is_local else run.run.name
    yield _meta(pid, 0, "process_name", named)
    places: dict[int, int] = {}  # an interval's identity -> its thread
    numbers = count(1)
    for lane, clock, kinds in _LANES:
        intervals = [each for each in run.of(*kinds) if clock in (None, side_of(each))]
        always = clock != "device" and lane != "owner, parked"
        for index, row in enumerate(tracks(intervals) or [[]] * always):
            tid = next(numbers)
            yield _meta(pid, tid, "thread_name", lane if not index else f"{lane} ({index + 1})")
            yield {**_meta(pid, tid, "thread_sort_index", ""), "args": {"sort_index": tid}}
            for each in row:
                places[id(each)] = tid
                yield _slice(pid, tid, each, _called(run, each))
    yield from _instants(pid, run)
    yield from _arrows(pid, run, places, ids)
    yield from _counters(pid, run)


def _meta(pid: int, tid: int, name: str, value: str) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": name, "args": {"name": value}}


def _called(run: Aligned, interval: Interval) -> str:
    return (
        f"{'compute and write' if computes_too(run, interval) else interval.kind} {interval.name}"
    )


def _slice(pid: int, tid: int, interval: Interval, name: str) -> Event:
    instant = interval.kind in _MESSAGES
    error = {"error_us": interval.error_ns / 1e3} if side_of(interval) == "device" else {}
    dur = MESSAGE_US if instant else max(0, interval.ended_ns - interval.begun_ns) / 1e3
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "cat": interval.kind,
        "name": name,
        "ts": interval.begun_ns / 1e3,
        "dur": dur,
        "args": {"bytes": interval.nbytes, "clock": interval.clock, "instant": instant} | error,
    }


def _instants(pid: int, run: Aligned) -> Iterator[Event]:
    for each in run.of(*_INSTANTS):
        yield {
            "ph": "i",
            "s": "p",
            "pid": pid,
            "tid": 0,
            "cat": each.kind,
            "name": _INSTANTS[each.kind],
            "ts": each.begun_ns / 1e3,
            "args": {"name": each.name, "clock": each.clock},
        }


def _arrows(pid: int, run: Aligned, places: dict[int, int], ids: Iterator[int]) -> Iterator[Event]:
    """From each message's sending to its validation, and from there to the imports of its spans."""
    imports = [(each, told[0]) for each in run.of("import") if (told := spans_of(each.name))]
    starts = Starts(span for _, span in imports)
    for sent, heard in pairs(run.source, run.owner):
        yield from _arrow(pid, next(ids), (sent, heard), places)
        inside = {number for span in spans_of(heard.name) for number in starts.inside(span)}
        for number in sorted(inside):
            yield from _arrow(pid, next(ids), (heard, imports[number][0]), places)


def _arrow(
    pid: int, number: int, ends: tuple[Interval, Interval], places: dict[int, int]
) -> Iterator[Event]:
    for phase, end in zip(("s", "f"), ends, strict=True):
        event = {"ph": phase, "pid": pid, "tid": places[id(end)], "id": number, "cat": "span"}
        bound = {"bp": "e"} if phase == "f" else {}
        yield {**event, "name": "span", "ts": end.begun_ns / 1e3, **bound}


def _counters(pid: int, run: Aligned) -> Iterator[Event]:
    for kind, name in _COUNTERS:
        total = 0
        moved = sorted(run.of(kind), key=lambda each: each.ended_ns)
        steps = [(each.ended_ns, each.nbytes) for each in moved]
        for at_ns, nbytes in [(moved[0].begun_ns, 0), *steps] if moved else []:
            total += nbytes
            event = {"ph": "C", "pid": pid, "cat": "bytes", "name": name, "ts": at_ns / 1e3}
            yield {**event, "args": {"bytes": total}}
