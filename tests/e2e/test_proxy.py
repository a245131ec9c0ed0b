"""`headrace proxy` as a process, in front of decoders that are a few lines of ASGI."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("openai")

import httpx
import openai
import uvicorn

from headrace.server.http import Message, Receive, Scope, Send

WITHIN_S = 30.0
MODEL = "m"
WORDS = ["one", " two", " three"]
GREETING: Any = [{"role": "user", "content": "hi"}]


class Decoder:
    """What a decoder is to the proxy; the prompt says what it does.

    `hold`: no answer, `stream-hold`: an event and no more, until its client leaves or `go_on`.
    `die`: an event and half of another one, then the connection breaks. Else it says WORDS.
    """

    def __init__(self, port: int = 0) -> None:
        self.asked: list[tuple[str, dict[str, str], Any]] = []
        self.ports: list[int] = []  # of the connections that they came by
        self.has_one = threading.Event()
        self.aborted = threading.Event()
        self.go_on = threading.Event()
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", port))
        self.port = self._socket.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(self._app, log_config=None, lifespan="off", interface="asgi3")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]})

    def __enter__(self) -> Self:
        self._socket.listen(128)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.go_on.set()
        self._server.should_exit = True
        self._thread.join(WITHIN_S)
        self._socket.close()
        assert not self._thread.is_alive()

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == "/health":
            await _whole(send, {})
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message.get("more_body", False)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        asked = json.loads(body) if body else None
        self.asked.append((path, headers, asked))
        self.ports.append(scope["client"][1])
        if path == "/v1/models":
            await _whole(send, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})
        elif path.startswith("/v1/"):
            await self._complete(asked, "chat" in path, receive, send)
        else:
            await _whole(send, {"tokens": [1, 2, 3]})

    async def _complete(self, asked: Any, chat: bool, receive: Receive, send: Send) -> None:
        task = asked.get("prompt")
        if not asked.get("stream"):
            if task == "hold":
                await self._hold(receive)
            text = "".join(WORDS)
            said = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            await _whole(send, {"id": "x", "object": "o", "choices": [{"index": 0, **said}]})
            return
        start: Message = {"type": "http.response.start", "status": 200}
        start["headers"] = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send(start)
        for word in WORDS:
            said = {"delta": {"content": word}} if chat else {"text": word}
            event = {"id": "x", "object": "o", "choices": [{"index": 0, **said}]}
            encoded = f"data: {json.dumps(event)}\n\n".encode()
            await _piece(send, encoded)
            if task == "stream-hold":
                await self._hold(receive)
            if task == "die":
                await _piece(send, encoded[:20])
                raise ConnectionError
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _hold(self, receive: Receive) -> None:
        self.has_one.set()
        left = asyncio.ensure_future(receive())
        going = asyncio.ensure_future(asyncio.to_thread(self.go_on.wait, WITHIN_S))
        await asyncio.wait({left, going}, return_when=asyncio.FIRST_COMPLETED)
        if left.done() and left.result()["type"] == "http.disconnect":
            self.go_on.set()
            self.aborted.set()
        left.cancel()
        await asyncio.wait({left, going})


async def _whole(send: Send, content: Any) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})


async def _piece(send: Send, piece: bytes) -> None:
    await send({"type": "http.response.body", "body": piece, "more_body": True})


class Proxy:
    """The proxy's process. lines: what it said, as it comes."""

    def __init__(self, *decoders: str, arguments: tuple[str, ...] = ()) -> None:
        named = [f"--decoder={each}" for each in decoders]
        self.lines: list[str] = []
        self._told = threading.Condition()
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-W", "error", "-m", "headrace", "proxy", "--port=0"),
                *(*named, *arguments),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        try:
            self.url = self.wait_for(r"listening at (http://\S+),")[1]
        except BaseException:
            self.close()
            raise

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            with self._told:
                self.lines.append(line.rstrip())
                self._told.notify_all()

    def wait_for(self, pattern: str, count: int = 1) -> re.Match[str]:
        """Wait until so many lines have the pattern; the last of them."""

        def found() -> list[re.Match[str]]:
            return [match for line in self.lines if (match := re.search(pattern, line))]

        with self._told:
            if not self._told.wait_for(lambda: len(found()) >= count, WITHIN_S):
                pytest.fail(f"not within {WITHIN_S} s: {pattern!r}\n" + "\n".join(self.lines))
            return found()[count - 1]

    def signal(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def ended(self) -> int:
        """Its exit status, once it has one."""
        status = self._process.wait(WITHIN_S)
        self._reader.join(WITHIN_S)
        assert not any("Traceback" in line for line in self.lines), "\n".join(self.lines)
        return status

    def close(self) -> None:
        self._process.kill()
        self._process.wait(WITHIN_S)
        self._reader.join(WITHIN_S)
        assert self._process.stderr is not None
        self._process.stderr.close()


@pytest.fixture
def decoder() -> Iterator[Decoder]:
    with Decoder() as decoder:
        yield decoder


Start = Callable[..., Proxy]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts proxies that are ended with the test."""
    started: list[Proxy] = []

    def begin(*decoders: str, arguments: tuple[str, ...] = ()) -> Proxy:
        started.append(Proxy(*decoders, arguments=arguments))
        return started[-1]

    yield begin
    for proxy in started:
        proxy.close()


def unused_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def post(proxy: Proxy, **body: Any) -> httpx.Response:
    return httpx.post(f"{proxy.url}/v1/completions", json=body, timeout=WITHIN_S)


def test_the_openai_client_is_answered(decoder: Decoder, start: Start) -> None:
    proxy = start(decoder.address, arguments=("--route=streamed",))
    client = openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="sk-1", max_retries=0)
    with client:
        assert [each.id for each in client.models.list()] == [MODEL]
        whole = client.completions.create(model=MODEL, prompt="hi")
        assert whole.choices[0].text == "".join(WORDS)
        chunks = client.chat.completions.create(model=MODEL, messages=GREETING, stream=True)
        assert [chunk.choices[0].delta.content for chunk in chunks] == WORDS
        own = {"kv_transfer_params": {"do_remote_prefill": False}}
        client.completions.create(model=MODEL, prompt="hi", extra_body=own)
        with pytest.raises(openai.APIError, match="ended before its answer did"):
            list(client.completions.create(model=MODEL, prompt="die", stream=True))
        with pytest.raises(openai.NotFoundError, match="not served here"):
            client.embeddings.create(model=MODEL, input="hi")
    _, (_, headers, first), (_, _, second), (_, _, third), _ = decoder.asked
    assert headers["authorization"] == "Bearer sk-1"
    params = {"do_remote_prefill": True, "do_remote_decode": False, "headrace_route": "streamed"}
    assert first["kv_transfer_params"] == second["kv_transfer_params"] == params
    assert third["kv_transfer_params"] == {"do_remote_prefill": False}
    assert len(set(decoder.ports)) == len(decoder.asked)  # none was kept for another request
    proxy.signal()
    assert proxy.ended() == 0


def test_a_client_that_leaves_aborts_the_decoders_request(decoder: Decoder, start: Start) -> None:
    proxy = start(decoder.address)
    for task, stream in (("hold", False), ("stream-hold", True)):
        decoder.has_one.clear()
        decoder.aborted.clear()
        decoder.go_on.clear()
        body = json.dumps({"prompt": task, "stream": stream}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
        host, port = proxy.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), WITHIN_S) as connection:
            connection.sendall(f"{head}\r\nX-Request-Id: {task}\r\n\r\n".encode() + body)
            assert decoder.has_one.wait(WITHIN_S)
            if stream:
                assert connection.recv(1).startswith(b"H")
        assert decoder.aborted.wait(WITHIN_S)
        proxy.wait_for(rf"{task}: completions 499 by {decoder.address}")
    assert "headrace_proxy_client_disconnects_total 2.0" in httpx.get(f"{proxy.url}/metrics").text


def test_a_decoder_that_is_not_there_is_left_out_until_it_is(
    decoder: Decoder, start: Start
) -> None:
    port = unused_port()
    other = f"http://127.0.0.1:{port}"
    proxy = start(other, decoder.address)
    proxy.wait_for(f"warning: decoder {other} is not up: ")
    proxy.wait_for(r"1 of 2 decoder\(s\) up")
    reply = post(proxy, prompt="hi")
    assert (reply.status_code, len(decoder.asked)) == (200, 1)
    with Decoder(port) as second:
        proxy.wait_for(f"decoder {other} is up")
        for _ in range(4):
            assert post(proxy, prompt="hi").status_code == 200
        assert (len(decoder.asked), len(second.asked)) == (3, 2)
        states = {each["address"]: each["up"] for each in _health(proxy)["decoders"]}
        assert states == {other: True, decoder.address: True}
    for _ in range(2):  # whoever has the turn: it is met or known to be down
        assert post(proxy, prompt="hi").status_code == 200
    proxy.wait_for(f"decoder {other} is down")
    assert len(decoder.asked) == 5


def _health(proxy: Proxy) -> Any:
    return httpx.get(f"{proxy.url}/health").json()


def test_sigterm_lets_what_runs_finish(decoder: Decoder, start: Start) -> None:
    proxy = start(decoder.address)
    with httpx.stream(
        "POST",
        f"{proxy.url}/v1/completions",
        json={"prompt": "stream-hold", "stream": True},
        timeout=WITHIN_S,
    ) as reply:
        pieces = reply.iter_raw()
        first = next(pieces)
        proxy.signal()
        proxy.wait_for("draining: 1 request")
        _until_refused(proxy.url)
        decoder.go_on.set()
        told = (first + b"".join(pieces)).decode()
    assert told.count("data: ") == len(WORDS) + 1
    assert told.endswith("data: [DONE]\n\n")
    assert proxy.ended() == 0


def _until_refused(url: str) -> None:
    """Return when no connection is taken any more."""
    host, port = url.removeprefix("http://").split(":")
    for _ in range(10_000):
        try:
            socket.create_connection((host, int(port)), WITHIN_S).close()
        except ConnectionError:  # one that waits to be accepted is reset
            return
    pytest.fail("it still takes connections")


def test_a_drain_has_an_end(decoder: Decoder, start: Start) -> None:
    limits = ("--drain-timeout=0.05", "--max-body-bytes=1024")
    proxy = start(decoder.address, arguments=limits)
    assert httpx.post(f"{proxy.url}/v1/completions", content=b"{").status_code == 400
    assert post(proxy, prompt="x" * 2048).status_code == 413
    with httpx.stream(
        "POST",
        f"{proxy.url}/v1/completions",
        json={"prompt": "stream-hold", "stream": True},
        timeout=WITHIN_S,
    ) as reply:
        pieces = reply.iter_raw()
        first = next(pieces)
        proxy.signal()
        told = (first + b"".join(pieces)).decode()
    assert "shutting-down" in told.split("\n\n")[-2]
    assert "[DONE]" not in told
    assert proxy.ended() == 0
