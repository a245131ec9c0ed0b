"""Every benchmark at smoke size: the rows are whole, and the figures are of what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.bench import slab
from headrace.bench.rows import percentile, spread, write_rows
from headrace.cli import run_command


def test_slab_rows_of_both_forms() -> None:
    rows = list(slab.run((2,), repeats=1))
    assert sorted(row["form"] for row in rows) == ["1-copy", "2-copy"]
    for row in rows:
        assert row["nbytes"] == 2 << 20
        assert row["wall_ratio"] == row["memcpy_wall_ns"] / row["wall_ns"]
        assert row["two_memcpy_wall_ns"] > 0


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
    out = tmp_path / "slab.jsonl"
    small = ["--sizes-mb", "1", "--repeats", "1", "--out", str(out)]
    assert run_command(["bench", "slab", *small]) == 0
    assert "1-copy" in capsys.readouterr().out
    assert len(out.read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["slab", "--out", "/tmp"], "/tmp is a directory"),
        (["slab", "--repeats", "0"], "--repeats is 0"),
        (["slab", "--sizes-mb", "0"], "--sizes-mb is 0"),
        (["slab", "--sizes-mb", "1", "--sizes-mb", "-5"], "--sizes-mb is -5"),
        (["slab", "--empty-sizes-mb"], "--sizes-mb is empty"),
        (["slab", "--out", "/dev/null/rows.jsonl"], "is not a directory"),
    ],
)
def test_a_mistake_is_told_before_anything_is_measured(
    arguments: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slab, "run", None)
    assert run_command(["bench", *arguments]) == 2
    complaint = capsys.readouterr().err
    assert sentence in complaint
    assert complaint.count("\n") == 1
