"""What the benchmarks' commands take rows up with, and how they print what came of the goals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from headrace.bench.faults.table import Figure
from headrace.bench.rows import RowFile
from headrace.cli.arguments import check_output
from headrace.errors import Refused


def open_rows(
    out: Path | None,
    claim: str,
    key: Sequence[str],
    settings: Mapping[str, Any] | None = None,
    *,
    resume: bool,
) -> RowFile:
    """The file that --out names; with --resume it keeps its rows. Raises: Refused."""
    check_output("--out", out, make_parents=True)
    if resume and out is None:
        raise Refused("--resume goes on with the rows of --out; name it", field="--resume")
    return RowFile(out, claim, key, settings=settings, resume=resume)


def goal_table(figures: Iterable[Figure]) -> Table:
    """A table of figures against their goals."""
    table = Table("figure", "result", "goal", "")
    for figure in figures:
        met = {True: "met", False: "missed", None: ""}[figure.met]
        table.add_row(figure.name, figure.result, figure.goal, met)
    return table


def print_goals(console: Console, figures: Iterable[Figure]) -> None:
    """One line for each figure with its goal, and how many of those were met."""
    figures = list(figures)
    for figure in figures:
        word = {True: "met", False: "MISSED", None: ""}[figure.met]
        text = f"{word:>6}  {figure.name}: {figure.result}; goal {figure.goal}"
        console.print(text, soft_wrap=True)
    judged = [figure.met for figure in figures if figure.met is not None]
    console.print(f"{sum(judged)} of {len(judged)} goals met")
