"""A line of the summary: a goal or a statement, and what was found."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

from headrace.bench.device.runner import Done

Rows: TypeAlias = list[dict[str, Any]]
Word: TypeAlias = Literal["met", "missed", "not run", "stated"]


class Verdict(NamedTuple):
    """One goal and what was found; `must`: whether it has to hold, whatever the speed.

    word: `stated` where there is no goal. why: for a goal that was not met.
    """

    name: str
    goal: str
    word: Word
    found: str
    must: bool = False
    why: str = ""


def why_not(done: Done, otherwise: str) -> str:
    """Why there is nothing to judge: how the step ended, or what its rows lack."""
    if done.state == "done":
        return otherwise
    how = "failed" if done.state == "failed" else f"was {done.state}"
    return f"the step {done.step} {how}: {done.note}"
