"""How costs grow: at smoke size, and slopes and goals on invented rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.bench import scale
from headrace.bench.rows import RowFile
from headrace.bench.scale import (
    AXES,
    KEY,
    LAYERS,
    Numbers,
    bend,
    figures,
    handoff_cut,
    medians,
    slopes,
)
from headrace.cli import run_command

SMOKE = Numbers(groups=4, slots=2, requests=2, repeats=2)


def quiet(_: str) -> None:
    pass


def test_rows_at_smoke_size() -> None:
    file = RowFile(None, "scale", KEY)
    scale.run(SMOKE, file, quiet)
    numbers = {axis: sorted(medians(file.rows, axis)) for axis in AXES}
    assert numbers == {"groups": [1, 2, 4], "slots": [1, 2], "waiting": [1, 2], "in_flight": [1, 2]}
    assert len(file.rows) == 2 * 9
    assert all(row["owner_ns"] > 0 for row in file.rows)
    for row in file.rows:
        if row["axis"] == "groups":
            assert row["spans"] == row["messages"] == row["number"]
    assert len(list(figures(file.rows))) == len(AXES)


def test_numbers_are_the_powers_of_two() -> None:
    assert Numbers(groups=64).of("groups") == [1, 2, 4, 8, 16, 32, 64]
    assert Numbers(slots=5).of("slots") == [1, 2, 4]
    assert Numbers(requests=1).of("waiting") == Numbers(requests=1).of("in_flight") == [1]


@pytest.mark.parametrize("power", range(11))
def test_a_prompt_is_cut_into_as_many_spans_as_asked_for(power: int) -> None:
    number = 1 << power
    options = handoff_cut(number)
    chunks = 1 if options.chunk == 0 else scale.NUM_TOKENS // options.chunk
    assert LAYERS // options.group_layers * chunks == number


def test_it_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "scale.jsonl"
    scale.run(SMOKE, RowFile(path, "scale", KEY), quiet)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]) + lines[-1][:10])
    said: list[str] = []
    file = RowFile(path, "scale", KEY, resume=True)
    scale.run(SMOKE, file, said.append)
    assert said == ["in_flight: 1 of 4 are to be measured"]
    assert len(file.rows) == 18


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "scale.jsonl", tmp_path / "scale.svg"
    small = ["--groups", "2", "--slots", "2", "--requests", "2", "--repeats", "1"]
    assert run_command(["bench", "scale", *small, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "grows as" in printed
    assert "goals met" in printed
    assert run_command(["bench", "plot", str(out), "--out", str(picture)]) == 0
    assert "in flight" in picture.read_text()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--groups", "0"], "--groups is 0"),
        (["--groups", "4097"], "--groups is 4097; it must be at most 4096"),
        (["--slots", "1025"], "--slots is 1025"),
        (["--requests", "-1"], "--requests is -1"),
        (["--repeats", "0"], "--repeats is 0"),
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
    monkeypatch.setattr(scale, "run", None)
    assert run_command(["bench", "scale", *arguments]) == 2
    assert sentence in capsys.readouterr().err


# Slopes and goals, on invented rows.


def rows_of(costs: dict[int, float], axis: str = "groups") -> list[dict[str, Any]]:
    return [
        {"axis": axis, "number": number, "repeat": repeat, "owner_ns": ns + repeat}
        for number, ns in costs.items()
        for repeat in range(3)
    ]


def test_slopes_are_powers_of_the_number() -> None:
    found = slopes({1: 5.0, 2: 10.0, 4: 40.0, 8: 40.0})
    assert [(slope.before, slope.after) for slope in found] == [(1, 2), (2, 4), (4, 8)]
    assert [slope.power for slope in found] == pytest.approx([1, 2, 0])
    assert slopes({1: 5.0}) == []


def test_a_bend_is_the_first_slope_above_linear() -> None:
    found = slopes({1: 100.0, 2: 200.0, 4: 700.0, 8: 5000.0})
    bent = bend(found)
    assert bent is not None
    assert (bent.before, bent.after) == (2, 4)
    assert bend(found[:1]) is None


@pytest.mark.parametrize(
    ("costs", "met", "word"),
    [
        ({1: 1e6, 2: 2e6, 4: 4.1e6}, True, "steepest n^1.04 from 2 to 4"),
        ({1: 1e6, 2: 2e6, 4: 8e6}, False, "bends above linear from 2 to 4"),
    ],
)
def test_the_goal_is_linear_or_better(costs: dict[int, float], met: bool, word: str) -> None:
    (figure,) = figures(rows_of(costs, "waiting"))
    assert figure.met is met
    assert word in figure.result


def test_one_number_alone_has_no_slope() -> None:
    assert not list(figures(rows_of({1: 1e6})))
