"""The text of one choice as its tokens come."""

from __future__ import annotations

import asyncio
from array import array

import pytest

from headrace.messages import Token
from headrace.runtime.requests import RequestOptions
from headrace.server.choices import Choice
from headrace.server.queue import Job
from headrace.server.saying import Saying
from headrace.server.terminals import Ending, Terminal
from tests.server_stand import STOP_TOKEN, ended, served_model


def choice_of(stop_tokens: tuple[int, ...] = (STOP_TOKEN,)) -> Choice:
    job = Job(1, "me", "letters", 5, 8, 512, 0, None)
    options = RequestOptions(stop_tokens=stop_tokens)
    return Choice(1, 0, job, array("I", list(b"hello")), options, asyncio.Event())


def saying(*stops: str) -> tuple[Saying, Choice]:
    choice = choice_of()
    return Saying(choice, served_model(), stops), choice


def say(choice: Choice, text: str, logprob: float | None = None) -> None:
    for byte in text.encode():
        choice.came(Token(0, byte, logprob))


def test_text_is_told_as_it_comes_and_its_end_once() -> None:
    spoken, choice = saying()
    assert spoken.more() is None
    assert not spoken.begun
    say(choice, "ab")
    assert spoken.begun
    piece = spoken.more()
    assert piece is not None
    assert (piece.text, piece.finish_reason) == ("ab", None)
    assert spoken.more() is None
    choice.end(ended())
    piece = spoken.more()
    assert piece is not None
    assert (piece.text, piece.finish_reason, spoken.finished) == ("", "length", True)
    assert spoken.more() is None
    assert spoken.num_tokens == 2


def test_a_part_of_a_character_waits_for_the_rest_of_it() -> None:
    spoken, choice = saying()
    first, second = "\u00e9".encode()
    choice.came(Token(0, first))
    assert spoken.begun
    assert spoken.more() is None
    choice.came(Token(0, second))
    piece = spoken.more()
    assert piece is not None
    assert piece.text == "\u00e9"


def test_a_character_that_stays_unfinished_is_told_at_the_end() -> None:
    spoken, choice = saying()
    choice.came(Token(0, "\u00e9".encode()[0]))
    choice.end(ended())
    piece = spoken.more()
    assert piece is not None
    assert (piece.text, piece.finish_reason) == ("\N{REPLACEMENT CHARACTER}", "length")


def test_what_came_before_a_failure_is_told_first() -> None:
    spoken, choice = saying()
    say(choice, "ab")
    choice.end(ended("failed", cause="device", reason="on fire"))
    piece = spoken.more()
    assert piece is not None
    assert (piece.text, piece.finish_reason) == ("ab", None)
    with pytest.raises(Ending, match="on fire") as told:
        spoken.more()
    assert told.value.terminal is Terminal.DEVICE
    assert not spoken.finished


def test_after_a_stop_string_tokens_count_and_say_nothing() -> None:
    spoken, choice = saying("b")
    withdrawn: list[int] = []
    choice.withdraw = lambda: withdrawn.append(1)
    say(choice, "abcd")
    piece = spoken.more()
    assert piece is not None
    assert (piece.text, piece.finish_reason) == ("a", "stop")
    assert (spoken.num_tokens, withdrawn) == (2, [1])
    say(choice, "e")
    choice.end(ended("cancelled", cause="cancelled"))
    assert spoken.more() is None
    assert spoken.num_tokens == 2


def test_a_stop_string_in_the_last_token_withdraws_nothing() -> None:
    spoken, choice = saying("b")
    withdrawn: list[int] = []
    choice.withdraw = lambda: withdrawn.append(1)
    say(choice, "ab")
    choice.end(ended())
    piece = spoken.more()
    assert piece is not None
    assert (piece.text, piece.finish_reason, withdrawn) == ("a", "stop", [])


def test_an_end_without_a_token_is_a_beginning_and_a_failure_is_none() -> None:
    spoken, choice = saying()
    choice.end(ended())
    assert spoken.begun
    spoken, choice = saying()
    choice.fail(Ending(Terminal.OWNER_DIED, "gone"))
    assert not spoken.begun


def test_offsets_count_the_characters_of_the_tokens_before() -> None:
    spoken, choice = saying()
    say(choice, "ab", -1.0)
    piece = spoken.more()
    assert piece is not None
    assert (piece.offset, [each.text for each in piece.scored]) == (0, ["a", "b"])
    say(choice, "c", -1.0)
    piece = spoken.more()
    assert piece is not None
    assert piece.offset == 2
