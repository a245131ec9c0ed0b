"""`headrace owner`: what a running owner holds, and bringing back what it set apart."""

from __future__ import annotations

import json
import re
from pathlib import Path

from cyclopts import App
from rich.console import Console
from rich.table import Table

from headrace.errors import HeadraceError, Refused
from headrace.ids import AttemptId
from headrace.messages import Inspect, Inspected, Reinstate, Reinstated, travelling_text
from headrace.runtime.control import ask

owner_app = App(
    name="owner",
    help="Ask an owner that was started with a control socket (`headrace run --control PATH`).",
    version_flags=[],
)

_ATTEMPT = re.compile(r"([0-9a-f]{1,16})\.(\d{1,19})/(\d{1,9})")


class NotReinstated(HeadraceError):
    """The owner did not bring back what was asked for; the text is its reason."""


@owner_app.command
def status(path: Path, *, json: bool = False) -> int:
    """Show lanes, slots, who waits, and what is in quarantine.

    Parameters
    ----------
    path
        The owner's control socket.
    json
        Print one JSON object.
    """
    report = ask(path, Inspect())
    if not isinstance(report, Inspected):
        raise HeadraceError("the owner answered with something else")
    if json:
        print(_as_json(report))
    else:
        _print(Console(highlight=False), report)
    return 0


@owner_app.command
def reinstate(path: Path, attempt: str, *, because: str) -> int:
    """Bring back a lane or a slot that was set apart: you answer for it that the device is quiet.

    Parameters
    ----------
    path
        The owner's control socket.
    attempt
        Which one, as `headrace owner status` shows it.
    because
        How you know that no device writes there any more; it goes to the owner's log.
    """
    if not because.strip():
        raise Refused("--because is empty; say how you know that the device is quiet")
    message = Reinstate(_attempt_of(attempt), travelling_text(because))
    answer = ask(path, message)
    if not isinstance(answer, Reinstated):
        raise HeadraceError("the owner answered with something else")
    if answer.error:
        raise NotReinstated(f"{attempt} stays in quarantine: {answer.error}")
    print(f"{attempt} is in service again")
    return 0


def _attempt_of(text: str) -> AttemptId:
    found = _ATTEMPT.fullmatch(text)
    if found is None:
        raise Refused(
            f"{text!r} names no attempt; give it as `headrace owner status` shows it, such as "
            "18a3f.7/1"
        )
    epoch, counter, number = found.groups()
    return AttemptId(int(epoch, 16), int(counter), int(number))


def _as_json(report: Inspected) -> str:
    statistics: dict[str, dict[str, int]] = {}
    for section, name, count in report.statistics:
        statistics.setdefault(section, {})[name] = count
    quarantined = [
        {"attempt": str(each.attempt), "reason": each.reason, "for_s": each.for_ns / 1e9}
        for each in report.quarantined
    ]
    return json.dumps(
        {"statistics": statistics, "quarantined": quarantined, "held": list(report.lines)}
    )


def _print(console: Console, report: Inspected) -> None:
    table = Table(box=None, show_header=False)
    sections: dict[str, list[str]] = {}
    for section, name, count in report.statistics:
        sections.setdefault(section, []).append(f"{name} {count}")
    for section, counts in sections.items():
        table.add_row(section, ", ".join(counts))
    console.print(table)
    for line in report.lines:
        console.print(line, markup=False, soft_wrap=True)
    for each in report.quarantined:
        text = f"quarantined {each.attempt} for {each.for_ns / 1e9:.1f} s: {each.reason}"
        console.print(text, markup=False, soft_wrap=True)
    if not report.quarantined:
        console.print("nothing is quarantined")
