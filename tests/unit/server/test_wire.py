"""Where the server listens, and how it ends; its connections are in test_protocol.py."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import socket
from typing import NoReturn

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from headrace.errors import Refused
from headrace.server.budget import Budget
from headrace.server.config import HttpConfig
from headrace.server.events import Event, Events, Rejected
from headrace.server.http import Front, Receive, Scope, Send, read_body
from headrace.server.wire import Server, _bind_text, bind, listen, uvicorn_config


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_a_free_port_is_taken(host: str) -> None:
    http = HttpConfig(host=host, port=0)
    with bind(http) as sock:
        port = sock.getsockname()[1]
        assert port
        with pytest.raises(ConnectionRefusedError):  # nobody waits for a server that checks
            socket.create_connection(("127.0.0.1", port))
        listen(sock, http)
        with socket.create_connection(("127.0.0.1", port)):
            pass


def test_a_port_in_use_is_refused() -> None:
    with bind(HttpConfig(port=0)) as sock:
        port = sock.getsockname()[1]
        http = HttpConfig(port=port)
        listen(sock, http)
        with pytest.raises(Refused, match="in use by another process") as told:
            bind(http)
    assert told.value.field == "http.port"
    with bind(http) as first, bind(http) as second:  # at once, whatever connections linger
        listen(first, http)
        with pytest.raises(Refused, match="in use by another process") as told:
            listen(second, http)
    assert told.value.field == "http.port"


@pytest.mark.parametrize("host", ["no.such.host.invalid", "300.1.1.1", "127.0.0.1:80"])
def test_a_host_that_is_no_address_is_refused(host: str) -> None:
    with pytest.raises(Refused) as told:
        bind(HttpConfig(host=host, port=0))
    assert told.value.field == "http.host"


def test_an_address_of_another_host_is_refused() -> None:
    with pytest.raises(Refused, match="cannot be listened at"):
        bind(HttpConfig(host="192.0.2.1", port=0))  # of the documentation's network


def test_a_family_that_this_host_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `::1` is where IPv6 is off."""

    def socket_of(*each: int) -> NoReturn:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr(socket, "socket", socket_of)
    with pytest.raises(Refused, match="cannot be listened at: Address family not supported"):
        bind(HttpConfig(port=0))


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (errno.EADDRINUSE, "in use"),
        (errno.EACCES, "from 1024 up"),
        (errno.ENOBUFS, "another host or port"),
    ],
)
def test_each_failure_says_what_to_do(number: int, text: str) -> None:
    assert text in _bind_text(HttpConfig(), OSError(number, "x"))


def test_an_upload_that_is_cut_off_at_the_end_is_told_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By an error as all are, which is counted, and for which its client has time."""
    caplog.set_level(logging.CRITICAL, "uvicorn")
    heard: list[Event] = []

    async def test() -> None:
        told = Events()
        told.listen(heard.append)
        begun = asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            begun.set()
            with Budget(1 << 24).of_one("a") as held:
                await read_body(scope, receive, 1 << 20, held)

        http = HttpConfig(port=0)
        config = uvicorn_config(Front(app, told, http, keys=()), told, http)
        config.timeout_graceful_shutdown = 0
        server = Server(config)
        with bind(http) as sock:
            listen(sock, http)
            reader, writer = await asyncio.open_connection(*sock.getsockname())
            serving = asyncio.ensure_future(server.serve(sockets=[sock]))
            head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n"
            writer.write(head)
            await begun.wait()
            server.should_exit = True
            head = await reader.readuntil(b"\r\n\r\n")
            writer.write(bytes(9))
            body = await reader.read()
            assert not serving.done()
            writer.close()
            await writer.wait_closed()
            await serving
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nx-request-id: " in head
        assert b"\r\nretry-after: 5\r\n" in head
        assert json.loads(body)["error"]["code"] == "shutting-down"

    asyncio.run(test())
    assert [type(each) for each in heard] == [Rejected]
