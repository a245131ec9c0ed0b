"""What lies beneath the application: the socket that is listened at, and uvicorn over it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from typing import Final, cast

import uvicorn

from headrace.errors import Refused
from headrace.server import events
from headrace.server.config import HttpConfig
from headrace.server.descriptors import ACCEPTED_AT_ONCE
from headrace.server.hosts import address_of
from headrace.server.http import App
from headrace.server.protocol import Connections, Limits, watch_clients

LAST_WORDS_S: Final = 5.0
"""For what is still answered at the end of a drain; what is left then is cut off."""

LAST_READ_S: Final = 2.0
"""For the clients of what was cut off to read so."""

BACKLOG: Final = 2048
"""Connections that may wait to be accepted; the kernel has a limit of its own."""


def bind(http: HttpConfig) -> socket.socket:
    """A socket that has the server's port; it takes no connection before `listen`.

    Raises:
        Refused: the port is in use, or the address is none of this host's.
    """
    family, kind, proto, address = address_of(http.host, http.port)
    try:
        with contextlib.ExitStack() as stack:
            sock = stack.enter_context(socket.socket(family, kind, proto))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            stack.pop_all()
    except OSError as exc:
        raise Refused(_bind_text(http, exc), field="http.port") from exc
    return sock


def listen(sock: socket.socket, http: HttpConfig) -> None:
    """Take connections from now on.

    Raises:
        Refused: another process that had the port too was first.
    """
    try:
        watch_clients(sock)
        sock.listen(BACKLOG)
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

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for each in sockets or ():  # its backlog is now what asyncio accepts at once, which is few
            each.listen(BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wait_tasks_to_complete(), LAST_READ_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def uvicorn_config(app: App, told: events.Events, http: HttpConfig) -> uvicorn.Config:
    """How uvicorn serves the application."""
    limits = Limits(http.max_connections, keep_alive_s=http.keep_alive_s)
    return uvicorn.Config(
        app,
        http=cast(type[asyncio.Protocol], Connections(told, limits)),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=http.max_header_bytes + 4096,
        backlog=ACCEPTED_AT_ONCE,
        timeout_keep_alive=max(1, int(http.keep_alive_s)),
        timeout_graceful_shutdown=int(LAST_WORDS_S),
    )
