"""Messages: every one comes back as it was sent; any bytes are a message or one error."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import messages as wire
from headrace.errors import RemoteProtocolError
from headrace.geometry import MAX_LAYERS, Full, Latent, Layer, Part, Shared, Sliding, State
from headrace.ids import AttemptId, Span
from headrace.messages import (
    MAX_ATTEMPT_TEXT,
    MAX_ATTEMPTS,
    MAX_CHOICE_TEXT,
    MAX_SPANS,
    MAX_STOP_TOKENS,
    MAX_TEXT,
    Attached,
    Cancel,
    Computing,
    Down,
    Ended,
    Events,
    Failed,
    Hello,
    Incompatible,
    Inspect,
    Inspected,
    Interval,
    Measured,
    Message,
    Prefill,
    Progress,
    Quarantined,
    Ready,
    Reinstate,
    Reinstated,
    Released,
    RouteChoice,
    Sampling,
    Shutdown,
    SourceFinal,
    Submit,
    Token,
    Up,
    Withdraw,
    encode,
    travelling_text,
)
from tests.unit.protocol.builders import FEW, attempt_id, decoder_manifest, source_manifest

Decode: TypeAlias = Callable[[bytes], Message]

A = attempt_id()
U64 = (1 << 64) - 1
CONTROL_NBYTES = 64 << 10
SPAN = Span(0, 1, 2, 3)
D = decoder_manifest()
SUBMIT = Submit(
    label=1,
    num_tokens=2,
    max_tokens=3,
    route="chunked",
    group_layers=1,
    chunk=0,
    prefill_chunk=0,
    emission="layers",
    digest=False,
    stop_tokens=(1, 2),
    sampling=Sampling(0.5, 0.9, 40, 3),
    audit=True,
    trace=False,
    deadline_ns=9,
    on_failure="retry",
    max_attempts=3,
    poison=False,
)
CHOICE = RouteChoice("streamed", 2, 0, "predicted 1.2 s against 1.4 s whole")
EXAMPLES: dict[Decode, list[Message]] = {
    wire.decode_to_source: [
        Hello(7, D, 64, 2, 8192),
        Prefill(A, 1, 2, 3, "streamed", 4, 5, 6, "cache_groups", True),
        Cancel(A),
        Shutdown(),
    ],
    wire.decode_from_source: [
        Ready(source_manifest(Full(), Sliding(4, 3), Shared("layers.0"), Latent(), State())),
        Attached(7),
        Computing(A, 1, 2),
        Progress(A, 1, 2, (SPAN, Span(1, 2, 2, 3)), (5, U64), 10, 15, 20),
        SourceFinal(A, 1, 2, "token", 3, 10, 20),
        Failed(A, 1, 2, "größer \N{SNOWMAN}"),
        Released(A, 1, 2),
        Incompatible("model", "differs"),
    ],
    wire.decode_to_owner: [
        SUBMIT,
        msgspec.structs.replace(SUBMIT, stop_tokens=(), sampling=Sampling(), deadline_ns=None),
        Withdraw(1),
        Inspect(),
        Reinstate(A, "the device was reset"),
        Shutdown(),
    ],
    wire.decode_from_owner: [
        Up(D, 1, 2, 3, 4),
        Down(True, "no such model"),
        Token(1, 2),
        Events(1, "source", (Interval("write", "layer group 0", 1, 2, 3, "host"),)),
        Ended(1, "finished", "", "", Measured(*range(17)), "ab", ("cd", "ef"), "", ("x",), CHOICE),
        Ended(1, "failed", "why", "prompt", None, "", (), "no-source", ("a", "b"), None),
        Inspected(
            (("lanes", "free", 1), ("lanes", "held", -1)),
            (Quarantined(A, "the device failed", 5),),
            ("slot 0 of source 0: free",),
        ),
        Reinstated(A, "nothing of it is quarantined"),
    ],
}
SENT = [(decode, message) for decode, sent in EXAMPLES.items() for message in sent]


def named(value: object) -> str:
    return type(value).__name__ if isinstance(value, msgspec.Struct) else ""


def raw(message: msgspec.Struct) -> list[Any]:
    """The array that a message is on the wire."""
    out: list[Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    return out


def refused(decode: Decode, array: object) -> bool:
    try:
        decode(msgspec.msgpack.encode(array))
    except RemoteProtocolError:
        return True
    return False


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
            wrong = ["1", None, [], True]
        elif value is None:
            wrong = ["", 1.5, True]
        else:
            wrong = [1, "x", {}, [[["x"]]]]
        for bad in wrong:
            assert refused(decode, [*array[:at], bad, *array[at + 1 :]]), (at, value, bad)


@pytest.mark.parametrize(
    "bad", [[1, 2], [1, 2, 3, 4], [1, 2, True], [1, 2, 3.0], [1, 2, "3"], [1, 2, None], 7, {}]
)
def test_an_attempt_that_is_not_three_integers_is_refused(bad: object) -> None:
    assert refused(wire.decode_from_source, ["released", bad, 0, 0])


@pytest.mark.parametrize(
    "bad", [[0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 2, True], [0, 1, 2, 3.0], 7, {}]
)
def test_a_span_that_is_not_four_integers_is_refused(bad: object) -> None:
    array = raw(Progress(A, 0, 0, (SPAN,), (), 0, 0, 0))
    array[4] = [list(SPAN), bad]
    assert refused(wire.decode_from_source, array)


def test_a_progress_message_holds_1_to_max_spans() -> None:
    for count, legal in ((0, False), (1, True), (MAX_SPANS, True), (MAX_SPANS + 1, False)):
        spans = [list(SPAN)] * count
        assert refused(wire.decode_from_source, ["progress", A, 0, 0, spans, [], 0, 0, 0]) != legal
    digests = [0] * (MAX_SPANS + 1)
    assert refused(wire.decode_from_source, ["progress", A, 0, 0, [list(SPAN)], digests, 0, 0])


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


def long_named(count: int) -> tuple[Layer, ...]:
    parts = (Part("k", 128, 65_536, "bfloat16"), Part("v", 128, 65_536, "bfloat16"))
    return tuple(
        Layer(i, f"model.language_model.layers.{i}.self_attn", Sliding(131_072, 131_071), parts)
        for i in range(count)
    )


def test_the_largest_manifest_stays_under_64_kib() -> None:
    listed = long_named(MAX_LAYERS)
    hello = Hello(U64, decoder_manifest(layers=listed, model="f" * 64), U64, U64, U64)
    assert len(encode(hello)) < CONTROL_NBYTES - 512


@pytest.mark.parametrize(
    "text", ["", "plain", "x" * (MAX_TEXT + 9), "\ud800 lone", "\N{GOAT}" * 9999]
)
def test_a_text_made_to_travel_does(text: str) -> None:
    sent = Failed(A, 0, 0, travelling_text(text))
    assert wire.decode_from_source(encode(sent)) == sent
    if text.isascii():
        assert sent.reason == text[:MAX_TEXT]


@pytest.mark.parametrize(
    ("storage_ns", "begun_ns", "tail_ns", "from_last_group_ns"),
    [(0, 100, 60, 75), (50, 100, 60, 75), (90, 100, 60, 70), (130, 130, 30, 30)],
)
def test_a_tail_begins_when_there_is_something_to_import_and_somewhere_to_put_it(
    storage_ns: int, begun_ns: int, tail_ns: int, from_last_group_ns: int
) -> None:
    zeros = dict.fromkeys(Measured.__struct_fields__, 0)
    told = {"source_final_ns": 100, "last_group_ns": 85, "published_ns": 160}
    measured = Measured(**zeros | told | {"storage_ns": storage_ns})
    assert measured.tail_begun_ns == begun_ns
    assert measured.tail_ns == tail_ns
    assert measured.tail_from_last_group_ns == from_last_group_ns
