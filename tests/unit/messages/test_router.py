"""What a router asks and hears at once: how many logprobs there may be of one token."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from headrace import messages as wire
from headrace.messages.base import MAX_LOGPROBS
from headrace.messages.router import Submit, Token
from tests.unit.messages.examples import SUBMIT, raw, refused


@pytest.mark.parametrize(
    ("logprobs", "legal"),
    [(None, True), (0, True), (MAX_LOGPROBS, True), (MAX_LOGPROBS + 1, False), (-1, False)],
)
def test_a_request_may_ask_for_so_many_logprobs(logprobs: int | None, legal: bool) -> None:
    assert refused(wire.decode_to_owner, raw(replace(SUBMIT, logprobs=logprobs))) != legal


def test_a_request_that_says_nothing_of_them_asks_for_none() -> None:
    at = Submit.__struct_fields__.index("logprobs")
    told = wire.decode_to_owner(wire.encode(SUBMIT))
    assert isinstance(told, Submit)
    assert told.logprobs == 20
    assert not refused(wire.decode_to_owner, raw(SUBMIT)[: at + 1])
    assert replace(SUBMIT, logprobs=None) == Submit(
        **{name: getattr(SUBMIT, name) for name in Submit.__struct_fields__[:at]}
    )


def test_a_token_carries_no_more_of_them_than_may_be_asked_for() -> None:
    for count, legal in ((0, True), (MAX_LOGPROBS, True), (MAX_LOGPROBS + 1, False)):
        top = ((1, -1.0),) * count
        assert refused(wire.decode_from_owner, raw(Token(0, 1, -1.0, top))) != legal
    for bad in ((1,), (1, -1.0, 2), (-1, 0.0), (1, None)):
        assert refused(wire.decode_from_owner, ["token", 0, 1, -1.0, [bad]])
