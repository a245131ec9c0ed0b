"""What Perfetto asks of a Chrome trace, and that arrows lead from a span to its imports."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.messages import Interval
from headrace.telemetry.chrome import MESSAGE_US, encode, tracks
from headrace.telemetry.recording import Recording, Run
from tests.unit.telemetry.scenes import (
    START_US,
    at,
    cancelled,
    local,
    measured,
    moved,
    on,
    on_devices,
    parked,
    several,
    streamed,
    whole,
)


def events(*runs: Run) -> list[dict[str, Any]]:
    file = json.loads(encode(Recording(runs=runs)))
    assert file["otherData"]["clock"] == "CLOCK_MONOTONIC of the owner's host"
    assert [each["name"] for each in file["otherData"]["figures"]] == [run.name for run in runs]
    found: list[dict[str, Any]] = file["traceEvents"]
    return found


def of(phase: str, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in found if event["ph"] == phase]


def test_a_process_per_run_and_its_lanes() -> None:
    file = json.loads(encode(Recording(runs=(streamed(), whole(), local()))))
    found = file["traceEvents"]
    named = [(e["pid"], e["args"]["name"]) for e in found if e["name"] == "process_name"]
    assert named == [(1, "streamed"), (2, "whole"), (3, "streamed (one thread)")]
    for pid in (1, 2, 3):
        mine = [e for e in found if e["pid"] == pid]
        threads = [e["args"]["name"] for e in mine if e["name"] == "thread_name"]
        assert threads == ["source", "source, messages", "owner, messages", "owner"]
        order = [e["args"]["sort_index"] for e in mine if e["name"] == "thread_sort_index"]
        assert order == [1, 2, 3, 4]


def test_every_interval_is_a_slice_or_an_instant() -> None:
    run = streamed()
    found = events(run)
    drawn = Counter(event["cat"] for event in found if event["ph"] in "Xi")
    due = Counter(each.kind for each in (*run.source, *run.owner))
    assert drawn == due + Counter(["final"])  # a message, and a mark across all lanes
    (first,) = [e for e in of("X", found) if e["cat"] == "write"][:1]
    assert first == {
        "ph": "X",
        "pid": 1,
        "tid": 1,
        "cat": "write",
        "name": "write layers [0, 1) x positions [0, 8)",
        "ts": START_US + 900.0,
        "dur": 100.0,
        "args": {"bytes": 1_000, "clock": "host", "instant": False},
    }
    (published,) = [e for e in of("i", found) if e["cat"] == "published"]
    assert (published["name"], published["ts"]) == ("published", START_US + 4_000.0)
    assert {
        (e["dur"], e["args"]["instant"]) for e in of("X", found) if e["cat"] == "announced"
    } == {(MESSAGE_US, True)}


def test_a_slice_says_where_writing_holds_computing() -> None:
    (both,) = [e for e in of("X", events(several())) if e["cat"] == "write"]
    assert both["name"] == "compute and write layers [0, 3) x positions [0, 8)"


def test_slices_of_a_thread_do_not_overlap() -> None:
    """Perfetto draws nested slices only; a device that copies by itself has several in flight."""
    busy = (at("import", 0, 10), at("import", 5, 15), at("import", 7, 9), at("import", 12, 20))
    rows = tracks(busy)
    assert [[each.begun_ns for each in row] for row in rows] == [
        [busy[0].begun_ns, busy[3].begun_ns],
        [busy[1].begun_ns],
        [busy[2].begun_ns],
    ]
    found = events(streamed(owner=busy))
    threads = [e["args"]["name"] for e in found if e["name"] == "thread_name"]
    assert threads[-3:] == ["owner", "owner (2)", "owner (3)"]
    by_thread = defaultdict(list)
    for event in of("X", found):
        by_thread[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in by_thread.values():
        for (_, ended), (begun, _) in pairwise(slices):
            assert ended <= begun


def test_each_slice_is_in_the_uppermost_row_that_is_free() -> None:
    draw = random.Random(6)
    for _ in range(100):
        begun = [draw.randrange(40) for _ in range(20)]
        busy = [at("import", each, each + draw.randrange(8)) for each in begun]
        rows: list[list[Interval]] = []
        for each in sorted(busy, key=lambda one: (one.begun_ns, one.ended_ns)):
            free = (row for row in rows if row[-1].ended_ns <= each.begun_ns)
            row = next(free, None)
            if row is None:
                rows.append([each])
            else:
                row.append(each)
        assert tracks(busy) == rows


def test_what_devices_tell_has_lanes_of_its_own_and_its_error() -> None:
    found = events(on_devices())
    threads = [e["args"]["name"] for e in found if e["name"] == "thread_name"]
    assert threads == [
        "source",
        "source's device, computing",
        "source's device, copying",
        "source, messages",
        "owner, messages",
        "owner",
        "owner's device",
    ]
    by_thread = defaultdict(set)
    for event in of("X", found):
        args = event["args"]
        by_thread[threads[event["tid"] - 1]].add(
            (event["cat"], args["clock"], args.get("error_us"))
        )
    assert by_thread == {
        "source's device, computing": {("compute", "device", 5.0)},
        "source's device, copying": {("write", "device", 5.0)},
        "source, messages": {("announced", "host", None), ("final", "host", None)},
        "owner, messages": {("validated", "host", None)},
        "owner": {("neighbour", "host", None), ("decode", "host", None), ("drain", "host", None)},
        "owner's device": {("import", "device", 5.0)},
    }
    assert len([e for e in found if e["ph"] in "sf"]) == 2 * 6  # arrows lead there too
    fakes = events(on("fake", on_devices(), "import"))
    assert {e["args"]["clock"] for e in of("X", fakes) if e["cat"] == "import"} == {"fake"}
    assert [e["args"]["name"] for e in fakes if e["name"] == "thread_name"] == threads


def test_every_interval_has_a_lane_whatever_its_clock() -> None:
    run = streamed()
    kinds = {each.kind for each in (*run.source, *run.owner)}
    drawn = Counter(e["cat"] for e in events(on("device", run, *kinds)) if e["ph"] in "Xi")
    assert drawn == Counter(e["cat"] for e in events(run) if e["ph"] in "Xi")


def test_arrows_lead_from_announced_to_validated_to_the_imports_of_the_span() -> None:
    found = events(whole())
    begun, ended = of("s", found), of("f", found)
    assert [e["id"] for e in begun] == [e["id"] for e in ended] == [1, 2, 3, 4]
    assert all(e["bp"] == "e" for e in ended)
    assert [(e["tid"], e["ts"] - START_US) for e in begun] == [(2, 3_500), *[(3, 3_550)] * 3]
    assert [(e["tid"], e["ts"] - START_US) for e in ended] == [
        (3, 3_550),
        (4, 3_600),
        (4, 4_000),
        (4, 4_400),
    ]


def test_each_end_of_an_arrow_is_on_a_slice() -> None:
    told = replace(whole(), owner=(*whole().owner, at("validated", 3_560, name="logits")))
    found = events(streamed(), told, cancelled())
    slices = [(e["pid"], e["tid"], e["ts"], e["ts"] + e["dur"]) for e in of("X", found)]
    arrows = [e for e in found if e["ph"] in "sf"]
    assert len(arrows) == 2 * (6 + 5 + 2)
    for arrow in arrows:
        assert any(
            (pid, tid) == (arrow["pid"], arrow["tid"]) and begun <= arrow["ts"] < ended
            for pid, tid, begun, ended in slices
        )


@pytest.mark.parametrize("name", ["decode", "layers", "layers [0, 2) x positions [0, 9)"])
def test_no_arrow_where_the_span_cannot_be_told(name: str) -> None:
    run = streamed()
    imports = tuple(
        replace(each, name=name) if each.kind == "import" else each for each in run.owner
    )
    assert len(of("s", events(replace(run, owner=imports)))) == 3


def test_counters_add_up() -> None:
    found = of("C", events(streamed()))
    by_name = defaultdict(list)
    for event in found:
        by_name[event["name"]].append((event["ts"] - START_US, event["args"]["bytes"]))
    assert by_name == {
        "bytes written by the source": [(900, 0), (1_000, 1_000), (2_000, 2_000), (3_210, 3_000)],
        "bytes imported by the owner": [
            (1_050, 0),
            (1_250, 1_000),
            (2_300, 2_000),
            (3_840, 3_000),
        ],
    }


def test_the_source_is_drawn_on_the_owners_clock() -> None:
    run = streamed()
    ahead = replace(run, source=moved(run.source, 3_000_000_000))
    first = of("X", events(ahead))[0]
    assert first["cat"] == "compute"
    assert abs(first["ts"] - (START_US + 100)) <= 65


def test_a_slice_never_has_a_negative_length() -> None:
    found = events(streamed(source=(at("compute", 90, 10),)))
    assert of("X", found)[0]["dur"] == 0


def test_nothing() -> None:
    run = streamed(source=(), owner=(), measured=measured(kv_nbytes=0))
    assert {event["ph"] for event in events(run)} == {"M"}
    assert events() == []


def test_parking_has_a_lane_of_its_own_where_there_is_any() -> None:
    found = [e for e in events(streamed(), parked()) if e["name"] == "thread_name"]
    mine = [e["args"]["name"] for e in found if e["pid"] == 2]
    assert mine == ["source", "source, messages", "owner, messages", "owner, parked", "owner"]
    assert "owner, parked" not in [e["args"]["name"] for e in found if e["pid"] == 1]
