"""Every way to keep a connection waiting, over real sockets, with limits of tenths of a second."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

pytest.importorskip("uvicorn")

import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from headrace.server import protocol
from headrace.server.events import Event, Events, Rejected
from headrace.server.http import App, Receive, Scope, Send, send_json
from headrace.server.protocol import (
    ABOVE,
    RECEIVED_AT_ONCE,
    Connection,
    Connections,
    Limits,
    response_of,
    watch_clients,
)
from headrace.server.terminals import STATUS, Ending, Terminal

WITHIN_S = 10.0
SHORT_S = 0.15
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"


@pytest.fixture(autouse=True)
def _log_stays_empty(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing that a client does here is worth a line; what uvicorn says is switched off."""
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    with caplog.at_level(logging.INFO):
        yield
    logging.getLogger("uvicorn").setLevel(logging.NOTSET)
    assert not [each.getMessage() for each in caplog.get_records("call")]


class Stand:
    """A listening socket over an application."""

    def __init__(self, app: App, **limits: Any) -> None:
        self.events: list[Event] = []
        told = Events()
        told.listen(self.events.append)
        short = {"max_connections": 8, "look_every_s": 0.02, "linger_s": 0.1}
        self.connections = Connections(told, Limits(**(short | limits)))
        self.config = uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            h11_max_incomplete_event_size=4096,
            timeout_keep_alive=1,
        )
        self.state = ServerState()
        self.address = ("", 0)
        self.made: list[Connection] = []
        self._writers: list[asyncio.StreamWriter] = []

    def make(self) -> Connection:
        self.made.append(self.connections(self.config, self.state, {}))
        return self.made[-1]

    @property
    def rejected(self) -> list[Terminal]:
        return [each.terminal for each in self.events if isinstance(each, Rejected)]

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self.address)
        self._writers.append(writer)
        return reader, writer

    async def close(self) -> None:
        for writer in self._writers:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def until_empty(self) -> None:
        async with asyncio.timeout(WITHIN_S):
            while self.state.connections or self.state.tasks or self.connections.refused:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def stand(app: App, *, kernel_s: float = 60.0, **limits: Any) -> AsyncIterator[Stand]:
    """One whose connections are all gone in the end. kernel_s: what the kernel watches for."""
    made = Stand(app, **limits)
    loop = asyncio.get_running_loop()
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    watch_clients(listening, kernel_s)
    server = await loop.create_server(made.make, sock=listening)
    made.address = listening.getsockname()
    try:
        async with asyncio.timeout(WITHIN_S):
            yield made
            await made.close()
            await made.until_empty()
        assert all(each._looking and each._looking.cancelled() for each in made.made)
    finally:
        server.close()
        await server.wait_closed()


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await send_json(send, 200, b'"hello"')


class Waits:
    """An application that does not answer before it is let, or its client has left."""

    def __init__(self, *, starts: bool = False, reads: bool = True) -> None:
        self.begun, self.left, self.may = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._starts = starts
        self._reads = reads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._starts:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        self.begun.set()
        if not self._reads:
            await self.may.wait()
        while (await receive())["type"] != "http.disconnect":
            if self.may.is_set():
                await send_json(send, 200, b'"waited"')
        self.left.set()


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test, debug=False)


async def whole(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """A response: its status, its headers and its body."""
    head = await reader.readuntil(b"\r\n\r\n")
    status, *lines = head.decode().rstrip().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    body = await reader.readexactly(int(headers["content-length"]))
    return int(status.split()[1]), headers, body


async def refused(reader: asyncio.StreamReader, terminal: Terminal) -> dict[str, str]:
    """It is told so with an error as all errors are, and nothing more comes."""
    status, headers, body = await whole(reader)
    assert (status, json.loads(body)["error"]["code"]) == (STATUS[terminal], terminal.value)
    assert headers["content-type"] == "application/json"
    assert headers["connection"] == "close"
    assert len(headers["x-request-id"]) == 24
    assert await reader.read() == b""
    return headers


async def closed(reader: asyncio.StreamReader) -> None:
    with suppress(ConnectionResetError):
        assert await reader.read() == b""


async def trickle(writer: asyncio.StreamWriter, content: bytes) -> None:
    """A byte at a time, as long as anybody is there."""
    with suppress(ConnectionError):
        for byte in content * 1000:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.03)


Acts = Callable[[Stand, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def _says_nothing(
    made: Stand, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    await closed(reader)
    assert not made.events


async def _half_a_head(
    made: Stand, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    writer.write(GET[:20])
    await refused(reader, Terminal.DEADLINE)
    assert made.rejected == [Terminal.DEADLINE]


async def _a_trickled_head(
    made: Stand, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    writer.write(GET[:-2])
    trickling = asyncio.ensure_future(trickle(writer, b"a: b\r\n"))
    await refused(reader, Terminal.DEADLINE)
    await trickling


async def _blank_lines(
    made: Stand, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    trickling = asyncio.ensure_future(trickle(writer, b"\r\n"))
    with suppress(ConnectionResetError):
        await reader.read()
    await trickling


async def _nothing_after_a_response(
    made: Stand, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    writer.write(GET)
    assert (await whole(reader))[0] == 200
    await closed(reader)
    assert not made.events


async def _half_a_head_after_a_response(
    made: Stand, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    writer.write(GET + GET[:20])
    assert (await whole(reader))[0] == 200
    await refused(reader, Terminal.DEADLINE)


async def _a_body_that_stays_out_after_a_response(
    made: Stand, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    writer.write(POST)
    assert (await whole(reader))[0] == 200
    await closed(reader)


async def _a_trickled_body_after_a_response(
    made: Stand, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    writer.write(POST)
    trickling = asyncio.ensure_future(trickle(writer, b"x"))
    assert (await whole(reader))[0] == 200
    await closed(reader)
    await trickling


async def _chatters_after_it_was_refused(
    made: Stand, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    writer.write(b"\x16\x03\x01\r\n\r\n")
    trickling = asyncio.ensure_future(trickle(writer, GET))
    await refused(reader, Terminal.INVALID)
    await trickling


@pytest.mark.parametrize(
    ("limit", "acts"),
    [
        ("head_within_s", _says_nothing),
        ("head_within_s", _half_a_head),
        ("head_within_s", _a_trickled_head),
        ("head_within_s", _blank_lines),
        ("keep_alive_s", _nothing_after_a_response),
        ("head_within_s", _half_a_head_after_a_response),
        ("rest_within_s", _a_body_that_stays_out_after_a_response),
        ("rest_within_s", _a_trickled_body_after_a_response),
        ("linger_s", _chatters_after_it_was_refused),
    ],
)
def test_nothing_that_a_client_leaves_open_stays_open(limit: str, acts: Acts) -> None:
    """Each has a limit of its own, and a time in which another one would not end it."""
    names = ("head_within_s", "keep_alive_s", "rest_within_s")
    limits = dict.fromkeys(names, 60.0) | {limit: SHORT_S}

    async def test() -> None:
        async with stand(hello, **limits) as made:
            reader, writer = await made.connect()
            await acts(made, reader, writer)
            await made.until_empty()

    run(test())


def test_each_wait_has_its_whole_time() -> None:
    """A head that begins late, and a request after a body that came late."""

    async def test() -> None:
        limits = {"keep_alive_s": SHORT_S, "rest_within_s": SHORT_S}
        async with stand(hello, **limits) as made:
            reader, writer = await made.connect()
            writer.write(GET)
            await whole(reader)
            writer.write(GET[:20])
            await asyncio.sleep(2 * SHORT_S)
            writer.write(GET[20:])
            assert (await whole(reader))[0] == 200
        async with stand(hello, keep_alive_s=60.0, rest_within_s=SHORT_S) as made:
            reader, writer = await made.connect()
            writer.write(POST)
            await whole(reader)
            writer.write(b"x" * 1000)
            await asyncio.sleep(2 * SHORT_S)
            writer.write(GET)
            assert (await whole(reader))[0] == 200

    run(test())


def test_a_client_in_time_keeps_its_connection() -> None:
    """Requests one after another, also one whose body came after its answer."""

    async def test() -> None:
        async with stand(hello) as made:
            reader, writer = await made.connect()
            for _ in range(2):
                for sent in (GET, POST):
                    writer.write(sent)
                    assert (await whole(reader))[2] == b'"hello"'
                    writer.write(b"x" * 1000 * (sent is POST))
            writer.write(GET + GET)
            assert [(await whole(reader))[0] for _ in range(2)] == [200, 200]

    run(test())


def test_connections_above_the_limit_are_told_so_and_the_next_is_served() -> None:
    """The spare one is marked for the application, the next told so, and the last just closed."""
    above: list[bool] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        above.append(scope["state"][ABOVE])
        await hello(scope, receive, send)

    async def test() -> None:
        limits = {"max_connections": 2, "spare": 1, "max_refused": 1, "linger_s": 1.0}
        async with stand(app, **limits) as made:
            for _ in range(3):
                reader, writer = await made.connect()
                writer.write(GET)
                assert (await whole(reader))[0] == 200
            assert above == [False, False, True]
            reader, writer = await made.connect()
            writer.write(GET)
            status, headers, body = await whole(reader)
            assert (status, headers["retry-after"]) == (503, "1")
            assert json.loads(body)["error"]["code"] == "too-many-connections"
            beyond, _ = await made.connect()
            with suppress(ConnectionResetError):
                assert await beyond.read() == b""
            assert made.rejected == [Terminal.TOO_MANY_CONNECTIONS]
            await made.close()
            await made.until_empty()
            reader, writer = await made.connect()
            writer.write(GET)
            assert (await whole(reader))[0] == 200
            assert above[3:] == [False]

    run(test())


@pytest.mark.parametrize("sent", [b"\0\r\n\r\n", GET[:20]], ids=["garbage", "half a head"])
def test_connections_whose_mistake_is_told_count_until_they_are_gone(sent: bytes) -> None:
    """Or there could be ever more, and who comes above the limit would be closed without a word."""

    async def test() -> None:
        limits = {"max_connections": 4, "spare": 2, "max_refused": 2}
        async with stand(hello, **limits, linger_s=60.0, head_within_s=SHORT_S) as made:
            told = []
            for _ in range(6):
                reader, writer = await made.connect()
                writer.write(sent)
                told.append(reader)
            for reader in told:
                assert (await whole(reader))[0] in (400, 408)
            for _ in range(2):
                reader, _ = await made.connect()
                assert (await whole(reader))[0] == 503
            for _ in range(8):
                reader, _ = await made.connect()
                await closed(reader)
            assert len(made.state.connections) == 8

    run(test())


EARLY = {
    "HTTP/1.0": (b"POST / HTTP/1.0", 413),
    "closes": (b"POST / HTTP/1.1\r\nConnection: close", 413),
    "is closed": (b"POST /closed HTTP/1.1", 413),
    "the server ends meanwhile": (b"POST /ending HTTP/1.1", 413),
    "the server ends then": (b"POST /ended HTTP/1.1", 413),
    "no HTTP": (b"POST /read HTTP/1.1\r\nTransfer-Encoding: chunked", 400),
}


@pytest.mark.parametrize(("head", "status"), EARLY.values(), ids=list(EARLY))
def test_an_answer_before_the_body_is_here_can_be_read_by_who_sends_it_first(
    head: bytes, status: int
) -> None:
    """Also where the connection ends with it: one with unread bytes is not closed but reset."""
    body = b"no size\r\n" + bytes(1 << 24)

    def posts(address: tuple[str, int]) -> bytes:
        with socket.create_connection(address) as sock:
            length = b"" if b"chunked" in head else f"\r\nContent-Length: {len(body)}".encode()
            sock.sendall(head + b"\r\nHost: x" + length + b"\r\n\r\n")
            sock.sendall(body)
            with sock.makefile("rb") as file:
                return file.read()

    async def test() -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            path = scope["path"]
            while path == "/read" and (await receive())["type"] != "http.disconnect":
                pass
            if path == "/ending":
                made.made[0].shutdown()
            headers = [(b"connection", b"close")] if path == "/closed" else []
            await send_json(send, 413, b'"too much"', headers)
            if path == "/ended":
                made.made[0].shutdown()

        async with stand(app) as made:
            answer = await asyncio.to_thread(posts, made.address)
            assert answer.startswith(b"HTTP/1.1 %d " % status)
            assert answer.count(b"\r\n\r\n") == 1

    run(test())


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes were given to the parser, each time."""
    sizes: list[int] = []
    parse = H11Protocol.data_received

    def recorded(self: H11Protocol, received: bytes) -> None:
        sizes.append(len(received))
        parse(self, received)

    monkeypatch.setattr(H11Protocol, "data_received", recorded)
    return sizes


CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
BYTES = b"1\r\nx\r\n" * 10_000


def test_no_more_than_a_small_part_of_a_body_is_parsed_at_once(parsed: list[int]) -> None:
    async def test() -> None:
        app = Waits()
        async with stand(app) as made:
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)
                sock.connect(made.address)
                sock.sendall(CHUNKED + BYTES)
                while sum(parsed) < len(CHUNKED + BYTES):
                    await asyncio.sleep(0.01)
            assert max(parsed) == RECEIVED_AT_ONCE
            await app.left.wait()

    run(test())


def test_chunks_that_nobody_waits_for_are_not_parsed(parsed: list[int]) -> None:
    """The connection ends with the answer instead."""

    async def test() -> None:
        async with stand(hello, rest_within_s=60.0) as made:
            reader, writer = await made.connect()
            writer.write(CHUNKED)
            assert (await whole(reader))[0] == 200
            assert await reader.read() == b""
            writer.write(BYTES)
            await writer.drain()
            writer.close()
            await made.until_empty()
            assert parsed == [len(CHUNKED)]

    run(test())


def test_what_is_no_http_behind_a_body_that_was_answered_before_is_told_so() -> None:
    async def test() -> None:
        async with stand(hello) as made:
            reader, writer = await made.connect()
            writer.write(POST)
            assert (await whole(reader))[0] == 200
            writer.write(b"x" * 1000 + b"\0\r\n\r\n")
            await refused(reader, Terminal.INVALID)

    run(test())


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("sent", [b"", GET, GET[:20], b"\0\r\n\r\n"])
@pytest.mark.parametrize("most", [0, 8])
def test_clients_that_are_gone_before_they_are_looked_at(
    sent: bytes, most: int, resets: bool
) -> None:
    async def test() -> None:
        async with stand(hello, max_connections=most, spare=0) as made:
            for _ in range(5):
                with socket.create_connection(made.address) as sock:
                    sock.sendall(sent)
                    at_once = struct.pack("ii", resets, 0)
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
            while len(made.made) < 5:
                await asyncio.sleep(0.01)

    run(test())


def _slow_socket(made: Stand) -> socket.socket:
    """A client with little room for what it does not read."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    sock.connect(made.address)
    sock.setblocking(False)
    sock.send(GET)
    return sock


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_reads_nothing_loses_its_connection(closes: bool, streamed: bool) -> None:
    ended: list[bool] = []

    async def much(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"connection", b"close")] if closes else []
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        piece = b"x" * (1 << 23)
        for _ in range(8 if streamed else 0):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": piece})
        ended.append(True)

    async def test() -> None:
        async with stand(much, read_within_s=SHORT_S) as made:
            with _slow_socket(made):
                while not made.state.connections:
                    await asyncio.sleep(0.01)
                await made.until_empty()
        assert ended

    run(test())


def test_the_kernel_ends_a_connection_that_is_not_read() -> None:
    async def much(scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, 200, b"x" * (1 << 23))

    async def test() -> None:
        async with stand(much, kernel_s=SHORT_S) as made:
            with _slow_socket(made):
                while not made.state.connections:
                    await asyncio.sleep(0.01)
                await made.until_empty()

    run(test())


def test_a_stream_that_nobody_reads_ends_when_its_client_says_no_more() -> None:
    """Neither its limit nor a flush is waited for."""
    ended: list[bool] = []

    async def much(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(100):
            await send({"type": "http.response.body", "body": b"x" * (1 << 16), "more_body": True})
        ended.append(True)

    async def test() -> None:
        async with stand(much) as made:
            with _slow_socket(made) as sock:
                while not (made.state.connections and made.made[0].flow.write_paused):
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.1)  # the kernel has taken what it takes
                sock.shutdown(socket.SHUT_WR)
                await made.until_empty()
        assert ended

    run(test())


def test_a_client_that_reads_slowly_is_served_in_full() -> None:
    """It takes several times as long as a client may read nothing."""
    nbytes = 1 << 21

    async def much(scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, 200, b"x" * nbytes)

    async def test() -> None:
        loop = asyncio.get_running_loop()
        async with stand(much, read_within_s=0.2, kernel_s=0.2) as made:
            with _slow_socket(made) as sock:
                num_read = 0
                begun_s = loop.time()
                while num_read < nbytes:
                    await asyncio.sleep(0.02)
                    num_read += len(await loop.sock_recv(sock, nbytes // 50))
                assert loop.time() - begun_s > 0.6

    run(test())


def test_a_client_that_reads_next_to_nothing_loses_its_connection() -> None:
    """It takes something all the time, and would need hours for all of it."""

    async def much(scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, 200, b"x" * (1 << 23))

    async def test() -> None:
        async with stand(much, read_within_s=0.3) as made:
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1000)
                sock.connect(made.address)
                sock.setblocking(False)
                sock.send(GET)
                while not made.state.connections:
                    await asyncio.sleep(0.01)
                while made.state.connections:
                    with suppress(BlockingIOError, ConnectionResetError):
                        sock.recv(500)
                    await asyncio.sleep(0.01)

    run(test())


def test_a_kernel_that_counts_nothing_leaves_what_is_written_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "_BYTES_ACKED", slice(1000, 1008))
    test_a_client_that_reads_nothing_loses_its_connection(False, False)


@pytest.mark.parametrize("leaves", ["closes", "shuts down", "resets"])
@pytest.mark.parametrize("pipelines", [False, True])
def test_a_client_that_leaves_is_noticed_while_it_is_answered(leaves: str, pipelines: bool) -> None:
    async def test() -> None:
        app = Waits()
        async with stand(app) as made:
            _, writer = await made.connect()
            writer.write(GET + GET * pipelines)
            await app.begun.wait()
            if leaves == "closes":
                writer.close()
            elif leaves == "shuts down":
                writer.write_eof()
            else:
                writer.transport.abort()
            await app.left.wait()
            await made.until_empty()

    run(test())


def test_a_client_that_leaves_with_a_long_body_unread_is_noticed() -> None:
    async def test() -> None:
        app = Waits(reads=False)
        async with stand(app) as made:
            _, writer = await made.connect()
            writer.write(POST.replace(b"1000", b"900000") + b"x" * 100_000)
            await app.begun.wait()
            writer.close()
            async with asyncio.timeout(WITHIN_S):
                while made.state.connections:
                    await asyncio.sleep(0.01)
            app.may.set()
            await app.left.wait()

    run(test())


def test_a_client_that_pipelines_and_stays_is_answered_twice() -> None:
    async def test() -> None:
        app = Waits()
        async with stand(app, look_every_s=0.01) as made:
            _, writer = await made.connect()
            writer.write(GET + GET)
            await app.begun.wait()
            await asyncio.sleep(0.05)  # some looks
            assert not app.left.is_set()

    run(test())


NO_HTTP = {
    "garbage": b"\x00\x01\x02\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n",
    "no Host": b"GET / HTTP/1.1\r\n\r\n",
    "two Hosts": b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    "no length": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    "gzip": b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n",
    "a name with a space": b"GET / HTTP/1.1\r\nHost: x\r\nA b: c\r\n\r\n",
    "a fold first": b"GET / HTTP/1.1\r\n Host: x\r\n\r\n",
    "a word": b"GARBAGE\r\n\r\n",
    "a quote": b"GARB'AGE\r\n\r\n",
    "a value that ends a line": b"GET / HTTP/1.1\r\nHost: x\r\nA: \x00\r\n\r\n",
    "after a response": GET + b"\xff\r\n\r\n",
}


@pytest.mark.parametrize("sent", NO_HTTP.values(), ids=list(NO_HTTP))
def test_what_is_no_http_is_told_as_all_errors_are(sent: bytes) -> None:
    async def test() -> None:
        async with stand(hello) as made:
            reader, writer = await made.connect()
            writer.write(sent)
            if sent.startswith(GET):
                assert (await whole(reader))[0] == 200
            await refused(reader, Terminal.INVALID)
            assert made.rejected == [Terminal.INVALID]
            (event,) = made.events
            assert isinstance(event, Rejected)
            assert event.reason.startswith("this is no HTTP/1.1: ")
            assert "Invalid HTTP request" not in event.reason  # it has h11's word for it
            assert len(event.reason) <= 300
            assert not re.search(r"bytearray|b['\"]", event.reason)

    run(test())


def test_a_head_that_is_too_long_is_told_so() -> None:
    async def test() -> None:
        async with stand(hello) as made:
            reader, writer = await made.connect()
            writer.write(GET[:-2] + b"a: " + b"x" * 100_000)
            await refused(reader, Terminal.HEADERS_TOO_LARGE)
            assert made.rejected == [Terminal.HEADERS_TOO_LARGE]

    run(test())


@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize("expects", [b"", b"Expect: 100-continue\r\n"])
def test_a_body_that_is_no_http_ends_its_request(starts: bool, expects: bytes) -> None:
    """It is told by who reads the body; before a status line its client reads why."""

    async def test() -> None:
        app = Waits(starts=starts)
        async with stand(app) as made:
            reader, writer = await made.connect()
            head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n" + expects
            if starts:
                writer.write(head + b"\r\n1\r\nx\r\n")
                await app.begun.wait()
                writer.write(b"no size\r\n")
                await app.left.wait()
                with suppress(ConnectionResetError):
                    assert b" 400 " not in await reader.read()
            else:
                writer.write(head + b"\r\nno size\r\n")
                await refused(reader, Terminal.INVALID)
                await app.left.wait()
            assert not made.events

    run(test())


def test_the_rest_of_a_body_that_is_no_http_has_no_second_response() -> None:
    async def test() -> None:
        async with stand(hello) as made:
            reader, writer = await made.connect()
            writer.write(CHUNKED)
            assert (await whole(reader))[0] == 200
            writer.write(b"no size\r\n")
            await closed(reader)
            assert not made.events

    run(test())


def test_what_asks_for_a_websocket_is_an_ordinary_request() -> None:
    async def test() -> None:
        async with stand(hello) as made:
            reader, writer = await made.connect()
            upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
            writer.write(GET[:-2] + upgrade)
            assert (await whole(reader))[0] == 200

    run(test())


def test_at_the_end_what_runs_is_answered_and_the_rest_is_closed() -> None:
    async def test() -> None:
        app = Waits(reads=False)
        async with stand(app, linger_s=60.0, keep_alive_s=60.0) as made:
            idle, running, bad = [await made.connect() for _ in range(3)]
            bad[1].write(b"\0\r\n\r\n")
            await whole(bad[0])
            running[1].write(GET)
            await app.begun.wait()
            for connection in list(made.state.connections):
                connection.shutdown()
            assert await idle[0].read() == b""
            app.may.set()
            assert (await whole(running[0]))[2] == b'"waited"'
            assert await running[0].read() == b""

    run(test())


def test_the_kernel_watches_what_is_accepted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        watch_clients(listening, 0.5)
        with socket.create_connection(listening.getsockname()), listening.accept()[0] as sock:
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 500
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 1


def test_a_response_of_an_error_says_when_to_come_again() -> None:
    told = response_of(Ending(Terminal.NOT_READY, "so", retry_after_s=1.2)).decode()
    assert told.startswith("HTTP/1.1 503 Service Unavailable\r\n")
    assert "\r\nretry-after: 2\r\n" in told
    assert "retry-after" not in response_of(Ending(Terminal.DEADLINE, "so")).decode()


def test_uvicorn_has_all_that_is_relied_on() -> None:
    """If this fails, a new uvicorn has other insides, and `Connection` must be looked at."""
    methods = {
        "connection_made": ["transport"],
        "connection_lost": ["exc"],
        "data_received": ["data"],
        "eof_received": [],
        "handle_events": [],
        "on_response_complete": [],
        "send_400_response": ["msg"],
        "shutdown": [],
    }
    for name, takes in methods.items():
        assert list(inspect.signature(getattr(H11Protocol, name)).parameters) == ["self", *takes]
    of_cycle = inspect.getsource(RequestResponseCycle.__init__)
    names = ("keep_alive", "response_started", "response_complete", "disconnected", "transport")
    for name in names:
        assert f"self.{name} = " in of_cycle
    asked = re.findall(r"self\.transport\.(\w+)", inspect.getsource(RequestResponseCycle))
    assert set(asked) == {"write", "is_closing", "close"}
    of_flow = inspect.getsource(FlowControl.__init__)
    assert "self.read_paused = False" in of_flow
    of_it = inspect.getsource(H11Protocol.__init__)
    for name in (
        "app_state",
        "config",
        "conn",
        "connections",
        "cycle",
        "flow",
        "loop",
        "transport",
    ):
        assert f"self.{name}" in of_it
    assert '"state": self.app_state.copy()' in inspect.getsource(H11Protocol.handle_events)
    assert "self.send_400_response(" in inspect.getsource(H11Protocol.handle_events)


@pytest.mark.parametrize("head", ["GET / HTTP/1.0", "GET / HTTP/1.1\r\nConnection: close"])
def test_what_comes_behind_a_last_request_cuts_no_response(head: str) -> None:
    """Some clients send an empty line behind a body; a connection that ends then reads no more."""

    async def test() -> None:
        app = Waits(reads=False)
        async with stand(app) as made:
            reader, writer = await made.connect()
            writer.write(f"{head}\r\nHost: localhost\r\n\r\n".encode())
            await app.begun.wait()
            writer.write(b"\r\n")
            await writer.drain()
            await asyncio.sleep(0.05)
            app.may.set()
            status, _, body = await whole(reader)
            assert (status, body) == (200, b'"waited"')
            assert not made.rejected

    run(test())


def test_no_timer_of_uvicorns_closes_a_connection_on_which_a_head_has_begun() -> None:
    async def test() -> None:
        async with stand(hello, keep_alive_s=5.0) as made:
            reader, writer = await made.connect()
            writer.write(GET + GET[:10])  # the beginning of a further one comes with the first
            assert (await whole(reader))[0] == 200
            await asyncio.sleep(1.3)  # uvicorn's own limit between two requests is 1 s here
            writer.write(GET[10:])
            assert (await whole(reader))[0] == 200

    run(test())
