"""The books: what is held is looked up, counted and found to add up, or told not to."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from headrace.errors import LocalProtocolError
from headrace.ids import AttemptId, ImportId, RequestId, SlotIndex, SourceId
from headrace.messages import Released
from headrace.protocol.books import Apart, Books, Limits
from headrace.protocol.handoff import Handoff, HandoffState
from tests.unit.protocol.builders import CONTEXT, EPOCH, Shell, attempt_id
from tests.unit.protocol.scenes import LOCALLY, TWICE

HERE, ELSEWHERE = SourceId(0), SourceId(9)


def importing() -> tuple[Shell, RequestId]:
    """One lane, two slots; one hand-off with one import in flight."""
    shell = Shell()
    request = shell.submit()
    shell.progress(request)
    shell.begin()
    return shell, request


def handoff_of(shell: Shell, request: RequestId) -> Handoff:
    return shell.owner._requests[request].handoff


def test_new_books_hold_nothing_and_add_up() -> None:
    books = Books(EPOCH, Limits(2, CONTEXT))
    books.check_integrity()
    assert books.statistics() == {
        "lanes": {"free": 2, "quarantined": 0, "held": 0},
        "slots": dict.fromkeys(
            ["free", "leased", "ready", "reading", "draining", "quarantined"], 0
        ),
        "handoffs": {},
        "sources": {"in_service": 0, "gone": 0, "expected": 0},
        "dropped": {},
        "ended": {},
        "retries": {"count": 0},
        "quarantined": {"attempts": 0, "lanes": 0, "reads": 0},
    }
    assert (books.has_pieces, books.num_in_flight) == (False, 0)
    assert not books.is_in_flight(ImportId(0))
    assert books.limits.drain_timeout_ns == 120 * 10**9
    assert (books.no_slot_left, books.no_local_left, books.no_lane_left) == (True, True, False)
    assert dict(books.apart) == {}
    assert books.attempt_of(RequestId(EPOCH, 0)) is None


def test_statistics_count_every_lane_slot_and_hand_off() -> None:
    shell = Shell(lanes=2, slots=(2, 1))
    for _ in range(4):
        shell.submit()
    shell.send(Released(attempt_id(9), 0, 0), source=0)
    statistics = shell.owner.statistics()
    assert statistics["lanes"] == {"free": 0, "quarantined": 0, "held": 2}
    assert {k: v for k, v in statistics["slots"].items() if v} == {"leased": 2, "free": 1}
    assert statistics["handoffs"] == {"streaming": 2, "waiting": 2}
    assert statistics["dropped"] == {"stale": 1}


def test_statistics_count_what_ended_by_its_cause_or_as_published() -> None:
    shell = Shell(lanes=3, slots=(1, 1))
    requests = [shell.submit(policy=TWICE) for _ in range(3)]
    shell.serve(requests[0])
    shell.cancel(requests[2])
    shell.released(requests[2])
    for _ in range(2):
        shell.failed(requests[1])
        shell.released(requests[1])
    assert shell.owner.statistics()["ended"] == {
        "published": 1,
        "cancelled": 1,
        "source-failed": 1,
    }
    assert shell.owner.statistics()["retries"] == {"count": 1}


def test_statistics_count_what_is_set_apart() -> None:
    shell = Shell(lanes=3, slots=(3,))
    requests = [shell.submit() for _ in range(3)]
    for request in requests:
        shell.serve(request)
    for request, reason in zip(requests, ["bus error", "", "bus error"], strict=True):
        shell.retire(request, reason)
    assert shell.owner.statistics()["quarantined"] == {"attempts": 2, "lanes": 2, "reads": 0}
    shell.lane_lost(requests[1], "not freed")
    assert shell.owner.statistics()["quarantined"] == {"attempts": 3, "lanes": 3, "reads": 0}
    for request in (requests[0], requests[1]):
        shell.reinstate(request)
    assert shell.owner.statistics()["quarantined"] == {"attempts": 1, "lanes": 1, "reads": 0}
    assert {attempt.counter: apart.reason for attempt, apart in shell.owner.apart.items()} == {
        2: "bus error"
    }


def test_statistics_count_sources() -> None:
    shell = Shell(slots=(1, 1))
    shell.owner.expect_source()
    shell.died(0)
    assert shell.owner.statistics()["sources"] == {"in_service": 1, "gone": 1, "expected": 1}


def test_a_snapshot_has_a_line_for_all_that_is_held() -> None:
    """The lines in every state are in test_snapshot.py."""
    shell = Shell(lanes=3, slots=(2,))
    published, drains, waits = shell.submit(), shell.submit(), shell.submit()
    shell.serve(published)
    shell.progress(drains)
    shell.begin()
    shell.cancel(drains)
    snapshot = shell.owner.snapshot()
    assert [(line.attempt.request, line.state) for line in snapshot.lanes] == [
        (published, "published"),
        (drains, "draining"),
        (waits, "reserved"),
    ]
    assert [(line.state, line.tokens) for line in snapshot.slots] == [
        ("free", ()),
        ("draining", ("write", "read 1")),
    ]
    assert [attempt.request for attempt in snapshot.waiting] == [waits]
    shell.import_failed(ImportId(1), "bus error")
    assert [(line.state, line.reason) for line in shell.owner.snapshot().lanes] == [
        ("published", ""),
        ("reserved", ""),
        ("quarantined", "bus error"),
    ]


def test_a_lane_that_was_lost_while_it_was_promised_has_one_line() -> None:
    shell = Shell()
    first = shell.submit()
    shell.serve(first)
    second = shell.submit()
    shell.retire(first)
    shell.lane_lost(first)
    shell.device_failed(second)
    assert [line.attempt.request for line in shell.owner.snapshot().lanes] == [first]
    assert shell.owner.statistics()["quarantined"] == {"attempts": 2, "lanes": 1, "reads": 0}


def test_a_lane_that_is_reinstated_goes_to_what_is_apart_without_one() -> None:
    shell = Shell()
    first = shell.submit()
    shell.serve(first)
    second = shell.submit()
    shell.retire(first)
    shell.lane_lost(first)
    shell.device_failed(second)
    shell.reinstate(first)
    assert shell.owner.no_lane_left  # the second's storage is still apart
    shell.reinstate(second)
    assert shell.owner.statistics()["lanes"] == {"free": 1, "quarantined": 0, "held": 0}


def test_what_is_queued_and_what_is_in_flight() -> None:
    shell = Shell()
    request = shell.submit()
    shell.progress(request)
    assert (shell.owner.has_pieces, shell.owner.num_in_flight) == (True, 0)
    (command,) = shell.begin()
    assert (shell.owner.has_pieces, shell.owner.num_in_flight) == (False, 1)
    assert shell.owner.is_in_flight(command.import_id)
    shell.done(command.import_id)
    assert shell.owner.num_in_flight == 0
    assert not shell.owner.is_in_flight(command.import_id)


def test_a_request_that_is_over_or_was_never_there_is_ended() -> None:
    shell, request = importing()
    assert shell.owner.state_of(request) is HandoffState.STREAMING
    assert shell.owner.attempt_of(request) == AttemptId(*request, 1)
    shell.cancel(request)
    shell.done(ImportId(0))
    assert shell.owner.state_of(request) is HandoffState.ENDED
    assert shell.owner.attempt_of(request) is None
    assert shell.owner.state_of(RequestId(EPOCH, 99)) is HandoffState.ENDED


# What is left in service.


def source_dead(shell: Shell) -> None:
    shell.died(0)


def source_to_be_killed(shell: Shell) -> None:
    shell.cancel(shell.submit())
    shell.tick(50)


def slot_read_for_ever(shell: Shell) -> None:
    request = shell.submit()
    shell.progress(request)
    shell.begin()
    shell.import_failed(ImportId(0))
    shell.released(request)
    shell.tick(50)


@pytest.mark.parametrize("lose", [source_dead, source_to_be_killed, slot_read_for_ever])
@pytest.mark.parametrize("slots", [(1,), (2,), (1, 1)])
def test_a_slot_is_left_while_a_source_that_goes_on_has_one_that_is_not_set_apart(
    lose: Callable[[Shell], None], slots: tuple[int, ...]
) -> None:
    shell = Shell(lanes=2, slots=slots)
    assert not shell.owner.no_slot_left
    lose(shell)
    one_left = len(slots) == 2 or (slots == (2,) and lose is slot_read_for_ever)
    assert shell.owner.no_slot_left is not one_left


def test_a_slot_is_left_while_a_source_is_expected() -> None:
    shell = Shell(slots=(1,))
    shell.owner.expect_source()
    shell.died()
    assert not shell.owner.no_slot_left
    shell.not_coming()
    assert shell.owner.no_slot_left


@pytest.mark.parametrize("local", [True, False])
def test_a_source_is_no_engine_of_the_owners_and_that_is_no_source(local: bool) -> None:
    shell = Shell(slots=())
    shell.add_source(1, 1, local=local)
    assert (shell.owner.no_slot_left, shell.owner.no_local_left) == (local, not local)


def test_the_owners_own_engine_is_lost_with_its_slot_until_that_comes_back() -> None:
    shell = Shell(slots=())
    shell.add_source(1, 1, local=True)
    request = shell.submit(policy=LOCALLY)
    shell.cancel(request)
    assert not shell.owner.no_local_left
    shell.tick(50)
    assert shell.owner.no_local_left
    shell.released(request)
    assert not shell.owner.no_local_left


@pytest.mark.parametrize("num_lanes", [1, 2])
def test_a_lane_is_left_until_all_are_quarantined(num_lanes: int) -> None:
    shell = Shell(lanes=num_lanes)
    for lost in range(num_lanes):
        assert not shell.owner.no_lane_left
        request = shell.submit()
        shell.device_failed(request)
        shell.released(request)
        assert shell.owner.statistics()["lanes"]["quarantined"] == lost + 1
    assert shell.owner.no_lane_left


# What does not add up.


def one_lane_too_many(shell: Shell, request: RequestId) -> None:
    shell.owner._admission.lanes_free += 1


def a_lane_of_nobody_set_apart(shell: Shell, request: RequestId) -> None:
    shell.owner._lanes_quarantined += 1
    shell.owner._admission.lanes_free -= 1


def something_set_apart_without_its_lane(shell: Shell, request: RequestId) -> None:
    shell.owner._apart[attempt_id(5)] = Apart("bus error", 0)


def a_free_slot_with_a_holder(shell: Shell, request: RequestId) -> None:
    shell.owner._sources[HERE].slots[SlotIndex(1)].holder = attempt_id()


def a_free_slot_with_a_writer(shell: Shell, request: RequestId) -> None:
    shell.owner._sources[HERE].slots[SlotIndex(1)].writer_out = True


def a_leased_slot_that_nobody_holds(shell: Shell, request: RequestId) -> None:
    slot = shell.owner._sources[HERE].slots[SlotIndex(0)]
    slot.holder, slot.writer_out = None, False
    slot.readers.clear()


def a_hand_off_without_its_source(shell: Shell, request: RequestId) -> None:
    handoff_of(shell, request).source = None


def an_import_of_nobody(shell: Shell, request: RequestId) -> None:
    shell.owner._imports.clear()


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (one_lane_too_many, "lanes .* are not 1 in all"),
        (a_lane_of_nobody_set_apart, "'quarantined': 1, .*, and apart are {}"),
        (something_set_apart_without_its_lane, "'quarantined': 0, .*reason='bus error'"),
        (a_free_slot_with_a_holder, "slot 1 of 0"),
        (a_free_slot_with_a_writer, "slot 1 of 0"),
        (a_leased_slot_that_nobody_holds, "slot 0 of 0"),
        (a_hand_off_without_its_source, "slot 0 and its hand-off disagree"),
        (an_import_of_nobody, "1 imports in flight, 0 known"),
    ],
)
def test_what_does_not_add_up_is_told(spoil: Callable[[Shell, RequestId], None], text: str) -> None:
    shell, request = importing()
    spoil(shell, request)
    with pytest.raises(LocalProtocolError, match=text):
        shell.owner.check_integrity()


# Look-ups.


def test_a_source_is_looked_up_by_its_id() -> None:
    owner = Shell().owner
    assert owner._attached(HERE) is owner._sources[HERE]
    with pytest.raises(LocalProtocolError, match="source 9 is not attached"):
        owner._attached(ELSEWHERE)


def test_a_hand_off_is_known_by_its_attempt() -> None:
    shell, request = importing()
    attempt = AttemptId(*request, 1)
    assert shell.owner._known(attempt) is handoff_of(shell, request)
    for other in (attempt._replace(attempt=2), attempt._replace(counter=9)):
        with pytest.raises(LocalProtocolError, match="is unknown or over"):
            shell.owner._known(other)


def test_a_hand_off_is_live_at_its_own_source_until_it_is_decided() -> None:
    shell, request = importing()
    owner, attempt = shell.owner, AttemptId(*request, 1)
    assert owner._live(HERE, attempt) is handoff_of(shell, request)
    assert owner._live(ELSEWHERE, attempt) is None
    for other in (None, attempt._replace(attempt=2), attempt._replace(counter=9)):
        assert owner._live(HERE, other) is None
    shell.cancel(request)
    assert owner._live(HERE, attempt) is None


def test_what_was_given_up_is_not_live_and_its_next_attempt_is_not_live_there() -> None:
    shell = Shell(slots=(1, 1))
    request = shell.submit(policy=TWICE)
    first = shell.attempt_of(request)
    shell.progress(request)
    shell.begin()
    shell.failed(request)
    assert shell.owner._live(HERE, first) is None
    shell.done(ImportId(0))
    assert shell.owner._live(HERE, first) is None
    assert shell.owner._live(HERE, first.next) is None
    assert shell.owner._live(SourceId(1), first.next) is handoff_of(shell, request)


def test_a_source_speaks_until_it_gives_its_write_token_back() -> None:
    shell = Shell()
    request = shell.submit()
    attempt = shell.attempt_of(request)
    shell.progress(request)
    shell.final(request)
    assert shell.owner._speaking(HERE, attempt) is handoff_of(shell, request)
    assert shell.owner._speaking(ELSEWHERE, attempt) is None
    assert shell.owner._speaking(HERE, None) is None
    shell.released(request)
    assert shell.owner._speaking(HERE, attempt) is None
    assert shell.owner._live(HERE, attempt) is handoff_of(shell, request)


def test_a_lease_is_slot_generation_and_holder() -> None:
    owner = importing()[0].owner
    for slot, generation, counter in product([-1, 0, 1, 2, 1 << 63], [0, 1], [0, 1]):
        message = Released(attempt_id(counter), slot, generation)
        leased = owner._leased(owner._sources[HERE], message)
        assert (leased is not None) == (slot == generation == counter == 0)


def test_a_hand_off_without_a_lease_has_neither_slot_nor_source() -> None:
    shell = Shell(slots=(1,))
    shell.submit()
    waiting = handoff_of(shell, shell.submit())
    for look in (shell.owner._slot_of, shell.owner._source_of):
        with pytest.raises(LocalProtocolError, match="has no"):
            look(waiting)


def test_an_import_is_taken_once() -> None:
    shell, request = importing()
    record = shell.owner._expect_import(ImportId(0))
    assert (record.handoff, record.expected) == (handoff_of(shell, request), 0)
    assert record.begun_ns == shell.now_ns
    assert shell.owner._take_import(ImportId(0)) is record
    with pytest.raises(LocalProtocolError, match="import 0 is not in flight"):
        shell.owner._take_import(ImportId(0))
    assert shell.owner._new_import(record.handoff, None, 5) == 1  # an id is never used again
