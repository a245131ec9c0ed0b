"""`headrace bench scale`: how the owner's cost grows with layer groups, slots and requests."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from headrace.bench import scale
from headrace.bench.scale import AXES, KEY, Numbers, figures, medians, slopes
from headrace.cli.arguments import check_count
from headrace.cli.bench.tables import open_rows, print_goals

MOST_GROUPS = scale.LAYERS * scale.NUM_TOKENS
MOST_SLOTS, MOST_REQUESTS = 1024, 4096

_console = Console(highlight=False)


def scale_command(
    *,
    groups: int = 1024,
    slots: int = 64,
    requests: int = 256,
    repeats: int = 10,
    resume: bool = False,
    out: Path | None = None,
) -> int:
    """The owner's cost against layer groups, slots, and requests waiting and in flight.

    Parameters
    ----------
    groups, slots, requests
        The largest number of each; all powers of two up to it are measured.
    resume
        Go on with the rows that --out holds.
    """
    check_count("--groups", groups, limit=MOST_GROUPS + 1)
    check_count("--slots", slots, limit=MOST_SLOTS + 1)
    check_count("--requests", requests, limit=MOST_REQUESTS + 1)
    check_count("--repeats", repeats)
    file = open_rows(out, "scale", KEY, resume=resume)
    scale.run(Numbers(groups, slots, requests, repeats), file, _console.print)
    for axis in AXES:
        costs = medians(file.rows, axis)
        table = Table(axis.replace("_", " "), "owner's CPU, us", "grows as", title=axis)
        powers = {slope.after: f"n^{slope.power:.2f}" for slope in slopes(costs)}
        for number, ns in costs.items():
            table.add_row(str(number), f"{ns / 1e3:.1f}", powers.get(number, ""))
        _console.print(table)
    print_goals(_console, figures(file.rows))
    return 0
