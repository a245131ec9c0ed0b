"""`headrace bench`: one command per claim, each with its raw rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cyclopts import App
from rich.console import Console

from headrace.bench import control, routes, slab
from headrace.bench.rows import percentile, spread, write_rows
from headrace.errors import Refused

bench_app = App(name="bench", help="Measure the hand-off; rows go to --out as JSON lines.")
_console = Console(highlight=False)


@bench_app.command(name="control")
def control_command(
    *, requests: int = 200, round_trips: int = 5000, out: Path | None = None
) -> int:
    """A span's control cost at the owner, and a message's one-way time."""
    rows = list(control.run(requests, round_trips))
    write_rows(out, "control", rows)
    for row in rows:
        micros = [ns / 1e3 for ns in row["ns"]]
        _console.print(
            f"{row['measure']:>10}: p50 {percentile(micros, 50):.1f} us  "
            f"p99 {percentile(micros, 99):.1f} us  n={len(micros)}"
        )
    return 0


@bench_app.command(name="slab")
def slab_command(
    *, sizes_mb: tuple[int, ...] = (128, 1024), repeats: int = 10, out: Path | None = None
) -> int:
    """The slab path in one and two copies, as ratios to a hot memcpy."""
    rows = list(slab.run(sizes_mb, repeats))
    write_rows(out, "slab", rows)
    for size_mb in sizes_mb:
        for form in ("1-copy", "2-copy"):
            mine = [row for row in rows if row["form"] == form and row["size_mb"] == size_mb]
            _console.print(
                f"{size_mb:>5} MiB {form}: wall x{spread([r['wall_ratio'] for r in mine])}  "
                f"cpu x{spread([r['cpu_ratio'] for r in mine])}  two memcpys at once "
                f"x{spread([r['memcpy_wall_ns'] / r['two_memcpy_wall_ns'] for r in mine])}  "
                f"machine busy before {spread([r['busy_before'] for r in mine])}",
                soft_wrap=True,
            )
    return 0


@bench_app.command(name="routes")
def routes_command(
    *,
    model: str,
    prompt_file: Path,
    repeats: int = 5,
    max_prompt: int = 512,
    group_layers: int = 1,
    busy: bool = False,
    out: Path | None = None,
) -> int:
    """Whole against streamed on a real model: share imported early, tail, prefill slow-down."""
    from headrace.engine.models import resolve
    from headrace.engine.text import ModelText

    directory = resolve(model)
    if not prompt_file.is_file():
        raise Refused(f"{prompt_file} is not a file; give a text with --prompt-file")
    tokens = ModelText(directory).encode(prompt_file.read_text())[:max_prompt]
    rows = [
        {"model": model, **row}
        for row in routes.run(directory, tokens, repeats, busy=busy, group_layers=group_layers)
    ]
    write_rows(out, "routes", rows)
    _print_routes(rows)
    return 0


def _print_routes(rows: list[dict[str, Any]]) -> None:
    by_route: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_route.setdefault(row["route"], []).append(row)
    for route, mine in by_route.items():
        early = spread([row["nbytes_before_final"] / row["kv_nbytes"] for row in mine])
        _console.print(
            f"{route:>9}: prefill {spread([r['prefill_ns'] / 1e6 for r in mine])} ms  "
            f"tail {spread([r['tail_ns'] / 1e6 for r in mine])} ms  "
            f"decode in the way {spread([r['decode_in_the_way_ns'] / 1e6 for r in mine])} ms  "
            f"early {early}",
            soft_wrap=True,
        )
    streamed = by_route["streamed"][0]
    bound = 1 - streamed["last_group_nbytes"] / streamed["kv_nbytes"]
    pairs = zip(by_route["whole"], by_route["streamed"], strict=True)
    slower = spread([b["prefill_ns"] / a["prefill_ns"] - 1 for a, b in pairs])
    _console.print(f"bound of the early share: {bound:.4f}; prefill slow-down: {slower}")
