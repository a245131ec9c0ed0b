"""`headrace bench`: one command per claim, each with its raw rows."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import msgspec
from cyclopts import App
from rich.console import Console
from rich.table import Table

from headrace.backends.load import check_name
from headrace.bench import control, faults, routes, slab
from headrace.bench.faults.pair import Setting
from headrace.bench.faults.table import figures
from headrace.bench.rows import percentile, spread, write_rows
from headrace.cli.arguments import check_count, check_output, open_text, read_prompt
from headrace.errors import Refused

bench_app = App(name="bench", help="Measure the hand-off; rows go to --out as JSON lines.")
MAX_SIZE_MB = 1 << 20

_console = Console(highlight=False)


@bench_app.command(name="control")
def control_command(
    *, requests: int = 200, round_trips: int = 5000, out: Path | None = None
) -> int:
    """A span's control cost at the owner, and a message's one-way time."""
    check_count("--requests", requests)
    check_count("--round-trips", round_trips)
    check_output("--out", out, make_parents=True)
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
    *,
    sizes_mb: tuple[int, ...] = (128, 1024),
    pieces_mb: tuple[int, ...] = (8,),
    repeats: int = 10,
    out: Path | None = None,
) -> int:
    """The slab path in one and two copies, as ratios to a hot memcpy.

    Parameters
    ----------
    pieces_mb
        What an import is cut into, MiB; 8 is the owner's default.
    """
    _check_sizes("--sizes-mb", sizes_mb)
    for piece_mb in pieces_mb:
        check_count("--pieces-mb", piece_mb, limit=MAX_SIZE_MB + 1)
    check_count("--repeats", repeats)
    check_output("--out", out, make_parents=True)
    rows = [
        {"piece_mb": piece_mb, **row}
        for piece_mb in pieces_mb
        for row in slab.run(sizes_mb, repeats, chunk_nbytes=piece_mb << 20)
    ]
    write_rows(out, "slab", rows)
    for piece_mb, size_mb in product(pieces_mb, sizes_mb):
        for form in ("1-copy", "2-copy"):
            key = (form, size_mb, piece_mb)
            mine = [r for r in rows if (r["form"], r["size_mb"], r["piece_mb"]) == key]
            _console.print(
                f"{size_mb:>5} MiB {form}, pieces of {piece_mb} MiB: "
                f"wall x{spread([r['wall_ratio'] for r in mine])}  "
                f"cpu x{spread([r['cpu_ratio'] for r in mine])}  two memcpys at once "
                f"x{spread([r['memcpy_wall_ns'] / r['two_memcpy_wall_ns'] for r in mine])}  "
                f"machine busy before {spread([r['busy_before'] for r in mine])}",
                soft_wrap=True,
            )
    return 0


@bench_app.command(name="faults")
def faults_command(
    *,
    cycles: int = 200,
    sizes_mb: tuple[int, ...] = (16, 256),
    digest_sizes_mb: tuple[int, ...] = (16, 128),
    repeats: int = 10,
    source: str = "replay",
    source_options: str = "{}",
    decoder: str = "null",
    decoder_options: str = "{}",
    max_prompt: int = 1 << 16,
    out: Path | None = None,
) -> int:
    """Deaths and cancels on real processes: how soon they are over, and what digests cost.

    Parameters
    ----------
    cycles
        Kills for each size of the slab, and cancels.
    sizes_mb
        Slabs of the sources that are killed, MiB.
    digest_sizes_mb
        What is handed over with and without digests, MiB.
    source, decoder
        As for `headrace run`. `null` stands for an emulated decoder, and `replay` is paced.
    """
    _check_sizes("--sizes-mb", sizes_mb)
    _check_sizes("--digest-sizes-mb", digest_sizes_mb)
    check_count("--cycles", cycles)
    check_count("--repeats", repeats)
    check_count("--max-prompt", max_prompt)
    check_name("source", source)
    check_name("decoder", decoder)
    check_output("--out", out, make_parents=True)
    setting = Setting(
        source,
        _json_object("--source-options", source_options),
        decoder,
        _json_object("--decoder-options", decoder_options),
        max_prompt,
    )
    rows = list(
        faults.run(
            setting,
            cycles=cycles,
            sizes_mb=sizes_mb,
            digest_sizes_mb=digest_sizes_mb,
            repeats=repeats,
        )
    )
    write_rows(out, "faults", rows)
    _print_figures(rows)
    return 0


def _print_figures(rows: list[dict[str, Any]]) -> None:
    table = Table("figure", "result", "goal", "")
    for figure in figures(rows):
        met = {True: "met", False: "missed", None: ""}[figure.met]
        table.add_row(figure.name, figure.result, figure.goal, met)
    _console.print(table)


def _check_sizes(flag: str, sizes_mb: tuple[int, ...]) -> None:
    if not sizes_mb:
        raise Refused(f"{flag} is empty; give at least one size in MiB")
    for size_mb in sizes_mb:
        check_count(flag, size_mb, limit=MAX_SIZE_MB + 1)


def _json_object(flag: str, text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as exc:
        raise Refused(f"{flag} is not a JSON object: {exc}", field=flag) from exc


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

    check_count("--repeats", repeats)
    check_count("--max-prompt", max_prompt)
    check_count("--group-layers", group_layers)
    check_output("--out", out, make_parents=True)
    text = read_prompt(prompt_file)
    directory = resolve(model)
    codec, _ = open_text(directory)
    tokens = codec.encode(text)[:max_prompt]
    if not tokens:
        raise Refused(f"{prompt_file} is empty; give a text with --prompt-file")
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
