"""Ways to import at smoke size."""

from __future__ import annotations

import ctypes
from contextlib import closing
from pathlib import Path

import pytest

from headrace.bench import imports
from headrace.bench.plots import draw
from headrace.bench.rows import read_rows
from headrace.cli import run_command
from headrace.errors import DeviceError
from headrace.memory import Slab

WAYS = {
    *(f"{kind}-{mb}" for kind in ("memmove", "numpy") for mb in imports.PIECES_MB),
    *("two-threads-8", "busy-memmove-8", "busy-two-threads-8"),
    *("window-1", "window-4", "cold-lane", "cold-mapping", "remap"),
}


def test_every_way_is_measured_plain_and_tuned_and_drawn(tmp_path: Path) -> None:
    out = tmp_path / "imports.jsonl"
    assert (
        run_command(["bench", "imports", "--sizes-mb", "4", "--repeats", "2", "--out", str(out)])
        == 0
    )
    rows = read_rows(out)
    for tuned in (False, True):
        assert {row["way"] for row in rows if row["tuned"] is tuned} == WAYS
    assert [row["half"] for row in rows if row["way"] == "memmove-8"] == [0, 1, 2, 3]
    for row in rows:
        assert row["ratio"] == row["memcpy_wall_ns"] / row["wall_ns"]
    draw(out, tmp_path / "imports.svg")
    assert "cold-lane" in (tmp_path / "imports.svg").read_text()


def test_every_way_copies_all_bytes() -> None:
    nbytes = (3 << 20) + 5  # no multiple of a piece or a window
    with closing(Slab.create(nbytes)) as slab:
        ways = imports.Ways(slab, nbytes)
        made = ways.all()
        assert set(made) == WAYS - {"window-4"}
        for name, way in made.items():
            ctypes.memset(ways.lane.address, 0, nbytes)
            ctypes.memset(slab.address, 1, nbytes)
            way()
            copied = {"cold-lane": 0, "remap": 0, "window-1": 2}.get(name, 1)
            assert bytes(ways.lane.view) == bytes([copied]) * nbytes, name


def test_a_process_that_fails_is_told() -> None:
    with pytest.raises(DeviceError, match="failed with status"):
        list(imports.run((0,), 2))
