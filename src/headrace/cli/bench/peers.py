"""`headrace bench peers`: the same bytes between two processes, by headrace and by others."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from headrace.bench.peers import runner
from headrace.bench.peers.environments import default_directory
from headrace.bench.peers.table import Line, figures, lines
from headrace.bench.peers.transports import HEADRACE, NAMES, peers_named
from headrace.cli.arguments import check_count, check_seconds
from headrace.cli.bench.arguments import check_sizes
from headrace.cli.bench.tables import goal_table, open_rows
from headrace.errors import Refused

_console = Console(highlight=False)


def peers_command(
    *,
    sizes_mib: tuple[int, ...] = (4, 16, 128, 1024),
    rounds: int = 5,
    transports: tuple[str, ...] = NAMES,
    environments: Path | None = None,
    deadline_s: float = runner.DEADLINE_S,
    resume: bool = False,
    out: Path | None = None,
) -> int:
    """The same bytes into another process's memory, by headrace and its peers, to hot memcpy.

    Every transport moves every size once in each round. Each transfer has a fresh pattern, and all
    of it is compared where it landed. `benchmarks/peers/setup.py` makes the peers' environments;
    what has none is told in its rows and not measured.

    Parameters
    ----------
    sizes_mib
        What one transfer moves, MiB. The largest needs five times as much memory.
    transports
        All by default.
    environments
        Where the peers' environments are; by default `peers` in headrace's cache directory.
    deadline_s
        How long one transfer may take; who takes longer is ended.
    resume
        Go on with the rows that --out holds.
    """
    check_sizes("--sizes-mib", sizes_mib)
    check_count("--rounds", rounds)
    check_seconds("--deadline-s", deadline_s)
    if not transports:
        raise Refused(f"--transports is empty; there are {', '.join(NAMES)}", field="--transports")
    peers_named(transports)
    file = open_rows(out, "peers", runner.KEY, resume=resume)
    where = environments or default_directory()
    measuring = runner.run(transports, sizes_mib, rounds, where, file, deadline_s=deadline_s)
    with closing(measuring), _console.status("") as status:
        for row in measuring:
            status.update(f"{row['size_mib']} MiB, round {row['round'] + 1} of {rounds}")
    _print_rows(file.rows)
    ours = [row for row in file.rows if row["transport"] in HEADRACE]
    return int(any("failed" in row or row.get("wrong_nbytes") for row in ours))


def _print_rows(rows: list[dict[str, Any]]) -> None:
    found = lines(rows)
    for size_mib in sorted({line.size_mib for line in found}):
        titles = "", "copies", "wall, x of memcpy", "CPU, x", "ms", "n", ""
        table = Table(*titles, title=f"{size_mib} MiB: medians with p10 and p90")
        for line in found:
            if line.size_mib == size_mib:
                table.add_row(line.transport, str(line.copies), *_cells(line))
        _console.print(table)
    _console.print(goal_table(figures(rows)))


def _cells(line: Line) -> tuple[str, ...]:
    wrong = f"{line.num_wrong} with wrong bytes" if line.num_wrong else ""
    note = "; ".join(text for text in (wrong, line.note) if text)
    if line.wall is None or line.cpu is None:
        return "", "", "", "0", note
    ratios = (
        f"{ratio.median:.2f} [{ratio.p10:.2f}, {ratio.p90:.2f}]" for ratio in (line.wall, line.cpu)
    )
    return *ratios, f"{line.wall_ms:.2f}", str(line.wall.samples), note
