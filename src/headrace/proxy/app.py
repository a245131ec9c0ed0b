"""The HTTP application: which path is passed on, and what the proxy answers itself."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from headrace.proxy.config import ProxyConfig
from headrace.proxy.metrics import Metrics
from headrace.proxy.pool import Pool
from headrace.proxy.relays import Relays
from headrace.server.events import Events
from headrace.server.http import App, Front, Receive, Scope, Send, header


def build(relays: Relays, pool: Pool, metrics: Metrics, told: Events, config: ProxyConfig) -> App:
    """The application."""
    told.listen(metrics.take)
    standing = Standing(pool)
    routes = [
        Route("/health", standing.reply, methods=["GET"]),
        Route("/ready", standing.reply, methods=["GET"]),
        Route("/metrics", metrics.scrape, methods=["GET"]),
        Route("/v1/models", relays.endpoint("models"), methods=["GET"]),
        Route("/v1/completions", relays.endpoint("completions"), methods=["POST"]),
        Route("/v1/chat/completions", relays.endpoint("chat"), methods=["POST"]),
        Route("/tokenize", relays.endpoint("tokenize"), methods=["POST"]),
        Route("/detokenize", relays.endpoint("detokenize"), methods=["POST"]),
    ]
    router = Router(routes, redirect_slashes=False)
    # `headrace serve` has no such path: what a front refuses there, it tells as `other`.
    detokenized = Events()
    detokenized.listen(partial(metrics.take, endpoint="detokenize"))
    front = Front(router, told, config.http, keys=config.keys)
    own = {"/detokenize": Front(router, detokenized, config.http, keys=config.keys)}
    return Named(front, own)


class Standing:
    """Whether a request can go anywhere."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def reply(self, request: Request) -> Response:
        """Which decoders there are is told to whoever may use the proxy."""
        content: dict[str, object] = {"status": "ok" if self._pool.any_up else "no decoder is up"}
        if request.state.known:
            content["decoders"] = [
                {
                    "address": each.address,
                    "up": each.up,
                    "in_flight": each.in_flight,
                    "why": each.why,
                }
                for each in self._pool.decoders
            ]
        status = 200 if self._pool.any_up else 503
        return Response(msgspec.json.encode(content), status, media_type="application/json")


class Named:
    """Gives a request without an id one such as vLLM gives, since it is vLLM's name for it too.

    own: applications of single paths.
    """

    def __init__(self, app: App, own: Mapping[str, App]) -> None:
        self._app = app
        self._own = own

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not header(scope["headers"], b"x-request-id"):
            own = (b"x-request-id", uuid.uuid4().hex.encode())
            named = [each for each in scope["headers"] if each[0] != own[0]]  # one that is empty
            scope = {**scope, "headers": [*named, own]}
        await self._own.get(scope.get("path", ""), self._app)(scope, receive, send)
