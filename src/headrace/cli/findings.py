"""A line of `headrace doctor`."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from msgspec import Struct

from headrace.errors import BackendUnavailable

Status: TypeAlias = Literal["ok", "note", "failed"]


class Finding(Struct, frozen=True, omit_defaults=True):
    """One line: what was looked at, how it is, what to do about it, and the same as bare values.

    A "note" costs speed or comfort; what is "failed" does not work here.
    """

    name: str
    status: Status
    found: str
    advice: str = ""
    facts: dict[str, Any] = {}


def unavailable(name: str, exc: BackendUnavailable, facts: dict[str, Any] | None = None) -> Finding:
    """A vendor's backend that is not here: a note, since whoever wants none misses nothing."""
    found = f"{exc.stage}: {exc.probe}: {exc.detail}"
    return Finding(name, "note", found, exc.hint, {**(facts or {}), "stage": exc.stage})
