"""Known bugs, planted one at a time: how many schedules it takes until the lab finds each.

Beside those of `headrace.testing.mutants`, which the walk finds, there are some here that no walk
of the machines can see: the plan cuts or places cells wrongly, and only bytes tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from headrace import plan
from headrace.errors import Refused
from headrace.plan import Plan
from headrace.testing.fault_lab.bounds import tiny_bounds
from headrace.testing.fault_lab.geometries import GEOMETRIES
from headrace.testing.fault_lab.schedule import Seen, run_schedule
from headrace.testing.mutants import EQUIVALENT, MUTANTS
from headrace.testing.planting import Mutant, read_mutants

_BUGS: Final = r"""
[Plan.cut]
bytes: the last position of a piece is left out
    min(at + step, stop)) => min(at + step, stop - 1))
bytes: pieces of a layer overlap
    Span(layer, layer + 1, at, min(at + step, stop)) =>
        Span(layer, layer + 1, at, min(at + step + 1, stop))
bytes: the layers after one that was cut are forgotten
    if first < span.layer_stop: => if first == span.layer_start:
bytes: the layers before one that is cut are forgotten
    if first < layer: => if False:
[Plan.region]
bytes: positions are counted from the start of the prompt, not of the window
    Region(base + (start - lo) * row, 1, => Region(base + start * row, 1,
bytes: a head's rows are as far apart as the span is long
    (stop - start) * row, (hi - lo) * row) => (stop - start) * row, (stop - start) * row)
bytes: a span of one head takes its neighbour's row
    Region(base + (start - lo) * row, shape.heads, =>
        Region(base + (start - lo + 1) * row, shape.heads,
bytes: all layers lie at the place of the first
    base = self._bases[layer][part] => base = self._bases[0][part]
[Plan.copies]
bytes: only the first part is copied
    for part in range(len(self.layers[layer].parts)) => for part in range(1)
[Plan._clip]
bytes: a span is taken to the window's end
    min(hi, span.stop) => hi
bytes: a span is taken from the window's start
    max(lo, span.start) => lo
[plan.live_window]
bytes: a window is anchored one row too late
    max(0, num_tokens - tail), num_tokens => max(0, num_tokens - tail + 1), num_tokens
bytes: a window is anchored at the first position
    max(0, num_tokens - tail), num_tokens => 0, min(tail, num_tokens)
bytes: a window of no rows takes all
    max(0, num_tokens - tail), num_tokens => num_tokens - (tail or num_tokens), num_tokens
[Plan.layer_groups]
bytes: the last layer group is not emitted
    if any(map(self._has_cells, numbers))] => if any(map(self._has_cells, numbers))][:-1]
[plan._runs]
bytes: a layer group holds its neighbour's layer
    if number != previous + 1: => if False:
"""

LAB_BUGS: Final = read_mutants(_BUGS, {"Plan": Plan, "plan": plan})
ALL_BUGS: Final = (*MUTANTS, *LAB_BUGS)


@dataclass(frozen=True)
class Hunted:
    """What came of one bug. at: the number of the schedule that found it, None if none did."""

    bug: Mutant
    at: int | None
    seen: Seen | None


def find_bug(text: str) -> Mutant:
    """The bug of this text.

    Raises:
        Refused: there is none.
    """
    for bug in (*ALL_BUGS, *EQUIVALENT):
        if bug.text == text:
            return bug
    raise Refused(f"no bug is called {text!r}", field="bug")


@contextmanager
def planted(bug: Mutant | None) -> Iterator[None]:
    """The bug is in the machines inside this block, and the lab's bounds are set."""
    with tiny_bounds():
        if bug is None:
            yield
            return
        _forget_plans()
        try:
            with bug.planted():
                yield
        finally:
            _forget_plans()


def hunt(bug: Mutant, most: int, first_seed: int = 0, *, one_lane: bool = False) -> Hunted:
    """Run up to `most` schedules with the bug planted, until one breaks a rule."""
    with planted(bug):
        for at in range(most):
            seen = run_schedule(first_seed + at, one_lane=one_lane)
            if seen.broken is not None:
                return Hunted(bug, at + 1, seen)
    return Hunted(bug, None, None)


def _forget_plans() -> None:
    for geometry in GEOMETRIES:
        geometry.forget_plans()
