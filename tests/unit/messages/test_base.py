"""What all messages are made of: arrays with a tag, and counts and texts within their bounds."""

from __future__ import annotations

import msgspec
import pytest

from headrace.messages.base import MAX_TEXT, Count, Text, WireMessage, WireStruct


class Inner(WireStruct, frozen=True):
    text: Text


class Outer(WireMessage, frozen=True, tag="outer"):
    count: Count
    inner: Inner | None = None


def decoded(array: object) -> Outer:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(array), type=Outer)


def test_a_message_is_an_array_that_begins_with_its_tag() -> None:
    sent = Outer(1, Inner("x"))
    array = msgspec.msgpack.decode(msgspec.msgpack.encode(sent))
    assert array == ["outer", 1, ["x"]]
    assert decoded(array) == sent
    assert decoded(["outer", 1]) == Outer(1)


@pytest.mark.parametrize(
    "array",
    [
        ["inner", 1],
        ["outer", -1],
        ["outer", 1, None, 0],
        ["outer", 1, ["x", 0]],
        ["outer", 1, ["x" * (MAX_TEXT + 1)]],
        {"t": "outer", "count": 1},
    ],
)
def test_whatever_is_beyond_it_is_refused(array: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        decoded(array)


def test_a_message_is_a_fact() -> None:
    with pytest.raises(AttributeError):
        Outer(1).count = 2  # type: ignore[misc]
