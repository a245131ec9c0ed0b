"""`headrace owner`: what a running owner holds, and bringing back what it set apart."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cyclopts import App
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from headrace.errors import HeadraceError, Refused
from headrace.ids import AttemptId
from headrace.messages import (
    Inspect,
    Inspected,
    LaneHeld,
    Reinstate,
    Reinstated,
    RequestHeld,
    SlotHeld,
    SourceHeld,
    travelling_text,
)
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
    """Show sources, lanes, slots, requests, and what is in quarantine.

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
    told: dict[str, Any] = {"statistics": statistics}
    for name in ("quarantined", "lanes", "slots", "sources", "requests"):
        told[name] = [_as_dict(each) for each in getattr(report, name)]
    for name in ("context", "lanes_free", "truncated"):
        told[name] = getattr(report, name)
    return json.dumps(told)


def _as_dict(held: Struct) -> dict[str, Any]:
    """A struct by its fields, an attempt as it is shown everywhere and an age in seconds."""
    told: dict[str, Any] = {}
    for name in held.__struct_fields__:
        value = getattr(held, name)
        if name == "for_ns":
            name, value = "for_s", value / 1e9
        told[name] = str(value) if isinstance(value, AttemptId) else value
    return told


def _print(console: Console, report: Inspected) -> None:
    table = Table(box=None, show_header=False)
    sections: dict[str, list[str]] = {}
    for section, name, count in report.statistics:
        sections.setdefault(section, []).append(f"{name} {count}")
    for section, counts in sections.items():
        table.add_row(section, ", ".join(counts))
    console.print(table)
    for line in _lines(report, time.monotonic_ns()):
        console.print(line, markup=False, soft_wrap=True)
    for each in report.quarantined:
        text = f"quarantined {each.attempt} for {_seconds(each.for_ns)}: {each.reason}"
        console.print(text, markup=False, soft_wrap=True)
    if not report.quarantined:
        console.print("nothing is quarantined")
    if report.truncated:
        console.print("there is more, which did not fit into one message")


def _lines(report: Inspected, now_ns: int) -> Iterator[str]:
    names = {each.source: each.name for each in report.sources}
    yield from map(_source_text, report.sources)
    yield f"lanes of {report.context} positions: {report.lanes_free} free"
    yield from map(_lane_text, report.lanes)
    for slot in report.slots:
        yield _slot_text(slot, names.get(slot.source, str(slot.source)))
    for request in report.requests:
        yield _request_text(request, now_ns)


def _source_text(source: SourceHeld) -> str:
    pid = f", pid {source.pid}" if source.pid else ""
    restarts = f", restarted {source.restarts} times" if source.restarts else ""
    reason = f": {source.reason}" if source.reason else ""
    return f"source {source.name} is {source.state}{pid}{restarts}{reason}"


def _lane_text(lane: LaneHeld) -> str:
    since = f" for {_seconds(lane.for_ns)}: {lane.reason}" if lane.for_ns else ""
    return f"lane {lane.state}, attempt {lane.attempt}{since}"


def _slot_text(slot: SlotHeld, source: str) -> str:
    holder = f", attempt {slot.holder}" if slot.holder is not None else ""
    tokens = f", tokens out: {', '.join(slot.tokens)}" if slot.tokens else ""
    since = f", for {_seconds(slot.for_ns)}" if slot.for_ns else ""
    where = f"slot {slot.slot} of source {source}, generation {slot.generation}"
    return f"{where}: {slot.state}{holder}{tokens}{since}"


def _request_text(request: RequestHeld, now_ns: int) -> str:
    label = "" if request.label is None else f" {request.label}"
    nbytes = f"{request.nbytes_imported} of {request.nbytes_total} bytes imported"
    return (
        f"request{label}, attempt {request.attempt}: {request.phase}, {request.num_tokens} prompt "
        f"tokens, {nbytes}, {request.num_generated} tokens generated, "
        f"{_seconds(max(0, now_ns - request.submitted_ns))} old"
    )


def _seconds(ns: int) -> str:
    return f"{ns / 1e9:.1f} s"
