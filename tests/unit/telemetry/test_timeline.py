"""The timeline says no more than two processes' host clocks can show."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.messages import Interval, Measured
from headrace.telemetry.timeline import chrome_trace, draw, overlap_ns


def interval(begun_ns: int, ended_ns: int, name: str = "x", nbytes: int = 8) -> Interval:
    return Interval(name, begun_ns, ended_ns, nbytes)


def measured(begun_ns: int = 1_000, final_ns: int = 9_000, published_ns: int = 11_000) -> Measured:
    facts: dict[str, Any] = dict.fromkeys(Measured.__struct_fields__, 0)
    times = {
        "prefill_begun_ns": begun_ns,
        "source_final_ns": final_ns,
        "published_ns": published_ns,
    }
    return Measured(**facts | times)


@pytest.mark.parametrize(
    ("source", "owner", "wanted"),
    [
        ([], [(0, 9)], 0),
        ([(0, 9)], [], 0),
        ([(0, 5)], [(5, 9)], 0),
        ([(0, 5)], [(6, 9)], 0),
        ([(0, 10)], [(2, 5)], 3),
        ([(2, 5)], [(0, 10)], 3),
        ([(0, 4), (4, 8)], [(2, 6)], 4),
        ([(0, 10)], [(2, 6), (4, 8)], 6),  # two imports in flight at once
        ([(0, 6), (3, 10)], [(2, 8)], 6),
        ([(0, 10)], [(2, 2)], 0),
    ],
)
def test_overlap(source: list[tuple[int, int]], owner: list[tuple[int, int]], wanted: int) -> None:
    assert overlap_ns([interval(*i) for i in source], [interval(*i) for i in owner]) == wanted


spans = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 10)).map(lambda t: (t[0], t[0] + t[1])), max_size=6
)


@settings(deadline=None, database=None)
@given(spans, spans)
def test_overlap_is_the_number_of_shared_instants(
    source: list[tuple[int, int]], owner: list[tuple[int, int]]
) -> None:
    shared = {at for b, e in source for at in range(b, e)} & {
        at for b, e in owner for at in range(b, e)
    }
    assert overlap_ns([interval(*i) for i in source], [interval(*i) for i in owner]) == len(shared)


def test_draw_shows_both_lanes_and_both_marks() -> None:
    source = [interval(1_000, 5_000), interval(5_000, 9_000)]
    owner = [interval(5_100, 5_200), interval(10_000, 10_500)]
    lines = draw(source, owner, measured(), width=40)
    lanes = [line.split("│")[1] for line in lines[:3]]
    assert [len(lane) for lane in lanes] == [40, 40, 40]
    assert lanes[0] == "█" * 16 + "▓" * 17 + " " * 7
    assert lanes[1].count("▄") == 4  # the short one gets a column, the long one three
    assert lanes[1][16] == "▄"
    assert (lanes[2].index("▲"), lanes[2].index("△")) == (32, 39)
    assert lines[3].startswith("        0 ms")
    assert "host clock" in lines[3]


@pytest.mark.parametrize(
    ("final_ns", "published_ns"),
    [(1_000, 1_000), (1_000, 500), (11_000, 11_000), (99_000, 11_000)],
)
def test_draw_keeps_its_marks_inside(final_ns: int, published_ns: int) -> None:
    """Also when nothing was measured between the marks, or a clock reading is off."""
    outside = [interval(0, 500), interval(50_000, 90_000)]
    lines = draw(outside, outside, measured(1_000, final_ns, published_ns), width=20)
    for line in lines[:3]:
        assert len(line.split("│")[1]) == 20
    marks = lines[2].split("│")[1]
    assert marks.index("▲") < marks.index("△")


def test_draw_of_nothing() -> None:
    lines = draw([], [], measured())
    assert lines[0].split("│")[1] == " " * 72


def test_chrome_trace_is_valid() -> None:
    """What Perfetto asks for: JSON, known phases, times in us, slices with a duration."""
    runs = [
        ("whole", [interval(1_000, 9_000, "layers [0, 2)")], [interval(9_500, 9_900)], measured()),
        ("streamed", [interval(1_500, 2_500)], [], measured()),
    ]
    trace = json.loads(json.dumps(chrome_trace(runs)))
    assert trace["otherData"] == {"clock": "CLOCK_MONOTONIC", "evidence": "host"}
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "i"}
    assert {event["pid"] for event in events} == {1, 2}
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["whole", "streamed"]
    threads = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 1]
    assert threads == ["source (host clock)", "owner (host clock)"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == 3
    assert slices[0] == {
        "ph": "X",
        "pid": 1,
        "tid": 1,
        "name": "layers [0, 2)",
        "ts": 1.0,
        "dur": 8.0,
        "args": {"bytes": 8, "clock": "host"},
    }
    marks = [(e["name"], e["ts"], e["tid"]) for e in events if e["ph"] == "i" and e["pid"] == 1]
    assert marks == [("prefill ended", 9.0, 1), ("published", 11.0, 2)]


def test_chrome_trace_of_nothing() -> None:
    assert chrome_trace([])["traceEvents"] == []
