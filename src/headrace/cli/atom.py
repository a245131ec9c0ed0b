"""`headrace atom`: probe a card."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from headrace.cli.arguments import check_count, check_given, check_output
from headrace.cli.children import NOTHING_DONE, ended, run_tied, show_record
from headrace.engine.atom import environment, preflight
from headrace.engine.atom.artifact import read_geometry
from headrace.engine.models import resolve
from headrace.errors import HeadraceError

PROBE_MODULE = "headrace.engine.atom.probe"
REFERENCE_MODULE = "headrace.engine.atom.reference"
CARDS = 1024

atom_app = App(name="atom", help="Probe a card for the ATOM decoder.", version_flags=[])


@atom_app.command
def probe(
    *,
    model: str,
    compiled: Path,
    device: int = 0,
    share_device: Annotated[bool, Parameter(negative="")] = False,
    out: Path | None = None,
    python: str | None = None,
) -> int:
    """Find out how a card keeps the cache of a compiled model, and write it down as a JSON record.

    The ATOM decoder reads the record: without one for this card, driver, compiled model and
    packages it refuses to import. The checkpoint is computed here, in float32 on the CPU, to
    compare the card's keys and values with.

    Parameters
    ----------
    model
        The checkpoint that was compiled: a built-in model, a directory, a GGUF file or a hub id.
    compiled
        The directory that optimum-rbln compiled it into.
    device
        The number of the card, as the vendor's runtime counts them.
    share_device
        Go on although another process uses the card.
    out
        The file of the record; the decoder finds it in headrace's cache all the same.
    python
        The interpreter of the decoder's environment, by default that in HEADRACE_ATOM_PYTHON.
    """
    check_count("--device", device, least=0, limit=CARDS)
    check_given("--python", python)
    if out is not None:
        out = out.expanduser().absolute()
        check_output("--out", out)
    compiled = compiled.expanduser().absolute()
    read_geometry(compiled)
    directory = resolve(model)
    interpreter = python or environment.find()
    preflight.check(interpreter, device=device, share=share_device)
    with tempfile.TemporaryDirectory(prefix="headrace-probe-") as scratch:
        reference = Path(scratch) / "reference.npz"
        arguments = [f"--model={directory}", f"--compiled={compiled}", f"--out={reference}"]
        status, _ = run_tied(sys.executable, REFERENCE_MODULE, arguments)
        if status == NOTHING_DONE:
            return status  # it has said why
        if status:
            raise HeadraceError(f"computing the checkpoint {ended(status)}")
        arguments = [
            *(f"--compiled={compiled}", f"--device={device}", f"--reference={reference}"),
            *([] if out is None else [f"--out={out}"]),
        ]
        status, told = run_tied(interpreter, PROBE_MODULE, arguments)
    return show_record(f"device {device}", status, told, out)
