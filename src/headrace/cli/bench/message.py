"""`headrace bench message`: what a span, a message and a recorded trace cost."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from headrace.bench import message
from headrace.bench.message import KEY, Counts, figures
from headrace.cli.arguments import check_count
from headrace.cli.bench.tables import open_rows, print_goals

_console = Console(highlight=False)


def message_command(
    *,
    requests: int = 200,
    round_trips: int = 5000,
    rounds: int = 1000,
    resume: bool = False,
    out: Path | None = None,
) -> int:
    """A span's cost at its source and at its owner, a message's way, and what a trace adds.

    Parameters
    ----------
    requests
        Hand-offs of 30 layers whose spans are told, at each end.
    rounds
        Of four hand-offs each: without, with, with and without a trace.
    resume
        Go on with the rows that --out holds.
    """
    check_count("--requests", requests)
    check_count("--round-trips", round_trips)
    check_count("--rounds", rounds)
    counts = Counts(requests, round_trips, rounds)
    file = open_rows(out, "message", KEY, counts._asdict(), resume=resume)
    message.run(counts, file, _console.print)
    print_goals(_console, figures(file.rows))
    return 0
