"""Pictures: drawn from rows alone, equal for equal rows, and refused in one sentence."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.bench import plots
from headrace.bench.plots import claim_of, draw
from headrace.bench.rows import write_rows
from headrace.cli import run_command
from headrace.errors import Refused

pytest.importorskip("matplotlib")

SCALE: list[dict[str, Any]] = [
    {"axis": axis, "number": number, "repeat": repeat, "owner_ns": number * 1000 + repeat}
    for axis in ("groups", "waiting")
    for number in (1, 2, 4)
    for repeat in range(3)
]
MESSAGE: list[dict[str, Any]] = [
    {"measure": "span_cost", "ns": [1000, 2000, 3000]},
    {"measure": "recording", "wall_ns": [[100, 101, 101, 100]], "cpu_ns": [[9, 9, 9, 9]]},
]


def curve_rows() -> list[dict[str, Any]]:
    """Two sizes of two geometries by three routes; the fixed cost and a cell that did not fit."""
    rows: list[dict[str, Any]] = []
    for geometry in ("one", "two"):
        key = {"geometry": geometry, "pace_gb_per_s": 1.0, "link_gb_per_s": 0.0, "repeat": 0}
        rows.append({**key, "measure": "fixed", "size_gb": 0.0, "tail_ns": 1e6})
        rows.append({**key, "measure": "skipped", "size_gb": 9.0, "skipped": "too large"})
        for size_gb in (0.1, 1.0):
            for route, tail in (("whole", 100), ("streamed-8", 20), ("auto", 21)):
                handoff = {
                    **key,
                    "measure": "hand-off",
                    "size_gb": size_gb,
                    "route": route,
                    "prefill_ns": size_gb * 1e9,
                    "tail_ns": tail * size_gb * 1e6,
                    "import_ns": tail * size_gb * 1e6,
                    "ttft_ns": (1000 + tail) * size_gb * 1e6,
                }
                rows.append(handoff)
    return rows


ROWS: dict[str, list[dict[str, Any]]] = {"scale": SCALE, "message": MESSAGE, "curve": curve_rows()}


@pytest.mark.parametrize("claim", ROWS)
def test_equal_rows_give_an_equal_picture(claim: str, tmp_path: Path) -> None:
    rows = tmp_path / f"{claim}.jsonl"
    pictures = [tmp_path / "new" / "a.svg", tmp_path / "new" / "b.svg"]
    for picture in pictures:
        write_rows(rows, claim, ROWS[claim])  # another time in the stamp
        draw(rows, picture)
    first, second = (picture.read_text() for picture in pictures)
    assert first == second
    assert "</svg>" in first
    assert "dc:date" not in first


@pytest.mark.parametrize("ending", [".png", ".pdf"])
def test_other_formats(ending: str, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", "scale", SCALE)
    out = tmp_path / f"picture{ending}"
    draw(tmp_path / "rows.jsonl", out)
    assert out.stat().st_size > 1000


def test_a_curve_of_cells_that_did_not_fit_is_an_empty_picture(tmp_path: Path) -> None:
    rows = [row for row in curve_rows() if row["measure"] != "hand-off"]
    write_rows(tmp_path / "rows.jsonl", "curve", rows)
    draw(tmp_path / "rows.jsonl", tmp_path / "picture.svg")
    assert "</svg>" in (tmp_path / "picture.svg").read_text()


def test_what_cannot_be_drawn_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "picture.svg"
    write_rows(rows, "dreams", [{"a": 1}])
    with pytest.raises(Refused, match="rows of 'dreams' cannot be drawn"):
        draw(rows, out)
    write_rows(rows, "scale", [])
    with pytest.raises(Refused, match="holds no rows yet"):
        draw(rows, out)
    rows.write_text(json.dumps({"a": 1}) + "\n")
    with pytest.raises(Refused, match="does not begin with a benchmark's stamp"):
        claim_of(rows)
    write_rows(rows, "scale", SCALE)
    with pytest.raises(Refused, match=r"does not end in one of \.svg"):
        draw(rows, tmp_path / "picture.jpg")
    monkeypatch.setitem(plots.MODULES, "scale", "headrace.bench.plots.missing")
    with pytest.raises(Refused, match="there is no picture of them"):
        draw(rows, out)
    assert not out.exists()


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path / "rows.jsonl", "scale", SCALE)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(Refused, match=r"drawing needs matplotlib.*pip install 'headrace\[bench\]'"):
        draw(tmp_path / "rows.jsonl", tmp_path / "picture.svg")


@pytest.mark.parametrize(
    ("rows", "out", "sentence"),
    [
        ("/nowhere.jsonl", "picture.svg", "/nowhere.jsonl is no file"),
        ("rows.jsonl", "picture.jpg", "does not end in one of"),
        ("rows.jsonl", "/dev/null/picture.svg", "is not a directory"),
    ],
)
def test_a_mistake_is_one_sentence(
    rows: str,
    out: str,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", "scale", SCALE)
    assert run_command(["bench", "plot", rows, "--out", out]) == 2
    complaint = capsys.readouterr().err
    assert sentence in complaint
    assert complaint.count("\n") == 1
