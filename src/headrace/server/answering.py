"""Answers completions: from a body to choices at the owners, and from their tokens to a response.

Nothing is sent before the first token, so that every failure up to there has a status of its own.
Whatever ends a request, its one terminal is told and its choices are dropped, in `finally`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

from headrace.server import events
from headrace.server.asking import DEADLINE_HEADER, ROUTE_HEADER, asked_of
from headrace.server.bodies import (
    Body,
    chat_of,
    check_choices,
    completion_of,
    without_prompts,
)
from headrace.server.budget import Budget, Held
from headrace.server.config import ServeConfig
from headrace.server.dispatch import Asked, Dispatcher
from headrace.server.encoding import Encoding
from headrace.server.http import Receive, Scope, Send, header, read_body, until_left
from headrace.server.models import ServedModel
from headrace.server.responding import Responding
from headrace.server.terminals import BUG_TEXT, STATUS, Ending, Terminal

_log = logging.getLogger("headrace.server")

LONG_BODY = 1 << 18  # bytes from which a body is read in a thread

Kind: TypeAlias = Literal["completions", "chat"]

_BODIES: dict[Kind, Callable[[bytes], Body]] = {"completions": completion_of, "chat": chat_of}


class Answering:
    """All completions of a server, as an ASGI application of each path."""

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        dispatcher: Dispatcher,
        told: events.Events,
        config: ServeConfig,
    ) -> None:
        self._models = models
        self._dispatcher = dispatcher
        self._told = told
        self._config = config
        self._budget = Budget(2 * max(config.queue.max_bytes, config.http.max_body_bytes))
        self.encoding = Encoding()
        self._requests = itertools.count(1)
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_open(self) -> int:
        """Requests that are not answered yet."""
        return self._open

    async def until_idle(self) -> None:
        """Return when no request is open."""
        await self._idle.wait()

    def close(self) -> None:
        """Encode no more texts. Idempotent."""
        self.encoding.close()

    def endpoint(self, kind: Kind) -> Endpoint:
        """The application of one path."""
        return Endpoint(self, kind)

    async def answer(self, kind: Kind, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request.

        Raises:
            Ending: it is refused before it was admitted, and nothing was sent.
        """
        with self._budget.of_one(scope["state"]["client"]) as held:
            asked, body, model = await self._read(kind, scope, receive, held)
        news = asyncio.Event()
        choices = self._dispatcher.admit(asked, news)
        responding = Responding(asked.request, kind, body, model, choices, news, send)
        self._told.tell(_arrived(asked, kind, body, scope["state"]))
        scope["state"]["admitted"] = True
        await self._respond(responding, receive)

    async def _read(
        self, kind: Kind, scope: Scope, receive: Receive, held: Held
    ) -> tuple[Asked, Body, ServedModel]:
        """A request as it is asked for; its body but for what is ids by now.

        Raises:
            Ending: it is refused.
        """
        raw = await read_body(scope, receive, self._config.http.max_body_bytes, held)
        read = _BODIES[kind]
        body = read(raw) if len(raw) < LONG_BODY else await asyncio.to_thread(read, raw)
        model = self._models.get(body.model)
        if model is None:
            text = f"no model {body.model!r} is served here; see /v1/models"
            raise Ending(Terminal.UNKNOWN_MODEL, text, field="model")
        check_choices(body, self._config.requests.max_choices)
        self._dispatcher.check_room(model.name, body.num_choices)
        headers = {
            name: header(scope["headers"], name.encode()).decode("latin-1")
            for name in (ROUTE_HEADER, DEADLINE_HEADER)
        }
        client = scope["state"]["client"]
        number = next(self._requests)
        asked = await asked_of(
            number, client, body, model, headers, self._config, self.encoding, receive
        )
        return asked, without_prompts(body), model

    async def _respond(self, responding: Responding, receive: Receive) -> None:
        """Tell the request's one terminal, whatever happens."""
        self._open += 1
        self._idle.clear()
        ending = Ending(Terminal.BUG, BUG_TEXT)
        try:
            ending = await self._outcome(responding, receive)
        except asyncio.CancelledError:
            ending = Ending(Terminal.SHUTTING_DOWN, "the server ended before it")
            raise
        finally:
            responding.drop()
            self._told.tell(
                events.Answered(
                    time.monotonic_ns(),
                    responding.request,
                    ending.terminal,
                    STATUS[ending.terminal],
                    responding.started,
                    "" if ending.terminal is Terminal.FINISHED else ending.text,
                )
            )
            self._open -= 1
            if not self._open:
                self._idle.set()

    async def _outcome(self, responding: Responding, receive: Receive) -> Ending:
        answer = asyncio.ensure_future(responding.run())
        left = asyncio.ensure_future(until_left(receive))
        try:
            await asyncio.wait({answer, left}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                return Ending(Terminal.CLIENT_LEFT, "its client left")
            failure = answer.exception()
            if failure is None:
                return Ending(Terminal.FINISHED, "")
            if not isinstance(failure, Ending):
                _log.error("request %d failed", responding.request, exc_info=failure)
                failure = Ending(Terminal.BUG, BUG_TEXT)
            responding.drop()  # before it is told, which takes as long as its client reads
            await responding.fail(failure)
            return failure
        finally:
            for task in (answer, left):
                task.cancel()
            await asyncio.wait({answer, left})


class Endpoint:
    """One path of `Answering`."""

    def __init__(self, answering: Answering, kind: Kind) -> None:
        self._answering = answering
        self._kind: Kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answering.answer(self._kind, scope, receive, send)


def _arrived(asked: Asked, kind: Kind, body: Body, state: Mapping[str, str]) -> events.Arrived:
    return events.Arrived(
        at_ns=time.monotonic_ns(),
        request=asked.request,
        client=asked.client,
        label=state["label"],
        traceparent=state["traceparent"],
        endpoint=kind,
        model=asked.model,
        num_prompt_tokens=sum(map(len, asked.prompts[:: body.n])),
        max_tokens=max(options.max_tokens for options in asked.options),
        choices=len(asked.prompts),
        route=asked.options[0].route,
        stream=body.stream,
    )
