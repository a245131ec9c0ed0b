"""The two files of a check: report.json has every raw row, report.md is for a public issue."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

JSON_NAME, MARKDOWN_NAME = "report.json", "report.md"
MAX_NOTE = 300  # characters of a note in the table; the detail below has all of it


def write(report: dict[str, Any], directory: Path) -> None:
    """Write both files into `directory`, which is made if it is not there."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / JSON_NAME).write_text(_public(json.dumps(report, indent=1, default=str)) + "\n")
    (directory / MARKDOWN_NAME).write_text(_public("\n".join(_markdown(report))) + "\n")


def _markdown(report: dict[str, Any]) -> Iterator[str]:
    asked, stamp = report["asked"], report["stamp"]
    yield f"# headrace check: {asked['pair']}"
    yield ""
    yield f"**{report['verdict']}** in {report['seconds']:.0f} s"
    yield ""
    commit = stamp["commit"] or "as installed"
    yield f"- headrace {stamp['headrace']}, {commit}{', changed' if stamp['dirty'] else ''}"
    yield f"- {report['platform']['system']}, {stamp['cpu']}, {stamp['cpus']} cores usable"
    yield f"- {_pairs({'python': stamp['python'], **stamp['packages']})}"
    for side in ("source", "decoder"):
        yield f"- {side} {asked[side]}: {_side(report[side])}"
    yield f"- model {asked['model'] or 'none'}, context {asked['context']}, seed {asked['seed']}"
    yield ""
    yield "| case | result | seconds | proves |"
    yield "| --- | --- | --- | --- |"
    for case in report["cases"]:
        proves = f"{case['proves']} {_cell(case['note'])}".strip()
        yield f"| {case['case']} | {case['result']} | {case['seconds']:.1f} | {proves} |"
    yield from _failures(report)
    yield from _bounds(report)
    yield ""
    yield "## How to repeat"
    yield ""
    yield "```"
    yield asked["command"]
    yield "```"
    yield ""
    yield f"Every raw row is in {JSON_NAME}. Times are of the host's clock."


def _failures(report: dict[str, Any]) -> Iterator[str]:
    failed = [case for case in report["cases"] if case["result"] in ("failed", "not run")]
    if not failed:
        return
    yield ""
    yield "## What failed"
    for case in failed:
        yield ""
        yield f"### {case['case']}"
        yield ""
        yield case["proves"]
        yield ""
        rows = [row for row in case["steps"] if row["result"] == "failed"]
        for row in rows:
            yield f"- {row['step']}: {_one_line(row['note'])}"
            if row["measured"]:
                yield f"  - measured: `{json.dumps(row['measured'])[:2000]}`"
        if not rows:
            yield f"- {_one_line(case['note'])}"


def _bounds(report: dict[str, Any]) -> Iterator[str]:
    """The slowest of each bound that was measured, over all steps."""
    slowest: dict[tuple[str, str], tuple[float, int]] = {}
    for case in report["cases"]:
        for row in case["steps"]:
            for name, value in row["measured"].items():
                if name.endswith("_s") and isinstance(value, float):
                    most, count = slowest.get((case["case"], name), (0.0, 0))
                    slowest[case["case"], name] = max(most, value), count + 1
    if not slowest:
        return
    yield ""
    yield "## What was measured"
    yield ""
    yield "| case | what | slowest, ms | steps |"
    yield "| --- | --- | --- | --- |"
    for (case_name, name), (most, count) in slowest.items():
        yield f"| {case_name} | {name.removesuffix('_s')} | {1000 * most:.2f} | {count} |"


def _side(facts: dict[str, Any]) -> str:
    layers = ", ".join(f"{count} x {what}" for what, count in facts["layers"].items())
    told = {**facts.get("facts", {}), **facts.get("engine", {})}
    devices, use = facts.get("devices", []), facts.get("device_use", "")
    return "; ".join(part for part in (layers, _pairs(told), ", ".join(devices), use) if part)


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items() if value != "")


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    line = _one_line(text).replace("|", "/")
    return line if len(line) <= MAX_NOTE else line[:MAX_NOTE] + " ..."


def _public(text: str) -> str:
    """Without the name of the user's own directory."""
    home = str(Path.home())
    return text.replace(home, "~") if len(home) > 1 else text
