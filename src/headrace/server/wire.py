"""What lies beneath the application: the socket that is listened at, and uvicorn over it."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterator
from typing import Final

import h11
import msgspec
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from headrace.errors import Refused
from headrace.server import events
from headrace.server.config import HttpConfig
from headrace.server.http import App
from headrace.server.terminals import Ending, Terminal

LAST_WORDS_S: Final = 5.0
"""For the responses of what was cut off at the end of a drain."""

BACKLOG: Final = 2048
SPARE_CONNECTIONS: Final = 64
"""Above twice `max_connections`: from there on uvicorn answers without asking the application."""

NO_HTTP: Final = "this is no HTTP request that can be read"


def bind(http: HttpConfig) -> socket.socket:
    """A socket that has the server's port; it takes no connection before `listen`.

    Raises:
        Refused: the port is in use, or the address is none of this host's.
    """
    try:
        found = socket.getaddrinfo(
            http.host, http.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as exc:
        raise Refused(f"http.host {http.host!r} is no address: {exc}", field="http.host") from exc
    family, kind, proto, _, address = found[0]
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as exc:
        sock.close()
        raise Refused(_bind_text(http, exc), field="http.port") from exc
    return sock


def listen(sock: socket.socket, http: HttpConfig) -> None:
    """Take connections from now on.

    Raises:
        Refused: another process that had the port too was first.
    """
    try:
        sock.listen(min(http.max_connections, BACKLOG))
    except OSError as exc:
        raise Refused(_bind_text(http, exc), field="http.port") from exc


def _bind_text(http: HttpConfig, exc: OSError) -> str:
    where = f"{http.host}:{http.port}"
    if exc.errno == errno.EADDRINUSE:
        return f"{where} is in use by another process; stop it or give another port"
    if exc.errno == errno.EACCES:
        return f"{where} may not be used by this user; give a port from 1024 up"
    return (
        f"{where} cannot be listened at: {os.strerror(exc.errno or 0)}; give another host or port"
    )


class Server(uvicorn.Server):
    """Without signal handlers of its own: who drains is decided elsewhere."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def uvicorn_config(app: App, told: events.Events, http: HttpConfig) -> uvicorn.Config:
    """How uvicorn serves the application."""
    return uvicorn.Config(
        app,
        http=protocol(told),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=http.max_header_bytes + 4096,
        limit_concurrency=2 * http.max_connections + SPARE_CONNECTIONS,
        timeout_keep_alive=max(1, int(http.keep_alive_s)),
        timeout_graceful_shutdown=int(LAST_WORDS_S),
    )


def protocol(told: events.Events) -> type[H11Protocol]:
    """Uvicorn's protocol, which tells what is no HTTP as all else that is refused is told."""

    class Protocol(H11Protocol):
        def send_400_response(self, msg: str) -> None:
            del msg
            ending = Ending(Terminal.INVALID, NO_HTTP)
            told.tell(_rejected(ending))
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                for event in _response(ending):
                    self.transport.write(self.conn.send(event) or b"")
            self.transport.close()

    return Protocol


def _rejected(ending: Ending) -> events.Rejected:
    now_ns = time.monotonic_ns()
    return events.Rejected(now_ns, "other", ending.terminal, ending.status, ending.text)


def _response(ending: Ending) -> tuple[h11.Event, ...]:
    body = msgspec.json.encode(ending.body())
    headers = [
        ("content-type", "application/json"),
        ("content-length", str(len(body))),
        ("connection", "close"),
    ]
    start = h11.Response(status_code=ending.status, headers=headers, reason=b"Bad Request")
    return start, h11.Data(data=body), h11.EndOfMessage()
