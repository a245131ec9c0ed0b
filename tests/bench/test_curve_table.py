"""The goals of the size curve, on invented rows."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.bench.curve_table import (
    CellKey,
    best_fixed,
    cells,
    figures,
    share_wanted,
    tail_allowed_ns,
)
from headrace.bench.faults.table import Figure


def row(route: str, tail_ms: float, ttft_ms: float, **more: Any) -> dict[str, Any]:
    """A hand-off of 800 bytes, 100 of them in the last of 8 groups; prefill of 1000 ms.

    What the whole route takes is its import.
    """
    return {
        "measure": "hand-off",
        "geometry": "g",
        "size_gb": 1.0,
        "pace_gb_per_s": 1.0,
        "link_gb_per_s": 0.0,
        "route": route,
        "repeat": 0,
        "prefill_chunk": 0,
        "groups": 8,
        "prefill_ns": 1000e6,
        "tail_ns": tail_ms * 1e6,
        "ttft_ns": ttft_ms * 1e6,
        "import_ns": tail_ms * 1e6,
        "kv_nbytes": 800,
        "last_group_nbytes": 100,
        "owner_cpu_ns": 1,
        "source_cpu_ns": 1,
        **more,
    }


def fixed(tail_ms: float) -> dict[str, Any]:
    return {**row("whole", tail_ms, 0), "measure": "fixed", "size_gb": 0.0}


def judged(*rows: dict[str, Any]) -> dict[str, Figure]:
    return {figure.name.partition(",")[0]: figure for figure in figures(rows)}


def test_what_a_tail_may_be() -> None:
    assert tail_allowed_ns(800, 1 / 8, 4) == 1.25 * 104
    assert share_wanted(1 / 8) == 0.95 * 7 / 8


@pytest.mark.parametrize(("tail_ms", "met"), [(130, True), (131, False)])
def test_the_goal_of_a_streamed_tail(tail_ms: float, met: bool) -> None:
    found = judged(row("whole", 800, 1800), fixed(4), row("streamed-4", tail_ms, 1130))
    assert found["tail"].met is met


@pytest.mark.parametrize(("tail_ms", "met"), [(134, True), (136, False)])
def test_the_goal_of_a_hidden_share(tail_ms: float, met: bool) -> None:
    found = judged(row("whole", 800, 1800), row("streamed-4", tail_ms, 1130))
    assert found["hidden share"].met is met
    assert "tail" not in found  # there is no fixed cost to add


def test_few_groups_have_no_share_to_reach() -> None:
    found = judged(row("whole", 800, 1800), row("streamed-8", 300, 1300, groups=4))
    assert "hidden share" not in found


def test_a_transfer_longer_than_the_prefill_or_without_a_pace_has_no_goal() -> None:
    assert not judged(row("whole", 1001, 2001), fixed(4), row("streamed-4", 900, 1900))
    unpaced = {"pace_gb_per_s": 0.0}
    assert not judged(row("whole", 800, 1800, **unpaced), row("streamed-4", 100, 1100, **unpaced))
    assert not judged(row("streamed-4", 100, 1100))


@pytest.mark.parametrize(
    ("auto_ms", "to_whole", "to_best"),
    [(1000, True, True), (1021, True, False), (1840, False, False)],
)
def test_the_goals_of_auto(auto_ms: float, to_whole: bool, to_best: bool) -> None:
    rows = [row("whole", 800, 1800), row("streamed-1", 10, 1000), row("auto", 10, auto_ms)]
    found = {figure.name: figure.met for figure in figures(rows) if "TTFT" in figure.name}
    assert found == {
        "TTFT, g 1 GB, 1 GB/s, auto to whole": to_whole,
        "TTFT, g 1 GB, 1 GB/s, auto to streamed-1, the best fixed": to_best,
    }


def test_auto_is_judged_by_all_its_rows_and_its_first_is_told() -> None:
    """The best fixed route is so by its median, though whole was once faster than it ever was."""
    rows = [row("whole", 800, ms, repeat=n) for n, ms in enumerate((900, 1800, 1800))]
    rows += [row("streamed-1", 10, 1000, repeat=n) for n in range(3)]
    rows += [
        row("auto", 10, ms, repeat=n, nth=n + 1) for n, ms in enumerate((1800, 1010, 1020, 1010))
    ]
    found = {figure.name: figure for figure in figures(rows)}
    best = found["TTFT, g 1 GB, 1 GB/s, auto to streamed-1, the best fixed"]
    assert best.result == "1.0150 [1.0100, 1.8000] n=4; first request 1.8000"
    assert best.met is True


def test_writing_that_moved_before_the_end_is_not_hidden_but_saved() -> None:
    """The import takes 400 ms of the whole route's tail of 800 ms; a tail of 100 ms is left."""
    rows = [row("whole", 800, 1800, import_ns=400e6), row("streamed-4", 100, 1300)]
    (cell,) = cells(rows)
    assert cell.hidden("streamed-4") == pytest.approx(1 - 100 / 400)
    assert cell.saved("streamed-4") == pytest.approx(500 / 800)
    assert [line.saved for line in cell.lines()] == [0, pytest.approx(500 / 800)]
    rows.append(row("whole", 800, 2700, import_ns=400e6, repeat=1))  # as far from itself
    assert cells(rows)[0].saved("streamed-4") is None


def test_another_prefill_chunk_is_another_pairing() -> None:
    """What `auto` may not choose is not what it is held against."""
    routes = {
        "whole": [row("whole", 800, 1800)],
        "chunked-256": [row("chunked-256", 1, 1, prefill_chunk=256)],
        "auto": [row("auto", 1, 1)],
    }
    assert best_fixed(routes) == "whole"
    assert best_fixed({"auto": routes["auto"]}) is None


def test_a_line_holds_medians_and_the_ratio_within_a_repeat() -> None:
    rows = [
        row("whole", 100, 1000, repeat=0),
        row("whole", 300, 2000, repeat=1),
        row("streamed-4", 20, 900, repeat=0, owner_cpu_ns=None),
        row("streamed-4", 40, 1000, repeat=1, owner_cpu_ns=None),
        row("streamed-4", 30, 1000, repeat=2, owner_cpu_ns=None),
    ]
    (cell,) = cells(rows)
    assert cell.key == CellKey("g", 1.0, 1.0, 0.0)
    (whole, streamed) = cell.lines()
    assert whole.cpu_s is not None
    assert streamed.cpu_s is None
    assert streamed.hidden == pytest.approx(1 - 30 / 200)
    assert streamed.bound == 7 / 8
    assert streamed.ttft_ratio is not None
    assert (streamed.ttft_ratio.p10, streamed.ttft_ratio.p90) == (0.5, 0.9)


def test_ratios_are_of_one_run() -> None:
    rows = [row("whole", 100, 1000, run=0), row("streamed-4", 20, 500, run=1)]
    (cell,) = cells(rows)
    assert cell.ratio("streamed-4", "whole") is None
    rows.append(row("whole", 100, 2000, run=1))
    (cell,) = cells(rows)
    ratio = cell.ratio("streamed-4", "whole")
    assert ratio is not None
    assert (ratio.median, ratio.samples) == (0.25, 1)
