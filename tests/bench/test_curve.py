"""The size curve: its cells, and its rows at smoke size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace.bench import curve
from headrace.bench.curve import (
    DEFAULT_WAYS,
    KEY,
    SIZES_GB,
    Cell,
    Setting,
    cells_of,
    linked,
    options_of,
)
from headrace.bench.curve_table import (
    cells,
    figures,
)
from headrace.bench.geometries import GEOMETRIES
from headrace.bench.rows import RowFile, read_rows
from headrace.bench.stand import Stand
from headrace.cli import run_command
from headrace.errors import Refused
from headrace.runtime.requests import Request, RequestOptions

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
    assert routes["llama-3.1-8b"] == tuple(way for way in DEFAULT_WAYS if way != "streamed-8th")
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


def test_the_estimate_follows_the_speed_of_a_copy() -> None:
    (_, cell) = cells_of([SMALL], [1.0], [Setting(1.0)], ("whole", "auto"), repeats=5)
    copies_s = cell.seconds(1.0) - cell.seconds(1e9)
    assert cell.seconds(0.5) - cell.seconds(1e9) == pytest.approx(2 * copies_s)
    assert 12 < cell.seconds(1e9) < 25  # ten prefills of a second, one of each stand, two slabs
    (_, fixed) = cells_of([SMALL], [1.0], [Setting(1.0)], ("whole",), repeats=10)
    assert fixed.seconds(10.0) < cell.seconds(10.0)  # one stand less


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
    assert [row["nth"] for row in file.rows if row["route"] == "auto"] == [1, 2]
    assert {row["nth"] for row in file.rows if row["route"] != "auto"} == {0}
    assert of_route["chunked-256"]["prefill_chunk"] == 256
    assert list(figures(file.rows))


def test_the_owner_of_auto_serves_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    served: dict[Stand, list[tuple[str, int]]] = {}
    serve = Stand.serve

    def noted(stand: Stand, tokens: Sequence[int], options: RequestOptions) -> Request:
        served.setdefault(stand, []).append((options.route, len(tokens)))
        return serve(stand, tokens, options)

    monkeypatch.setattr(Stand, "serve", noted)
    (_, cell) = small_cells()
    file = RowFile(None, "curve", KEY)
    curve.run([cell], file, quiet)
    fixed, auto = served.values()
    assert auto == [("whole", 1), ("auto", 15), ("auto", 15)]
    assert fixed[0] == ("whole", 15)
    assert len(fixed) == 1 + 6
    assert "auto" not in dict(fixed)
    assert "no prefill measured yet" in file.rows[3]["choice"]["reason"]


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
    assert [row["run"] for row in file.rows] == [0] * 7 + [1] * 3


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


def test_what_does_not_fit_is_told_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(nbytes: int, what: str) -> None:
        raise Refused(f"{what}: needs {nbytes} bytes")

    monkeypatch.setattr(curve, "require_memory", full)
    said: list[str] = []
    for resume in (False, True):
        file = RowFile(tmp_path / "curve.jsonl", "curve", KEY, resume=resume)
        curve.run(small_cells(), file, said.append)
    assert [row["measure"] for row in file.rows] == ["skipped", "skipped"]
    assert "needs" in file.rows[1]["skipped"]
    assert len(read_rows(tmp_path / "curve.jsonl")) == 2
    assert sum(text.startswith("skipped:") for text in said) == 4
    assert not list(figures(file.rows))


def test_auto_is_left_out_where_its_own_source_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (_, cell) = small_cells()
    asked: list[int] = []

    def one_fits(nbytes: int, what: str) -> None:
        asked.append(nbytes - curve.HEADROOM_NBYTES)
        if what.endswith("auto beside the others"):
            raise Refused(f"{what}: needs {nbytes} bytes")

    path = tmp_path / "curve.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(curve, "require_memory", one_fits)
        file = RowFile(path, "curve", KEY)
        curve.run([cell], file, quiet)
    assert asked[1] == 2 * asked[0]
    skipped = [row for row in file.rows if "skipped" in row]
    assert [(row["measure"], row["route"]) for row in skipped] == [("skipped", "auto")]
    assert len(file.rows) == 1 + 6
    assert list(cells(file.rows)[0].routes) == ["whole", "chunked-256", "streamed-4"]

    again = RowFile(path, "curve", KEY, resume=True)  # there is room for it now
    curve.run([cell], again, quiet)
    assert [row["route"] for row in again.rows[6:]] == ["auto", "auto"]
    assert not any("skipped" in row for row in again.rows)


def test_rows_of_another_link_scale_are_not_gone_on_with(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "curve.jsonl"), "--geometries", SMALL, "--repeats", "1"]
    small = ["bench", "curve", "--sizes-gb", "0.002", "--routes", "whole", *out]
    link = [*small, "--link-gb-per-s", "1", "--link-scale"]
    assert run_command([*link, "0.1"]) == 0
    assert run_command([*link, "0.2", "--resume"]) == 2


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
