"""Slots: one holder, tokens given back once, and FREE only on proof that all are back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.errors import HeadraceError, LocalProtocolError, RemoteProtocolError, WouldBlock
from headrace.ids import ImportId, SlotIndex
from headrace.protocol.slots import Lease, Slot, SlotState, SlotTable
from tests.unit.protocol.builders import attempt_id, trace_of

A = attempt_id(0)
B = attempt_id(1)
R0, R1 = ImportId(0), ImportId(1)


def leased() -> Slot:
    slot = Slot(SlotIndex(0))
    slot.lease(A)
    return slot


def leased_reading() -> Slot:
    slot = leased()
    slot.begin_read(R0)
    return slot


def ready() -> Slot:
    slot = leased()
    slot.writer_back()
    return slot


def reading() -> Slot:
    slot = leased_reading()
    slot.writer_back()
    return slot


def draining() -> Slot:
    slot = leased_reading()
    slot.end(5)
    return slot


def quarantined() -> Slot:
    slot = draining()
    slot.deadline()
    return slot


MADE: dict[SlotState, Callable[[], Slot]] = {
    SlotState.FREE: lambda: Slot(SlotIndex(0)),
    SlotState.LEASED: leased,
    SlotState.READY: ready,
    SlotState.READING: reading,
    SlotState.DRAINING: draining,
    SlotState.QUARANTINED: quarantined,
}
EVENTS: dict[str, Callable[[Slot], object]] = {
    "lease": lambda slot: slot.lease(B),
    "begin_read": lambda slot: slot.begin_read(R1),
    "end_read": lambda slot: slot.end_read(R0),
    "writer_back": lambda slot: slot.writer_back(),
    "end": lambda slot: slot.end(9),
    "deadline": lambda slot: slot.deadline(),
}
S = SlotState
LEGAL: dict[tuple[SlotState, str], SlotState] = {
    (S.FREE, "lease"): S.LEASED,
    (S.LEASED, "begin_read"): S.LEASED,
    (S.LEASED, "writer_back"): S.READY,
    (S.LEASED, "end"): S.DRAINING,
    (S.READY, "begin_read"): S.READING,
    (S.READY, "end"): S.FREE,  # both tokens are back: nothing to drain
    (S.READING, "begin_read"): S.READING,
    (S.READING, "end_read"): S.READY,
    (S.READING, "end"): S.DRAINING,
    (S.DRAINING, "end_read"): S.DRAINING,
    (S.DRAINING, "writer_back"): S.DRAINING,
    (S.DRAINING, "deadline"): S.QUARANTINED,
    (S.QUARANTINED, "end_read"): S.QUARANTINED,
    (S.QUARANTINED, "writer_back"): S.QUARANTINED,
}


@pytest.mark.parametrize("state", S)
def test_every_event_in_every_state_is_legal_or_leaves_no_trace(state: SlotState) -> None:
    for event in EVENTS:
        check_event(state, event)


def check_event(state: SlotState, event: str) -> None:
    slot = MADE[state]()
    assert slot.state is state
    before = trace_of(slot)
    if (state, event) in LEGAL:
        EVENTS[event](slot)
        assert slot.state is LEGAL[state, event]
    else:
        with pytest.raises(HeadraceError):
            EVENTS[event](slot)
        assert trace_of(slot) == before


@pytest.mark.parametrize("make", [draining, quarantined])
@pytest.mark.parametrize("first", ["end_read", "writer_back"])
def test_only_the_last_token_back_frees_a_slot(make: Callable[[], Slot], first: str) -> None:
    slot = make()
    state = slot.state
    second = ({"end_read", "writer_back"} - {first}).pop()
    EVENTS[first](slot)
    assert (slot.state, slot.generation, slot.holder) == (state, 0, A)
    EVENTS[second](slot)
    assert (slot.state, slot.generation, slot.holder) == (S.FREE, 1, None)


def test_a_slot_without_readers_drains_by_its_writer_alone() -> None:
    slot = leased()
    slot.end(5)
    assert (slot.state, slot.draining_since_ns) == (S.DRAINING, 5)
    slot.writer_back()
    assert slot.state is S.FREE


def test_the_write_token_comes_back_once() -> None:
    slot = ready()
    with pytest.raises(RemoteProtocolError, match="slot 0: the write token is not out"):
        slot.writer_back()


def test_a_read_token_goes_out_and_comes_back_once() -> None:
    slot = leased_reading()
    with pytest.raises(LocalProtocolError, match="read token 0 is out already"):
        slot.begin_read(R0)
    slot.end_read(R0)
    with pytest.raises(LocalProtocolError, match="read token 0 is not out"):
        slot.end_read(R0)


def test_a_reader_does_not_stand_in_for_another() -> None:
    slot = reading()
    slot.begin_read(R1)
    slot.end_read(R0)
    states = [slot.state]
    slot.end_read(R1)
    assert [*states, slot.state] == [S.READING, S.READY]


def test_reading_a_slot_that_is_still_written_keeps_it_leased() -> None:
    slot = leased_reading()
    slot.end_read(R0)
    assert (slot.state, slot.writer_out) == (S.LEASED, True)


def test_the_generation_rises_with_each_return_to_free_and_no_lease_is_ever_equal_to_another() -> (
    None
):
    slot = Slot(SlotIndex(3))
    leases = []
    for generation in range(3):
        leases.append(slot.lease(A))
        assert leases[-1] == Lease(SlotIndex(3), slot.generation, A)
        slot.writer_back()
        slot.end(0)
        assert slot.generation == generation + 1
    assert len(set(leases)) == 3


def test_the_lowest_free_slot_is_leased_and_none_when_all_are_out() -> None:
    table = SlotTable(2)
    assert [table.lease(A).slot, table.lease(B).slot] == [0, 1]
    with pytest.raises(WouldBlock, match="no slot free of 2"):
        table.lease(A)
    table[SlotIndex(0)].end(0)
    table[SlotIndex(0)].writer_back()
    assert table.lease(B) == Lease(SlotIndex(0), table[SlotIndex(0)].generation, B)


def test_the_tokens_that_are_out_are_named() -> None:
    slot = Slot(SlotIndex(0))
    assert list(slot.tokens_out()) == []
    slot.lease(A)
    for token in (12, 3):
        slot.begin_read(ImportId(token))
    assert list(slot.tokens_out()) == ["write", "read 3", "read 12"]
    slot.writer_back()
    slot.end(0)
    slot.end_read(ImportId(3))
    assert list(slot.tokens_out()) == ["read 12"]
    slot.end_read(ImportId(12))
    assert list(slot.tokens_out()) == []


def test_every_slot_is_counted_in_exactly_one_state() -> None:
    table = SlotTable(6)
    for index, make in enumerate(MADE.values()):
        table._slots[index] = make()
    assert len(table) == len(list(table)) == 6
    assert table.num_free == 1
    assert table.statistics() == {state.name.lower(): 1 for state in S}
