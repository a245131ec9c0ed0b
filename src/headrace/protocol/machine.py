"""One transition table per machine, and the only code that reads legality from it.

A machine checks an event first, then changes what it must, then steps. A refused event raises and
leaves no trace. Joint conditions (of several facts at once) are settled by the machine itself after
each event, in one place, by stepping events that its table allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import ClassVar, Generic, TypeVar

from headrace.errors import HeadraceError, LocalProtocolError

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class Machine(Generic[S, E]):
    """A state, and the table that says which events move it where."""

    TABLE: ClassVar[Mapping[Enum, Mapping[Enum, Enum]]]

    def __init__(self, state: S, name: str) -> None:
        self.state = state
        self._name = name

    def allows(self, event: E) -> bool:
        """Whether the table has a transition for `event` now."""
        return event in self.TABLE[self.state]

    def _check(self, event: E, error: type[HeadraceError] = LocalProtocolError) -> None:
        if not self.allows(event):
            raise error(f"{self._name}: {event.name} is illegal in {self.state.name}")

    def _step(self, event: E) -> None:
        self.state = self.TABLE[self.state][event]  # type: ignore[assignment]
