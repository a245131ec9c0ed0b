"""Pictures of the rows of all steps before it, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Callable

from headrace.bench.device.place import Place
from headrace.bench.plots import draw
from headrace.bench.plots.device import DRAWN
from headrace.bench.rows import read_rows


def run(place: Place, step: str, say: Callable[[str], None]) -> None:
    """One picture for each file that holds something to draw. Raises: Refused as `draw`."""
    for path in sorted(place.folder.glob("*.jsonl")):
        rows = [row for row in read_rows(path) if "skipped" not in row]
        if DRAWN & {row["measure"] for row in rows}:
            draw(path, path.with_suffix(".svg"))
            say(f"{path.with_suffix('.svg').name}: drawn")
