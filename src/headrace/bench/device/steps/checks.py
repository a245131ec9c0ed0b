"""`headrace check` of a source and the CUDA decoder; a row for each case, and its report beside.

Its longer cases start a process of a source again and again, each of which loads CUDA anew. They
are left for a run of `headrace check` by hand, without --only.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from headrace.bench.device.place import Place
from headrace.bench.device.plan import GRACE_S
from headrace.bench.families import make_model
from headrace.errors import DeviceError, Refused

LAYERS: Final = 4
WINDOW: Final = 32
MISTAKE: Final = 2


def run(place: Place, step: str, say: Callable[[str], None]) -> None:
    """Check the pair that the step is named after, on a small hybrid model.

    Raises:
        Refused: the pair cannot be opened. DeviceError: it left no report.
    """
    on_cpu = step == "check-torch"
    cases = place.sizes.cases_torch if on_cpu else place.sizes.cases_cuda
    model = make_model("exaone4", place.folder / "models" / step, layers=LAYERS, window=WINDOW)
    report = place.folder / step
    command = _command(place, "torch" if on_cpu else place.source, model, report, cases)
    say(" ".join(command))
    status = _run(command)
    found = _read(report)
    if found is None and status == MISTAKE:
        raise Refused("headrace check could not open the pair; see above in this log")
    if found is None:
        raise DeviceError(f"headrace check ended with status {status} and left no report")
    file = place.rows(step)
    for case in found["cases"]:
        taken = {name: case[name] for name in ("case", "result", "seconds", "note")}
        file.append({"measure": "check", "asked": list(cases), **taken})
    say(str(found["verdict"]))


def _command(
    place: Place, source: str, model: Path, report: Path, cases: tuple[str, ...]
) -> list[str]:
    words = [sys.executable, "-m", "headrace", "check", "--quick"]
    words += ["--source", source, "--decoder", place.decoder, "--model", str(model)]
    words += ["--report", str(report)]
    for case in cases:
        words += ["--only", case]
    return [*words, "--share-device"] if place.share_device else words


def _run(command: list[str]) -> int:
    """Its status. When this step's time is up, the check is told too, and writes what it has."""
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as child:
        try:
            return child.wait()
        except KeyboardInterrupt:
            child.send_signal(signal.SIGINT)
            try:
                return child.wait(GRACE_S - 1)
            except subprocess.TimeoutExpired:
                child.kill()
                return child.wait()


def _read(report: Path) -> dict[str, Any] | None:
    path = report / "report.json"
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    return found
