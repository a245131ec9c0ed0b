"""Records of probes: what was found on a device that is stated nowhere, kept as JSON.

What a step of a probe found is a `Finding`. The record is written before each step, which it names
as unfinished, and after the last one; so a vendor's library that aborts leaves a record that names
the step. What else a record says of its device, and what is relied on of it, is the backend's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from headrace.engine.faults import raised_as
from headrace.errors import HeadraceError, Refused

Facts: TypeAlias = dict[str, Any]
"""What a step found: bare values by name."""


class Finding(Struct, frozen=True, omit_defaults=True):
    """What one step of a probe found: bare values, and in `error` why there are none."""

    facts: Facts = {}
    error: str = ""
    took_s: float = 0.0


class Record(Struct, frozen=True, kw_only=True):
    """What the records of all backends say.

    sdk: the vendor's packages, or a fake's name. card: what is told of it. findings: by step.
    unfinished: the step that was begun and never ended, which is the one that the process died in.
    """

    version: int
    sdk: str
    packages: dict[str, str]
    card: dict[str, Any]
    made: str
    findings: dict[str, Finding] = {}
    unfinished: str = ""

    def fact(self, step: str, name: str) -> Any:
        """One value that a step found; None if it did not."""
        finding = self.findings.get(step)
        return finding.facts.get(name) if finding is not None and not finding.error else None


Kind = TypeVar("Kind", bound=Record)


def now() -> str:
    """The time at which a record is made, as it says it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def write(record: Record, path: Path) -> None:
    """Put a record in place of what was there, in one step.

    Raises:
        Refused: it cannot be put there.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
        part.replace(path)
    except OSError as exc:
        raise Refused(f"{path} cannot be written: {exc.strerror}", field="record") from exc


def read(path: Path, kind: type[Kind]) -> Kind:
    """The record in a file.

    Raises:
        Refused: there is none, or it is not of this kind.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as exc:
        raise Refused(f"{path} cannot be read: {exc.strerror}", field="record") from exc
    except msgspec.MsgspecError as exc:
        raise Refused(f"{path} is no record of a probe: {exc}", field="record") from exc


def take_all(
    record: Kind,
    steps: Iterable[tuple[str, Callable[[], Facts]]],
    path: Path,
    say: Callable[[str], None],
) -> Kind:
    """Take each step, by name, and return the record with what they found, as it was written.

    Raises:
        Refused: the record cannot be written.
    """
    for name, take in steps:
        say(f"probe: {name}")
        write(replace(record, unfinished=name), path)
        record = replace(record, findings={**record.findings, name: _taken(take)})
    write(record, path)
    return record


def _taken(take: Callable[[], Facts]) -> Finding:
    began = time.perf_counter()
    facts: Facts = {}
    error = ""
    try:
        with raised_as(HeadraceError):  # whatever a vendor's library raises is to be known
            facts = take()
    except HeadraceError as exc:
        error = str(exc)
    return Finding(facts, error, round(time.perf_counter() - began, 3))
