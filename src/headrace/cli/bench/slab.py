"""`headrace bench slab`: the slab path against memcpy."""

from __future__ import annotations

from itertools import product
from pathlib import Path

from rich.console import Console

from headrace.bench import slab
from headrace.bench.rows import spread, write_rows
from headrace.cli.arguments import check_count, check_output
from headrace.cli.bench.arguments import MAX_SIZE_MB, check_sizes

_console = Console(highlight=False)


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
    check_sizes("--sizes-mb", sizes_mb)
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
