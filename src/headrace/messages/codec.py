"""Messages to bytes and back: any bytes are a message of the expected direction, or one error."""

from __future__ import annotations

from typing import TypeAlias, TypeVar

import msgspec

from headrace.errors import RemoteProtocolError
from headrace.messages.base import MAX_TEXT
from headrace.messages.held import Inspected
from headrace.messages.reports import Ended, Events
from headrace.messages.router import (
    Down,
    Inspect,
    Reinstate,
    Reinstated,
    Submit,
    Token,
    Up,
    Withdraw,
)
from headrace.messages.source import FromSource, Shutdown, ToSource

T = TypeVar("T")

ToOwner: TypeAlias = Submit | Withdraw | Inspect | Reinstate | Shutdown
FromOwner: TypeAlias = Up | Down | Token | Events | Ended | Inspected | Reinstated

Message: TypeAlias = ToSource | FromSource | ToOwner | FromOwner

_encoder = msgspec.msgpack.Encoder()
_to_source = msgspec.msgpack.Decoder(ToSource)
_from_source = msgspec.msgpack.Decoder(FromSource)
_to_owner = msgspec.msgpack.Decoder(ToOwner)
_from_owner = msgspec.msgpack.Decoder(FromOwner)


def travelling_text(text: str) -> str:
    """`text` as a message can carry it: at most MAX_TEXT characters, each of them encodable.

    An exception's text may hold lone surrogates (`os.fsdecode`), which no UTF-8 string has.
    """
    return text[:MAX_TEXT].encode("utf-8", "replace").decode("utf-8")


def encode(message: Message) -> bytes:
    """The bytes of a message."""
    return _encoder.encode(message)


def decode_to_source(payload: bytes) -> ToSource:
    """A message from the owner; raises RemoteProtocolError for anything else."""
    return _decode(_to_source, payload)


def decode_from_source(payload: bytes) -> FromSource:
    """A message from a source; raises RemoteProtocolError for anything else."""
    return _decode(_from_source, payload)


def decode_to_owner(payload: bytes) -> ToOwner:
    """A message from the router; raises RemoteProtocolError for anything else."""
    return _decode(_to_owner, payload)


def decode_from_owner(payload: bytes) -> FromOwner:
    """A message from an owner; raises RemoteProtocolError for anything else."""
    return _decode(_from_owner, payload)


def _decode(decoder: msgspec.msgpack.Decoder[T], payload: bytes) -> T:
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise RemoteProtocolError(f"undecodable message of {len(payload)} bytes: {exc}") from exc
