"""The size curve: its cells, its rows at smoke size, and its goals on invented rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.bench import curve
from headrace.bench.curve import (
    KEY,
    SIZES_GB,
    WAYS,
    Cell,
    Setting,
    cells_of,
    linked,
    options_of,
)
from headrace.bench.curve_table import (
    CellKey,
    best_fixed,
    cells,
    figures,
    share_wanted,
    tail_allowed_ns,
)
from headrace.bench.faults.table import Figure
from headrace.bench.geometries import GEOMETRIES
from headrace.bench.rows import RowFile
from headrace.cli import run_command
from headrace.errors import Refused

SMALL = "llama-3.1-8b"
ROUTES = ("whole", "chunked-256", "streamed-8th", "auto")


def small_cells(repeats: int = 2) -> list[Cell]:
    return cells_of([SMALL], [0.002], [Setting(1.0)], ROUTES, repeats=repeats)


def quiet(_: str) -> None:
    pass


# Which cells there are.


def test_large_sizes_and_links_have_fewer_cells() -> None:
    sizes = {
        (cell.geometry.name, cell.size_gb): cell.repeats
        for cell in cells_of(list(GEOMETRIES), SIZES_GB, [Setting(1.0)])
    }
    assert len(sizes) == 4 * (1 + 4) + 2 * 2
    assert sizes["qwen3-8b", 0.5] == 10
    assert sizes["qwen3-8b", 1.0] == 5
    assert sizes["gemma-3-12b", 4.0] == 3
    assert ("qwen3-8b", 2.0) not in sizes
    everything = cells_of(list(GEOMETRIES), SIZES_GB, [Setting(1.0)], all_large=True)
    assert len(everything) == 4 * 7
    behind = cells_of(["qwen3-8b"], SIZES_GB, [linked(1.0, 8.0, 0.2)])
    assert [cell.size_gb for cell in behind] == [0, 0.1, 0.25, 0.5]


def test_about_eight_groups_are_told_by_their_layers() -> None:
    routes = {
        cell.geometry.name: cell.routes
        for cell in cells_of(list(GEOMETRIES), [0.1], [Setting(1.0)])
        if cell.size_gb
    }
    assert routes["llama-3.1-8b"] == tuple(way for way in WAYS if way != "streamed-8th")
    assert "streamed-5" in routes["qwen3-8b"]
    assert "streamed-8" in routes["exaone-4.0-32b"]
    assert "streamed-6" in routes["gemma-3-12b"]


def test_each_second_repeat_goes_backwards_and_every_route_begins_once() -> None:
    (_, cell) = cells_of([SMALL], [0.1], [Setting(1.0)], ("whole", "streamed-1", "auto"), repeats=6)
    routes = [row["route"] for row in cell.rows()]
    by_repeat = [routes[at : at + 3] for at in range(0, 18, 3)]
    assert by_repeat[1] == by_repeat[0][::-1]
    assert [repeat[0] for repeat in by_repeat[::2]] == ["whole", "streamed-1", "auto"]
    assert all(sorted(repeat) == sorted(by_repeat[0]) for repeat in by_repeat)


def test_routes_are_what_their_labels_say() -> None:
    assert options_of("streamed-6").group_layers == 6
    chunked = options_of("chunked-256")
    assert (chunked.chunk, chunked.prefill_chunk) == (256, 256)
    assert [options_of(label).route for label in ("auto", "whole")] == ["auto", "whole"]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (Setting(0.0), "unpaced"),
        (Setting(1.0), "paced at 1 GB/s of KV"),
        (linked(1.0, 2.0, 1.0), "paced at 1 GB/s of KV, emulated link of 2 GB/s"),
        (
            linked(1.0, 25.0, 0.2),
            "paced at 0.2 GB/s of KV, emulated link of 5 GB/s, both scaled by 0.2: they stand for "
            "1 and 25 GB/s",
        ),
    ],
)
def test_a_row_says_what_is_emulated(setting: Setting, words: str) -> None:
    assert setting.words == words


def test_unknown_names_are_refused() -> None:
    with pytest.raises(Refused, match="unknown geometry 'gpt'; known: llama"):
        cells_of(["gpt"], [0.1], [Setting(1.0)])
    with pytest.raises(Refused, match="unknown route 'sideways'"):
        cells_of([SMALL], [0.1], [Setting(1.0)], ["sideways"])


# Smoke size.


def test_rows_at_smoke_size(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "curve.jsonl", "curve", KEY)
    curve.run(small_cells(), file, quiet)
    assert [row["measure"] for row in file.rows] == ["fixed"] * 2 + ["hand-off"] * 8
    for row in file.rows:
        assert row["setting"] == "paced at 1 GB/s of KV"
        assert row["prefill_ns"] > 0 < row["tail_ns"] <= row["publish_ns"] <= row["ttft_ns"]
        assert row["nbytes_before_final"] <= row["kv_nbytes"]
        assert row["import_ns"] > 0
        assert min(row["owner_cpu_ns"], row["source_cpu_ns"]) > 0
        assert {"machine_busy_before", "load_1min", "beyond_model", "imports"} <= row.keys()
    of_route = {row["route"]: row for row in file.rows if row["measure"] == "hand-off"}
    assert of_route["whole"]["kv_nbytes"] == 15 * 131_072
    assert of_route["whole"]["nbytes_before_final"] == 0
    assert of_route["streamed-4"]["groups"] == 8
    assert of_route["streamed-4"]["last_group_nbytes"] * 8 == of_route["whole"]["kv_nbytes"]
    assert of_route["auto"]["choice"]["reason"]
    assert of_route["chunked-256"]["prefill_chunk"] == 256
    assert list(figures(file.rows))


def test_it_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "curve.jsonl"
    curve.run(small_cells(), RowFile(path, "curve", KEY), quiet)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-3]) + lines[-3][:20])  # killed while it wrote a row
    said: list[str] = []
    file = RowFile(path, "curve", KEY, resume=True)
    kept = list(file.rows)
    curve.run(small_cells(), file, said.append)
    assert said[0].startswith("1 of 2 cells are to be measured")
    assert len(said) == 2
    assert file.rows[: len(kept)] == kept
    keys = [tuple(row[name] for name in KEY) for row in file.rows]
    assert len(keys) == len(set(keys)) == 10


def test_behind_an_emulated_link(tmp_path: Path) -> None:
    """The whole route waits for the link to carry all of it, and the owner's polling is no cost."""
    todo = cells_of([SMALL], [0.002], [linked(1.0, 1.0, 0.1)], ("whole",), repeats=1)
    file = RowFile(None, "curve", KEY)
    curve.run(todo, file, quiet)
    (_, row) = file.rows
    assert "emulated link of 0.1 GB/s" in row["setting"]
    assert row["tail_ns"] >= row["kv_nbytes"] / 0.1
    assert row["owner_cpu_ns"] is None


def test_without_a_pace_nothing_is_hidden() -> None:
    todo = cells_of([SMALL], [0.002], [Setting(0.0)], ("whole", "streamed-1"), repeats=1)
    file = RowFile(None, "curve", KEY)
    curve.run(todo, file, quiet)
    assert {row["setting"] for row in file.rows} == {"unpaced"}
    (cell,) = cells(file.rows)
    assert [line.hidden for line in cell.lines()] == [None, None]
    assert not list(figures(file.rows))


def test_a_source_ends_with_a_cell_that_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoMemory:
        def __init__(self, *_: object, **__: object) -> None:
            raise Refused("no memory for a lane")

    monkeypatch.setattr(curve, "NullDecoder", NoMemory)
    with pytest.raises(Refused, match="no memory for a lane"):
        curve.run(small_cells(), RowFile(None, "curve", KEY), quiet)


def test_what_does_not_fit_is_told_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(nbytes: int, what: str) -> None:
        raise Refused(f"{what}: needs {nbytes} bytes")

    monkeypatch.setattr(curve, "require_memory", full)
    said: list[str] = []
    file = RowFile(None, "curve", KEY)
    for _ in range(2):
        curve.run(small_cells(), file, said.append)
    assert [row["measure"] for row in file.rows] == ["skipped", "skipped"]
    assert "needs" in file.rows[1]["skipped"]
    assert sum(text.startswith("skipped:") for text in said) == 4
    assert not list(figures(file.rows))


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "rows" / "curve.jsonl", tmp_path / "curve.svg"
    small = ["--sizes-gb", "0.002", "--geometries", SMALL, "--routes", "whole", "--repeats", "1"]
    arguments = ["bench", "curve", *small, "--routes", "streamed-1", "--out", str(out)]
    assert run_command(arguments) == 0
    printed = capsys.readouterr().out
    assert "cells are to be measured" in printed
    assert "goals met" in printed
    assert run_command([*arguments, "--resume"]) == 0
    assert "0 of 2 cells" in capsys.readouterr().out
    assert run_command(["bench", "plot", str(out), "--out", str(picture)]) == 0
    assert "</svg>" in picture.read_text()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--sizes-gb", "0"], "--sizes-gb is 0; it must be above 0"),
        (["--empty-sizes-gb"], "--sizes-gb is empty"),
        (["--pace", "-1"], "--pace is -1; it must be 0 or more"),
        (["--pace", "nan"], "--pace is nan"),
        (["--link-gb-per-s", "0"], "--link-gb-per-s is 0"),
        (["--link-scale", "0"], "--link-scale is 0"),
        (["--repeats", "-1"], "--repeats is -1"),
        (["--geometries", "gpt"], "unknown geometry 'gpt'"),
        (["--empty-routes"], "no route is named"),
        (["--empty-geometries"], "no geometry is named"),
        (["--resume"], "--resume goes on with the rows of --out"),
        (["--out", "/tmp"], "/tmp is a directory"),
    ],
)
def test_a_mistake_is_told_before_anything_is_measured(
    arguments: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(curve, "run", None)
    assert run_command(["bench", "curve", *arguments]) == 2
    assert sentence in capsys.readouterr().err


# Goals, on invented rows.


def row(route: str, tail_ms: float, ttft_ms: float, **more: Any) -> dict[str, Any]:
    """A hand-off of 800 bytes, 100 of them in the last of 8 groups; prefill of 1000 ms."""
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
