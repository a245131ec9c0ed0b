"""Bytes that are no message of a source: cut, padded, mistyped, misshapen, misdirected or random.

All are made from legal messages, changed at one place, so that a decoder that overlooks just that
place takes them. Each must be refused as undecodable.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from headrace.messages import MAX_SPANS, MAX_TEXT, Message, encode

Path: TypeAlias = tuple[int, ...]  # of a value in nested arrays

SEED: Final = 20_260_101
NUM_RANDOM: Final = 24
PACKET_NBYTES: Final = 65_536  # above what a channel lets through

_ATTEMPT_AT, _SPANS_AT, _DIGESTS_AT = 1, 4, 5

_raw = msgspec.Raw
_pack = msgspec.msgpack.encode

# No integers, though some decoders take them for one.
_NO_INTEGERS: Final[dict[str, object]] = {
    "true": True,
    "false": False,
    "a float": 1.0,
    "a half": 0.5,
    "no number": float("nan"),
    "infinity": float("inf"),
    "nothing": None,
    "a text": "1",
    "bytes": b"\x01",
    "2^64 in bytes": (1 << 64).to_bytes(9, "big"),
    "2^64 in a text": str(1 << 64),
    "an array": [1],
    "a map": {},
    "an extension": msgspec.msgpack.Ext(1, b"\x01"),
    "a time": msgspec.msgpack.Ext(-1, bytes(4)),
}
_BELOW_ZERO: Final[dict[str, object]] = {
    "-1": -1,
    "-1 in 64 bits": _raw(b"\xd3" + b"\xff" * 8),
    "-2^31": -(1 << 31),
    "-2^63": -(1 << 63),
}


def undecodable(
    samples: Sequence[Message], strays: Sequence[Message]
) -> Iterator[tuple[str, bytes]]:
    """Named payloads that no source may send, each to be refused as undecodable.

    `samples`: one legal message of each kind. `strays`: messages of other directions.
    """
    yield from _odd()
    for sample in samples:
        array = to_array(sample)
        yield from _cut(array[0], encode(sample))
        yield from _mistyped(array)
        yield from _misshapen(array)
    yield from _bounds(next(to_array(s) for s in samples if to_array(s)[0] == "progress"))
    yield from _texts(next(to_array(s) for s in samples if to_array(s)[0] == "failed"))
    for stray in strays:
        yield f"direction: {to_array(stray)[0]} from a source", encode(stray)
    yield from _random(encode(samples[0]))


def to_array(message: Message) -> list[Any]:
    """The array that a message is on the wire."""
    out: list[Any] = msgspec.msgpack.decode(encode(message))
    return out


def integers(array: list[Any]) -> Iterator[Path]:
    """Where the array, or an array in it, has an integer."""
    for at, value in enumerate(array):
        if isinstance(value, list):
            yield from ((at, *rest) for rest in integers(value))
        elif isinstance(value, int):
            yield (at,)


def replaced(array: list[Any], path: Path, value: object) -> list[Any]:
    """The array with another value at one place."""
    at, *rest = path
    inner = replaced(array[at], tuple(rest), value) if rest else value
    return [*array[:at], inner, *array[at + 1 :]]


def may_be_negative(array: list[Any], path: Path) -> bool:
    """Whether the wire lets this integer be negative: those of an attempt and of a span."""
    return path[0] == _ATTEMPT_AT or (array[0] == "progress" and path[0] == _SPANS_AT)


def _odd() -> Iterator[tuple[str, bytes]]:
    yield "bytes: an empty packet", b""
    for byte in (0x00, 0x7F, 0x80, 0x90, 0xA0, 0xC0, 0xC1, 0xC2, 0xC4, 0xCF, 0xD4, 0xDC, 0xFF):
        yield f"bytes: only {byte:#04x}", bytes([byte])
    yield "bytes: a packet of zeros too long for a channel", bytes(PACKET_NBYTES)
    yield "bytes: a packet of zeros", bytes(PACKET_NBYTES - 1024)
    yield "bytes: 64512 arrays in one another", b"\x91" * (PACKET_NBYTES - 1024)
    yield "bytes: an array that claims 2^32 - 1 elements", b"\xdd\xff\xff\xff\xff"
    yield "bytes: a text that claims 2^32 - 1 bytes", b"\x92\xdb\xff\xff\xff\xff"
    yield "bytes: no array but a text", _pack("released")
    for name, tag in {
        "an unknown tag": "explode",
        "an empty tag": "",
        "a tag in capitals": "PROGRESS",
        "a tag with a zero byte": "progress\0",
        "a tag in bytes": b"progress",
        "a number for a tag": 3,
        "an array for a tag": ["progress"],
        "a tag of 8 KiB": "p" * 8192,
        "a tag that is no UTF-8": _raw(b"\xa8progr\xff\xfes"),
    }.items():
        yield f"bytes: {name}", _pack([tag, [0, 0, 0], 0, 0])


def _cut(word: str, payload: bytes) -> Iterator[tuple[str, bytes]]:
    for at in range(1, len(payload)):
        yield f"cut: {word} after {at} bytes", payload[:at]
    yield f"cut: {word} and a byte more", payload + b"\0"
    yield f"cut: {word} twice in a packet", payload + payload
    yield f"cut: {word} without its first byte", payload[1:]


def _mistyped(array: list[Any]) -> Iterator[tuple[str, bytes]]:
    for path in integers(array):
        wrong = _NO_INTEGERS if may_be_negative(array, path) else _NO_INTEGERS | _BELOW_ZERO
        for name, value in wrong.items():
            where = ".".join(map(str, path))
            yield f"types: {array[0]} with {name} at {where}", _pack(replaced(array, path, value))
    for at, value in enumerate(array):
        if isinstance(value, str) and at > 0:
            for name, wrong_text in {"a number": 1, "bytes": b"x", "nothing": None}.items():
                yield (
                    f"types: {array[0]} with {name} at {at}",
                    _pack(replaced(array, (at,), wrong_text)),
                )


def _misshapen(array: list[Any]) -> Iterator[tuple[str, bytes]]:
    word = array[0]
    names = [str(at) for at in range(len(array))]
    for at in range(len(array)):
        if any(value is not None for value in array[at:]):  # the last ones may be left out
            yield f"shape: {word} without field {at}", _pack([*array[:at], *array[at + 1 :]])
        yield f"shape: {word} with field {at} twice", _pack([*array[: at + 1], *array[at:]])
    yield f"shape: {word} with a field more", _pack([*array, 0])
    deep = _raw(b"\x91" * 8192 + b"\x90")
    yield f"shape: {word} with a deep field more", _pack([*array, deep])
    yield f"shape: {word} as a map", _pack({"t": word, **dict(zip(names, array, strict=True))})
    twice = b"\x82" + (_pack("t") + _pack(word)) * 2
    yield f"shape: {word} as a map with its tag twice", twice
    yield f"shape: {word} in an array", _pack([array])
    yield f"shape: {word} reversed", _pack(array[::-1])
    attempt = array[_ATTEMPT_AT]
    for name, wrong in {
        "of two numbers": attempt[:2],
        "of four numbers": [*attempt, 0],
        "in an array": [attempt],
        "as a map": {"epoch": 0, "counter": 0, "attempt": 1},
        "as a deep array": deep,
    }.items():
        yield (
            f"shape: {word} with an attempt {name}",
            _pack(replaced(array, (_ATTEMPT_AT,), wrong)),
        )


def _bounds(progress: list[Any]) -> Iterator[tuple[str, bytes]]:
    span = progress[_SPANS_AT][0]
    for name, spans in {
        "no span": [],
        "a span too many": [span] * (MAX_SPANS + 1),
        "9000 spans": [span] * 9000,
        "a span of three numbers": [span[:3]],
        "a span of five numbers": [[*span, 0]],
        "a span not in an array": span,
        "a span as a map": [dict.fromkeys(["layer_start", "layer_stop", "start", "stop"], 0)],
        "a span of pairs": [[span[:2], span[2:]]],
        "a good span and nothing": [span, None],
        "a good span and an empty one": [span, []],
    }.items():
        yield f"bounds: {name}", _pack(replaced(progress, (_SPANS_AT,), spans))
    for name, digests in {
        "a digest too many for any message": [0] * (MAX_SPANS + 1),
        "a text for digests": "00",
        "bytes for digests": bytes(4),
        "a digest in bytes": [bytes(4)],
    }.items():
        yield f"bounds: {name}", _pack(replaced(progress, (_DIGESTS_AT,), digests))


def _texts(failed: list[Any]) -> Iterator[tuple[str, bytes]]:
    last = (len(failed) - 1,)
    for name, text in {
        "a character too long": "x" * (MAX_TEXT + 1),
        "48 KiB long": "x" * (48 << 10),
        "that is no UTF-8": _raw(b"\xa4\xc3\x28\xff\xfe"),
        "with half a character": _raw(b"\xa3ab\xe2"),
        "with a lone surrogate": _raw(b"\xa3\xed\xa0\x80"),
        "with an overlong zero": _raw(b"\xa2\xc0\x80"),
    }.items():
        yield f"text: a reason {name}", _pack(replaced(failed, last, text))


def _random(sample: bytes) -> Iterator[tuple[str, bytes]]:
    chance = random.Random(SEED)
    for at in range(NUM_RANDOM):
        yield f"random: bytes {at}", chance.randbytes(chance.choice((3, 16, 64, 512, 4096)))
        head = sample[: chance.randrange(1, len(sample) - 1)]
        yield f"random: a message that goes on in bytes {at}", head + chance.randbytes(16)
