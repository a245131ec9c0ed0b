"""What messages cost, at smoke size, and the goals on invented rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.bench import message
from headrace.bench.message import KEY, LAYERS, Counts, figures, median_interval, slow_downs
from headrace.bench.rows import RowFile
from headrace.cli import run_command

SMOKE = Counts(requests=2, round_trips=50, rounds=2)


def quiet(_: str) -> None:
    pass


def test_rows_hold_every_sample() -> None:
    file = RowFile(None, "message", KEY)
    message.run(SMOKE, file, quiet)
    rows = {row["measure"]: row for row in file.rows}
    assert list(rows) == ["span_cost", "announce", "one_way", "recording"]
    for measure, samples in (("span_cost", 2 * LAYERS), ("announce", 2 * LAYERS), ("one_way", 50)):
        assert len(rows[measure]["ns"]) == samples
        assert min(rows[measure]["ns"]) > 0
    for name in ("wall_ns", "cpu_ns"):
        assert [len(each) for each in rows["recording"][name]] == [4, 4]
        assert min(map(min, rows["recording"][name])) > 0


def test_it_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "message.jsonl"
    message.run(SMOKE, RowFile(path, "message", KEY), quiet)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3] + lines[4:]))  # the stamp, three rows of four
    said: list[str] = []
    file = RowFile(path, "message", KEY, resume=True)
    message.run(SMOKE, file, said.append)
    assert said == ["measuring one_way"]
    assert len(file.rows) == 4


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "message.jsonl", tmp_path / "message.svg"
    small = ["--requests", "1", "--round-trips", "20", "--rounds", "1", "--out", str(out)]
    assert run_command(["bench", "message", *small]) == 0
    printed = capsys.readouterr().out
    assert "span_cost, us: p50" in printed
    assert "recording a trace, added CPU" in printed
    assert len(out.read_text().splitlines()) == 5
    assert run_command(["bench", "plot", str(out), "--out", str(picture)]) == 0
    assert "a span at its source" in picture.read_text()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--requests", "0"], "--requests is 0"),
        (["--round-trips", "-1"], "--round-trips is -1"),
        (["--rounds", "0"], "--rounds is 0"),
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
    monkeypatch.setattr(message, "run", None)
    assert run_command(["bench", "message", *arguments]) == 2
    assert sentence in capsys.readouterr().err


# Goals, on invented rows.


def judged(row: dict[str, Any]) -> list[bool | None]:
    return [figure.met for figure in figures([row])]


@pytest.mark.parametrize(
    ("measure", "median_us", "met"),
    [
        ("span_cost", 25.0, True),
        ("span_cost", 25.1, False),
        ("one_way", 50.0, True),
        ("one_way", 50.1, False),
        ("announce", 1e6, None),
    ],
)
def test_the_goals_of_costs(measure: str, median_us: float, met: bool | None) -> None:
    samples = [1.0, median_us * 1e3, 1e9]
    assert judged({"measure": measure, "ns": samples}) == [met]


@pytest.mark.parametrize(("traced", "met"), [(1009, True), (1010, False)])
def test_the_goal_of_recording(traced: int, met: bool) -> None:
    rounds = [[1000, traced, traced, 1000]]
    assert judged({"measure": "recording", "wall_ns": rounds, "cpu_ns": [[1, 1, 1, 1]]}) == [
        met,
        True,
    ]


def test_a_slow_down_is_of_a_whole_round() -> None:
    assert slow_downs([[100, 110, 130, 100], [100, 90, 90, 100]]) == pytest.approx([0.2, -0.1])


def test_the_interval_of_a_median_is_by_ranks() -> None:
    interval = median_interval([float(at) for at in range(100)])
    assert (interval.low, interval.high) == (40, 60)
    assert median_interval([3.0]) == (3, 3, 3)
