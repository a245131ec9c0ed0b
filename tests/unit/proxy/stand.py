"""A proxy without sockets, which a test steps by hand.

The application, the pool and the relays are the real ones. A transport that the test scripts stands
where the decoders would be, and raw ASGI calls stand for the clients.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

import httpx
from prometheus_client.parser import text_string_to_metric_families

from headrace.proxy.app import build
from headrace.proxy.config import ProxyConfig
from headrace.proxy.metrics import PREFIX, Metrics
from headrace.proxy.pool import Pool
from headrace.proxy.relays import Relays
from headrace.server.config import HttpConfig
from headrace.server.events import Events
from tests.server_stand import TURNS, Client

ONE, TWO = "http://one:8001", "http://two:8002"
JSON, EVENTS = "application/json", "text/event-stream; charset=utf-8"
PATHS = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "models": "/v1/models",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
}


class Call(httpx.AsyncByteStream):
    """A request as a decoder got it; the test tells what comes of it."""

    def __init__(self, request: httpx.Request, body: bytes) -> None:
        self.request = request
        self.address = f"{request.url.scheme}://{request.url.netloc.decode()}"
        self.body = body
        self.closed = False
        self._answer: asyncio.Future[httpx.Response] = asyncio.get_running_loop().create_future()
        self._pieces: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def headers(self) -> dict[str, str]:
        return dict(self.request.headers)

    def answer(
        self, *pieces: bytes, status: int = 200, kind: str = JSON, end: bool = True, **more: str
    ) -> None:
        """Send a head and these pieces of a body; end: and its end."""
        headers = {"content-type": kind, **{name.replace("_", "-"): v for name, v in more.items()}}
        self._answer.set_result(httpx.Response(status, headers=headers, stream=self))
        self.send(*pieces)
        if end:
            self._pieces.put_nowait(None)

    def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self._pieces.put_nowait(piece)

    def end(self) -> None:
        self._pieces.put_nowait(None)

    def die(self, exc: Exception | None = None) -> None:
        """Break the connection, before the head or in the body."""
        exc = exc or httpx.RemoteProtocolError("peer closed connection")
        if self._answer.done():
            self._pieces.put_nowait(exc)
        else:
            self._answer.set_exception(exc)

    async def response(self) -> httpx.Response:
        try:
            return await self._answer
        except asyncio.CancelledError:
            self.closed = True
            raise

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (piece := await self._pieces.get()) is not None:
            if isinstance(piece, Exception):
                raise piece
            yield piece

    async def aclose(self) -> None:
        self.closed = True


class Decoders(httpx.AsyncBaseTransport):
    """All decoders. refuse: addresses that cannot be reached. health: what /health comes to.

    location: where its answers point.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.refuse: dict[str, Exception] = {}
        self.health: dict[str, int] = {}
        self.location = ""
        self.looks: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        address = f"{request.url.scheme}://{request.url.netloc.decode()}"
        if request.url.path == "/health":
            self.looks.append(address)
        if address in self.refuse:
            raise self.refuse[address]
        if request.url.path == "/health":
            headers = {"location": self.location} if self.location else {}
            return httpx.Response(self.health.get(address, 200), headers=headers)
        call = Call(request, await self.take(request))
        self.calls.append(call)
        return await call.response()

    async def take(self, request: httpx.Request) -> bytes:
        """Its body, as it comes over the wire: the request does not keep it."""
        assert isinstance(request.stream, httpx.AsyncByteStream)
        return b"".join([piece async for piece in request.stream])


class ProxyStand:
    """The application in front of scripted decoders."""

    def __init__(
        self,
        *addresses: str,
        up: bool = True,
        http: HttpConfig | None = None,
        **config: Any,
    ) -> None:
        self.decoders = Decoders()
        self.config = ProxyConfig(decoders=addresses or (ONE,), http=http or HttpConfig(), **config)
        self.pool = Pool(self.config.decoders, self.decoders)
        for each in self.pool.decoders:
            each.why = "" if up else "not asked yet"
        self.metrics = Metrics(self.pool)
        self.relays = Relays(self.config, self.pool, self.decoders, self.metrics)
        self.app = build(self.relays, self.pool, self.metrics, Events(), self.config)

    @property
    def calls(self) -> list[Call]:
        return self.decoders.calls

    def ask(
        self,
        name: str = "completions",
        *,
        headers: Mapping[str, str] | None = None,
        raw: bytes | None = None,
        **body: Any,
    ) -> Client:
        """Begin a request. raw: its body, instead of one made of `body`."""
        if name == "models":
            return self.get(PATHS[name], headers=headers)
        encoded = json.dumps({"model": "m", "prompt": "hello", **body}).encode()
        return Client(self.app, PATHS[name], encoded if raw is None else raw, headers=headers)

    def get(self, path: str, *, headers: Any = None, method: str = "GET") -> Client:
        return Client(self.app, path, b"", method=method, headers=headers)

    async def asked(self, name: str = "completions", **body: Any) -> tuple[Client, Call]:
        """Begin a request and wait until a decoder has it."""
        before = len(self.calls)
        client = self.ask(name, **body)
        await self.until(lambda: len(self.calls) > before or client.task.done())
        assert len(self.calls) == before + 1, client.sent
        return client, self.calls[-1]

    async def until(self, condition: Any) -> None:
        """Turn the loop until it holds."""
        for _ in range(TURNS):
            if condition():
                return
            await asyncio.sleep(0)
        raise AssertionError(f"not within {TURNS} turns")

    async def turn(self) -> None:
        """Let all that can happen happen."""
        for _ in range(40):
            await asyncio.sleep(0)

    def advance(self, seconds: float) -> None:
        """Put the loop's clock forward."""
        loop: Any = asyncio.get_running_loop()
        before = loop.time
        loop.time = lambda: before() + seconds

    async def done(self, client: Client) -> Client:
        """Wait until its request is answered in full."""
        await asyncio.wait_for(client.task, 30)
        return client

    def count(self, name: str, **labels: str) -> float:
        """A sample of /metrics; 0 where there is none."""
        text = self.metrics.exposition().decode()
        samples = [
            each for family in text_string_to_metric_families(text) for each in family.samples
        ]
        found = [
            each.value
            for each in samples
            if each.name == PREFIX + name and labels.items() <= each.labels.items()
        ]
        return float(sum(found))

    async def nothing_left(self) -> None:
        """No request, connection or task is left."""
        await self.turn()
        assert self.relays.num_open == 0
        assert [each.in_flight for each in self.pool.decoders] == [0] * len(self.pool.decoders)
        assert all(call.closed for call in self.calls)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not cast(Any, others), others
