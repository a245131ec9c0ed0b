"""The size curve into device memory: `headrace.bench.curve` with the lanes of the CUDA decoder.

The source imitates a device that computes KV at a set pace, so the figures are "paced"; what is
real on a real device is the way from the slab into its memory. Once with pinned slabs and once with
pageable ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from headrace.bench.curve import Cell, CurveBench, Setting, options_of
from headrace.bench.device.place import Place, PlaceRows
from headrace.bench.device.steps.link import PINNED
from headrace.bench.geometries import GEOMETRIES
from headrace.errors import Refused

GEOMETRY: Final = "llama-3.1-8b"
LARGE_GB: Final = 1.0


def run(place: Place, step: str, say: Callable[[str], None]) -> None:
    """Rows as `headrace bench curve` has them, each with how the slab was: pinned or pageable."""
    file = PlaceRows(place.kind, place.folder / f"{step}.jsonl", step)
    sizes = place.sizes
    for pinned in (True, False):
        fixed = _cell(place, 0.0, ("whole",), sizes.fixed_repeats)
        _measure(place, fixed, file, say, pinned=pinned)
        for size_gb in sizes.curve_gb:
            if not pinned and size_gb > sizes.pageable_gb:
                continue
            routes = sizes.curve_routes if pinned else sizes.pageable_routes
            repeats = sizes.repeats if size_gb <= LARGE_GB else sizes.repeats_large
            _measure(place, _cell(place, size_gb, routes, repeats), file, say, pinned=pinned)


def _cell(place: Place, size_gb: float, routes: Sequence[str], repeats: int) -> Cell:
    pace = Setting(place.sizes.curve_pace)
    return Cell(GEOMETRIES[GEOMETRY], size_gb, pace, tuple(routes), repeats)


def _measure(
    place: Place, cell: Cell, file: PlaceRows, say: Callable[[str], None], *, pinned: bool
) -> None:
    """All rows of a cell, with a decoder of its own; one without room is told in a row."""
    same = {"slab": PINNED[pinned]}
    try:
        decoder = place.open_memory(cell.geometry.decoder(), cell.prompt.num_tokens, pinned=pinned)
        with CurveBench(cell, decoder=decoder) as bench:
            for row in cell.rows():
                measured = bench.measure(options_of(row["route"]))
                was_pinned = decoder.statistics()["pinned_nbytes"] > 0
                file.append({**row, **same, "registered": was_pinned, **measured})
    except Refused as exc:
        file.append({"measure": "skipped", **cell.key, **same, "skipped": str(exc)})
        say(f"{cell.words}, {PINNED[pinned]}: {exc}")
        return
    say(f"{cell.words}, {PINNED[pinned]}: done")
