"""How a request ends for its client, and the HTTP status of each end: one total table.

A status line is sent after admission and the first token, or with an error. An end after the first
token of a stream has no status any more: it is told as an event in the stream.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from msgspec import Struct

from headrace.errors import Refused
from headrace.messages import Ended
from headrace.protocol.commands import Cause

BUG_TEXT: Final = "a fault of this server; see its log"


class Terminal(Enum):
    """Why a request ended; the word is what metrics, logs and error bodies call it."""

    FINISHED = "finished"
    INVALID = "invalid"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    UNKNOWN_MODEL = "unknown-model"
    UNKNOWN_PATH = "unknown-path"
    WRONG_METHOD = "wrong-method"
    TOO_LARGE = "too-large"
    HEADERS_TOO_LARGE = "headers-too-large"
    QUEUE_FULL = "queue-full"
    DEADLINE = "deadline"
    CLIENT_LEFT = "client-left"
    TOO_MANY_CONNECTIONS = "too-many-connections"
    SHUTTING_DOWN = "shutting-down"
    NOT_READY = "not-ready"
    OWNER_DIED = "owner-died"
    NO_STORAGE = "no-storage"
    NO_SOURCE = "no-source"
    SOURCE_DIED = "source-died"
    SOURCE_FAILED = "source-failed"
    STALLED = "stalled"
    MALFORMED = "malformed"
    CORRUPT = "corrupt"
    DEVICE = "device"
    BUG = "bug"


STATUS: Final[dict[Terminal, int]] = {
    Terminal.FINISHED: 200,
    Terminal.INVALID: 400,
    Terminal.UNAUTHORIZED: 401,
    Terminal.FORBIDDEN: 403,
    Terminal.UNKNOWN_MODEL: 404,
    Terminal.UNKNOWN_PATH: 404,
    Terminal.WRONG_METHOD: 405,
    Terminal.TOO_LARGE: 413,
    Terminal.HEADERS_TOO_LARGE: 431,
    Terminal.QUEUE_FULL: 429,
    Terminal.DEADLINE: 408,
    Terminal.CLIENT_LEFT: 499,  # nobody is there to read it: for logs and metrics
    Terminal.TOO_MANY_CONNECTIONS: 503,
    Terminal.SHUTTING_DOWN: 503,
    Terminal.NOT_READY: 503,
    Terminal.OWNER_DIED: 503,
    Terminal.NO_STORAGE: 503,
    Terminal.NO_SOURCE: 503,
    Terminal.SOURCE_DIED: 503,
    Terminal.SOURCE_FAILED: 500,
    Terminal.STALLED: 503,
    Terminal.MALFORMED: 500,
    Terminal.CORRUPT: 500,
    Terminal.DEVICE: 500,
    Terminal.BUG: 500,
}
"""503 where the same request may do well later or elsewhere; 500 where something is broken."""

_OF_CAUSE: Final[dict[Cause, Terminal]] = {
    Cause.CANCELLED: Terminal.CLIENT_LEFT,
    Cause.DEADLINE: Terminal.DEADLINE,
    Cause.STALLED: Terminal.STALLED,
    Cause.SOURCE_FAILED: Terminal.SOURCE_FAILED,
    Cause.SOURCE_DIED: Terminal.SOURCE_DIED,
    Cause.MALFORMED: Terminal.MALFORMED,
    Cause.CORRUPT: Terminal.CORRUPT,
    Cause.DEVICE: Terminal.DEVICE,
    Cause.NO_STORAGE: Terminal.NO_STORAGE,
    Cause.NO_SOURCE: Terminal.NO_SOURCE,
}

_LACKING: Final = {"source": Terminal.NO_SOURCE, "decoder": Terminal.NO_STORAGE}
"""What an owner refuses by these names is no client's mistake: nothing of it is in service."""

_TYPES: Final[dict[int, str]] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    499: "client_closed_request",
    500: "server_error",
    503: "overloaded_error",
}


class ErrorInside(Struct, frozen=True):
    """What OpenAI's clients read of an error."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(Struct, frozen=True):
    """The body of every error, and the data of an error event in a stream."""

    error: ErrorInside


class Ending(Exception):
    """A request ends, and not as finished: `terminal` says why, `text` what to tell its client.

    `field` names the field of the body that is at fault. `retry_after_s`: when to come again.
    """

    def __init__(
        self,
        terminal: Terminal,
        text: str,
        *,
        field: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(text)
        self.terminal = terminal
        self.text = text
        self.field = field
        self.retry_after_s = retry_after_s

    @property
    def status(self) -> int:
        """Its HTTP status."""
        return STATUS[self.terminal]

    def body(self) -> ErrorBody:
        """What its client reads."""
        kind = _TYPES[self.status]
        return ErrorBody(ErrorInside(self.text, kind, self.field, self.terminal.value))


def terminal_of(ended: Ended) -> Terminal:
    """What an owner's end of a hand-off is to its client.

    A cause that no table knows is a bug of ours, and told as one.
    """
    if ended.outcome == "finished":
        return Terminal.FINISHED
    if ended.mistake in _LACKING:
        return _LACKING[ended.mistake]
    if ended.mistake:
        return Terminal.INVALID
    if ended.outcome == "cancelled":
        return Terminal.CLIENT_LEFT
    try:
        return _OF_CAUSE[Cause(ended.cause)]
    except (ValueError, KeyError):
        return Terminal.BUG


def ending_of(exc: Exception) -> Ending:
    """What kept a choice from being told to its owner.

    What is no fault of an option's value is one of ours, or this host lacks something.
    """
    if not isinstance(exc, Refused):
        return Ending(Terminal.BUG, BUG_TEXT)
    terminal = Terminal.INVALID if exc.field else Terminal.NOT_READY
    return Ending(terminal, str(exc), field=exc.field or None)
