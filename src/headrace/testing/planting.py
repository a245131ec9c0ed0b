"""Plants small bugs into the machines of this process, and takes them out again.

A bug is an edit of a method's source or of a table's row, written as text:

    [Class.method]
    instance: what the bug does
        old => new

In the source of the method, `old` stands exactly once and becomes `new`; `\\n` is a line break, and
a line of deeper indent goes on with the one before. `[Machine.TABLE]` takes `STATE EVENT => STATE`,
without the last one if the event becomes illegal. A further plant of the same bug may name its own
method at its start. `instance` is the one that shows the bug first.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from headrace.errors import LocalProtocolError


@dataclass(frozen=True)
class Plant:
    """In `where.name`, `old` becomes `new`."""

    where: type | ModuleType
    name: str
    old: str
    new: str

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The bug is in the machine inside this block.

        Raises:
            LocalProtocolError: there is no such place, or more than one.
        """
        kept = inspect.getattr_static(self.where, self.name)
        setattr(
            self.where, self.name, self._row(kept) if self.name == "TABLE" else self._edit(kept)
        )
        try:
            yield
        finally:
            setattr(self.where, self.name, kept)

    def _edit(self, kept: Any) -> Any:
        function: Any = kept.fget if isinstance(kept, property) else kept
        text = textwrap.dedent(inspect.getsource(function))
        if text.count(self.old) != 1:
            raise LocalProtocolError(f"{text.count(self.old)} places for {self}")
        made: dict[str, Any] = {}
        exec(text.replace(self.old, self.new), function.__globals__, made)
        return made[self.name]

    def _row(self, kept: Mapping[Any, Mapping[Any, Any]]) -> Mapping[Any, Mapping[Any, Any]]:
        state_name, event_name = self.old.split()
        state = next(state for state in kept if state.name == state_name)
        events = {event.name: event for row in kept.values() for event in row}
        row = {event: to for event, to in kept[state].items() if event.name != event_name}
        if self.new:
            row[events[event_name]] = next(to for to in kept if to.name == self.new)
        if row == kept[state]:
            raise LocalProtocolError(f"no place for {self}")
        return {**kept, state: row}


@dataclass(frozen=True)
class Mutant:
    """A bug: what it does, where it is planted, and the instance that shows it first."""

    text: str
    instance: str
    plants: tuple[Plant, ...]

    @contextmanager
    def planted(self) -> Iterator[None]:
        """All of the bug is in the machines inside this block."""
        if not self.plants:
            raise LocalProtocolError(f"no plant for {self}")
        with ExitStack() as stack:
            for plant in self.plants:
                stack.enter_context(plant.planted())
            yield


def read_mutants(text: str, places: Mapping[str, type | ModuleType]) -> tuple[Mutant, ...]:
    """The bugs of a text; `places` are the classes and modules that it may name."""
    mutants: list[Mutant] = []
    place = ""
    for line in _whole_lines(text):
        if line.startswith("["):
            place = line[1:-1]
        elif not line.startswith(" "):
            instance, _, what = line.partition(": ")
            mutants.append(Mutant(what, instance, ()))
        else:
            plants = (*mutants[-1].plants, _read_plant(line.strip(), place, places))
            mutants[-1] = Mutant(mutants[-1].text, mutants[-1].instance, plants)
    return tuple(mutants)


def _read_plant(line: str, place: str, places: Mapping[str, type | ModuleType]) -> Plant:
    if line.startswith("["):
        place, _, line = line[1:].partition("] ")
    where, _, name = place.partition(".")
    old, _, new = line.replace("\\n", "\n").partition(" =>")
    return Plant(places[where], name, old, new.strip(" "))


def _whole_lines(text: str) -> list[str]:
    lines: list[str] = []
    for line in text.strip().splitlines():
        if line.startswith(" " * 8):
            lines[-1] += f" {line.strip()}"
        elif line:
            lines.append(line)
    return lines
