"""The router's end of an owner process: start it, submit, and hear what becomes of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from headrace.errors import HeadraceError, PeerDied, Refused, RemoteProtocolError, WouldBlock
from headrace.ids import AttemptId
from headrace.messages import (
    Ended,
    Events,
    FromOwner,
    Inspect,
    Inspected,
    Interval,
    Reinstate,
    Reinstated,
    Token,
    Up,
    Withdraw,
    travelling_text,
)
from headrace.runtime.config import OwnerConfig
from headrace.runtime.owner_link import OwnerFailed, OwnerLink
from headrace.runtime.requests import RequestOptions
from headrace.runtime.tuning import Tuning

_M = TypeVar("_M", bound=FromOwner)

DRAIN_WITHIN_S = 5.0  # how long the end of a traced request waits for its storage to be free


@dataclass(slots=True)
class RouteResult:
    """What one request came to."""

    tokens: list[int]
    ended: Ended
    source_intervals: list[Interval] = field(default_factory=list)
    owner_intervals: list[Interval] = field(default_factory=list)


class OwnerClient:
    """One owner process, as its router sees it. Used from one thread.

    `interpreter`: of the environment that the decoder needs, or None for this process's own. A
    source that names none runs in this process's environment then, and not in the decoder's.
    """

    def __init__(self, config: OwnerConfig, *, interpreter: str | None = None) -> None:
        self._link = OwnerLink(config, interpreter=interpreter)
        self._up = False
        self._next_label = 0
        self._num_ended = 0
        self._traced: set[int] = set()
        self._inbox: dict[int, deque[FromOwner]] = {}  # of requests whose result was not taken
        self._put_off: HeadraceError | None = None  # met where a result was at hand already

    @property
    def tuning(self) -> Tuning | None:
        """What the probe of `tune_copies` found, if it was asked for."""
        return self._link.tuning

    @property
    def pid(self) -> int:
        """Of the owner process. Raises: PeerDied: it was not started."""
        if self._link.pid is None:
            raise PeerDied("the owner was not started")
        return self._link.pid

    def start(self) -> Up:
        """Spawn the owner and wait until it and its sources can serve.

        Raises:
            Refused: a user's mistake, or the interpreter cannot run this headrace.
            OwnerFailed, PeerDied: it could not start.
        """
        self._link.check()
        self._link.spawn()
        message = self._next()
        if not isinstance(message, Up):
            raise RemoteProtocolError(f"the owner began with {type(message).__name__}")
        self._up = True
        return message

    def submit(self, tokens: Sequence[int], options: RequestOptions) -> int:
        """Start a request; returns the label that its messages carry."""
        label = self._next_label
        self._next_label += 1
        self._link.submit(label, tokens, options)
        self._inbox[label] = deque()
        if options.trace:
            self._traced.add(label)
        return label

    def withdraw(self, label: int) -> None:
        """Cancel a request; its `Ended` still comes."""
        self._link.send(Withdraw(label))

    def result(
        self,
        label: int,
        on_token: Callable[[int], bool] | None = None,
        *,
        within_s: float | None = None,
    ) -> RouteResult:
        """Wait for a request's end; `on_token` returns True to stop it there.

        `within_s`: for a request that was withdrawn, whose end is up to its owner alone. A trace
        lacks what did not come in time, or before the owner was gone.

        Raises:
            OwnerFailed: it did not come in time; `close` then ends that owner without grace.
        """
        give_up_s = None if within_s is None else time.monotonic() + within_s
        tokens: list[int] = []
        lanes: dict[str, list[Interval]] = {"source": [], "owner": []}
        stopped = False
        while True:
            message = self._next_of(label, give_up_s)
            if isinstance(message, Token) and not stopped:
                tokens.append(message.token)
                if on_token is not None and on_token(message.token):
                    stopped = True
                    self.withdraw(label)
            elif isinstance(message, Events):
                lanes[message.lane] += message.intervals
            elif isinstance(message, Ended):
                traced = label in self._traced and not message.mistake
                self._traced.discard(label)
                if traced:
                    lanes["owner"] += self._drain_of(label, give_up_s)
                del self._inbox[label]
                return RouteResult(tokens, message, lanes["source"], lanes["owner"])

    def _drain_of(self, label: int, give_up_s: float | None) -> list[Interval]:
        """What a traced request's owner tells until its storage is free, if that is soon."""
        soon_s = time.monotonic() + DRAIN_WITHIN_S
        give_up_s = soon_s if give_up_s is None else min(soon_s, give_up_s)
        inbox, told = self._inbox[label], list[Interval]()
        try:
            while True:
                while not inbox:
                    message = self._receive(give_up_s)
                    if message is None:
                        return told
                    self._keep(message)
                last = inbox.popleft()
                if not isinstance(last, Events) or not last.intervals:
                    return told
                told += last.intervals
        except HeadraceError as exc:  # the request is over all the same; the next call hears of it
            self._put_off = exc
            return told

    def inspect(self) -> Inspected:
        """What the owner holds: counts, what is quarantined, each lane and slot as a line.

        Raises:
            PeerDied, OwnerFailed: the owner is gone.
        """
        self._link.send(Inspect())
        return self._answer(Inspected)

    def reinstate(self, attempt: AttemptId, because: str) -> None:
        """Have what an attempt left in quarantine back in service; see `DecoderOwner.reinstate`.

        Raises:
            Refused: the owner did not do it; the text says why.
        """
        self._link.send(Reinstate(attempt, travelling_text(because)))
        answer = self._answer(Reinstated)
        if answer.error:
            raise Refused(answer.error, field="attempt")

    def statistics(self) -> dict[str, int]:
        """Counts: requests submitted and ended, messages kept for whoever asks, the channel's."""
        return {
            **self._link.statistics(),
            "submitted": self._next_label,
            "ended": self._num_ended,
            "kept": sum(map(len, self._inbox.values())),
        }

    def close(self, grace_s: float = 10.0) -> None:
        """Ask the owner to end, wait, then make sure. Idempotent.

        An owner that is still loading would not hear the message, and has nothing to end in good
        order: it is killed at once, and its source dies with it.
        """
        if not self._up or not self._link.ask_to_end():
            grace_s = 0.0
        self._link.close(grace_s)

    def _next_of(self, label: int, give_up_s: float | None) -> FromOwner:
        """The next message of a request; what comes of others is kept for whoever asks for them."""
        inbox = self._inbox.setdefault(label, deque())
        while not inbox:
            self._keep(self._next(give_up_s))
        return inbox.popleft()

    def _answer(self, kind: type[_M]) -> _M:
        """The answer to what was just asked; what comes of requests meanwhile is kept."""
        while True:
            message = self._next()
            if isinstance(message, kind):
                return message
            self._keep(message)

    def _keep(self, message: FromOwner) -> None:
        """Keep what is of a request, unless its result was taken: a drain may outlast it."""
        if isinstance(message, Token | Events | Ended):
            self._num_ended += isinstance(message, Ended)
            if message.label in self._inbox:
                self._inbox[message.label].append(message)

    def _next(self, give_up_s: float | None = None) -> FromOwner:
        message = self._receive(give_up_s)
        if message is None:
            self._up = False
            raise OwnerFailed("the owner stands still: it did not end a request")
        return message

    def _receive(self, give_up_s: float | None) -> FromOwner | None:
        """The next message; None if there is none until then."""
        if self._put_off is not None:
            error, self._put_off = self._put_off, None
            raise error
        while True:
            try:
                return self._link.receive()
            except WouldBlock:
                left_s = 60.0 if give_up_s is None else give_up_s - time.monotonic()
                if left_s <= 0:
                    return None
                self._link.wait_readable(min(left_s, 60.0))
            except PeerDied as exc:
                raise PeerDied(f"the owner process {self._link.exit_text(5.0)}") from exc
