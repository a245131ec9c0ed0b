"""Work apart from the loop: in order, bounded, and never waited for."""

from __future__ import annotations

import logging
import threading

import pytest

from headrace.server.backlog import Backlog


def test_what_is_offered_is_done_in_order_in_another_thread() -> None:
    done: list[tuple[int, int]] = []
    backlog = Backlog[int](
        "tests", lambda n: done.append((n, threading.get_ident())), max_items=100, max_weight=100
    )
    assert all(backlog.offer(number, 1) for number in range(50))
    assert backlog.close(20)
    assert backlog.close(20)
    assert [number for number, _ in done] == list(range(50))
    assert threading.get_ident() not in {thread for _, thread in done}
    assert backlog.dropped == 0
    assert not backlog.offer(1, 1)
    assert backlog.dropped == 1


@pytest.mark.parametrize(("weight", "most"), [(1, 8), (30, 3)])
def test_what_there_is_no_room_for_is_dropped_and_counted(weight: int, most: int) -> None:
    go_on, begun = threading.Event(), threading.Event()
    done = list[int]()

    def act(number: int) -> None:
        begun.set()
        assert go_on.wait(20)
        done.append(number)

    backlog = Backlog[int]("tests", act, max_items=8, max_weight=100)
    taken = [backlog.offer(number, weight) for number in range(20)]
    assert taken == [True] * most + [False] * (20 - most)
    assert backlog.dropped == 20 - most
    assert begun.wait(20)
    assert not backlog.wait(0)
    go_on.set()
    assert backlog.wait(20)
    assert done == list(range(most))
    assert backlog.offer(20, 100)  # its room is there again
    assert not backlog.offer(21, 101)
    assert backlog.close(20)


def test_the_end_waits_no_longer_than_it_may_and_drops_the_rest() -> None:
    go_on, begun, done = threading.Event(), threading.Event(), list[int]()

    def act(number: int) -> None:
        begun.set()
        assert go_on.wait(20)
        done.append(number)

    backlog = Backlog[int]("tests", act, max_items=8, max_weight=8)
    for number in range(3):
        backlog.offer(number, 1)
    assert begun.wait(20)
    assert not backlog.close(0)
    assert backlog.dropped == 2
    go_on.set()
    assert backlog.wait(20)
    assert done == [0]


def test_one_that_fails_does_not_end_the_others(caplog: pytest.LogCaptureFixture) -> None:
    done = list[int]()

    def act(number: int) -> None:
        if number % 2:
            raise OSError("no space left")
        done.append(number)

    backlog = Backlog[int]("tests", act, max_items=8, max_weight=8)
    with caplog.at_level(logging.ERROR, "headrace.server"):
        for number in range(6):
            backlog.offer(number, 1)
        assert backlog.close(20)
    assert done == [0, 2, 4]
    assert [each.getMessage() for each in caplog.records] == ["tests failed"]
