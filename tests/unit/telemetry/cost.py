"""How much work something does, counted and not timed, for tests that it grows with its size."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from msgspec.structs import replace

from headrace.ids import Span
from headrace.messages import Interval
from headrace.telemetry.recording import Run
from tests.unit.telemetry.scenes import at, streamed

GROWTH = 2.5
"""Twice the size is about twice the work, a logarithm included; a square would be four times."""


def work(act: Callable[[], object]) -> int:
    """The instructions of Python code that `act` runs."""
    count = 0

    def step(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        count += event == "opcode"
        return step

    before = sys.gettrace()
    sys.settrace(step)
    try:
        act()
    finally:
        sys.settrace(before)
    return count


def growth(act: Callable[[Run], object], make: Callable[[int], Run], num_groups: int = 60) -> float:
    """The work on a run of twice as many layer groups, in that on one of `num_groups`."""
    small, large = make(num_groups), make(2 * num_groups)
    return work(lambda: act(large)) / work(lambda: act(small))


def many(num_groups: int, **clock: Any) -> Run:
    """A run of so many layer groups, each imported in two pieces; the last two in the tail."""
    source: list[Interval] = []
    owner = [at("granted", 0, name="prefill")]
    for number in range(num_groups):
        begun, name = 100 * number, str(Span(2 * number, 2 * number + 2, 0, 8))
        pieces = [str(Span(layer, layer + 1, 0, 8)) for layer in (2 * number, 2 * number + 1)]
        source += [
            at("compute", begun, begun + 60, name=name, **clock),
            at("write", begun + 60, begun + 90, name=name, nbytes=1_000, **clock),
            at("announced", begun + 90, name=name, nbytes=1_000),
        ]
        owner += [
            at("validated", begun + 100, name=name, nbytes=1_000),
            at("import", begun + 110, begun + 160, name=pieces[0], nbytes=500, **clock),
            at("import", begun + 115, begun + 170, name=pieces[1], nbytes=500, **clock),
            at("neighbour", begun + 170, begun + 175, name="decode step of another"),
        ]
    end = 100 * num_groups
    source.append(at("final", end, name="logits"))
    owner += [at("published", end + 200, name="entry"), at("ended", end + 900, name="finished")]
    return streamed(source=tuple(source), owner=tuple(owner))


def deep(num_groups: int) -> Run:
    """All imports are in flight together, as of a device that takes them all at once."""
    run = many(num_groups)
    end_ns = max(each.ended_ns for each in run.owner)
    owner = [
        replace(each, ended_ns=end_ns) if each.kind == "import" else each for each in run.owner
    ]
    return replace(run, owner=tuple(owner))
