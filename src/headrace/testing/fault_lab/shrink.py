"""Makes a schedule that breaks a rule as short and as tame as it can, and says how to see it again.

Decisions are left out, set to 0 or lowered, stream by stream; a change is kept if the schedule then
breaks the same rule with the same words and is shorter, or as long and tamer.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from headrace.errors import LocalProtocolError
from headrace.testing.fault_lab.choices import Recorded, to_text, trimmed
from headrace.testing.fault_lab.safety import Broken
from headrace.testing.fault_lab.schedule import Seen, run_schedule

Values = tuple[int, ...]

COMMAND: Final = "python -m headrace.testing.fault_lab"
_SIZES: Final = (16, 8, 4, 2, 1)
_WORDS_COMPARED: Final = 40  # characters of a finding, without its numbers


@dataclass(frozen=True)
class Shrunk:
    """The shortest schedule that was found."""

    recorded: Recorded
    broken: Broken
    num_steps: int
    num_tried: int

    def command(self, bug: str = "") -> str:
        """What to type to see it; `bug`: what must be planted for it."""
        planted = f" --bug '{bug}'" if bug else ""
        return f"{COMMAND} --replay '{to_text(self.recorded)}'{planted}"


def shrink(seen: Seen, budget_s: float = 20.0) -> Shrunk:
    """Shrink a schedule that broke a rule, for at most about `budget_s` seconds."""
    if seen.broken is None:
        raise LocalProtocolError("this schedule broke no rule")
    return _Shrinker(seen, seen.broken, time.monotonic() + budget_s).run()


def same_finding(one: Broken, other: Broken) -> bool:
    """Whether two findings are of the same rule and say the same, up to their numbers."""
    return _words(one) == _words(other)


class _Shrinker:
    def __init__(self, seen: Seen, broken: Broken, until_s: float) -> None:
        self._best = seen
        self._broken = broken
        self._until_s = until_s
        self._tried: set[str] = set()

    def run(self) -> Shrunk:
        cost = None
        while cost != _cost(self._best) and not self._late:
            cost = _cost(self._best)
            for name in list(self._best.recorded):
                self._keep(_edited(self._best.recorded, name, 0, None, ()))
            for size in _SIZES:
                self._sweep(size, _left_out)
                self._sweep(size, _zeroed)
            self._sweep(1, _lowered)
        best = self._best
        return Shrunk(best.recorded, best.broken or self._broken, best.num_steps, len(self._tried))

    @property
    def _late(self) -> bool:
        return time.monotonic() > self._until_s

    def _sweep(self, size: int, change: Callable[[Values], Iterator[Values]]) -> None:
        """Change `size` decisions at a time, in all streams from front to back."""
        for name in list(self._best.recorded):
            at = 0
            while at < len(self._best.recorded.get(name, ())) and not self._late:
                block = self._best.recorded[name][at : at + size]
                changes = (
                    _edited(self._best.recorded, name, at, size, new) for new in change(block)
                )
                kept = any(map(self._keep, changes))
                if not kept or change is not _left_out:  # else what came after is here now
                    at += size

    def _keep(self, recorded: Recorded) -> bool:
        """Run a changed schedule; it is the best from now on if it breaks the same rule sooner."""
        text = to_text(recorded)
        if text in self._tried or self._late:
            return False
        self._tried.add(text)
        seen = run_schedule(recorded=recorded)
        same = seen.broken is not None and same_finding(seen.broken, self._broken)
        if not same or _cost(seen) >= _cost(self._best):
            return False
        self._best = seen
        return True


def _edited(
    recorded: Recorded, name: str, at: int, size: int | None, new: Sequence[int]
) -> Recorded:
    """`recorded` with `size` decisions of a stream, or all from there on, replaced by `new`."""
    values = recorded.get(name, ())
    rest = () if size is None else values[at + size :]
    return trimmed({**recorded, name: (*values[:at], *new, *rest)})


def _left_out(block: Values) -> Iterator[Values]:
    yield ()


def _zeroed(block: Values) -> Iterator[Values]:
    yield (0,) * len(block)


def _lowered(block: Values) -> Iterator[Values]:
    (value,) = block
    yield from ((lower,) for lower in sorted({1, value // 2, value - 1}) if 0 < lower < value)


def _cost(seen: Seen) -> tuple[int, int, int]:
    """Shorter first, then with fewer decisions that are not tame, then with tamer ones."""
    values = [value for stream in seen.recorded.values() for value in stream]
    return seen.num_steps, sum(map(bool, values)), sum(values)


def _words(broken: Broken) -> tuple[int, str]:
    return broken.number, re.sub(r"\d+", "#", broken.text)[:_WORDS_COMPARED]
