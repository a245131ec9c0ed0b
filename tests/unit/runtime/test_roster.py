"""How a source stands, whatever became of it and of those that took its place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from headrace.ids import Generation, SlotIndex, SourceId
from headrace.messages import MAX_HELD_TEXT, SourceHeld
from headrace.protocol.snapshot import SlotLine
from headrace.runtime.restarts import Line, _Phase
from headrace.runtime.roster import OWN_ENGINE, Roster
from headrace.runtime.supervisor import RestartPolicy
from headrace.runtime.worker import SourceHandle

pytestmark = pytest.mark.usefixtures("nothing_left")

GEOMETRY: dict[str, Any] = {"layers": 1}


@pytest.fixture
def handle() -> Iterator[SourceHandle]:
    made = SourceHandle("replay", GEOMETRY, name="replay-1")
    made.start()
    yield made
    made.close()


def slots(source: int, *states: str) -> list[SlotLine]:
    return [
        SlotLine(SourceId(source), SlotIndex(at), Generation(0), state, None, ())
        for at, state in enumerate(states)
    ]


def only(roster: Roster, *lines: SlotLine, local: SourceId | None = None) -> SourceHeld:
    (held,) = roster.held(lines, local)
    return held


def test_one_that_is_never_started_again(handle: SourceHandle) -> None:
    roster = Roster()
    roster.entered(SourceId(4), handle, None)
    good = SourceHeld(4, "replay-1", "in service", "", handle.pid, 0)
    assert only(roster, *slots(4, "free", "quarantined")) == good
    apart = only(roster, *slots(4, "quarantined", "quarantined"))
    assert (apart.state, apart.reason) == ("set aside", "all of its slots are quarantined")
    roster.lost(SourceId(3), "another")
    assert only(roster, *slots(4, "free")) == good
    roster.lost(SourceId(4), "it is ended")
    assert only(roster).pid == handle.pid
    handle.kill()
    assert handle.wait(10)
    roster.lost(SourceId(4), "x" * 9999)
    assert only(roster) == SourceHeld(4, "replay-1", "gone", "x" * MAX_HELD_TEXT, 0, 0)


def test_one_that_is_started_again(handle: SourceHandle) -> None:
    handle.manifest  # noqa: B018 - it is loaded
    line = Line(handle, RestartPolicy(), 0)
    roster = Roster()
    roster.entered(SourceId(0), handle, line)
    assert only(roster).state == "in service"
    roster.lost(SourceId(0), "it is ended")
    assert (only(roster).state, only(roster).reason) == ("waiting to restart", "it is ended")
    line.reason = "it died"
    for phase, state in (
        (_Phase.WAITING, "waiting to restart"),
        (_Phase.STARTING, "starting"),
        (_Phase.ENDING, "starting"),
    ):
        line.phase = phase
        assert (only(roster).state, only(roster).reason) == (state, "it died")
    line.phase = _Phase.SERVING
    roster.entered(SourceId(5), handle, line)
    assert only(roster) == SourceHeld(5, "replay-1", "in service", "", handle.pid, 1)
    line.aside, line.reason = True, "it died once more"
    assert (only(roster).state, only(roster).reason) == ("set aside", "it died once more")


def test_the_owners_own_engine_comes_last(handle: SourceHandle) -> None:
    roster = Roster()
    roster.entered(SourceId(0), handle, None)
    for state, told in (("free", "in service"), ("quarantined", "set aside")):
        first, own = roster.held(slots(1, state), SourceId(1))
        assert first.name == "replay-1"
        assert (own.source, own.name, own.state, own.pid) == (1, OWN_ENGINE, told, 0)
