"""What happens in a server, as typed events: all that metrics, the page and traces are made of.

Whoever listens cannot change an outcome: what a listener raises is logged and goes no further.
Times are ns of the host's CLOCK_MONOTONIC, as in the owners' messages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal, TypeAlias

from msgspec import Struct

from headrace.messages import Ended, Inspected, Interval
from headrace.server.terminals import Terminal

_log = logging.getLogger("headrace.server")

Endpoint: TypeAlias = Literal["completions", "chat", "tokenize", "models", "other"]
DecoderState: TypeAlias = Literal["starting", "ready", "waiting", "set aside", "stopped"]
"""Of an owner process: it loads, serves, waits to be started again, is not started again, ended."""


class Arrived(Struct, frozen=True):
    """A request was admitted to the queue.

    request: our own number, of which each choice is a hand-off. client: whose share it counts for.
    label: the client's X-Request-Id, which identifies nothing here. traceparent: as it came, or "".
    """

    at_ns: int
    request: int
    client: str
    label: str
    traceparent: str
    endpoint: Endpoint
    model: str
    num_prompt_tokens: int
    max_tokens: int
    choices: int
    route: str
    stream: bool


class Dispatched(Struct, frozen=True):
    """A choice left the queue for an owner, under a label of its own there."""

    at_ns: int
    request: int
    choice: int
    decoder: str
    label: int


class Decoded(Struct, frozen=True):
    """A choice has one more token; `index` 0 is its first."""

    at_ns: int
    request: int
    choice: int
    index: int


class ChoiceEnded(Struct, frozen=True):
    """An owner ended a choice. The intervals are there if the request was traced.

    num_prompt_tokens: of its own prompt; a request may have several.
    """

    at_ns: int
    request: int
    choice: int
    decoder: str
    num_tokens: int
    ended: Ended
    source_intervals: tuple[Interval, ...]
    owner_intervals: tuple[Interval, ...]
    num_prompt_tokens: int = 0


class Answered(Struct, frozen=True):
    """A request had its one terminal. in_stream: the status line was sent before, as 200."""

    at_ns: int
    request: int
    terminal: Terminal
    status: int
    in_stream: bool
    reason: str


class Served(Struct, frozen=True):
    """A request was answered that asks nothing of an owner, such as for the list of models."""

    at_ns: int
    endpoint: Endpoint
    status: int


class Rejected(Struct, frozen=True):
    """A request was refused before it was admitted to the queue."""

    at_ns: int
    endpoint: Endpoint
    terminal: Terminal
    status: int
    reason: str


class DecoderChanged(Struct, frozen=True):
    """The owner of a decoder changed its state; incarnation: how often it was started before."""

    at_ns: int
    decoder: str
    state: DecoderState
    reason: str
    incarnation: int
    pid: int


class Looked(Struct, frozen=True):
    """What an owner said that it holds; counts start anew with each incarnation."""

    at_ns: int
    decoder: str
    incarnation: int
    report: Inspected


class QueueChanged(Struct, frozen=True):
    """What waits for an owner now, in choices and in bytes as `queue.max_bytes` bounds them."""

    at_ns: int
    waiting: int
    nbytes: int


Event: TypeAlias = (
    Arrived
    | Dispatched
    | Decoded
    | ChoiceEnded
    | Answered
    | Served
    | Rejected
    | DecoderChanged
    | Looked
    | QueueChanged
)


class Events:
    """Hands each event to all listeners, in order."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[Event], None]] = []
        self._complained: set[Callable[[Event], None]] = set()

    def listen(self, listener: Callable[[Event], None]) -> None:
        """Call `listener` with every event from now on."""
        self._listeners.append(listener)

    def tell(self, event: Event) -> None:
        """Hand an event over; a listener that raises is named once in the log."""
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:
                if listener not in self._complained:
                    self._complained.add(listener)
                    _log.exception("a listener failed on %s", type(event).__name__)
