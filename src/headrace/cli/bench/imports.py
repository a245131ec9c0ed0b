"""`headrace bench imports`: ways to copy a slot into a reservation."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from headrace.bench import imports
from headrace.bench.rows import spread, write_rows
from headrace.cli.arguments import check_count, check_output
from headrace.cli.bench.arguments import check_sizes

_console = Console(highlight=False)


def imports_command(
    *, sizes_mb: tuple[int, ...] = (128, 1024), repeats: int = 10, out: Path | None = None
) -> int:
    """Ways to copy a slot into a reservation, as ratios to a hot memcpy.

    Parameters
    ----------
    sizes_mb
        What is copied, MiB.
    repeats
        Rounds of all ways, half of them before and half after those that bypass the cache.
    """
    check_sizes("--sizes-mb", sizes_mb)
    check_count("--repeats", repeats)
    check_output("--out", out, make_parents=True)
    rows = list(imports.run(sizes_mb, repeats))
    write_rows(out, "imports", rows)
    for size_mb in sizes_mb:
        table = Table("way", "plain", "bypassing the cache", title=f"{size_mb} MiB, x of memcpy")
        for way in dict.fromkeys(row["way"] for row in rows):
            mine = [row for row in rows if (row["size_mb"], row["way"]) == (size_mb, way)]
            found = [
                str(spread([row["ratio"] for row in mine if row["tuned"] is tuned]))
                for tuned in (False, True)
                if mine
            ]
            table.add_row(way, *found)
        _console.print(table)
    return 0
