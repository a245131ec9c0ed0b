"""When a source that died is started again, and when it is set aside.

Each death in a row waits longer than the one before it. A source that was well (that finished a
request, or lived for `healthy_after_s`) starts over. One that dies `max_failures` times without
being well in between is set aside with a reason, since to start it once more would change nothing.

No clock and no process is held here: time comes in as an argument.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TypeAlias

from headrace.errors import Refused


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How a source that dies is started again.

    first_delay_s: from the first death to the restart; each further one in a row is `factor` times
    longer, up to `longest_delay_s`. max_failures: deaths in a row after which it is set aside.
    healthy_after_s: how long a source must live for its earlier deaths to be forgotten.

    Raises:
        Refused: a number makes no sense; the text names it.
    """

    first_delay_s: float = 0.2
    factor: float = 2.0
    longest_delay_s: float = 30.0
    max_failures: int = 5
    healthy_after_s: float = 60.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            least = 0.0 if each.name.endswith("_s") else 1.0
            good = type(value) in (int, float) and math.isfinite(value) and value >= least
            if each.name == "max_failures":
                good = good and type(value) is int
            if not good:
                raise Refused(
                    f"{each.name} is {value!r}; it is a number from {least:.0f} up", field=each.name
                )


@dataclass(frozen=True, slots=True)
class Restart:
    """Start it again at `at_ns`."""

    at_ns: int


@dataclass(frozen=True, slots=True)
class SetAside:
    """Do not start it again; `reason` says why."""

    reason: str


Decision: TypeAlias = Restart | SetAside


class Supervisor:
    """Decides on each death of one process and of those that take its place."""

    def __init__(self, name: str, policy: RestartPolicy, now_ns: int) -> None:
        """`name`: what it is, as reasons call it. It is in service since `now_ns`."""
        self._name = name
        self._policy = policy
        self._failures = 0
        self._first_failure_ns = 0
        self._since_ns: int | None = now_ns

    @property
    def failures(self) -> int:
        """Deaths since it was last well."""
        return self._failures

    def entered(self, now_ns: int) -> None:
        """It is in service from now on."""
        self._since_ns = now_ns

    def served(self) -> None:
        """It finished a request: what was before is forgotten."""
        self._failures = 0

    def died(self, reason: str, now_ns: int, *, well: bool = True) -> Decision:
        """It is dead, in service or while it was starting; what is to be done?

        `well`: whether having lived for long makes earlier deaths forgotten.
        """
        policy = self._policy
        since_ns, self._since_ns = self._since_ns, None
        if well and since_ns is not None and now_ns - since_ns >= policy.healthy_after_s * 1e9:
            self._failures = 0
        if self._failures == 0:
            self._first_failure_ns = now_ns
        self._failures += 1
        if self._failures >= policy.max_failures:
            times = "once" if self._failures == 1 else f"{self._failures} times"
            within_s = (now_ns - self._first_failure_ns) / 1e9
            return SetAside(
                f"{self._name} died {times} within {within_s:.1f} s and is set aside; "
                f"the last: {reason}"
            )
        return Restart(now_ns + int(self._delay_s() * 1e9))

    def _delay_s(self) -> float:
        policy = self._policy
        try:
            grown = policy.first_delay_s * policy.factor ** (self._failures - 1)
        except OverflowError:  # far beyond any delay
            return policy.longest_delay_s
        return min(grown, policy.longest_delay_s)
