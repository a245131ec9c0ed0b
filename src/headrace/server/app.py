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
    created = int(time.time())

    async def health(request: Request) -> Response:
        return _json({"status": "ok"})

    async def ready(request: Request) -> Response:
        known = request.state.known
        states = {each.name: _standing(each, known=known) for each in decoders}
        can = any(each.ready for each in decoders) and not draining()
        status = "draining" if draining() else "ready" if can else "not ready"
        return _json({"status": status, "decoders": states}, 200 if can else 503)

    async def list_models(request: Request) -> Response:
        cards = [_card(model, created) for model in models.values()]
        return _json(ModelList(cards))

    async def one_model(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in models:
            raise Ending(Terminal.UNKNOWN_MODEL, f"no model {name!r} is served here")
        return _json(_card(models[name], created))

    async def not_served(scope: Scope, receive: Receive, send: Send) -> None:
        raise HTTPException(404)

    routes = [
        Route("/health", health, methods=["GET"]),
        Route("/ready", ready, methods=["GET"]),
        Route("/v1/models", list_models, methods=["GET"]),
        Route("/v1/models/{name:path}", one_model, methods=["GET"]),
        Route("/v1/completions", answering.endpoint("completions"), methods=["POST"]),
        Route("/v1/chat/completions", answering.endpoint("chat"), methods=["POST"]),
        Route(
            "/tokenize",
            Tokenizing(models, config.max_body_bytes, answering.encoding),
            methods=["POST"],
        ),
        *more,
    ]
    router = Router(routes, redirect_slashes=False, default=not_served)
    return Front(router, told, config, keys=keys)


def _standing(decoder: ServedDecoder, *, known: bool) -> str:
    """Whether it can take work, or why not; a reason may name paths, which not all are told."""
    if decoder.ready:
        return "ready"
    if decoder.state != "ready":
        told = known and decoder.reason
        return f"{decoder.state}: {decoder.reason}" if told else decoder.state
    return "no source is in service" if decoder.lanes else "no lane is in service"


def _card(model: ServedModel, created: int) -> ModelCard:
    return ModelCard(model.name, created, model.context)


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
