"""A machine: legality is what its table says, and a refused event changes nothing."""

from __future__ import annotations

from enum import Enum, auto
from typing import ClassVar

import pytest

from headrace.errors import LocalProtocolError, RemoteProtocolError
from headrace.protocol.handoff import Handoff, HandoffEvent, HandoffState
from headrace.protocol.machine import Machine
from headrace.protocol.slots import Slot, SlotEvent, SlotState
from headrace.protocol.source import SourceAttempt, SourceEvent, SourceState


class Light(Enum):
    RED = auto()
    GREEN = auto()


class Press(Enum):
    GO = auto()
    STOP = auto()


class Signal(Machine[Light, Press]):
    TABLE: ClassVar = {Light.RED: {Press.GO: Light.GREEN}, Light.GREEN: {Press.STOP: Light.RED}}

    def press(self, event: Press) -> None:
        self._check(event)
        self._step(event)

    def press_from_afar(self, event: Press) -> None:
        self._check(event, RemoteProtocolError)
        self._step(event)


def test_a_legal_event_moves_the_state() -> None:
    signal = Signal(Light.RED, "signal 1")
    assert signal.allows(Press.GO)
    signal.press(Press.GO)
    assert signal.state is Light.GREEN


def test_an_illegal_event_names_machine_event_and_state_and_changes_nothing() -> None:
    signal = Signal(Light.RED, "signal 1")
    assert not signal.allows(Press.STOP)
    with pytest.raises(LocalProtocolError, match="signal 1: STOP is illegal in RED"):
        signal.press(Press.STOP)
    assert signal.state is Light.RED


def test_who_broke_the_rule_decides_the_error() -> None:
    with pytest.raises(RemoteProtocolError):
        Signal(Light.GREEN, "signal 1").press_from_afar(Press.GO)


@pytest.mark.parametrize(
    ("machine", "states", "events", "final"),
    [
        (Slot, SlotState, SlotEvent, set()),
        (SourceAttempt, SourceState, SourceEvent, {SourceState.DONE}),
        (Handoff, HandoffState, HandoffEvent, {HandoffState.ENDED}),
    ],
)
def test_a_table_has_every_state_uses_every_event_and_leads_everywhere(
    machine: type[Machine[Enum, Enum]],
    states: type[Enum],
    events: type[Enum],
    final: set[Enum],
) -> None:
    table = machine.TABLE
    assert set(table) == set(states)
    assert {event for row in table.values() for event in row} == set(events)
    start = next(iter(table))
    reached = {start}
    for _ in table:
        reached |= {target for state in reached for target in table[state].values()}
    assert reached == set(states)
    stuck = {state for state in states if set(table[state].values()) <= {state}}
    assert stuck == final
