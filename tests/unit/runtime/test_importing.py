"""How much is imported in a turn, and how much is in flight on a device that copies by itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from headrace.backends.base import CopyTuning
from headrace.backends.copy_probe import CHUNKS, choose
from headrace.ids import ImportId
from headrace.protocol.owner import Owner
from headrace.runtime.importing import (
    IDLE_CHUNK_NBYTES,
    LOOK_AGAIN_S,
    MAX_FLIGHT_NBYTES,
    MAX_FLIGHTS,
    SHARED_CHUNK_NBYTES,
    Importing,
)

COPIES = CopyTuning(
    chunk_nbytes=400, shared_chunk_nbytes=200, in_flight_nbytes=2000, shared_in_flight_nbytes=800
)


@dataclass
class Flight:
    nbytes: int


@dataclass
class Machine:
    """Begins pieces of a chunk each as long as it has bytes; `flies`: they are not fenced."""

    left: int = 1 << 40
    flies: bool = True
    chunk_nbytes: int = 0
    begun: list[int] = field(default_factory=list)
    flights: dict[ImportId, Flight] = field(default_factory=dict)

    def begin_imports(self, budget_nbytes: int, now_ns: int) -> int:
        nbytes = min(self.chunk_nbytes, self.left)
        if nbytes:
            self.left -= nbytes
            self.begun.append(nbytes)
            if self.flies:
                self.flights[ImportId(len(self.begun))] = Flight(nbytes)
        return nbytes


def importing(machine: Machine, **how: Any) -> Importing:
    given = {"share": 1.0, "chunk_nbytes": None, "budget_nbytes": None, **how}
    return Importing(cast(Owner, machine), machine.flights, **given)


def begin(importing: Importing, *, decoding: bool = False, interrupted: bool = False) -> None:
    importing.begin(lambda: None, lambda: interrupted, decoding=decoding)


def earn(importing: Importing) -> None:
    """A decode step that earns imports far more than they spend here."""

    def step() -> None:
        assert sum(range(1_000_000)) > 0

    importing.decode(step, decoding=True)


@pytest.mark.parametrize("decoding", [False, True])
def test_a_device_is_fed_as_it_was_measured(decoding: bool) -> None:
    machine = Machine()
    subject = importing(machine, copies=COPIES)
    earn(subject)
    begin(subject, decoding=decoding)
    chunk = COPIES.shared_chunk_nbytes if decoding else COPIES.chunk_nbytes
    assert set(machine.begun) == {chunk}
    room = COPIES.shared_in_flight_nbytes if decoding else COPIES.in_flight_nbytes
    assert sum(machine.begun) == room
    begin(subject, decoding=decoding)
    assert sum(machine.begun) == room
    machine.flights.pop(ImportId(1))
    begin(subject, decoding=decoding)
    assert sum(machine.begun) == room + chunk


def test_one_piece_is_always_begun() -> None:
    machine = Machine()
    begin(importing(machine, copies=CopyTuning(400, 400, 1, 1)))
    assert machine.begun == [400]


def test_a_chunk_that_the_user_gave_goes_first() -> None:
    machine = Machine()
    begin(importing(machine, copies=COPIES, chunk_nbytes=150))
    assert set(machine.begun) == {150}
    assert 2000 <= sum(machine.begun) < 2150


@pytest.mark.parametrize("decoding", [False, True])
def test_without_a_measure_it_is_as_ever(decoding: bool) -> None:
    machine = Machine(flies=False)
    begin(importing(machine), decoding=decoding)
    assert machine.begun[0] == (SHARED_CHUNK_NBYTES if decoding else IDLE_CHUNK_NBYTES)
    flying = Machine()
    subject = importing(flying, chunk_nbytes=1 << 20)
    earn(subject)
    begin(subject, decoding=decoding)
    assert sum(flying.begun) == MAX_FLIGHT_NBYTES


def test_flights_are_bounded_in_number() -> None:
    machine = Machine()
    begin(importing(machine, chunk_nbytes=1))
    assert len(machine.flights) == MAX_FLIGHTS


@pytest.mark.parametrize("rate", [10.0**n for n in range(5, 13)])
@pytest.mark.parametrize("decoding", [False, True])
def test_their_bound_is_beyond_what_a_measured_link_has_in_flight(
    rate: float, decoding: bool
) -> None:
    machine = Machine()
    copies = choose({(chunk, 4): rate for chunk in CHUNKS})
    subject = importing(machine, copies=copies, budget_nbytes=1 << 40)
    earn(subject)
    begin(subject, decoding=decoding)
    room = copies.shared_in_flight_nbytes if decoding else copies.in_flight_nbytes
    assert room <= sum(machine.begun)
    assert len(machine.begun) <= MAX_FLIGHTS // 2


def test_a_turn_has_a_budget_and_ears() -> None:
    machine = Machine(flies=False)
    begin(importing(machine, copies=COPIES, budget_nbytes=1000))
    assert machine.begun == [400, 400, 400]
    begin(importing(machine, copies=COPIES), interrupted=True)
    assert machine.begun == [400] * 4


def test_it_looks_away_from_a_full_link_only() -> None:
    machine = Machine()
    subject = importing(machine, copies=COPIES)
    assert subject.look_again_s() == 0
    begin(subject)
    assert subject.look_again_s() == LOOK_AGAIN_S
    machine.flights.pop(ImportId(1))
    assert subject.look_again_s() == 0
    flying = Machine()
    unmeasured = importing(flying, chunk_nbytes=1 << 20)
    begin(unmeasured)
    assert unmeasured.look_again_s() == 0
