"""Pictures made of a benchmark's rows and of nothing else: one module per claim."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from headrace.bench.rows import read_rows
from headrace.errors import Refused

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODULES = {
    claim: f"headrace.bench.plots.{claim}"
    for claim in (
        "curve",
        "ttft",
        "load",
        "peers",
        "message",
        "scale",
        "imports",
        "batch",
        "prefix",
        "device",
    )
}
"""Which module draws the rows of a claim: its `figure` takes the rows and returns a picture."""

FORMATS = (".svg", ".png", ".pdf")
INSTALL = "run: pip install 'headrace[bench]'"


class _Drawing(Protocol):
    def figure(self, rows: list[dict[str, Any]]) -> Figure: ...


def draw(rows_file: Path, out: Path) -> None:
    """Draw the rows of a file into `out`, whose ending is one of FORMATS; equal rows give an equal
    picture.

    Raises:
        Refused: the file holds no rows of a claim that can be drawn, or matplotlib is missing.
    """
    if out.suffix not in FORMATS:
        raise Refused(f"{out} does not end in one of {', '.join(FORMATS)}", field="out")
    rows = read_rows(rows_file)
    if not rows:
        raise Refused(f"{rows_file} holds no rows yet", field="rows")
    drawing = _drawing_of(claim_of(rows_file))
    try:
        from matplotlib import rc_context
    except ModuleNotFoundError as exc:
        raise Refused(f"drawing needs {exc.name}, which is not installed; {INSTALL}") from exc
    out.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "headrace", "svg.fonttype": "none"}):
        dated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {}}[out.suffix]
        drawing.figure(rows).savefig(out, metadata=dated, dpi=150)


def claim_of(rows_file: Path) -> str:
    """The claim that a file's stamp names. Raises: Refused."""
    with rows_file.open() as lines:
        first = json.loads(lines.readline())
    claim = first.get("claim")
    if not isinstance(claim, str):
        raise Refused(f"{rows_file} does not begin with a benchmark's stamp", field="rows")
    return claim


def _drawing_of(claim: str) -> _Drawing:
    module = MODULES.get(claim)
    if module is None or importlib.util.find_spec(module) is None:
        raise Refused(f"rows of {claim!r} cannot be drawn: there is no picture of them")
    return cast(_Drawing, importlib.import_module(module))
