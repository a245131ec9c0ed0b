"""How each source of an owner stands, by its name, whatever became of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headrace.ids import SourceId
from headrace.messages import MAX_HELD_TEXT, SourceHeld, SourceState, travelling_text
from headrace.protocol.snapshot import SlotLine
from headrace.runtime.restarts import Line
from headrace.runtime.worker import SourceHandle

OWN_ENGINE = "owner"  # the name of the engine in the owner's own process

_ALL_APART = "all of its slots are quarantined"


@dataclass(slots=True)
class _Place:
    """One source that was attached, and those that took its place."""

    handle: SourceHandle  # of the one that serves, or served last
    line: Line | None  # None: nothing takes its place
    source: SourceId
    restarts: int = 0
    lost: str = ""  # why it is gone, or about to be

    def standing(self, apart: set[SourceId]) -> tuple[SourceState, str]:
        if self.line is not None and self.line.standing[0] != "in service":
            return self.line.standing
        if self.lost:  # the next of a line comes when this one is dead
            return ("gone" if self.line is None else "waiting to restart"), self.lost
        return ("set aside", _ALL_APART) if self.source in apart else ("in service", "")


class Roster:
    """The sources in the order in which they were attached; none is ever forgotten."""

    def __init__(self) -> None:
        self._places: list[_Place] = []

    def entered(self, source: SourceId, handle: SourceHandle, line: Line | None) -> None:
        """A source came into service: a new one, or the next of a line."""
        for place in self._places:
            if line is not None and place.line is line:
                place.handle, place.source, place.lost = handle, source, ""
                place.restarts += 1
                return
        self._places.append(_Place(handle, line, source))

    def lost(self, source: SourceId, reason: str) -> None:
        """It is dead, or is being ended; the last reason is the one that is told."""
        for place in self._places:
            if place.source == source:
                place.lost = reason

    def held(self, slots: Iterable[SlotLine], local: SourceId | None) -> list[SourceHeld]:
        """How each stands; `local`: the owner's own engine, if it is in service."""
        usable, all_ids = set[SourceId](), set[SourceId]()
        for slot in slots:
            all_ids.add(slot.source)
            if slot.state != "quarantined":
                usable.add(slot.source)
        out = []
        for place in self._places:
            state, reason = place.standing(all_ids - usable)
            handle = place.handle if place.line is None else place.line.handle
            name, told = _short(handle.name), _short(reason)
            pid = handle.running_pid
            out.append(SourceHeld(place.source, name, state, told, pid, place.restarts))
        if local is not None:
            if local in all_ids - usable:
                out.append(SourceHeld(local, OWN_ENGINE, "set aside", _ALL_APART, 0, 0))
            else:
                out.append(SourceHeld(local, OWN_ENGINE, "in service", "", 0, 0))
        return out


def _short(text: str) -> str:
    return travelling_text(text)[:MAX_HELD_TEXT]
