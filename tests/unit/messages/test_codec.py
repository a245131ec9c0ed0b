"""Messages: every one comes back as it was sent; any bytes are a message or one error."""

from __future__ import annotations

from contextlib import suppress
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import messages as wire
from headrace.errors import RemoteProtocolError
from headrace.geometry import MAX_LAYERS
from headrace.ids import AttemptId, Span
from headrace.messages import (
    MAX_ATTEMPT_TEXT,
    MAX_ATTEMPTS,
    MAX_CHOICE_TEXT,
    MAX_SPANS,
    MAX_STOP_TOKENS,
    MAX_TEXT,
    Ended,
    Failed,
    Interval,
    Measured,
    Message,
    Progress,
    RouteChoice,
    Shutdown,
    SourceFinal,
    Token,
    encode,
    travelling_text,
)
from tests.unit.messages.examples import (
    CONTROL_NBYTES,
    EXAMPLES,
    SUBMIT,
    U64,
    A,
    Decode,
    raw,
    refused,
)
from tests.unit.protocol.builders import FEW

SENT = [(decode, message) for decode, sent in EXAMPLES.items() for message in sent]


def named(value: object) -> str:
    return type(value).__name__ if isinstance(value, msgspec.Struct) else ""


@pytest.mark.parametrize(
    ("decode", "union"),
    [
        (wire.decode_to_source, wire.ToSource),
        (wire.decode_from_source, wire.FromSource),
        (wire.decode_to_owner, wire.ToOwner),
        (wire.decode_from_owner, wire.FromOwner),
    ],
)
def test_no_message_is_without_an_example(decode: Decode, union: object) -> None:
    assert {type(message) for message in EXAMPLES[decode]} == set(get_args(union))


@pytest.mark.parametrize(("decode", "message"), SENT, ids=named)
def test_every_message_comes_back_as_it_was_sent(decode: Decode, message: Message) -> None:
    back = decode(encode(message))
    assert back == message
    assert type(back) is type(message)


def test_a_message_of_another_direction_is_refused() -> None:
    for decode, message in SENT:
        if isinstance(message, Shutdown):
            continue  # told to sources and to owners alike
        for other in EXAMPLES:
            if other is not decode:
                with pytest.raises(RemoteProtocolError, match="undecodable message of"):
                    other(encode(message))


def test_a_message_with_an_element_more_is_refused() -> None:
    for decode, message in SENT:
        assert refused(decode, [*raw(message), 0])


def test_a_truncated_message_is_refused() -> None:
    for decode, message in SENT:
        payload = encode(message)
        for at in range(len(payload)):
            with pytest.raises(RemoteProtocolError):
                decode(payload[:at])
        with pytest.raises(RemoteProtocolError):
            decode(payload + b"\0")


@pytest.mark.parametrize(("decode", "message"), SENT, ids=named)
def test_a_field_of_another_type_is_refused(decode: Decode, message: Message) -> None:
    array = raw(message)
    for at, value in enumerate(array):
        wrong: list[object]
        if isinstance(value, bool):
            wrong = [0, 1, "", 1.0]
        elif isinstance(value, int):
            wrong = [True, False, 1.5, 1.0, -1, "1", [1]]
        elif isinstance(value, str):
            wrong = [1, b"x", [], None]
        elif isinstance(value, float):
            wrong = ["1", [], True]
            wrong += [] if isinstance(message, Token) else [None]
        elif value is None:
            wrong = ["", True]
            wrong += [] if isinstance(message, Token) else [1.5]  # its one option is a number
        else:
            wrong = [1, "x", {}, [[["x"]]]]
        for bad in wrong:
            assert refused(decode, [*array[:at], bad, *array[at + 1 :]]), (at, value, bad)


def test_texts_and_batches_are_bounded() -> None:
    assert not refused(wire.decode_from_source, ["failed", A, 0, 0, "x" * MAX_TEXT])
    assert refused(wire.decode_from_source, ["failed", A, 0, 0, "x" * (MAX_TEXT + 1)])
    intervals = [raw(Interval("import", "x", 0, 0, 0, "host"))] * 257
    assert refused(wire.decode_from_owner, ["events", 0, "owner", intervals])
    stops = raw(SUBMIT).index([1, 2])
    for count, legal in ((0, True), (MAX_STOP_TOKENS, True), (MAX_STOP_TOKENS + 1, False)):
        array = raw(SUBMIT)
        array[stops] = [U64] * count
        assert refused(wire.decode_to_owner, array) != legal


@pytest.mark.parametrize(
    "array",
    [
        ["final", A, 0, 0, "both", 0, 0, 0],
        ["prefill", A, 0, 0, 1, "auto", 1, 0, 0, "layers", False],
        ["prefill", A, 0, 0, 1, "whole", 1, 0, 0, "positions", False],
        ["unknown", A],
        [],
        {"t": "cancel"},
    ],
)
def test_words_that_nobody_declared_are_refused(array: object) -> None:
    assert all(refused(decode, array) for decode in EXAMPLES)


def test_unsigned_64_bits_travel_unchanged() -> None:
    sent = SourceFinal(AttemptId(U64, U64, U64), U64, U64, "token", U64, U64, 1 << 63)
    assert wire.decode_from_source(encode(sent)) == sent


@FEW
@given(st.binary(max_size=64))
def test_any_bytes_are_a_message_or_one_error(payload: bytes) -> None:
    for decode in EXAMPLES:
        with suppress(RemoteProtocolError):
            decode(payload)


@FEW
@given(
    st.sampled_from(SENT),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 2), st.integers(0, 255)), max_size=4),
)
def test_any_mutated_message_is_a_message_or_one_error(
    sent: tuple[Decode, Message], changes: list[tuple[int, int, int]]
) -> None:
    decode, message = sent
    payload = bytearray(encode(message))
    for place, what, byte in changes:
        at = place % len(payload) if payload else 0
        payload[at : at + (what != 1)] = b"" if what == 0 else bytes([byte])
    try:
        back = decode(bytes(payload))
    except RemoteProtocolError:
        return
    assert decode(encode(back)) == back


def test_a_length_beyond_the_payload_allocates_nothing() -> None:
    claims = b"\xdd\xff\xff\xff\xff"  # an array of 2^32 - 1 elements, of which none follows
    head = msgspec.msgpack.encode(raw(SUBMIT)[:10])
    for payload in (b"\x9f" + head[1:] + claims, b"\x92\xa5ready" + claims, claims):
        for decode in EXAMPLES:
            with pytest.raises(RemoteProtocolError):
                decode(payload)


def test_the_largest_control_messages_stay_under_64_kib() -> None:
    worst = Progress(
        AttemptId(U64, U64, U64),
        U64,
        U64,
        (Span(U64, U64, U64, U64),) * MAX_SPANS,
        (U64,) * MAX_SPANS,
        U64,
        U64,
        U64,
    )
    assert len(encode(worst)) < 4096
    assert len(encode(Failed(A, U64, U64, "\N{GOAT}" * MAX_TEXT))) < CONTROL_NBYTES
    goats = ("\N{GOAT}" * MAX_ATTEMPT_TEXT,) * MAX_ATTEMPTS
    digests = ("0" * 32,) * MAX_LAYERS
    measured = Measured(*(U64,) * 17)
    reason = "\N{GOAT}" * MAX_TEXT
    choice = RouteChoice("streamed", U64, U64, "\N{GOAT}" * MAX_CHOICE_TEXT)
    ended = Ended(
        U64, "failed", reason, "", measured, "0" * 32, digests, "malformed", goats, choice
    )
    assert len(encode(ended)) < CONTROL_NBYTES - 512


@pytest.mark.parametrize(
    "text", ["", "plain", "x" * (MAX_TEXT + 9), "\ud800 lone", "\N{GOAT}" * 9999]
)
def test_a_text_made_to_travel_does(text: str) -> None:
    sent = Failed(A, 0, 0, travelling_text(text))
    assert wire.decode_from_source(encode(sent)) == sent
    if text.isascii():
        assert sent.reason == text[:MAX_TEXT]
