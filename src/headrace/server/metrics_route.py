"""`/metrics`: what Prometheus scrapes."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.server.metrics import Metrics


def metrics_route(metrics: Metrics) -> Route:
    """The route; it is rendered in a thread, so that streams of others do not wait for it."""

    def scrape(request: Request) -> Response:
        content_type, body = metrics.exposition(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    return Route("/metrics", scrape, methods=["GET"])
