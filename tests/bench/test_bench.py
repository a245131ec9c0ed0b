"""Every benchmark at smoke size: the rows are whole, and the figures are of what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.bench import imports
from headrace.bench.rows import RowFile, percentile, read_rows, spread, write_rows
from headrace.cli import run_command
from headrace.errors import Refused


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
    out = tmp_path / "imports.jsonl"
    small = ["--sizes-mb", "1", "--repeats", "2", "--out", str(out)]
    assert run_command(["bench", "imports", *small]) == 0
    assert "cold-mapping" in capsys.readouterr().out
    claim, *rows = map(json.loads, out.read_text().splitlines())
    assert claim["claim"] == "imports"
    assert {row["way"] for row in rows} >= {"memmove-8", "remap"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["imports", "--out", "/tmp"], "/tmp is a directory"),
        (["imports", "--repeats", "0"], "--repeats is 0"),
        (["imports", "--sizes-mb", "0"], "--sizes-mb is 0"),
        (["imports", "--sizes-mb", "1", "--sizes-mb", "-5"], "--sizes-mb is -5"),
        (["imports", "--empty-sizes-mb"], "--sizes-mb is empty"),
        (["imports", "--out", "/dev/null/rows.jsonl"], "is not a directory"),
    ],
)
def test_a_mistake_is_told_before_anything_is_measured(
    arguments: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(imports, "run", None)
    assert run_command(["bench", *arguments]) == 2
    complaint = capsys.readouterr().err
    assert sentence in complaint
    assert complaint.count("\n") == 1


def test_a_run_goes_on_where_it_was_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    first = RowFile(path, "nothing", ("a", "b"))
    first.append({"a": 1, "b": 1, "ns": 5})
    first.append({"a": 1, "b": 2, "ns": 6})
    whole = path.read_text()
    path.write_text(whole[:-4])  # killed while it wrote
    again = RowFile(path, "nothing", ("a", "b"), resume=True)
    assert {"a": 1, "b": 1} in again
    assert {"a": 1, "b": 2} not in again
    again.append({"a": 1, "b": 2, "ns": 7})
    assert [row["ns"] for row in read_rows(path)] == [5, 7]
    assert [("stamp" in json.loads(line)) for line in path.read_text().splitlines()] == [
        *(True, False),
        *(True, False),
    ]


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    write_rows(path, "other", [{"a": 1}])
    with pytest.raises(Refused, match="holds rows of other, not nothing"):
        RowFile(path, "nothing", ("a",), resume=True)
    for text in ("{}\nno row\n{}\n", "[1]\n{}\n"):
        path.write_text(text)
        with pytest.raises(Refused, match="is no row of a benchmark"):
            read_rows(path)
    assert RowFile(path, "nothing", ("a",)).rows == []  # a new run replaces it
    RowFile(None, "nothing", ("a",)).append({"a": 1})
