"""`headrace bench curve`: tail, hidden share and TTFT of every route, from 0.1 to 4 GB of KV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from headrace.bench import curve
from headrace.bench.curve import DEFAULT_WAYS, KEY, SIZES_GB, Setting, linked
from headrace.bench.curve_table import Line, cells
from headrace.bench.geometries import GEOMETRIES
from headrace.cli.arguments import check_count
from headrace.cli.bench.tables import open_rows, print_goals
from headrace.errors import Refused

MAX_RATE = 1e6  # GB/s or GB: far beyond every machine, so that no product of them overflows

_console = Console(highlight=False)


def curve_command(
    *,
    sizes_gb: tuple[float, ...] = SIZES_GB,
    geometries: tuple[str, ...] = tuple(GEOMETRIES),
    routes: tuple[str, ...] = DEFAULT_WAYS,
    pace: tuple[float, ...] = (1.0,),
    link_gb_per_s: tuple[float, ...] = (),
    link_scale: float = 0.2,
    repeats: int = 0,
    all_large: bool = False,
    resume: bool = False,
    out: Path | None = None,
) -> int:
    """The transfer tail against the size of the KV: paced replay source, memory-only decoder.

    A prefill takes the same time on every route here, so what differs is the transfer. `auto` has a
    source and an owner of its own, and so needs as much memory again.

    Parameters
    ----------
    sizes_gb
        KV of one prompt, GB (1e9 bytes). Above 1 GB llama-3.1-8b and gemma-3-12b only.
    routes
        `streamed-8th` is about 8 layer groups; `streamed-2` is there too. The chunked routes also
        prefill in such chunks.
    pace
        KV that the source computes, GB/s; 0 is unpaced.
    link_gb_per_s
        Behind emulated links of these speeds, up to 0.5 GB, instead of at memory speed.
    link_scale
        Pace and link are both multiplied by it: no link faster than memory can be emulated.
    repeats
        Of each route and size; 0 is 10 up to 0.5 GB, 5 up to 1 GB and 3 above.
    all_large
        Sizes above 1 GB with every geometry.
    resume
        Go on with the rows that --out holds.
    """
    _check(sizes_gb, pace, link_gb_per_s, link_scale)
    check_count("--repeats", repeats, least=0)
    if link_gb_per_s:
        settings = [linked(each, link, link_scale) for each in pace for link in link_gb_per_s]
    else:
        settings = [Setting(each) for each in pace]
    todo = curve.cells_of(
        geometries, sizes_gb, settings, routes, repeats=repeats, all_large=all_large
    )
    file = open_rows(out, "curve", KEY, {"link_scale": link_scale}, resume=resume)
    curve.run(todo, file, lambda text: _console.print(text, soft_wrap=True))
    _print_rows(file.rows)
    return 0


def _check(
    sizes_gb: tuple[float, ...],
    pace: tuple[float, ...],
    link_gb_per_s: tuple[float, ...],
    link_scale: float,
) -> None:
    for flag, values in (("--sizes-gb", sizes_gb), ("--pace", pace)):
        if not values:
            raise Refused(f"{flag} is empty; give at least one number", field=flag)
    for flag, values, zero in (
        ("--sizes-gb", sizes_gb, False),
        ("--pace", pace, True),
        ("--link-gb-per-s", link_gb_per_s, False),
        ("--link-scale", (link_scale,), False),
    ):
        for value in values:
            if not (0 < value <= MAX_RATE or (zero and value == 0)):
                least = "0 or more" if zero else "above 0"
                raise Refused(f"{flag} is {value:g}; it must be {least}, and finite", field=flag)


def _print_rows(rows: list[dict[str, Any]]) -> None:
    judged = []
    for cell in cells(rows):
        _console.print(str(cell.key))
        for line in cell.lines():
            _console.print(_words(line), soft_wrap=True)
        judged += list(cell.figures())
    print_goals(_console, judged)


def _words(line: Line) -> str:
    hidden = "n/a" if line.hidden is None else f"{line.hidden:.4f}"
    ratio = "" if line.ttft_ratio is None else f", to whole x{line.ttft_ratio}"
    saved = "n/a" if line.saved is None else f"{line.saved:.4f}"
    cpu = "n/a" if line.cpu_s is None else f"{line.cpu_s.median:.3f} s"
    return (
        f"{line.route:>14}: tail {line.tail_ms} ms, hidden {hidden} of {line.bound:.4f}, "
        f"saved {saved}, TTFT {line.ttft_ms.median:.2f} ms{ratio}, CPU {cpu}, {line.groups} groups"
    )
