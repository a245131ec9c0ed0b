"""`headrace proxy`, running: look at the decoders, serve until told to stop, drain, and end."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
from collections.abc import Callable
from typing import Any, Final

import httpx

from headrace.proxy.app import build
from headrace.proxy.config import ProxyConfig, check_place
from headrace.proxy.metrics import Metrics
from headrace.proxy.pool import Pool
from headrace.proxy.relays import Relays
from headrace.proxy.upstream import connections
from headrace.runtime.log import configure
from headrace.server.events import Events
from headrace.server.stopping import ToldToStop
from headrace.server.wire import LAST_WORDS_S, Server, bind, listen, uvicorn_config

BACKSTOP_S: Final = 5.0


def serve(config: ProxyConfig, told: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status: 0 after a drain.

    A second signal ends the drain.

    Raises:
        Refused: it cannot be served here, in one sentence.
    """
    configure(config.log_level)
    for name in ("uvicorn", "httpx", "httpcore"):  # what they say is said here, or no news
        logging.getLogger(name).setLevel(logging.CRITICAL)
    check_place(config)
    with bind(config.http) as listening:
        try:
            return asyncio.run(_run(config, listening, told))
        except ToldToStop:
            told("told to stop before it served")
            return 0


async def _run(config: ProxyConfig, listening: socket.socket, told: Callable[[str], None]) -> int:
    async with connections() as decoders:
        await _Serving(config, decoders, told).run(listening)
    return 0


class _Serving:
    """One run of the proxy, from start to exit."""

    def __init__(
        self,
        config: ProxyConfig,
        decoders: httpx.AsyncBaseTransport,
        told: Callable[[str], None],
    ) -> None:
        self._config = config
        self._told = told
        self._pool = Pool(config.decoders, decoders)
        metrics = Metrics(self._pool)
        self._relays = Relays(config, self._pool, decoders, metrics)
        events = Events()
        app = build(self._relays, self._pool, metrics, events, config)
        served = uvicorn_config(app, events, config.http)
        # A drain is ended here; uvicorn's own end of it comes if that does not help.
        drain_s = config.http.drain_timeout_s + LAST_WORDS_S + BACKSTOP_S
        served.timeout_graceful_shutdown = math.ceil(drain_s)
        self._http = Server(served)
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self, listening: socket.socket) -> None:
        """Serve until it is over."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked_to_stop)
        looking = asyncio.ensure_future(self._pool.look_at_all())
        stop = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({looking, stop}, return_when=asyncio.FIRST_COMPLETED)
        looking.cancel()
        if stop.done():
            self._told("told to stop before it served")
            return
        looking.result()
        self._warn()
        listen(listening, self._config.http)
        self._told(self._where(listening))
        watching = asyncio.ensure_future(self._pool.watch())
        serving = asyncio.ensure_future(self._http.serve(sockets=[listening]))
        first: set[asyncio.Future[Any]] = {serving, stop, watching}
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            await self._drain(serving)
        finally:
            for task in (watching, stop):
                task.cancel()
            await asyncio.wait({watching, stop})
        if not watching.cancelled():
            watching.result()  # it has failed, and that ended all

    def _warn(self) -> None:
        for each in self._pool.decoders:
            if not each.up:
                self._told(f"warning: decoder {each.address} is not up: {each.why}")

    def _where(self, listening: socket.socket) -> str:
        host, port = listening.getsockname()[:2]
        where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        count = sum(each.up for each in self._pool.decoders)
        up = f"{count} of {len(self._pool.decoders)} decoder(s) up"
        return f"listening at {where}, {up}, metrics at /metrics"

    def _asked_to_stop(self) -> None:
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def _drain(self, serving: asyncio.Future[None]) -> None:
        """Take no more, and wait for what is open, as long as the config says."""
        self._http.should_exit = True
        timeout_s = self._config.http.drain_timeout_s
        if self._relays.num_open:
            self._told(f"draining: {self._relays.num_open} request(s), at most {timeout_s:g} s")
        hurry = asyncio.ensure_future(self._hurry.wait())
        first: set[asyncio.Future[Any]] = {serving, hurry}
        await asyncio.wait(first, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        self._relays.cut()
        await asyncio.wait({serving}, timeout=LAST_WORDS_S)
        for connection in list(self._http.server_state.connections):
            if connection.transport is not None:  # its client does not read what it was told
                connection.transport.abort()
        await serving
