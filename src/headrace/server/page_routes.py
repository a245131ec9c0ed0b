"""The live page's routes: its three files, what it shows, and a trace file per request.

Nothing is read from a client but the path. Whoever mounts these asks for API keys on all paths but
`PUBLIC`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from importlib.resources import files
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.server.recent import Recent
from headrace.server.terminals import Ending, Terminal
from headrace.telemetry.chrome import encode
from headrace.telemetry.style import STYLE

PUBLIC: Final = ("/", "/page.css", "/page.js")
"""What tells nothing of any request: the page asks for a key itself."""

CONTENT_SECURITY_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src data:",  # the icon
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)

HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}

_MAX_DIGITS: Final = 19
_TYPES: Final = {
    "index.html": "text/html",
    "page.css": "text/css",
    "page.js": "text/javascript",
}


def routes(recent: Recent, clock: Callable[[], int]) -> list[Route]:
    """The routes, for `GET` and `HEAD`; `clock` tells the ns of the events' clock."""
    content = {name: _content(name) for name in _TYPES}
    apart = asyncio.Lock()  # of drawing and encoding: one at a time, and in a thread

    def page_file(name: str) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            return _response(content[name], _TYPES[name], "no-cache")

        return answer

    async def status(request: Request) -> Response:
        async with apart:
            for due in recent.undrawn():
                due.keep(await asyncio.to_thread(due.draw))
        encoded = msgspec.json.encode(recent.snapshot(clock()))
        return _response(encoded, "application/json", "no-store")

    async def trace(request: Request) -> Response:
        asked = request.path_params["request"]
        number = int(asked) if _is_number(asked) else None
        found = None if number is None else recent.recording_of(number)
        if found is None:
            return _unknown(f"there is no trace of request {asked[:_MAX_DIGITS]}, or not any more")
        async with apart:
            encoded = await asyncio.to_thread(encode, found)
        name = f'attachment; filename="headrace-request-{number}.json"'
        return _response(encoded, "application/json", "no-store", {"Content-Disposition": name})

    return [
        Route("/", page_file("index.html"), methods=["GET"]),
        Route("/page.css", page_file("page.css"), methods=["GET"]),
        Route("/page.js", page_file("page.js"), methods=["GET"]),
        Route("/status", status, methods=["GET"]),
        Route("/trace/{request}", trace, methods=["GET"]),
    ]


def _content(name: str) -> bytes:
    """A file of the page; its style begins with that of the trace page, whose colours it shares."""
    text = files("headrace.server").joinpath("page", name).read_text(encoding="utf-8")
    return f"{STYLE}\n{text}".encode() if name == "page.css" else text.encode()


def _is_number(text: str) -> bool:
    return len(text) <= _MAX_DIGITS and text.isascii() and text.isdecimal()


def _unknown(text: str) -> Response:
    ending = Ending(Terminal.UNKNOWN_PATH, text)
    encoded = msgspec.json.encode(ending.body())
    return _response(encoded, "application/json", "no-store", status=ending.status)


def _response(
    content: bytes,
    kind: str,
    caching: str,
    more: Mapping[str, str] | None = None,
    *,
    status: int = 200,
) -> Response:
    headers = {**HEADERS, "Cache-Control": caching, **(more or {})}
    return Response(content, status, headers, media_type=kind)
