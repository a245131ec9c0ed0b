"""Connections to decoders, over a real socket, and what is sent over one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress

import httpx
import pytest

pytest.importorskip("starlette")

from headrace.proxy.upstream import GONE_AFTER_S, Body, connections, request_to
from tests.server_stand import run

WITHIN_S = 30.0


async def with_a_decoder(ask: Callable[[str], Awaitable[None]]) -> bytes:
    """What a decoder that answers once was sent by `ask`."""
    got = bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.extend(await reader.readuntil(b"\r\n\r\n"))
        with suppress(asyncio.IncompleteReadError):
            got.extend(await reader.readexactly(3 if b"POST" in got else 0))
        writer.write(b"HTTP/1.1 302 Found\r\nLocation: mailto:x\r\nContent-Length: 2\r\n\r\n{}")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, asyncio.timeout(WITHIN_S):
        await ask(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    return bytes(got)


def test_a_host_that_is_gone_ends_its_connections_and_no_proxy_is_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://nowhere:1")

    async def ask(address: str) -> None:
        async with connections() as transport:
            answer = await transport.handle_async_request(request_to(address, "/health"))
            assert answer.status_code == 302
            taken = answer.extensions["network_stream"].get_extra_info("socket")
            tcp = socket.IPPROTO_TCP
            assert taken.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            idle_s = taken.getsockopt(tcp, socket.TCP_KEEPIDLE)
            more_s = taken.getsockopt(tcp, socket.TCP_KEEPINTVL)
            more_s *= taken.getsockopt(tcp, socket.TCP_KEEPCNT)
            assert idle_s + more_s == GONE_AFTER_S
            assert taken.getsockopt(tcp, socket.TCP_USER_TIMEOUT) == GONE_AFTER_S * 1000
            await answer.aclose()

    async def test() -> None:
        assert (await with_a_decoder(ask)).startswith(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1:")

    run(test)


def test_a_request_is_sent_as_it_was_written_and_its_body_is_let_go() -> None:
    released: list[int] = []
    body = Body(b"abc", lambda: released.append(1))

    async def ask(address: str) -> None:
        async with connections() as transport:
            request = request_to(
                address,
                "/tokenize",
                method="POST",
                query=b'a=%2f&b="<|\xff\x7f',
                headers=[(b"x-a", b"1")],
                body=body,
            )
            assert released == []
            answer = await transport.handle_async_request(request)
            assert b"".join([piece async for piece in answer.aiter_raw()]) == b"{}"
            await answer.aclose()

    async def test() -> None:
        head, _, sent = (await with_a_decoder(ask)).partition(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        assert first == b'POST /tokenize?a=%2f&b="<|%FF%7F HTTP/1.1'
        assert sorted(line.lower().split(b":")[0] for line in lines) == [
            *(b"content-length", b"host", b"x-a")
        ]
        assert b"content-length: 3" in [line.lower() for line in lines]
        assert (sent, released) == (b"abc", [1])
        assert [piece async for piece in body] == [b""]

    run(test)


def test_a_request_has_no_limit_but_that_of_connecting() -> None:
    timeout = request_to("http://one:1", "/health").extensions["timeout"]
    assert timeout == {"connect": 5.0, "read": None, "write": None, "pool": None}
    assert isinstance(connections(), httpx.AsyncBaseTransport)
