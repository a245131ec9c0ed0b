"""A connection: uvicorn's HTTP/1.1 protocol, with an end to all that a client can make wait.

uvicorn answers requests and has one timer, between two of them. Everything else that a client may
hold open has its limit here. It waits for one thing at a time, `Awaits`, and for each there is a
time by which it must have come. What is written must be taken by the client's host, whatever state
the connection is in. While a request is answered it waits for nothing of its client, except that
it stays: an end of what the client sends means that it left, also of one that shut down only that
direction, since the two look the same.

What is relied on of uvicorn's class, beside the methods of `asyncio.Protocol`: `app_state`,
`conn`, `connections`, `cycle`, `flow`, `loop`, `transport`, `on_response_complete`,
`handle_events`, `send_400_response`, `shutdown` and `_unset_keepalive_if_required`; and of its
cycles, that they write, close and ask for the end of a `transport`, are `disconnected` and are
told by a `message_event`.
"""

from __future__ import annotations

import asyncio
import math
import re
import secrets
import select
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, Final, cast

import h11
import msgspec
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from headrace.server import events
from headrace.server.descriptors import MAX_REFUSED, SPARE_CONNECTIONS
from headrace.server.terminals import Ending, Terminal

ABOVE: Final = "above"
"""In the `state` of a request's scope: its connection came when there were as many as may be."""

READ_WITHIN_S: Final = 60.0

LEAST_READ: Final = 1 << 16
"""Bytes that a client must take within `READ_WITHIN_S`, of what is written and waits for it."""

RECEIVED_AT_ONCE: Final = 1 << 14
"""Bytes; a chunk of a body may be one, and each is parsed before anybody else has a turn."""

_BYTES_ACKED = slice(120, 128)  # of Linux's struct tcp_info, since 4.1
_REPR: Final = re.compile(r":? (bytearray\()?b['\"].*", re.DOTALL)  # of what h11 quotes
_LEFT = select.POLLRDHUP | select.POLLHUP | select.POLLERR


@dataclass(frozen=True)
class Limits:
    """How many connections there may be, and what each may take, in seconds.

    spare: connections above the limit whose requests are still read, with `ABOVE` in their state;
    further ones are closed. max_refused: how many of those at once are told why.
    keep_alive_s: from a response to the next request's first byte. head_within_s: for all of a
    request's head, from its first byte, and for the first one from when the connection was made.
    rest_within_s: for the rest of a body that was answered before it was here. read_within_s: for
    each `LEAST_READ` of what a client is sent. linger_s: for a client that was refused to read why.
    look_every_s: how exact all this is.
    """

    max_connections: int
    spare: int = SPARE_CONNECTIONS
    max_refused: int = MAX_REFUSED
    keep_alive_s: float = 5.0
    head_within_s: float = 30.0
    rest_within_s: float = 5.0
    read_within_s: float = READ_WITHIN_S
    linger_s: float = 1.0
    look_every_s: float = 1.0


class Awaits(Enum):
    """What a connection waits for while no request of it is answered."""

    HEAD = auto()
    NEXT = auto()  # the first byte of a further head
    REST = auto()  # of a body that was answered before it was here
    CLOSE = auto()  # the client's, which has been told why


class Connections:
    """All connections of a server; makes the protocol of each, for `uvicorn.Config(http=...)`."""

    def __init__(self, told: events.Events, limits: Limits) -> None:
        self.told = told
        self.limits = limits
        self.refused: set[Connection] = set()  # when they were made; at most `max_refused`

    def __call__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> Connection:
        return Connection(self, config, server_state, app_state, _loop)


class Connection(H11Protocol):
    """One connection."""

    def __init__(
        self,
        among: Connections,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._among = among
        self._limits = among.limits
        self._awaits = Awaits.HEAD
        self._by_s = math.inf
        self._taken: tuple[int, float] | None = None  # bytes when it was last enough, and when
        self._looking: asyncio.TimerHandle | None = None

    @property
    def answering(self) -> bool:
        """Whether a request of it is under way."""
        if self._awaits is Awaits.CLOSE or self.cycle is None:
            return False
        return not self.cycle.response_complete

    # What the client does.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if hasattr(transport, "max_size"):  # asyncio's own have it
            transport.max_size = RECEIVED_AT_ONCE
        seen = SimpleNamespace(
            write=transport.write, close=self._close, is_closing=self._is_closing
        )
        self._of_cycles = cast(asyncio.Transport, seen)
        self._wait_for(Awaits.HEAD, self._limits.head_within_s)
        self._look_later()
        above = len(self.connections) - len(self._among.refused) - self._limits.max_connections
        self.app_state = {**self.app_state, ABOVE: above > 0}
        if above <= self._limits.spare:
            return
        if len(self._among.refused) < self._limits.max_refused:
            text = (
                f"more than {self._limits.max_connections} connections are open; come again later"
            )
            self._among.refused.add(self)
            self._refuse(Ending(Terminal.TOO_MANY_CONNECTIONS, text, retry_after_s=1.0))
        else:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        # Behind a request that is the connection's last, whatever comes is none.
        if self._awaits is Awaits.CLOSE or self.conn.their_state is h11.MUST_CLOSE:
            return
        if self._awaits is Awaits.NEXT:
            self._wait_for(Awaits.HEAD, self._limits.head_within_s)
        super().data_received(data)
        if self._awaits is Awaits.REST and self.conn.their_state is not h11.SEND_BODY:
            self._wait_for(Awaits.NEXT, self._limits.keep_alive_s)

    def eof_received(self) -> None:
        # A plain close would wait for the client to read what is written.
        if self.answering:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._looking is not None:
            self._looking.cancel()
        self._among.refused.discard(self)
        super().connection_lost(exc)

    # What uvicorn does.

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None:
            self.cycle.transport = self._of_cycles

    def on_response_complete(self) -> None:
        if self._awaits is not Awaits.CLOSE:
            self._wait_for_more()
        super().on_response_complete()
        self._unset_keepalive_if_required()  # its one timer, which knows no head that has begun

    def _wait_for_more(self) -> None:
        in_body = self.conn.their_state is h11.SEND_BODY
        if in_body and any(name == b"transfer-encoding" for name, _ in self.headers):
            self._close()  # to find its end, each chunk would be parsed, which may be a byte
        elif in_body:
            self._wait_for(Awaits.REST, self._limits.rest_within_s)
        elif self.conn.trailing_data[0]:
            self._wait_for(Awaits.HEAD, self._limits.head_within_s)
        else:
            self._wait_for(Awaits.NEXT, self._limits.keep_alive_s)

    def send_400_response(self, msg: str) -> None:
        exc = sys.exception()
        if getattr(exc, "error_status_hint", 400) == 431:
            ending = Ending(Terminal.HEADERS_TOO_LARGE, "the headers have too many bytes")
        else:
            said = _REPR.sub("", str(exc or msg))
            ending = Ending(Terminal.INVALID, f"this is no HTTP/1.1: {said}"[:300])
        if self.answering and self.cycle.response_started:
            self.transport.abort()
        elif not self.answering:
            self._refuse(ending)
        else:  # in the body of a request, whose own end is told by whoever reads it
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self._close_with(ending)

    def shutdown(self) -> None:
        if self.answering:
            self.cycle.keep_alive = False
        else:
            self._close()

    # What is looked at again and again.

    def _look_later(self) -> None:
        self._looking = self.loop.call_later(self._limits.look_every_s, self._look)

    def _look(self) -> None:
        self._look_later()
        now_s = self.loop.time()
        # Nothing is read meanwhile, so that an end of what the client sends is not seen.
        hung_up = self.flow.read_paused and _hung_up(_socket(self.transport))
        if hung_up or self._unread_too_long(now_s):
            self.transport.abort()
        elif now_s >= self._by_s and not self.answering:
            self._too_late()

    def _unread_too_long(self, now_s: float) -> bool:
        waiting = self.transport.get_write_buffer_size()
        if not waiting:
            self._taken = None
            return False
        taken = _acknowledged(_socket(self.transport), otherwise=-waiting)
        if self._taken is None or taken - self._taken[0] >= LEAST_READ:
            self._taken = (taken, now_s)
        return now_s - self._taken[1] >= self._limits.read_within_s

    def _too_late(self) -> None:
        if self._awaits is Awaits.HEAD and self.conn.trailing_data[0]:
            within = f"{self._limits.head_within_s:.0f} s"
            text = f"the request's head did not come within {within}"
            self._refuse(Ending(Terminal.DEADLINE, text))
        else:  # once what is written has been taken, for which there is a limit too
            self.transport.close()

    def _wait_for(self, what: Awaits, within_s: float) -> None:
        self._awaits = what
        self._by_s = self.loop.time() + within_s

    def _refuse(self, ending: Ending) -> None:
        self._among.told.tell(
            events.Rejected(
                time.monotonic_ns(), "other", ending.terminal, ending.status, ending.text
            )
        )
        self._close_with(ending)

    def _close_with(self, ending: Ending) -> None:
        self.transport.write(response_of(ending))
        self._linger(self._limits.linger_s)

    def _is_closing(self) -> bool:
        return self._awaits is Awaits.CLOSE or self.transport.is_closing()

    def _close(self) -> None:
        if self.conn.their_state is h11.SEND_BODY:
            self._linger(self._limits.rest_within_s)
        else:
            self.transport.close()

    def _linger(self, within_s: float) -> None:
        """Send no more; what still comes is thrown away, or the client could not read the rest."""
        self._wait_for(Awaits.CLOSE, within_s)
        self.flow.resume_reading()
        if not self.transport.get_write_buffer_size():
            with suppress(OSError):  # the client has reset it meanwhile
                self.transport.write_eof()


def response_of(ending: Ending) -> bytes:
    """A whole response that tells an error to a client whose connection is closed then."""
    body = msgspec.json.encode(ending.body())
    lines = [
        f"HTTP/1.1 {ending.status} {HTTPStatus(ending.status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        f"x-request-id: {secrets.token_hex(12)}",
        "connection: close",
    ]
    if ending.retry_after_s is not None:
        lines.append(f"retry-after: {math.ceil(ending.retry_after_s)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def watch_clients(listening: socket.socket, read_within_s: float = READ_WITHIN_S) -> None:
    """Have the kernel end connections of clients that are gone or take nothing.

    It goes on to watch after a connection was closed here, with what was not taken yet.
    """
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, max(1, int(read_within_s))),
        (socket.TCP_KEEPINTVL, max(1, int(read_within_s / 4))),
        (socket.TCP_KEEPCNT, 4),
        (socket.TCP_USER_TIMEOUT, int(read_within_s * 1000)),
    ):
        listening.setsockopt(socket.IPPROTO_TCP, option, value)


def _socket(transport: asyncio.Transport) -> socket.socket:
    found: socket.socket = transport.get_extra_info("socket")
    return found


def _hung_up(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock.fileno(), _LEFT)
    return bool(poll.poll(0))


def _acknowledged(sock: socket.socket, *, otherwise: int) -> int:
    """Bytes that the client's host has taken. What is written here moves in lumps of megabytes."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED.stop)
    if len(info) < _BYTES_ACKED.stop:
        return otherwise
    return int.from_bytes(info[_BYTES_ACKED], sys.byteorder)
