"""What of a request's text is printed, when, and what is told of its end."""

from __future__ import annotations

import pytest

from headrace.cli.shown import Printer, Shown, shown_of
from headrace.engine.text import ByteText
from headrace.messages import Ended
from headrace.runtime.router import RouteResult

TEXT = ByteText()


def printed(
    text: bytes, stops: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> tuple[list[str], str]:
    """What stands on stdout after each byte that came as a token, and after the end."""
    printer = Printer(TEXT, stops, echo=True)
    seen, whole = [], ""
    for token in text:
        stopped = printer(token)
        whole += capsys.readouterr().out
        seen.append(whole)
        if stopped:
            break
    printer.end()
    return seen, whole + capsys.readouterr().out


def test_the_beginning_of_a_stop_string_is_held_back(capsys: pytest.CaptureFixture[str]) -> None:
    seen, whole = printed(b"ab##c", ("##",), capsys)
    assert seen == ["a", "ab", "ab", "ab"]
    assert whole == "ab\n"


def test_what_was_held_back_in_vain_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    seen, whole = printed(b"a#b#", ("##",), capsys)
    assert seen == ["a", "a", "a#b", "a#b"]
    assert whole == "a#b#\n"


def test_a_character_is_printed_whole_and_a_cut_one_at_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen, whole = printed("aé".encode(), (), capsys)
    assert seen == ["a", "a", "aé"]
    assert whole == "aé\n"
    seen, whole = printed("xyé".encode()[:-1], (), capsys)
    assert seen == ["x", "xy", "xy"]
    assert whole == "xy\N{REPLACEMENT CHARACTER}\n"


def test_nothing_is_printed_without_echo_or_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    printer = Printer(TEXT, ("b",), echo=False)
    assert [printer(token) for token in b"ab"] == [False, True]
    printer.end()
    Printer(TEXT, (), echo=True).end()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("text", "outcome", "stops", "shown"),
    [
        (b"ab##cd", "finished", ("##",), Shown(list(b"ab##"), "ab", "stop")),
        (b"ab##", "cancelled", ("##",), Shown(list(b"ab##"), "ab", "stop")),
        (b"abcd", "finished", ("##",), Shown(list(b"abcd"), "abcd", "length")),
        (b"abc.", "finished", (), Shown(list(b"abc."), "abc.", "eos")),
        (b"", "finished", (), Shown([], "", "length")),
        (b"ab", "cancelled", (), Shown(list(b"ab"), "ab", None)),
    ],
)
def test_why_a_request_ended(
    text: bytes, outcome: str, stops: tuple[str, ...], shown: Shown
) -> None:
    ended = Ended(0, outcome, "", "", None, "", (), "", (), None)  # type: ignore[arg-type]
    told = shown_of(RouteResult(list(text), ended), TEXT, stops, (ord("."),))
    assert told == shown
    assert told.outcome == ("cancelled" if shown.finish_reason is None else "finished")
