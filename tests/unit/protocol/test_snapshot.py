"""A snapshot: one line for each lane and slot that is not free, in every state it can be in."""

from __future__ import annotations

import dataclasses

import pytest

from headrace.ids import AttemptId, ImportId, RequestId
from headrace.protocol.snapshot import LaneLine, SlotLine, Snapshot
from tests.unit.protocol.builders import EPOCH, Shell
from tests.unit.protocol.scenes import LOCAL, LOCALLY, MADE, TWICE, in_parked, in_published


def lines_of(shell: Shell, request: RequestId) -> tuple[list[LaneLine], list[SlotLine]]:
    """What the request's first attempt holds."""
    attempt, now = AttemptId(*request, 1), shell.owner.snapshot()
    lanes = [line for line in now.lanes if line.attempt == attempt]
    return lanes, [line for line in now.slots if line.holder == attempt]


def slot_line(request: RequestId, state: str, *tokens: str, since_ns: int = 0) -> SlotLine:
    """Slot 0 of source 0, which was never used before."""
    return SlotLine(0, 0, 0, state, AttemptId(*request, 1), tokens, since_ns)  # type: ignore[arg-type]


def test_of_an_owner_that_holds_nothing_there_are_its_free_slots() -> None:
    assert Shell(lanes=2, slots=(1, 2)).owner.snapshot() == Snapshot(
        lanes_free=2,
        lanes=(),
        slots=tuple(
            SlotLine(source, slot, 0, "free", None, ())  # type: ignore[arg-type]
            for source, slot in [(0, 0), (1, 0), (1, 1)]
        ),
        waiting=(),
        sources=(("in_service", 2), ("gone", 0), ("expected", 0)),
    )


@pytest.mark.parametrize(
    ("made", "lane", "slot"),
    [
        ("waiting", "", ()),
        ("reserved", "reserved", ()),
        ("streaming", "reserved", ("leased", "write")),
        ("streaming, importing", "reserved", ("leased", "write", "read 0")),
        ("sealed, importing", "reserved", ("leased", "write", "read 0")),
        ("published", "published", ("draining", "write")),
    ],
)
def test_a_request_holds_what_its_state_says(made: str, lane: str, slot: tuple[str, ...]) -> None:
    shell, request = MADE[made]()
    lanes, slots = lines_of(shell, request)
    assert lanes == [LaneLine(AttemptId(*request, 1), lane)] * bool(lane)
    assert slots == [slot_line(request, *slot) for _ in slot[:1]]
    waiting = shell.owner.snapshot().waiting
    assert waiting == (AttemptId(*request, 1),) * (made in ("waiting", "reserved"))


def test_a_slot_that_was_given_back_is_ready_and_then_read() -> None:
    shell = Shell()
    request = shell.submit()
    shell.prefill(request)
    assert lines_of(shell, request)[1] == [slot_line(request, "ready")]
    shell.begin()
    assert lines_of(shell, request)[1] == [slot_line(request, "reading", "read 0")]


def test_who_is_parked_waits_with_a_slot_and_without_a_lane() -> None:
    shell, request = in_parked()
    first, now = RequestId(EPOCH, 0), shell.owner.snapshot()
    assert now.waiting == (AttemptId(*request, 1),)
    assert now.lanes == (LaneLine(AttemptId(*first, 1), "published"),)
    assert [(s.generation, s.state) for s in now.slots] == [(1, "leased"), (0, "free")]


def test_what_drains_has_its_time_and_what_is_set_apart_its_reason() -> None:
    shell = Shell(lanes=2)
    request = shell.submit()
    attempt = AttemptId(*request, 1)
    shell.progress(request)
    shell.tick(3)
    shell.begin()
    shell.cancel(request)
    draining = slot_line(request, "draining", "write", "read 0", since_ns=3)
    assert lines_of(shell, request) == ([LaneLine(attempt, "draining")], [draining])
    shell.tick(5)
    shell.import_failed(ImportId(0), "device lost")
    apart = LaneLine(attempt, "quarantined", "device lost", 5)
    assert lines_of(shell, request) == ([apart], [draining])
    shell.tick(53)
    quarantined = dataclasses.replace(draining, state="quarantined")
    assert lines_of(shell, request) == ([apart], [quarantined])
    shell.released(request)
    assert lines_of(shell, request)[1] == [dataclasses.replace(quarantined, tokens=("read 0",))]
    assert shell.owner.snapshot().lanes_free == 1
    shell.reinstate(request)
    assert lines_of(shell, request) == ([], [])
    assert shell.owner.snapshot().lanes_free == 2


def test_a_retired_entry_that_was_not_freed_is_set_apart() -> None:
    shell, request = in_published()
    shell.tick(8)
    shell.retire(request, "still written")
    lane = LaneLine(AttemptId(*request, 1), "quarantined", "still written", 8)
    assert lines_of(shell, request)[0] == [lane]


def test_a_lane_that_was_promised_when_it_was_lost_has_one_line() -> None:
    shell = Shell()
    first = shell.submit()
    shell.serve(first)
    second = shell.submit()
    shell.retire(first)
    shell.lane_lost(first)
    now = shell.owner.snapshot()
    assert (now.lanes_free, [line.state for line in now.lanes]) == (-1, ["reserved", "quarantined"])
    shell.device_failed(second)
    now = shell.owner.snapshot()
    assert now.lanes == (LaneLine(AttemptId(*first, 1), "quarantined", "not freed", 0),)
    assert now.lanes_free == 0


def test_a_retry_waits_with_the_lane_of_the_attempt_before() -> None:
    shell = Shell(slots=(1,))
    request = shell.submit(policy=TWICE)
    shell.failed(request)
    now, second = shell.owner.snapshot(), AttemptId(*request, 2)
    assert (now.lanes, now.waiting) == ((LaneLine(second, "reserved"),), (second,))
    assert now.slots == (slot_line(request, "draining", "write"),)


def test_one_that_was_given_up_drains_with_its_lane_and_does_not_wait() -> None:
    shell, request = MADE["streaming, importing"](policy=TWICE)
    shell.failed(request)
    now = shell.owner.snapshot()
    assert [(line.attempt.attempt, line.state) for line in now.lanes] == [(1, "draining")]
    assert now.waiting == ()


def test_who_waits_is_told_oldest_first() -> None:
    shell = Shell(lanes=2, slots=(1,))
    requests = [shell.submit(policy=TWICE) for _ in range(4)]
    shell.failed(requests[0])
    shell.released(requests[0])
    shell.failed(requests[0])
    waiting = [(a.counter, a.attempt) for a in shell.owner.snapshot().waiting]
    assert waiting == [(1, 1), (2, 1), (3, 1)]
    shell.released(requests[0])
    shell.failed(requests[1])
    waiting = [(a.counter, a.attempt) for a in shell.owner.snapshot().waiting]
    assert waiting == [(1, 2), (2, 1), (3, 1)]


def test_sources_are_in_service_gone_or_expected() -> None:
    shell = Shell(lanes=2, slots=(1, 1, 1))
    shell.add_source(LOCAL, 1, local=True)
    shell.owner.expect_source()
    shell.died(0)
    overdue = shell.submit(policy=LOCALLY)
    shell.cancel(overdue)
    shell.tick(50)  # source 1 is to be killed
    assert dict(shell.owner.snapshot().sources) == {"in_service": 2, "gone": 2, "expected": 1}
    shell.forget(0)
    assert dict(shell.owner.snapshot().sources) == {"in_service": 2, "gone": 1, "expected": 1}
    assert {line.source for line in shell.owner.snapshot().slots} == {1, 2, LOCAL}


def test_a_snapshot_is_a_fact_and_not_a_view() -> None:
    shell = Shell()
    before = shell.owner.snapshot()
    request = shell.submit()
    assert (before.lanes, before.lanes_free) == ((), 1)
    assert shell.owner.snapshot() == shell.owner.snapshot() != before
    for fact in (before, before.slots[0], lines_of(shell, request)[0][0]):
        name = dataclasses.fields(fact)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(fact, name, None)
    assert len({before, shell.owner.snapshot()}) == 2  # it can be kept in a set
