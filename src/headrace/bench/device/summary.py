"""What the device check came to: `summary.json`, and the same to read in `summary.txt`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from headrace.bench.device.goals import judge
from headrace.bench.device.plan import Kind, step_of
from headrace.bench.device.runner import Done
from headrace.bench.device.verdict import Verdict
from headrace.bench.rows import read_rows, stamp

HEADS: Final[dict[Kind, str]] = {
    "real": "device check on a real device",
    "fake": "device check, a dry run on the FAKE device: nothing here was measured on a GPU",
}


class Summary(NamedTuple):
    """holds: whether everything that must be true was shown, or was left out and told."""

    text: str
    holds: bool


def summarise(kind: Kind, folder: Path, results: Sequence[Done]) -> Summary:
    """Judge all rows in the folder and write both files."""
    rows = {
        done.step: read_rows(path)
        for done in results
        if (path := folder / f"{done.step}.jsonl").exists()
    }
    verdicts = judge(kind, results, rows)
    holds = holds_of(verdicts, results)
    text = as_text(kind, results, verdicts, holds=holds)
    (folder / "summary.txt").write_text(text)
    summary = {
        "device": kind,
        "stamp": stamp(),
        "holds": holds,
        "steps": [done._asdict() for done in results],
        "goals": [verdict._asdict() for verdict in verdicts],
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    return Summary(text, holds)


def holds_of(verdicts: Sequence[Verdict], results: Sequence[Done]) -> bool:
    """False if something that must be true is false, or a step that was to show it broke down.

    A step that was left out is told and shows nothing, for or against.
    """
    must = [verdict for verdict in verdicts if verdict.must]
    broken = {done.step for done in results if done.state in ("failed", "timed out")}
    shown = not broken & {"check-cuda", "check-torch", "exactness"}
    return shown and all(verdict.word != "missed" for verdict in must)


def as_text(
    kind: Kind, results: Sequence[Done], verdicts: Sequence[Verdict], *, holds: bool
) -> str:
    """Steps, then goals: what must be true first."""
    lines = [HEADS[kind], ""]
    for done in results:
        lines += [f"{done.state:>9}  {done.step}: {step_of(done.step).does}, {done.seconds:.1f} s"]
        lines += [f"{'':>11}{done.note}"] if done.note else []
    for must, head in ((True, "what must be true"), (False, "speeds and what is stated")):
        lines += ["", head]
        for verdict in verdicts:
            if verdict.must is must:
                lines += _lines(verdict)
    total = sum(done.seconds for done in results)
    word = (
        "nothing that must be true was found false"
        if holds
        else "NOT ALL THAT MUST BE TRUE WAS SHOWN"
    )
    return "\n".join([*lines, "", f"{word}, in {total:.0f} s", ""])


def _lines(verdict: Verdict) -> list[str]:
    goal = "" if verdict.goal == "stated" else f" [{verdict.goal}]"
    lines = [f"{verdict.word.upper():>9}  {verdict.name}{goal}"]
    lines += [f"{'':>11}{text}" for text in (verdict.found, verdict.why) if text]
    return lines


def read_summary(folder: Path) -> dict[str, Any]:
    """What `summary.json` holds."""
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found
