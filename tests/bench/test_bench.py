"""Every benchmark at smoke size: the rows are whole, and the figures are of what they say."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from headrace.bench import imports
from headrace.bench.rows import RowFile, pairs, percentile, read_rows, spread, write_rows
from headrace.cli import run_command
from headrace.errors import Refused


def test_rows_begin_with_a_stamp(tmp_path: Path) -> None:
    path = tmp_path / "results" / "x.jsonl"
    write_rows(path, "nothing", [{"a": 1}, {"a": 2}])
    stamp, *found = map(json.loads, path.read_text().splitlines())
    assert stamp["claim"] == "nothing"
    for key in ("commit", "dirty", "cpu", "kernel", "python", "packages", "load"):
        assert key in stamp["stamp"]
    assert found == [{"a": 1}, {"a": 2}]
    write_rows(None, "nothing", found)


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
    claim, *found = map(json.loads, out.read_text().splitlines())
    assert claim["claim"] == "imports"
    assert {row["way"] for row in found} >= {"memmove-8", "remap"}


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


def test_what_was_taken_up_is_whole_at_every_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.jsonl"
    RowFile(path, "nothing", ("a",)).append({"a": 1})
    text = path.read_text()

    def killed(*_: object) -> None:
        assert path.read_text() == text + '{"a": 2'  # nothing was taken away yet
        raise KeyboardInterrupt

    with path.open("a") as file:
        file.write('{"a": 2')
    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        RowFile(path, "nothing", ("a",), resume=True)
    monkeypatch.undo()
    RowFile(path, "nothing", ("a",), resume=True)
    assert path.read_text() == text
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_rows_of_other_settings_are_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    RowFile(path, "nothing", ("a",), settings={"s": 1, "sizes": (1, 2)}).append({"a": 1})
    text = path.read_text()
    assert json.loads(text.splitlines()[0])["settings"] == {"s": 1, "sizes": [1, 2]}
    for settings, words in (
        ({"s": 2, "sizes": (1, 2)}, "was measured with s 1 and this run has 2"),
        ({"s": 1}, r"was measured with sizes \[1, 2\] and this run has None"),
        ({"s": 1, "sizes": (1, 2), "t": 3}, "was measured with t None and this run has 3"),
    ):
        with pytest.raises(Refused, match=words):
            RowFile(path, "nothing", ("a",), settings=settings, resume=True)
    assert path.read_text() == text
    again = RowFile(path, "nothing", ("a",), settings={"sizes": [1, 2], "s": 1}, resume=True)
    assert again.rows == [{"a": 1, "run": 0}]


def test_a_skipped_row_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    first = RowFile(path, "nothing", ("a",))
    first.append({"a": 1, "skipped": "no room"})
    first.append({"a": 2})
    assert {"a": 1} not in first
    again = RowFile(path, "nothing", ("a",), resume=True)
    assert [row["a"] for row in again.rows] == [2]
    assert {"a": 2} in again
    again.append({"a": 1})
    assert [(row["a"], row["run"]) for row in read_rows(path)] == [(2, 0), (1, 1)]


def test_pairs_are_of_one_run() -> None:
    ours = [{"n": 1, "ns": 3}, {"n": 2, "ns": 4, "run": 1}, {"n": 3, "ns": 5, "run": 1}]
    theirs = [{"n": 1, "ns": 6}, {"n": 2, "ns": 7}, {"n": 3, "ns": 8, "run": 1}]
    assert [(a["ns"], b["ns"]) for a, b in pairs(ours, theirs, "n")] == [(3, 6), (5, 8)]


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
