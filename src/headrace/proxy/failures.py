"""What the proxy itself says of a request that no decoder answers, in OpenAI's shape."""

from __future__ import annotations

from typing import Final

from headrace.server.http import Headers, Send, send_json
from headrace.server.replies import event_of, json_of
from headrace.server.terminals import BUG_TEXT, ErrorBody, ErrorInside

AGAIN_S: Final = 1
"""When to come again: decoders are asked once a second how they are."""

LEFT: Final = 499
"""The status of a request whose client left; nobody is there to read it."""

_TYPES: Final = {
    500: "server_error",
    502: "server_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class Failure(Exception):
    """A request ends here: with a status before the first byte, else with an event in its stream.

    code: one word, of a closed set. again: whether the same request may do well later.
    """

    def __init__(self, status: int, code: str, text: str, *, again: bool = False) -> None:
        super().__init__(text)
        self.status = status
        self.code = code
        self.text = text
        self.again = again

    def body(self) -> ErrorBody:
        """What its client reads."""
        return ErrorBody(ErrorInside(self.text, _TYPES[self.status], None, self.code))

    async def send(self, send: Send) -> None:
        """As a whole response."""
        headers: Headers = [(b"retry-after", str(AGAIN_S).encode())] if self.again else []
        await send_json(send, self.status, json_of(self.body()), headers)

    async def send_event(self, send: Send, *, within: bool) -> None:
        """As the last event of a stream; no `[DONE]` follows. within: another one is not ended."""
        event = (b"\n\n" if within else b"") + event_of(self.body())
        await send({"type": "http.response.body", "body": event, "more_body": False})


def none_up() -> Failure:
    """There is nobody to ask."""
    return Failure(503, "no-decoder", "no decoder is up; come again later", again=True)


def too_many(most: int) -> Failure:
    """As many requests as may be are in flight."""
    text = f"{most} requests are in flight; come again later"
    return Failure(503, "too-many-requests", text, again=True)


def died(address: str) -> Failure:
    """The connection to a decoder broke."""
    return Failure(502, "decoder-died", f"the decoder {address} ended before its answer did")


def answered(address: str, status: int) -> Failure:
    """What a decoder sent cannot be passed on."""
    text = f"the decoder {address} answered with status {status}, which HTTP does not have"
    return Failure(502, "decoder-died", text)


def late(address: str, timeout_s: float) -> Failure:
    """Nothing came of a decoder."""
    text = f"the decoder {address} sent nothing within {timeout_s:g} s"
    return Failure(504, "first-byte-timeout", text)


def shutting_down() -> Failure:
    """The drain is over."""
    return Failure(503, "shutting-down", "the proxy is shutting down", again=True)


def bug() -> Failure:
    """What must not be."""
    return Failure(500, "bug", BUG_TEXT)
