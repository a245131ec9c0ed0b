"""Bodies are held within a room of their own, of which no client has it all."""

from __future__ import annotations

import pytest

from headrace.server.budget import Budget
from headrace.server.terminals import Ending, Terminal


def test_no_more_is_held_than_there_is_room_and_all_is_given_back() -> None:
    budget = Budget(100)
    with budget.of_one("a") as first, budget.of_one("b") as second:
        first.grow(20)
        first.grow(30)
        second.grow(50)
        with budget.of_one("c") as third, pytest.raises(Ending) as caught:
            third.grow(1)
        assert caught.value.terminal is Terminal.QUEUE_FULL
        assert caught.value.retry_after_s
        assert budget.nbytes == 100
    assert budget.nbytes == 0


def test_one_client_leaves_half_of_the_room_to_others() -> None:
    budget = Budget(100)
    with budget.of_one("greedy") as first, budget.of_one("greedy") as second:
        first.grow(30)
        second.grow(20)
        with pytest.raises(Ending):
            second.grow(1)
        with budget.of_one("modest") as other:
            other.grow(50)
        assert budget.nbytes == 50
    with budget.of_one("greedy") as again:
        again.grow(50)


def test_what_fails_gives_back_what_it_held() -> None:
    budget = Budget(100)

    def reads() -> None:
        with budget.of_one("a") as held:
            held.grow(10)
            held.grow(1000)

    with pytest.raises(Ending):
        reads()
    assert budget.nbytes == 0
