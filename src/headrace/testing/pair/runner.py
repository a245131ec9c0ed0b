"""Runs the pair suite outside of pytest, for `headrace check`, and gathers what came of it.

What goes in and out is plain values, since the command line may not import this package. A
decoder's own environment runs it too, which need have msgspec alone.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import SkipTest

import msgspec

from headrace.bench.rows import stamp
from headrace.errors import DeviceError, HeadraceError, Refused
from headrace.geometry import Manifest, kind_name
from headrace.runtime.log import configure
from headrace.testing.faulty import devices
from headrace.testing.pair.cases import CASES, PairConformance
from headrace.testing.pair.occupants import device_use
from headrace.testing.pair.subject import PairGone
from headrace.testing.pair.suite import Row

HANG_S = 1800.0

Case = dict[str, Any]
Told = Callable[[str, Case], None]
"""Called with "begin" before and "end" after each case."""


def case_names() -> list[str]:
    """The names that `only` may hold, in the order in which the cases are run."""
    return [_name(method) for method in CASES]


def run(
    attributes: dict[str, Any],
    *,
    only: Sequence[str] = (),
    repeat: int = 1,
    told: Told = lambda what, case: None,
    hung: Callable[[dict[str, Any]], None] = lambda report: None,
    suite: type[PairConformance] = PairConformance,
) -> dict[str, Any]:
    """Run the cases named, or all, `repeat` times; returns the report.

    `attributes` are those of the suite. `hung` is given the report if a case does not come back
    at all; then the process ends.

    Raises:
        Refused, BackendUnavailable: the pair cannot be opened, or there is no such case.
        PeerDied: its source died while it was opened.
    """
    methods = _methods(only)
    checked: type[PairConformance] = type("Checked", (suite,), dict(attributes))
    begun_s = time.monotonic()
    report: dict[str, Any] = {"stamp": stamp() | _commit(), "cases": []}
    try:
        report |= _facts(checked())
        for number in range(repeat):
            checked.seed = attributes.get("seed", 0) + number
            _run_round(checked, methods, number, report, told, hung)
    except KeyboardInterrupt:
        if "decoder" not in report:  # nothing was opened yet that a report could tell of
            raise
        report["interrupted"] = True
    finally:
        closed = _close(checked)
        if report["cases"] and closed:
            report["cases"].append(_closing(closed))
    report["seconds"] = time.monotonic() - begun_s
    return report | judge(report)


def run_asked(asked: dict[str, Any], told: Callable[[Any], None]) -> dict[str, Any]:
    """`run` as another environment's process is asked for it; returns the report.

    `asked` has `run`'s attributes, only and repeat. What is told is `[what, case]`, as `run` tells
    it, or `["hung", report]`, after which the process ends.

    Raises: as `run`.
    """
    configure("error")  # what is warned of here was ordered
    return run(
        asked["attributes"],
        only=asked["only"],
        repeat=asked["repeat"],
        told=lambda what, case: told([what, case]),
        hung=lambda report: told(["hung", report]),
    )


def judge(report: dict[str, Any]) -> dict[str, Any]:
    """Whether all is well, and one sentence that says so."""
    counts = Counter(case["result"] for case in report["cases"])
    failed = [case["case"] for case in report["cases"] if case["result"] == "failed"]
    total, left = len(report["cases"]), counts["not run"]
    if report.get("interrupted"):
        verdict = f"interrupted after {total} cases, {len(failed)} of which failed"
    elif failed or left:
        names = ", ".join(dict.fromkeys(failed))
        verdict = f"{len(failed)} of {total} cases failed: {names}"
        verdict += f"; {left} were not run" if left else ""
    else:
        verdict = f"all {counts['ok']} cases hold" if counts["ok"] != 1 else "1 case holds"
        verdict += f", {counts['skipped']} do not apply" if counts["skipped"] else ""
    passed = not failed and not left and not report.get("interrupted", False)
    return {"passed": passed, "verdict": verdict}


def _run_round(
    checked: type[PairConformance],
    methods: Sequence[str],
    number: int,
    report: dict[str, Any],
    told: Told,
    hung: Callable[[dict[str, Any]], None],
) -> None:
    gone = next((case["gone"] for case in report["cases"] if case.get("gone")), "")
    for method in methods:
        case = _case(method, number)
        if gone:
            case |= {"result": "not run", "note": f"the pair is gone: {gone}"}
        else:
            told("begin", case)
            watch = threading.Timer(HANG_S, _give_up, (case, report, hung))
            watch.daemon = True
            watch.start()
            try:
                _run_case(checked(), method, case)
            finally:
                watch.cancel()
            gone = case.get("gone", "")
        report["cases"].append(case)
        told("end", case)


def _run_case(suite: PairConformance, method: str, case: Case) -> None:
    begun_s = time.monotonic()
    suite.rows = []
    try:
        getattr(suite, method)()
        case |= {"result": "ok", "note": _left_out(suite.rows)}
    except SkipTest as exc:
        case |= {"result": "skipped", "note": str(exc)}
    except PairGone as exc:
        case |= {"result": "failed", "note": str(exc), "gone": str(exc)}
    except AssertionError as exc:
        case |= {"result": "failed", "note": str(exc)}
    except Exception as exc:  # an adapter's own error outside of any step
        case |= {"result": "failed", "note": f"{type(exc).__name__}: {exc}"}
    case["seconds"] = time.monotonic() - begun_s
    case["steps"] = [msgspec.to_builtins(row) for row in suite.rows]


def _left_out(rows: Sequence[Row]) -> str:
    """What a case that holds did not show here, and why."""
    steps: dict[str, list[str]] = {}
    for row in rows:
        if row.result == "skipped":
            steps.setdefault(row.note, []).append(row.step)
    return "; ".join(f"without {', '.join(names)}: {why}" for why, names in steps.items())


def _give_up(case: Case, report: dict[str, Any], hung: Callable[[dict[str, Any]], None]) -> None:
    """A call of the decoder did not come back: nothing in this process can end it but its end."""
    text = f"it did not come back within {HANG_S:.0f} s, so the pair is gone"
    report["cases"].append(case | {"result": "failed", "note": text, "seconds": HANG_S})
    hung(report | {"seconds": HANG_S} | judge(report))
    os._exit(1)  # sources die with this process


def _case(method: str, number: int) -> Case:
    return {
        "case": _name(method),
        "round": number,
        "proves": _proves(method),
        "result": "",
        "seconds": 0.0,
        "note": "",
        "steps": [],
    }


def _closing(text: str) -> Case:
    case = _case("test_closing", 0)
    return case | {"proves": "What was opened can be closed.", "result": "failed", "note": text}


def _close(checked: type[PairConformance]) -> str:
    """End the pair; what it raised, if it did."""
    try:
        checked.teardown_class()
    except (HeadraceError, DeviceError, OSError, RuntimeError) as exc:
        return f"{type(exc).__name__}: {exc}"
    return ""


def _methods(only: Sequence[str]) -> list[str]:
    known = case_names()
    for name in only:
        if name not in known:
            raise Refused(f"there is no case {name!r}; there are {', '.join(known)}", field="only")
    return [method for method in CASES if not only or _name(method) in only]


def _name(method: str) -> str:
    return method.removeprefix("test_").replace("_", "-")


def _proves(method: str) -> str:
    text = getattr(PairConformance, method, None)
    return " ".join((getattr(text, "__doc__", "") or "").split("\n\n")[0].split())


def _commit() -> dict[str, Any]:
    """The commit of headrace's own tree, where it runs from one, and not of the user's."""
    here = Path(__file__).parent
    tracked = _git(here, "ls-files", "--error-unmatch", Path(__file__).name)
    if not tracked:
        return {"commit": "", "dirty": False}
    dirty = bool(_git(here, "status", "--porcelain", "--untracked-files=no"))
    return {"commit": _git(here, "rev-parse", "HEAD"), "dirty": dirty}


def _git(directory: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=directory,
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _facts(suite: PairConformance) -> dict[str, Any]:
    """What is checked, on what; opens the pair."""
    pair, settings = suite.pair, suite.settings
    caps, named = pair.decoder.caps, (settings.decoder, settings.decoder_options)
    return {
        "platform": {
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "python": platform.python_version(),
        },
        "source": {**_manifest_facts(pair.source_manifest), **pair.source_facts},
        "decoder": {
            **_manifest_facts(pair.decoder_manifest),
            "caps": msgspec.to_builtins(caps),
            "facts": dict(getattr(pair.decoder, "facts", {})),
            "devices": devices(sys.modules),
            "device_use": device_use("decoder", *named, share=True) if settings.decoder else "",
        },
    }


def _manifest_facts(manifest: Manifest) -> dict[str, Any]:
    layers = Counter(
        " ".join([kind_name(layer.kind), *(str(part) for part in _parts(layer))])
        for layer in manifest.layers
    )
    return {
        "model": manifest.model,
        "layers": dict(layers),
        "layouts": list(manifest.layouts),
        "vocab_size": manifest.vocab_size,
        "logits_dtype": manifest.logits_dtype,
        "max_positions": manifest.max_positions,
        "emits": list(manifest.emits),
        "first": manifest.first,
        "digests": list(manifest.digests),
    }


def _parts(layer: Any) -> list[str]:
    window = getattr(layer.kind, "window", None)
    sizes = [f"{part.name}:{part.heads}x{part.head_dim}:{part.dtype}" for part in layer.parts]
    return [*([f"window {window}"] if window else []), *sizes]
