"""A request's way to a decoder and its answer's way back.

Nothing is sent to the client before the decoder's first byte, so that every failure up to there has
a status of its own. A client that leaves ends the decoder's request: the connection to it is
closed, which is what vLLM aborts on. Each connection to a decoder serves one request: one that was
kept could be closed by the decoder just then, and nobody could tell whether it had read the
request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, ExitStack, aclosing
from typing import Final, Literal, TypeAlias, cast

import httpx

from headrace.proxy import failures
from headrace.proxy.asking import PROMPTS, asked_of, fields_of
from headrace.proxy.config import ProxyConfig
from headrace.proxy.failures import LEFT, Failure
from headrace.proxy.metrics import NOBODY, Metrics
from headrace.proxy.passing import WholeEvents, answer_headers, request_headers
from headrace.proxy.pool import Decoder, Pool, reason_of
from headrace.proxy.upstream import Body, request_to
from headrace.server.budget import Budget
from headrace.server.http import Receive, Scope, Send, read_body, until_left

_log = logging.getLogger("headrace.proxy")

Endpoint: TypeAlias = Literal["completions", "chat", "models", "tokenize", "detokenize"]

BODIES_NBYTES: Final = 256 << 20
"""Of bodies that are being read or not sent yet, of all requests together."""

STATUSES: Final = range(200, 600)
"""Of a whole answer; no other could be passed on."""


class Relays:
    """All requests that are passed on."""

    def __init__(
        self,
        config: ProxyConfig,
        pool: Pool,
        decoders: httpx.AsyncBaseTransport,
        metrics: Metrics,
    ) -> None:
        self.config = config
        self.pool = pool
        self.decoders = decoders
        self.metrics = metrics
        self.num_open = 0
        self._budget = Budget(max(BODIES_NBYTES, 2 * config.http.max_body_bytes))
        self._cut = asyncio.Event()

    def cut(self) -> None:
        """End all that is open, and what still comes: the drain is over."""
        self._cut.set()

    def endpoint(self, name: Endpoint) -> Relay:
        """The application of one path."""
        return Relay(self, name)

    async def pass_on(self, name: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request.

        Raises:
            Ending: it is refused, and nothing was sent.
        """
        exchange = Exchange(self, name, scope, send)
        if self.num_open >= self.config.max_in_flight:
            await exchange.fail(failures.too_many(self.config.max_in_flight))
            exchange.count()
            return
        self.num_open += 1
        try:
            with ExitStack() as stack:
                held = stack.enter_context(self._budget.of_one(scope["state"]["client"]))
                most = self.config.http.max_body_bytes
                # Under no name here: it would be held as long as the answer takes.
                exchange.read(await read_body(scope, receive, most, held), stack.close)
                await self._relay(exchange, receive)
        finally:
            self.num_open -= 1

    async def _relay(self, exchange: Exchange, receive: Receive) -> None:
        """Until it is over, and count it, whatever happens."""
        try:
            failure = await self._outcome(exchange, receive)
            if failure is not None:
                await exchange.fail(failure)
        except asyncio.CancelledError:
            exchange.status = 503
            raise
        finally:
            exchange.count()

    async def _outcome(self, exchange: Exchange, receive: Receive) -> Failure | None:
        """What its client is still to be told, once nothing of it is under way any more."""
        answer = asyncio.ensure_future(exchange.run())
        left = asyncio.ensure_future(until_left(receive))
        cut = asyncio.ensure_future(self._cut.wait())
        tasks = {answer, left, cut}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return _failure_of(answer)
            if exchange.told:  # whatever comes now, its client is told no more
                return None
            if left.done():
                exchange.status = LEFT
                self.metrics.disconnects.inc()
                return None
            return failures.shutting_down()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


class Relay:
    """One path of `Relays`."""

    def __init__(self, relays: Relays, name: Endpoint) -> None:
        self._relays = relays
        self._name = name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._relays.pass_on(self._name, scope, receive, send)


class Exchange:
    """One request. status: what it came to, also where its stream had begun as a good one.

    told: its answer is whole, and the rest of it is on its way to its client.
    """

    def __init__(self, relays: Relays, name: Endpoint, scope: Scope, send: Send) -> None:
        self.status = 0
        self.told = False
        self._relays = relays
        self._name = name
        self._scope = scope
        self._send = send
        self._body: Body | None = None
        self._events = WholeEvents()
        self._where = ""
        self._decoder: Decoder | None = None  # who had it last
        self._started = False  # its client was sent a status

    def read(self, raw: bytes, sent: Callable[[], None]) -> None:
        """Take its body; `sent` is called when it is not needed any more.

        Raises:
            Ending: it is none that a decoder could read.
        """
        config, metrics = self._relays.config, self._relays.metrics
        if prompt := PROMPTS.get(self._name):
            asked = asked_of(raw, self._scope["headers"], config, prompt)
            self._body, self._where = Body(asked.body, sent), asked.where
            metrics.prefills.labels(self._where).inc()
        elif self._scope["method"] == "POST":
            fields_of(raw)
            self._body = Body(raw, sent)
        self._scope["state"]["admitted"] = True

    async def run(self) -> None:
        """Ask a decoder, or others while one cannot be reached, and answer.

        Raises:
            Failure: there is no whole answer.
        """
        pool = self._relays.pool
        until_s = asyncio.get_running_loop().time() + self._relays.config.first_byte_timeout_s
        while (decoder := pool.choose()) is not None:
            self._decoder = decoder
            try:
                with decoder.busy():
                    await self._ask(decoder, until_s)
                return
            except (httpx.ConnectError, httpx.ConnectTimeout) as exc:
                self._fault(decoder, "refused")
                pool.went_down(decoder, reason_of(exc))
        raise failures.none_up()

    async def fail(self, failure: Failure) -> None:
        """Tell its client why it ends."""
        self.status = failure.status
        _log.warning("%s: %s", self._label, failure.text)
        if self._started:
            await failure.send_event(self._send, within=self._events.cut)
        else:
            await failure.send(self._send)

    def count(self) -> None:
        """It is over."""
        decoder = NOBODY if self._decoder is None else self._decoder.address
        self._relays.metrics.ended(self._name, decoder, self.status)
        where = f", prefill asked: {self._where}" if self._where else ""
        _log.info("%s: %s %d by %s%s", self._label, self._name, self.status, decoder, where)

    async def _ask(self, decoder: Decoder, until_s: float) -> None:
        """until_s: when the first byte must be here, by the loop's clock."""
        request = self._request(decoder)
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout_at(until_s):
                    answer = await self._relays.decoders.handle_async_request(request)
                    stack.push_async_callback(answer.aclose)
                    pieces = await stack.enter_async_context(aclosing(_pieces_of(answer)))
                    if answer.status_code not in STATUSES:
                        self._fault(decoder, "died")
                        raise failures.answered(decoder.address, answer.status_code)
                    first = await anext(pieces, b"")
                streams = answer.headers.get("content-type", "").startswith("text/event-stream")
                self._observe(decoder, loop.time() - asked_s, streams=streams)
                if streams:
                    await self._pass_events(answer, first, pieces)
                else:
                    await self._pass_whole(answer, first, pieces)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                raise
            except httpx.TransportError as exc:
                self._fault(decoder, "died")
                raise failures.died(decoder.address) from exc
            except TimeoutError:
                self._fault(decoder, "late")
                timeout_s = self._relays.config.first_byte_timeout_s
                raise failures.late(decoder.address, timeout_s) from None

    def _request(self, decoder: Decoder) -> httpx.Request:
        scope = self._scope
        return request_to(
            decoder.address,
            scope["path"],
            method=scope["method"],
            query=scope["query_string"],
            headers=request_headers(scope["headers"], self._label),
            body=self._body,
        )

    async def _pass_events(
        self, answer: httpx.Response, first: bytes, pieces: AsyncGenerator[bytes, None]
    ) -> None:
        await self._start(answer)
        events, piece = self._events, first
        while piece:
            if whole := events.push(piece):
                await self._send({"type": "http.response.body", "body": whole, "more_body": True})
            piece = await anext(pieces, b"")
        self.told = True
        await self._send({"type": "http.response.body", "body": events.rest()})

    async def _pass_whole(
        self, answer: httpx.Response, first: bytes, pieces: AsyncGenerator[bytes, None]
    ) -> None:
        body = first + b"".join([piece async for piece in pieces])
        self.told = True
        await self._start(answer, (b"content-length", str(len(body)).encode()))
        await self._send({"type": "http.response.body", "body": body})

    async def _start(self, answer: httpx.Response, *more: tuple[bytes, bytes]) -> None:
        self.status, self._started = answer.status_code, True
        headers = [*answer_headers(answer.headers.raw), *more]
        await self._send(
            {"type": "http.response.start", "status": answer.status_code, "headers": headers}
        )

    def _observe(self, decoder: Decoder, took_s: float, *, streams: bool) -> None:
        if self._where:
            words = decoder.address, "true" if streams else "false"
            self._relays.metrics.first_byte.labels(*words).observe(took_s)

    def _fault(self, decoder: Decoder, reason: str) -> None:
        self._relays.metrics.failures.labels(decoder.address, reason).inc()

    @property
    def _label(self) -> str:
        label: str = self._scope["state"]["label"]
        return label


def _pieces_of(answer: httpx.Response) -> AsyncGenerator[bytes, None]:
    """Its body as it comes over the wire."""
    return cast(AsyncGenerator[bytes, None], answer.aiter_raw())


def _failure_of(answer: asyncio.Future[None]) -> Failure | None:
    """How a request ended by itself."""
    failure = answer.exception()
    if failure is None or isinstance(failure, Failure):
        return failure
    _log.error("a request failed", exc_info=failure)
    return failures.bug()
