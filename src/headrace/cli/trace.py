"""`headrace trace`: what a recorded trace shows, as text, as a JSON object or as a page."""

from __future__ import annotations

import json as json_text
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.cli.arguments import check_output
from headrace.cli.report import print_timeline
from headrace.errors import Refused
from headrace.telemetry.clocks import Aligned, align
from headrace.telemetry.page import page
from headrace.telemetry.recording import Recording, read
from headrace.telemetry.report import Report, reports_of
from headrace.telemetry.words import as_object, figures, parts, title


def trace(file: Path, /, *, html: Path | None = None, json: bool = False) -> int:
    """Tell what a trace of `headrace run --trace FILE.json` shows: overlap, tail, hidden share.

    Parameters
    ----------
    file
        The trace.
    html
        Write one self-contained page with the lanes drawn to scale; it opens offline.
    json
        Print one JSON object.
    """
    check_output("--html", html)
    if html is not None and html.exists() and file.exists() and html.samefile(file):
        raise Refused(f"--html would overwrite the trace {file}; name another file", field="--html")
    recording = read(file)
    if html is not None:
        html.write_text(page(recording, file.name), encoding="utf-8")
    runs = [align(run) for run in recording.runs]
    reports = reports_of(runs)
    if json:
        print(json_text.dumps(_as_object(recording, reports)))
        return 0
    console = Console(highlight=False)
    for run, report in zip(runs, reports, strict=True):
        _print_run(console, run, report)
    if html is not None:
        console.print(f"the page is {html}", markup=False, soft_wrap=True)
    return 0


def _as_object(recording: Recording, reports: list[Report]) -> dict[str, object]:
    return {"stamp": recording.stamp, "runs": [as_object(report) for report in reports]}


def _print_run(console: Console, run: Aligned, report: Report) -> None:
    console.print(title(report), style="bold", markup=False, soft_wrap=True)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for figure, value in figures(report):
        table.add_row(figure, Text(value))
    console.print(table)
    found = parts(report)
    if found:
        console.print(_made_of(found))
    print_timeline(console, run)
    console.print()


def _made_of(found: list[tuple[str, str, str]]) -> Table:
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("what the tail was made of", overflow="fold")
    for name in ("time", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found:
        table.add_row(*row)
    return table
