"""What an owner holds: the states of a source, and that all that may be held fits a message."""

from __future__ import annotations

from typing import get_args

import pytest

from headrace import messages as wire
from headrace.channel import MAX_MESSAGE_NBYTES
from headrace.messages.base import MAX_HELD_TEXT
from headrace.messages.held import Inspected, SourceHeld, SourceState
from headrace.runtime.config import MAX_SOURCES
from tests.unit.messages.examples import U64, raw, refused


def report(*sources: SourceHeld) -> Inspected:
    return Inspected((), (), 64, 1, (), (), sources, ())


@pytest.mark.parametrize("state", get_args(SourceState))
def test_a_source_is_in_one_of_its_states(state: SourceState) -> None:
    assert not refused(wire.decode_from_owner, raw(report(SourceHeld(0, "x", state, "", 0, 0))))


def test_another_state_is_refused() -> None:
    array = raw(report(SourceHeld(0, "x", "gone", "", 0, 0)))
    array[7][0][2] = "dead"
    assert refused(wire.decode_from_owner, array)


def test_the_sources_of_an_owner_fit_a_message() -> None:
    goats = "\N{GOAT}" * MAX_HELD_TEXT
    each = SourceHeld(U64, "x" * 64, "waiting to restart", goats, U64, U64)
    assert len(wire.encode(report(*[each] * MAX_SOURCES))) < MAX_MESSAGE_NBYTES // 2
    assert refused(
        wire.decode_from_owner, raw(report(SourceHeld(0, "x", "gone", goats + "x", 0, 0)))
    )
