"""`headrace bench plot`: a picture of a benchmark's rows."""

from __future__ import annotations

from pathlib import Path

from headrace.bench.plots import FORMATS, draw
from headrace.cli.arguments import check_output
from headrace.errors import Refused


def plot_command(rows: Path, /, *, out: Path) -> int:
    """Draw the rows of a benchmark, and nothing else.

    Parameters
    ----------
    rows
        The file that a benchmark wrote with --out.
    out
        The picture: .svg, .png or .pdf.
    """
    if not rows.is_file():
        raise Refused(f"{rows} is no file; name what a benchmark wrote with --out", field="rows")
    if out.suffix not in FORMATS:
        raise Refused(f"--out: {out} does not end in one of {', '.join(FORMATS)}", field="--out")
    check_output("--out", out, make_parents=True)
    draw(rows, out)
    return 0
