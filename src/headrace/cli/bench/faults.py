"""`headrace bench faults`: deaths, cancels, and what digests cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from headrace.backends.load import check_name
from headrace.bench import faults
from headrace.bench.faults.pair import Setting
from headrace.bench.faults.table import figures
from headrace.bench.rows import write_rows
from headrace.cli.arguments import check_count, check_output
from headrace.cli.bench.arguments import check_sizes, json_object

_console = Console(highlight=False)


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
    check_sizes("--sizes-mb", sizes_mb)
    check_sizes("--digest-sizes-mb", digest_sizes_mb)
    check_count("--cycles", cycles)
    check_count("--repeats", repeats)
    check_count("--max-prompt", max_prompt)
    check_name("source", source)
    check_name("decoder", decoder)
    check_output("--out", out, make_parents=True)
    setting = Setting(
        source,
        json_object("--source-options", source_options),
        decoder,
        json_object("--decoder-options", decoder_options),
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
