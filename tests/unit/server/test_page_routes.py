"""The page's routes: what they answer, with which headers, and what is in the files."""

from __future__ import annotations

import asyncio
import re
import threading
from html.parser import HTMLParser
from typing import Any

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from headrace.server import page_requests, page_routes
from headrace.server.config import PageConfig
from headrace.server.page_routes import CONTENT_SECURITY_POLICY, HEADERS, PUBLIC, routes
from headrace.server.page_state import PageState
from headrace.server.recent import Recent
from headrace.telemetry.style import STYLE
from tests.unit.server import page_scenes as scenes

FILES = [("/", "text/html"), ("/page.css", "text/css"), ("/page.js", "text/javascript")]


@pytest.fixture(scope="module")
def client() -> TestClient:
    recent = Recent(PageConfig())
    for event in scenes.busy():
        recent(event)
    now_ns = scenes.START + 27 * scenes.SECOND
    return TestClient(Starlette(routes=routes(recent, lambda: now_ns)))


@pytest.mark.parametrize(("path", "kind"), FILES)
def test_the_files(client: TestClient, path: str, kind: str) -> None:
    reply = client.get(path)
    assert reply.status_code == 200
    assert reply.headers["content-type"] == f"{kind}; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    assert len(reply.content) > 1_000
    head = client.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == reply.headers["content-length"]


def test_what_needs_no_key_is_the_files(client: TestClient) -> None:
    assert list(PUBLIC) == [path for path, _ in FILES]


@pytest.mark.parametrize("path", [*PUBLIC, "/status", "/trace/3", "/trace/99", "/trace/x"])
def test_each_answer_has_the_security_headers(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    for name, value in HEADERS.items():
        assert headers[name] == value
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


def test_the_policy_lets_nothing_in_that_is_not_from_here() -> None:
    allowed = dict(part.split(" ", 1) for part in CONTENT_SECURITY_POLICY.split("; "))
    assert allowed["default-src"] == "'none'"
    assert {allowed[f"{kind}-src"] for kind in ("script", "style", "connect")} == {"'self'"}
    assert not re.search("unsafe|http|\\*", CONTENT_SECURITY_POLICY)


def test_the_status(client: TestClient) -> None:
    reply = client.get("/status")
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["cache-control"] == "no-store"
    state = msgspec.json.decode(reply.content, type=PageState)
    assert (state.version, state.num_open, len(state.ended)) == (1, 6, 6)
    assert state.now_ns == scenes.START + 27 * scenes.SECOND


def test_a_trace_is_a_file_to_keep(client: TestClient) -> None:
    reply = client.get("/trace/3")
    assert reply.status_code == 200
    disposition = reply.headers["content-disposition"]
    assert disposition == 'attachment; filename="headrace-request-3.json"'
    assert reply.headers["cache-control"] == "no-store"
    assert reply.json()["headrace"]["runs"][0]["name"] == "request 3"


@pytest.mark.parametrize(
    "asked", ["99", "16", "x", "-3", "3.0", "%C2%B2", "%D9%A3", "0x3", "9" * 19, "9" * 5000, "%0D"]
)
def test_what_is_no_trace_is_told_as_that(client: TestClient, asked: str) -> None:
    """Also numbers that are too long to be read as such."""
    reply = client.get(f"/trace/{asked}")
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "unknown-path"
    assert len(reply.content) < 300


@pytest.mark.parametrize("path", [*PUBLIC, "/status", "/trace/3"])
def test_nothing_is_taken(client: TestClient, path: str) -> None:
    assert client.post(path, content=b"{}").status_code == 405


async def _get(app: Starlette, path: str) -> int:
    """The status of an answer, asked for within the running loop."""
    told = []

    async def receive() -> Any:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        told.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b""}
    await app(scope, receive, send)
    return int(told[0]["status"])


@pytest.mark.parametrize(("path", "does"), [("/trace/3", "encode"), ("/status", "draw")])
def test_what_takes_long_holds_up_nobody_and_is_done_one_at_a_time(
    path: str, does: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recent = Recent(PageConfig())
    for event in scenes.busy():
        recent(event)
    module = page_routes if does == "encode" else page_requests
    real = getattr(module, does)
    go_on, begun, under_way = threading.Event(), threading.Event(), list[int]()

    def slow(*args: Any) -> Any:
        under_way.append(1)
        assert len(under_way) == 1
        begun.set()
        assert go_on.wait(20)
        under_way.pop()
        return real(*args)

    monkeypatch.setattr(module, does, slow)

    async def ask() -> list[int]:
        app = Starlette(routes=routes(recent, lambda: scenes.START))
        asked = [asyncio.ensure_future(_get(app, path)) for _ in range(3)]
        await asyncio.to_thread(begun.wait, 20)
        assert await _get(app, "/page.css") == 200  # answered while the others are worked on
        assert not any(each.done() for each in asked)
        go_on.set()
        return await asyncio.gather(*asked)

    assert asyncio.run(ask()) == [200, 200, 200]


def test_a_drawing_of_what_is_kept_no_more_is_let_go() -> None:
    one = Recent(PageConfig())
    for event in scenes.traced(4):
        one(event)
    recent = Recent(PageConfig(), max_traced_nbytes=one.traced_nbytes)
    for event in scenes.traced(4):
        recent(event)
    (due,) = recent.undrawn()
    drawing = due.draw()
    for event in scenes.traced(8):
        recent(event)
    due.keep(drawing)
    assert not due.choice.is_drawn
    (due,) = recent.undrawn()
    due.keep(due.draw())
    assert recent.undrawn() == []


class _Markup(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_the_markup_has_nothing_inline_and_names_nothing_elsewhere(client: TestClient) -> None:
    markup = _Markup()
    markup.feed(client.get("/").text)
    for tag, facts in markup.tags:
        assert tag != "style"
        assert not [name for name in facts if name.startswith("on") or name == "style"]
        assert tag != "script" or facts.get("src") == "page.js"
        for name in ("src", "href"):
            value = facts.get(name) or ""
            assert "//" not in value.removeprefix("data:").replace("http://www.w3.org", "")
    ids = [facts["id"] for _, facts in markup.tags if "id" in facts]
    assert len(ids) == len(set(ids))
    assert all(facts.get("scope") == "col" for tag, facts in markup.tags if tag == "th")


def test_the_script_makes_no_markup_and_knows_the_ids(client: TestClient) -> None:
    script, markup = client.get("/page.js").text, client.get("/").text
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b", script)
    for name in re.findall(r'byId\("([^"]+)"\)', script):
        assert f'id="{name}"' in markup


def test_the_style_is_that_of_the_trace_page_and_more(client: TestClient) -> None:
    style: Any = client.get("/page.css").text
    assert style.startswith(STYLE)
    assert style.count("prefers-color-scheme: dark") == 2
    used = set(re.findall(r"var\((--[a-z-]+)\)", style))
    assert used <= set(re.findall(r"(--[a-z-]+):", style))
