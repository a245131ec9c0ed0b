"""A choice has one end, and is withdrawn at most once."""

from __future__ import annotations

import pytest

from headrace.messages import Token
from headrace.server.terminals import Ending, Terminal
from tests.server_stand import ended, reused
from tests.unit.server.test_saying import choice_of


def test_tokens_are_taken_in_order_and_news_is_told() -> None:
    choice = choice_of()
    assert choice.take() is None
    choice.came(Token(0, 65))
    choice.came(Token(0, 66))
    assert choice._news.is_set()
    assert [choice.take(), choice.take(), choice.take()] == [Token(0, 65), Token(0, 66), None]


def test_a_drop_withdraws_once_and_keeps_no_token() -> None:
    choice = choice_of()
    withdrawn: list[int] = []
    choice.withdraw = lambda: withdrawn.append(1)
    choice.came(Token(0, 65))
    choice.drop()
    choice.drop()
    choice.came(Token(0, 66))
    assert (withdrawn, choice.take(), choice.num_tokens) == ([1], None, 2)


@pytest.mark.parametrize("how", ["ended", "failed"])
def test_what_is_over_is_not_withdrawn(how: str) -> None:
    choice = choice_of()
    choice.withdraw = lambda: pytest.fail("it is over")
    if how == "ended":
        choice.end(ended())
    else:
        choice.fail(Ending(Terminal.OWNER_DIED, "gone"))
    choice.drop()
    assert choice.over


def test_before_anybody_holds_it_a_drop_withdraws_nothing() -> None:
    choice = choice_of()
    choice.drop()
    assert not choice.over


def test_the_first_failure_stays() -> None:
    choice = choice_of()
    first = Ending(Terminal.OWNER_DIED, "gone")
    choice.fail(first)
    choice.fail(Ending(Terminal.BUG, "later"))
    assert choice.failure is first
    choice = choice_of()
    choice.end(ended())
    choice.fail(first)
    assert choice.failure is None


def test_a_mistake_names_its_field() -> None:
    choice = choice_of()
    choice.end(ended("failed", mistake="chunk", reason="chunk is 0"))
    assert choice.failure is not None
    told = choice.failure
    assert (told.terminal, told.field, told.text) == (Terminal.INVALID, "chunk", "chunk is 0")


def test_a_failure_without_a_reason_tells_its_word() -> None:
    choice = choice_of()
    choice.end(ended("failed", cause="stalled"))
    assert choice.failure is not None
    assert (choice.failure.text, choice.failure.field) == ("stalled", None)


def test_parts_of_a_prompt_are_known_with_the_end() -> None:
    choice = choice_of()
    assert (choice.num_cached, choice.num_transferred) == (0, 0)
    choice.end(ended(reuse=reused(2)))
    assert (choice.num_cached, choice.num_transferred) == (2, 3)
