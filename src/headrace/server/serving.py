"""`headrace serve`, running: start the owners, serve until told to stop, drain, and end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from typing import Final, Protocol

from headrace.errors import Refused
from headrace.runtime.log import configure
from headrace.runtime.owner_link import OwnerFailed
from headrace.server import events
from headrace.server.answering import Answering
from headrace.server.app import build
from headrace.server.config import ServeConfig
from headrace.server.decoders import CLOSE_GRACE_S, ServedDecoder
from headrace.server.descriptors import raise_descriptors
from headrace.server.dispatch import Dispatcher
from headrace.server.http import App
from headrace.server.metrics import Metrics
from headrace.server.metrics_route import metrics_route
from headrace.server.page_notes import notes_of
from headrace.server.page_routes import routes as page_routes
from headrace.server.prepared import Prepared, prepare
from headrace.server.queue import FairQueue
from headrace.server.recent import Recent
from headrace.server.stopping import ToldToStop
from headrace.server.wire import Server, bind, listen, uvicorn_config
from headrace.version import VERSION

_log = logging.getLogger("headrace.server")

SAID: Final = "headrace.serve"
"""The logger of what is said at any log level, where what is said is JSON."""


class Told(Protocol):
    """Says a line to who started the server."""

    def __call__(self, line: str, *, level: int = logging.INFO) -> None: ...


def serve(config: ServeConfig, told: Told) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status: 0 after a drain.

    A second signal ends the drain. All is over `http.drain_timeout_s` + 20 s after the first.

    Raises:
        Refused: the config cannot be served here, in one sentence.
    """
    as_json = config.telemetry.log_json
    configure(config.telemetry.log_level, as_json=as_json)
    logging.getLogger(SAID).setLevel(logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # what it says is said here, or no news
    raise_descriptors(config.http.max_connections)
    told = _log_said if as_json else told
    with bind(config.http) as listening:
        told("checking the config and its models")
        try:
            prepared = prepare(config)
            listen(listening, config.http)
            host, port = listening.getsockname()[:2]
            where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            return asyncio.run(_Serving(config, prepared, told).run(listening, where))
        except ToldToStop:
            told("told to stop before it served")
            return 0


def _log_said(line: str, *, level: int = logging.INFO) -> None:
    logging.getLogger(SAID).log(level, "%s", line)


class _Serving:
    """One run of the server, from start to exit."""

    def __init__(self, config: ServeConfig, prepared: Prepared, told: Told) -> None:
        self._config = config
        self._print = told
        self._starting_ns: dict[str, int] = {}  # since when each decoder's owner is
        self._told = events.Events()
        self._metrics = Metrics(prepared.models, prepared.source_names)
        self._recent = Recent(
            config.page,
            notes=notes_of({each.name: each.owner for each in prepared.decoders}),
            stamp={"headrace": VERSION, "clock": "host CLOCK_MONOTONIC"},
        )
        self._spans = prepared.spans
        for listener in (self._metrics.take, self._recent, self._log_event):
            self._told.listen(listener)
        if self._spans is not None:
            self._told.listen(self._spans.take)
        queue = FairQueue(
            config.queue.max_requests, config.queue.max_bytes, patience=config.queue.patience
        )
        self._dispatcher = Dispatcher(queue, config.queue, self._told)
        self._decoders = [
            ServedDecoder(each, self._told, self._changed, self._dispatcher.finished)
            for each in prepared.decoders
        ]
        self._dispatcher.serve(self._decoders)
        self._models = prepared.models
        self._answering = Answering(self._models, self._dispatcher, self._told, config)
        self._keys = prepared.keys
        self._warnings = prepared.warnings
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._was_ready = self._signalled = False
        self._set_aside: list[tuple[ServedDecoder, str]] = []
        self._where = ""
        self._http = Server(uvicorn_config(self._app(), self._told, config.http))

    async def run(self, listening: socket.socket, where: str) -> int:
        """Serve; returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked_to_stop)
        self._where = where
        serving = asyncio.ensure_future(self._http.serve(sockets=[listening]))
        for warning in self._warnings:
            self._print(warning, level=logging.WARNING)
        self._print(f"listening at {where}, {len(self._decoders)} decoder(s) to start")
        try:
            starting = [asyncio.ensure_future(each.start()) for each in self._decoders]
            await asyncio.wait(
                [serving, asyncio.ensure_future(self._stop.wait())],
                return_when=asyncio.FIRST_COMPLETED,
            )
            await self._drain()
        finally:
            for task in starting:
                task.cancel()
            await self._close(serving)
        return self._status()

    def _app(self) -> App:
        more = [metrics_route(self._metrics)]
        if self._config.page.enabled:
            more += page_routes(self._recent, time.monotonic_ns)
        return build(
            self._answering,
            self._told,
            self._models,
            self._decoders,
            self._config.http,
            keys=self._keys,
            draining=lambda: self._dispatcher.draining,
            more=more,
        )

    # What happens meanwhile.

    def _changed(self) -> None:
        self._dispatcher.look_soon()
        aside = [each for each in self._decoders if each.state == "set aside"]
        if len(aside) == len(self._decoders) or any(each.mistake for each in aside):
            self._set_aside = [(each, each.reason) for each in aside]
            self._stop.set()  # nothing is served any more, or not what was configured

    def _asked_to_stop(self) -> None:
        self._signalled = True
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    def _log_event(self, event: events.Event) -> None:
        match event:
            case events.DecoderChanged():
                if not self._is_last_word(event):
                    self._print(self._decoder_line(event))
                self._say_when_ready()
            case events.Arrived():
                asked = f"{event.endpoint} of {event.num_prompt_tokens} tokens"
                _log.info(
                    "request %d: %s by %s as %s", event.request, asked, event.client, event.label
                )
            case events.Answered():
                why = f": {event.reason}" if event.reason else ""
                ending = f"{event.terminal.value} {event.status}{why}"
                _log.info("request %d: %s", event.request, ending)
            case events.Rejected():
                ending = f"{event.terminal.value} {event.status}: {event.reason}"
                _log.info("%s: %s", event.endpoint, ending)

    def _is_last_word(self, event: events.DecoderChanged) -> bool:
        """Whether the server ends with this reason, and says it then."""
        decoder = next(each for each in self._decoders if each.name == event.decoder)
        return event.state == "set aside" and decoder.mistake

    def _decoder_line(self, event: events.DecoderChanged) -> str:
        decoder = next(each for each in self._decoders if each.name == event.decoder)
        line = f"decoder {event.decoder}: {event.state}"
        if event.state == "ready" and decoder.up is not None:
            up = decoder.up
            line += (
                f", {up.lanes} lanes of {up.context} positions, {up.num_sources} source(s) with "
                f"{up.num_slots} slots, after {self._took_s(event):.1f} s"
            )
        elif event.state == "starting":
            self._starting_ns[event.decoder] = event.at_ns
            line += f" {decoder.settings.pair}, model {', '.join(decoder.settings.models)}"
        elif event.reason:
            line += f": {event.reason}"
        return line

    def _took_s(self, event: events.DecoderChanged) -> float:
        """How long this start of its owner took."""
        return (event.at_ns - self._starting_ns.get(event.decoder, event.at_ns)) / 1e9

    def _say_when_ready(self) -> None:
        if not self._was_ready and any(each.ready for each in self._decoders):
            self._was_ready = True
            page = ", page at /" if self._config.page.enabled else ""
            self._print(f"ready: {self._where}/v1{page}, metrics at /metrics")

    # The end.

    async def _drain(self) -> None:
        """Take no more, and wait for what runs, as long as the config says."""
        self._dispatcher.draining = True
        if not self._answering.num_open:
            return
        timeout_s = self._config.http.drain_timeout_s
        self._print(f"draining: {self._answering.num_open} request(s), at most {timeout_s:.0f} s")
        hurry = asyncio.ensure_future(self._hurry.wait())
        idle = asyncio.ensure_future(self._answering.until_idle())
        await asyncio.wait([hurry, idle], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in (hurry, idle):
            task.cancel()

    async def _close(self, serving: asyncio.Future[None]) -> None:
        self._dispatcher.close()
        await asyncio.gather(*(each.stop(CLOSE_GRACE_S) for each in self._decoders))
        self._http.should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        self._answering.close()
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)

    def _status(self) -> int:
        """0 after a drain that was asked for.

        Raises:
            Refused: a decoder cannot be served as the config says. OwnerFailed: none is left.
        """
        if self._signalled:
            return 0
        mistakes = [(each, why) for each, why in self._set_aside if each.mistake]
        reasons = [f"decoder {each.name}: {why}" for each, why in mistakes]
        if reasons:
            raise Refused("; ".join(reasons))
        raise OwnerFailed(
            "no decoder is left: "
            + "; ".join(f"{each.name}: {why}" for each, why in self._set_aside)
        )
