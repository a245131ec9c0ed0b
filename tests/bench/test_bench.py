"""Every benchmark at smoke size: the rows are whole, and the figures are of what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.bench import control, routes, slab
from headrace.bench.rows import percentile, spread, write_rows
from headrace.cli import run_command
from headrace.errors import Refused
from tests.e2e.families import directory_of, make_prompt


def test_control_rows_hold_every_sample() -> None:
    cost, one_way = control.run(requests=2, round_trips=50)
    assert (cost["measure"], len(cost["ns"])) == ("span_cost", 2 * 30)
    assert (one_way["measure"], len(one_way["ns"])) == ("one_way", 50)
    assert min(cost["ns"]) > 0
    assert min(one_way["ns"]) > 0


def test_slab_rows_of_both_forms() -> None:
    rows = list(slab.run((2,), repeats=1))
    assert sorted(row["form"] for row in rows) == ["1-copy", "2-copy"]
    for row in rows:
        assert row["nbytes"] == 2 << 20
        assert row["wall_ratio"] == row["memcpy_wall_ns"] / row["wall_ns"]
        assert row["two_memcpy_wall_ns"] > 0


@pytest.mark.parametrize("busy", [False, True])
def test_route_rows_are_a_b_b_a(busy: bool) -> None:
    rows = list(routes.run(directory_of("gemma3"), make_prompt(96), 1, busy=busy))
    assert [row["route"] for row in rows] == ["whole", "streamed", "streamed", "whole"]
    for row in rows:
        assert row["nbytes_before_final"] <= row["kv_nbytes"]
        assert row["tail_ns"] > 0
    assert all(row["nbytes_before_final"] == 0 for row in rows if row["route"] == "whole")


def test_rows_begin_with_a_stamp(tmp_path: Path) -> None:
    path = tmp_path / "results" / "x.jsonl"
    write_rows(path, "nothing", [{"a": 1}, {"a": 2}])
    stamp, *rows = map(json.loads, path.read_text().splitlines())
    assert stamp["claim"] == "nothing"
    for key in ("commit", "dirty", "cpu", "kernel", "python", "packages", "load"):
        assert key in stamp["stamp"]
    assert rows == [{"a": 1}, {"a": 2}]
    write_rows(None, "nothing", rows)


def test_spread_is_by_rank() -> None:
    assert percentile([3, 1, 2], 50) == 2
    assert percentile([5], 99) == 5
    assert str(spread([1.0, 2.0, 3.0])) == "2 [1, 3] n=3"


def test_the_command_line_prints_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "control.jsonl"
    small = ["--requests", "1", "--round-trips", "20", "--out", str(out)]
    assert run_command(["bench", "control", *small]) == 0
    assert "span_cost: p50" in capsys.readouterr().out
    assert len(out.read_text().splitlines()) == 3
    assert run_command(["bench", "slab", "--sizes-mb", "1", "--repeats", "1"]) == 0
    assert "1-copy" in capsys.readouterr().out
    missing = ["--model", str(directory_of("llama")), "--prompt-file", "/nowhere.txt"]
    assert run_command(["bench", "routes", *missing]) == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["control", "--requests", "0"], "--requests is 0"),
        (["control", "--round-trips", "-1"], "--round-trips is -1"),
        (["control", "--out", "/tmp"], "/tmp is a directory"),
        (["slab", "--repeats", "0"], "--repeats is 0"),
        (["slab", "--sizes-mb", "0"], "--sizes-mb is 0"),
        (["slab", "--sizes-mb", "1", "--sizes-mb", "-5"], "--sizes-mb is -5"),
        (["slab", "--empty-sizes-mb"], "--sizes-mb is empty"),
        (["slab", "--out", "/dev/null/rows.jsonl"], "is not a directory"),
        (["routes", "--model", "m", "--prompt-file", "p", "--repeats", "0"], "--repeats is 0"),
        (["routes", "--model", "m", "--prompt-file", "p", "--max-prompt", "0"], "--max-prompt is"),
        (["routes", "--model", "m", "--prompt-file", "p", "--group-layers", "0"], "--group-layers"),
        (["routes", "--model", "m", "--prompt-file", "/tmp"], "cannot be read"),
    ],
)
def test_a_mistake_is_told_before_anything_is_measured(
    arguments: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (control, routes, slab):
        monkeypatch.setattr(module, "run", None)
    assert run_command(["bench", *arguments]) == 2
    complaint = capsys.readouterr().err
    assert sentence in complaint
    assert complaint.count("\n") == 1


def test_a_model_too_short_for_a_neighbour_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "max_positions_of", lambda _: routes.NEIGHBOUR_PROMPT + 1)
    with pytest.raises(Refused, match="leave --busy out"):
        next(routes.run(directory_of("llama"), make_prompt(8), 1, busy=True))
