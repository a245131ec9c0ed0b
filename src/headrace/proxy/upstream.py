"""Connections to decoders, and a request as it is sent over one.

A transport is used, and not a client of httpx: a client builds the request that a redirect asks for
even where it follows none, and fails at what is no address; and it keeps cookies.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from typing import Any, Final
from urllib.parse import quote

import httpx

from headrace.server.http import Headers

CONNECT_WITHIN_S: Final = 5.0
GONE_AFTER_S: Final = 30
"""A host that acknowledges nothing for so long is gone, also while a request waits for tokens."""

_SOCKET_OPTIONS: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, GONE_AFTER_S // 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, GONE_AFTER_S // 6),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GONE_AFTER_S * 1000),
)
_VISIBLE: Final = "".join(map(chr, range(0x21, 0x7F)))


def connections() -> httpx.AsyncHTTPTransport:
    """What decoders are asked over. They are named by their address: no proxy of the environment
    is between. Each connection serves one request.
    """
    return httpx.AsyncHTTPTransport(
        trust_env=False,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        socket_options=_SOCKET_OPTIONS,
    )


class Body:
    """A request's body, which is let go once it was sent. released: called then, once."""

    def __init__(self, content: bytes, released: Callable[[], None]) -> None:
        self.nbytes = len(content)
        self._content = content
        self._released = released

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._content
        self._content = b""
        self._released()


def request_to(
    address: str,
    path: str,
    *,
    method: str = "GET",
    query: bytes = b"",
    headers: Headers | None = None,
    body: Body | None = None,
) -> httpx.Request:
    """A request for the decoder at an address."""
    timeout = httpx.Timeout(None, connect=CONNECT_WITHIN_S)
    extensions: dict[str, Any] = {"timeout": timeout.as_dict()}
    if query:  # as it was written, where a URL would change some of it
        extensions["target"] = f"{path}?{quote(query, safe=_VISIBLE)}".encode()
    headers = headers or []
    if body is not None:
        headers = [*headers, (b"content-length", str(body.nbytes).encode())]
    return httpx.Request(
        method, address + path, headers=headers, content=body, extensions=extensions
    )
