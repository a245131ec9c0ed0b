"""Batched decode at smoke size: every block is measured, and ratios come from whole repeats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.bench.batch import ARMS, KEY, gains
from headrace.bench.rows import RowFile, read_rows
from headrace.cli import run_command
from tests.e2e.families import directory_of

pytest.importorskip("matplotlib")


def bench(out: Path, *more: str) -> int:
    model = str(directory_of("gemma3"))
    sizes = ["--active=1", "--active=3", "--batches=2", "--batches=4", "--prompt=20", "--steps=3"]
    return run_command(["bench", "batch", "--model", model, *sizes, *more, "--out", str(out)])


def test_all_blocks_are_measured_and_gone_on_with_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "batch.jsonl"
    assert bench(out, "--repeats", "1") == 0
    assert bench(out, "--repeats", "2", "--resume") == 0
    assert str(directory_of("gemma3")) not in out.read_text(), "a place of this machine"
    rows = read_rows(out)
    keys = [tuple(row[name] for name in KEY) for row in rows]
    assert len(set(keys)) == len(keys) == 2 * 2 * 2 * len(ARMS)
    assert {row["run"] for row in rows} == {0, 1}
    for row in rows:
        assert row["arm"] == ARMS[row["order"]]
        assert row["tokens"] == row["active"] * 3
        batch = 1 if row["arm"] == "exact" else row["decode_batch"]
        assert row["pairing"]["decode_batch"] == batch
    assert set(gains(rows)) == {(1, 2), (1, 4), (3, 2), (3, 4)}
    assert "batched / exact" in capsys.readouterr().out
    picture = tmp_path / "batch.svg"
    assert run_command(["bench", "plot", str(out), "--out", str(picture)]) == 0
    assert "batch 4" in picture.read_text()


def row(repeat: int, order: int, wall_ns: int) -> dict[str, Any]:
    place = {"active": 4, "decode_batch": 2, "repeat": repeat, "order": order, "run": 0}
    return {**place, "arm": ARMS[order], "wall_ns": wall_ns, "tokens": 10}


def test_a_ratio_is_of_both_halves_of_a_repeat() -> None:
    """A repeat that was cut short counts for nothing."""
    rows = [row(0, at, ns) for at, ns in enumerate((300, 100, 200, 300))]
    rows += [row(1, at, ns) for at, ns in enumerate((400, 100, 100, 400))]
    rows += [row(2, at, ns) for at, ns in enumerate((900, 1, 1))]
    gain = gains(rows)[4, 2]
    assert (gain.ratio.median, gain.ratio.samples) == (3.0, 2)
    assert gain.exact == pytest.approx(1e9 / 35)
    assert gain.batched == pytest.approx(1e9 / 12.5)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--batches", "1"], "--batches is 1; it must be at least 2"),
        (["--active", "0"], "--active is 0"),
        (["--steps", "0"], "--steps is 0"),
        (["--prompt", "5000"], "holds 512 positions, and a prompt of 5000 with 3 steps"),
    ],
)
def test_a_mistake_is_one_sentence(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = {"--batches": "2", "--active": "1", "--steps": "3", "--prompt": "20"}
    given |= {arguments[0]: arguments[1]}
    words = [word for pair in given.items() for word in pair]
    model = str(directory_of("gemma3"))
    assert run_command(["bench", "batch", "--model", model, *words]) == 2
    complaint = capsys.readouterr().err
    assert sentence in complaint
    assert complaint.count("\n") == 1


def test_rows_of_another_setting_are_not_gone_on_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "batch.jsonl"
    RowFile(out, "batch", KEY, settings={"model": "another"}).append(row(0, 0, 1))
    assert bench(out, "--repeats", "1", "--resume") == 2
    assert "was measured with model another" in capsys.readouterr().err
    assert json.loads(out.read_text().splitlines()[0])["claim"] == "batch"
