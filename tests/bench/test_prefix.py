"""Kept prompts at smoke size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.bench import prefix
from headrace.bench.plots import draw
from headrace.bench.prefix_table import GOAL, lines, worst_identical
from headrace.bench.rows import read_rows
from headrace.cli import run_command
from tests.e2e.families import directory_of

LABELS = {"cold", "cold-longer", "first", "identical", "identical-copied"}


def command(out: Path, *more: str, rest: int = 6) -> list[str]:
    model = str(directory_of("llama"))
    sizes = ["--tokens", "24", "--rest", str(rest), "--repeats", "2"]
    return ["bench", "prefix", "--model", model, *sizes, "--out", str(out), *more]


@pytest.mark.full_matrix
def test_every_label_of_every_kind_is_measured_and_drawn(tmp_path: Path) -> None:
    out = tmp_path / "prefix.jsonl"
    assert run_command(command(out)) == 0
    assert str(directory_of("llama")) not in out.read_text(), "a place of this machine"
    rows = read_rows(out)
    for kind in prefix.KINDS:
        for repeat in (0, 1):
            mine = [r for r in rows if (r["kind"], r["repeat"]) == (kind, repeat)]
            assert {row["label"] for row in mine} == {*LABELS, f"longer-{kind}"}
            assert len(mine) == 6
    for row in rows:
        told = {0: ("cold", "cold-longer", "first"), 24: ("identical", "identical-copied")}
        longer = row["label"].startswith("longer-")  # a tiny model may be as fast cold
        assert row["label"] in told.get(row["kept_positions"], ()) or longer, row
        if row["label"].startswith("identical"):
            assert (row["remainder"], row["kv_nbytes"]) == ("none", 0)
    draw(out, tmp_path / "prefix.svg")
    assert "identical-copied" in (tmp_path / "prefix.svg").read_text()
    before = out.read_text()
    assert run_command(command(out, "--resume")) == 0
    assert out.read_text() == before, "nothing was missing"


def test_a_prompt_that_the_model_cannot_hold_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "prefix.jsonl"
    assert run_command(command(out, rest=100_000)) == 2
    assert "ask for a shorter prompt" in capsys.readouterr().err


def made(label: str, ttft_ns: float, repeat: int) -> dict[str, Any]:
    where = {"model": "m", "prompt_tokens": 4, "rest": 1, "kind": "owner"}
    kept = {"kept_positions": 4 if label.startswith("i") else 0, "remainder": "none"}
    return where | kept | {"label": label, "repeat": repeat, "ttft_ns": ttft_ns}


def test_ratios_are_taken_within_a_repeat_and_the_worst_is_told() -> None:
    rows = [made("cold", 100.0, 0), made("cold", 1000.0, 1)]
    rows += [made("identical", 1.0, 0), made("identical", 100.0, 1)]
    rows += [made("identical-copied", 2.0, 0), made("identical-copied", 20.0, 1)]
    rows += [made("longer-owner", 5.0, 0)]  # without its cold one
    found = {line.label: line for line in lines(rows)}
    assert set(found) == {"cold", "identical", "identical-copied"}
    assert found["identical"].ratio.median == pytest.approx((0.01 + 0.1) / 2)
    assert found["identical-copied"].taken == "2 x 4 kept, rest by none"
    worst = worst_identical(rows)
    assert worst is not None
    assert worst == found["identical"].ratio
    assert worst.median > GOAL
    assert worst_identical(rows[:2]) is None
