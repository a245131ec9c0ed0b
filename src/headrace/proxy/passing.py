"""What of headers and streams is passed on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from headrace.proxy.asking import PREFILLER_HEADER
from headrace.server.http import Headers

_HOP_BY_HOP: Final = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization"),
        *(b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
    }
)
_OF_A_REQUEST: Final = frozenset(
    {b"accept-encoding", b"content-length", b"expect", b"host", b"x-request-id", PREFILLER_HEADER}
)
_OF_AN_ANSWER: Final = frozenset({b"content-length", b"date", b"server", b"x-request-id"})

_ENDS: Final = (b"\n\n", b"\r\n\r\n")

MAX_HELD: Final = 1 << 20
"""Bytes of an event that are waited for to be whole."""


def request_headers(headers: Headers, label: str) -> Headers:
    """What a decoder gets of a client's headers. label: the request's id.

    No encoding is asked for: the ends of a stream's events are looked for.
    """
    own = [(b"x-request-id", label.encode()), (b"accept-encoding", b"identity")]
    return [*_end_to_end(headers, _OF_A_REQUEST), *own]


def answer_headers(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """What a client gets of a decoder's headers; its server adds the rest."""
    lower = [(name.lower(), value) for name, value in headers]
    return _end_to_end(lower, _OF_AN_ANSWER)


def _end_to_end(headers: Headers, left_out: frozenset[bytes]) -> Headers:
    named = {
        word.strip().lower()
        for name, value in headers
        if name == b"connection"
        for word in value.split(b",")
    }
    out = _HOP_BY_HOP | left_out | named
    return [(name, value) for name, value in headers if name not in out]


class WholeEvents:
    """Passes a stream of events on as it comes, but never a part of an event.

    A decoder may die in the midst of one; what says so would else be read as its end.
    cut: of one above MAX_HELD a part was passed on all the same.
    """

    def __init__(self) -> None:
        self.cut = False
        self._held = b""

    def push(self, piece: bytes) -> bytes:
        """The bytes up to the last event's end so far."""
        held = self._held + piece
        end = max((held.rfind(mark) + len(mark) for mark in _ENDS if mark in held), default=0)
        if end:
            self.cut = False
        if len(held) - end > MAX_HELD:
            end, self.cut = len(held), True
        self._held = held[end:]
        return held[:end]

    def rest(self) -> bytes:
        """What came after that, at the stream's own end."""
        held, self._held = self._held, b""
        return held
