"""What every request goes through: its ids, its key, its limits, and how an error is sent."""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeAlias

import msgspec
from starlette.exceptions import HTTPException

from headrace.server import events
from headrace.server.budget import Held
from headrace.server.config import HttpConfig
from headrace.server.hosts import check_asked
from headrace.server.terminals import BUG_TEXT, Ending, Terminal

_log = logging.getLogger("headrace.server")

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers: TypeAlias = list[tuple[bytes, bytes]]

OPEN_PATHS: Final = frozenset({"/", "/page.css", "/page.js", "/health", "/ready"})
"""What is served without a key: that the server is there, and a page without what it shows."""

WATCHED_PATHS: Final = frozenset({"/health", "/ready", "/metrics"})
"""What is answered above the limit of connections too: how it fares then."""

ENDPOINTS: Final[Mapping[str, events.Endpoint]] = {
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat",
    "/v1/models": "models",
    "/tokenize": "tokenize",
}

BODY_WITHIN_S = 30.0  # and longer, as long as it comes at this rate
BODY_RATE = 1 << 16  # bytes per second

PIECE: Final = 1 << 16
"""Bytes of a whole response that are sent at once; each waits until its client took the last."""

LAST_WORD_WITHIN_S: Final = 0.5
FULL_AGAIN_S = 1.0  # when to come again after too many connections
_LABEL = re.compile(rb"[\x21-\x7e]{1,128}")
_TRACEPARENT = re.compile(rb"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


class Front:
    """The outermost part: limits, API key, the request's ids, and a last catch for bugs.

    It leaves in the scope's `state`: `label`, the client's X-Request-Id or one of ours;
    `traceparent`, as it came if it is one, or ""; `client`, whose share of the queue it takes;
    `known`, whether it may be told what only who may use the server is told. Where it finds
    `admitted` there, somebody else tells the request's end.
    """

    def __init__(
        self,
        app: App,
        told: events.Events,
        config: HttpConfig,
        *,
        keys: Sequence[str],
    ) -> None:
        self._app = app
        self._told = told
        self._config = config
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":  # nothing is served there
                await send({"type": "websocket.close", "code": 1008})
            return
        headers: Headers = scope["headers"]
        state = scope.setdefault("state", {})
        label = _introduce(headers, state)
        scope["app"] = self  # so that the router raises what it does not serve
        started = False

        async def labelled(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", label)]
            await send(message)

        try:
            self._check(scope, headers, state)
            await self._app(scope, receive, labelled)
            self._tell_served(scope)
        except Ending as exc:
            self._tell(scope, exc)
            await send_error(labelled, exc)
        except HTTPException as exc:
            await self._not_served(scope, labelled, exc)
        except asyncio.CancelledError:  # at the end of a drain
            await self._cut_off(scope, labelled, started=started)
            raise
        except Exception:
            _log.exception("%s %s failed", scope["method"], scope["path"])
            if started:
                raise
            bug = Ending(Terminal.BUG, BUG_TEXT)
            self._tell(scope, bug)
            await send_error(labelled, bug)

    async def _cut_off(self, scope: Scope, send: Send, *, started: bool) -> None:
        text = "the server is shutting down"
        ending = Ending(Terminal.SHUTTING_DOWN, text, retry_after_s=5.0)
        self._tell(scope, ending)
        if not started:
            with suppress(TimeoutError):  # what was sent to it before may be unread
                async with asyncio.timeout(LAST_WORD_WITHIN_S):
                    await send_error(send, ending)

    async def _not_served(self, scope: Scope, send: Send, exc: HTTPException) -> None:
        where = f"{scope['method']} {scope['path']}"
        ending = Ending(Terminal.UNKNOWN_PATH, f"{where[:200]} is not served here")
        if exc.status_code == 405:
            text = f"{where[:200]}: this path is served, and this method is not"
            ending = Ending(Terminal.WRONG_METHOD, text)
        self._tell(scope, ending)
        allow = (exc.headers or {}).get("Allow", "").encode()
        await send_error(send, ending, [(b"allow", allow)] if allow else ())

    def _tell_served(self, scope: Scope) -> None:
        """Completions tell their ends themselves; of page, health and metrics nobody counts any."""
        endpoint = _endpoint_of(scope["path"])
        if endpoint in ("tokenize", "models"):
            self._told.tell(events.Served(time.monotonic_ns(), endpoint, 200))

    def _tell(self, scope: Scope, ending: Ending) -> None:
        if "admitted" in scope["state"]:
            return
        endpoint = _endpoint_of(scope["path"])
        self._told.tell(
            events.Rejected(
                time.monotonic_ns(), endpoint, ending.terminal, ending.status, ending.text
            )
        )

    def _check(self, scope: Scope, headers: Headers, state: dict[str, Any]) -> None:
        self._check_limits(scope, headers)
        peer = scope.get("client")
        state["client"], state["known"] = peer[0] if peer else "local", True
        if not self._keys:
            host = header(headers, b"host").decode("latin-1")
            origin = header(headers, b"origin").decode("latin-1")
            own, allow_open = self._config.host, self._config.allow_open
            check_asked(host, origin, scope["method"], own=own, allow_open=allow_open)
            return
        scheme, _, given = header(headers, b"authorization").partition(b" ")
        given = given.strip() if scheme.lower() == b"bearer" else b""
        same = [hmac.compare_digest(given, key) for key in self._keys]  # all, in equal time
        state["known"] = any(same)
        if any(same):
            state["client"] = f"key-{same.index(True) + 1}"
        elif scope["path"] not in OPEN_PATHS:
            raise Ending(Terminal.UNAUTHORIZED, "give an API key: Authorization: Bearer KEY")

    def _check_limits(self, scope: Scope, headers: Headers) -> None:
        most = self._config.max_connections
        if scope["path"] not in WATCHED_PATHS and scope["state"].get("above"):
            text = f"more than {most} connections are open; come again later"
            raise Ending(Terminal.TOO_MANY_CONNECTIONS, text, retry_after_s=FULL_AGAIN_S)
        nbytes = sum(len(name) + len(value) for name, value in headers) + len(scope["raw_path"])
        if nbytes > self._config.max_header_bytes:
            most = self._config.max_header_bytes
            text = f"the headers have {nbytes} bytes and the limit is {most}"
            raise Ending(Terminal.HEADERS_TOO_LARGE, text)


def _introduce(headers: Headers, state: dict[str, Any]) -> bytes:
    """Leave the request's ids in its state; returns its label."""
    label = header(headers, b"x-request-id")
    if _LABEL.fullmatch(label) is None:
        label = secrets.token_hex(12).encode()
    traceparent = header(headers, b"traceparent")
    if _TRACEPARENT.fullmatch(traceparent) is None:
        traceparent = b""
    state["label"], state["traceparent"] = label.decode(), traceparent.decode()
    return label


def _endpoint_of(path: str) -> events.Endpoint:
    return "models" if path.startswith("/v1/models/") else ENDPOINTS.get(path, "other")


def header(headers: Headers, name: bytes) -> bytes:
    """The value of the first header of that name, which is in lower case; b"" without one."""
    return next((value for key, value in headers if key == name), b"")


async def read_body(scope: Scope, receive: Receive, max_nbytes: int, held: Held) -> bytes:
    """The whole body, whose bytes are held from when they come.

    Raises:
        Ending: it is larger than `max_nbytes`, too much is held already, it does not come in time,
        or its client leaves.
    """
    encoding = header(scope["headers"], b"content-encoding")
    if encoding.lower() not in (b"", b"identity"):
        raise Ending(Terminal.INVALID, "compressed bodies are not read; send it as it is")
    length = header(scope["headers"], b"content-length")
    if length.isdigit() and int(length[:20]) > max_nbytes:
        raise _too_large(max_nbytes)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_WITHIN_S) as limit:
            begun_s = asyncio.get_running_loop().time()
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Ending(Terminal.CLIENT_LEFT, "the client left before its body was here")
                piece = message.get("body", b"")
                if len(body) + len(piece) > max_nbytes:
                    raise _too_large(max_nbytes)
                held.grow(len(piece))
                body += piece
                limit.reschedule(begun_s + BODY_WITHIN_S + len(body) / BODY_RATE)
                more = message.get("more_body", False)
    except TimeoutError:
        text = f"the body came with less than {BODY_RATE} bytes/s after {BODY_WITHIN_S:.0f} s"
        raise Ending(Terminal.DEADLINE, text) from None
    return bytes(body)


def _too_large(max_nbytes: int) -> Ending:
    return Ending(Terminal.TOO_LARGE, f"the body has more than {max_nbytes} bytes; send a shorter")


async def send_json(
    send: Send, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    """A whole response of JSON."""
    fixed = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers]})
    for start in range(0, len(body), PIECE):
        end = start + PIECE
        piece = body[start:end]
        await send({"type": "http.response.body", "body": piece, "more_body": end < len(body)})


async def send_error(send: Send, ending: Ending, more: Sequence[tuple[bytes, bytes]] = ()) -> None:
    """A whole response that tells an error. more: headers of its own."""
    headers: Headers = [*more]
    if ending.retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, math.ceil(ending.retry_after_s))).encode()))
    if ending.terminal is Terminal.UNAUTHORIZED:
        headers.append((b"www-authenticate", b"Bearer"))
    if ending.terminal is Terminal.TOO_MANY_CONNECTIONS:
        headers.append((b"connection", b"close"))
    await send_json(send, ending.status, msgspec.json.encode(ending.body()), headers)


async def until_left(receive: Receive) -> None:
    """Return when the client has gone; its body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
