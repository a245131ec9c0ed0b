"""The HTTP application: which path is answered by what."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router

from headrace.server.answering import Answering
from headrace.server.config import HttpConfig
from headrace.server.decoders import ServedDecoder
from headrace.server.events import Events
from headrace.server.http import App, Front, Receive, Scope, Send
from headrace.server.models import ServedModel
from headrace.server.replies import ModelCard, ModelList
from headrace.server.terminals import Ending, Terminal
from headrace.server.tokenizing import Tokenizing


def build(
    answering: Answering,
    told: Events,
    models: Mapping[str, ServedModel],
    decoders: Sequence[ServedDecoder],
    config: HttpConfig,
    *,
    keys: Sequence[str] = (),
    draining: Callable[[], bool] = lambda: False,
    more: Sequence[BaseRoute] = (),
) -> App:
    """The application. more: the page's routes and the metrics'."""
    plain = _Plain(models, decoders, draining)
    tokenizing = Tokenizing(models, config.max_body_bytes, answering.encoding)
    routes = [
        Route("/health", plain.health, methods=["GET"]),
        Route("/ready", plain.ready, methods=["GET"]),
        Route("/v1/models", plain.list_models, methods=["GET"]),
        Route("/v1/models/{name:path}", plain.one_model, methods=["GET"]),
        Route("/v1/completions", answering.endpoint("completions"), methods=["POST"]),
        Route("/v1/chat/completions", answering.endpoint("chat"), methods=["POST"]),
        Route("/tokenize", tokenizing, methods=["POST"]),
        *more,
    ]
    router = Router(routes, redirect_slashes=False, default=_not_served)
    return Front(router, told, config, keys=keys)


class _Plain:
    """What is answered at once."""

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        decoders: Sequence[ServedDecoder],
        draining: Callable[[], bool],
    ) -> None:
        self._models = models
        self._decoders = decoders
        self._draining = draining
        self._created = int(time.time())

    async def health(self, request: Request) -> Response:
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        known, draining = request.state.known, self._draining()
        states = {each.name: _standing(each, known=known) for each in self._decoders}
        can = any(each.ready for each in self._decoders) and not draining
        status = "draining" if draining else "ready" if can else "not ready"
        return _json({"status": status, "decoders": states}, 200 if can else 503)

    async def list_models(self, request: Request) -> Response:
        return _json(ModelList([self._card(model) for model in self._models.values()]))

    async def one_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._models:
            raise Ending(Terminal.UNKNOWN_MODEL, f"no model {name!r} is served here")
        return _json(self._card(self._models[name]))

    def _card(self, model: ServedModel) -> ModelCard:
        return ModelCard(model.name, self._created, model.context)


async def _not_served(scope: Scope, receive: Receive, send: Send) -> None:
    raise HTTPException(404)


def _standing(decoder: ServedDecoder, *, known: bool) -> str:
    """Whether it can take work, or why not; a reason may name paths, which not all are told."""
    if decoder.ready:
        return "ready"
    if decoder.state != "ready":
        told = known and decoder.reason
        return f"{decoder.state}: {decoder.reason}" if told else decoder.state
    return "no source is in service" if decoder.lanes else "no lane is in service"


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
