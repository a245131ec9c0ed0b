"""The live page in a real browser: what it shows of a server's states, and what it asks for.

A small app tells the states; no model runs. Needs chromium on PATH, starlette and uvicorn. Where
HEADRACE_SCREENSHOTS names a folder, what was seen is kept there as serve-*.png.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import uvicorn
from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from headrace.server.config import PageConfig
from headrace.server.events import Event
from headrace.server.page_routes import PUBLIC, routes
from headrace.server.recent import Recent
from headrace.server.terminals import Terminal
from tests.e2e.devtools import BROWSER, NAMES, Browser, Tab, tab
from tests.unit.server import page_scenes as scenes

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason=f"no browser: none of {', '.join(NAMES)} is on PATH"
)

KEY: Final = "a key for tests"
WIDE: Final = (1180, 800)
PHONE: Final = (360, 740)
NOTES: Final = {("cpu", "rngd"): "emulated"}


class Served:
    """The routes of one page behind a port; `faulty`: the status is answered 503; `key`: needed."""

    def __init__(self) -> None:
        self.recent = Recent(PageConfig())
        self.now_ns = scenes.START
        self.faulty = self.key = False
        self.asked = 0
        app = Starlette(
            routes=[*self._routes(), Route("/metrics", _metrics)],
            middleware=[Middleware(BaseHTTPMiddleware, dispatch=self._guard)],
        )
        config = uvicorn.Config(app, port=0, log_level="error", lifespan="off", ws="none")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def start(self) -> str:
        """Listen; the URL of the page."""
        socket = self._server.config.bind_socket()
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [socket]}, daemon=True
        )
        self._thread.start()
        return f"http://127.0.0.1:{socket.getsockname()[1]}/"

    def tell(self, events: Iterable[Event], now_ns: int, config: PageConfig | None = None) -> None:
        """Begin anew with these events."""
        config = PageConfig() if config is None else config
        self.recent = Recent(config, notes=NOTES, stamp={"pair": "a test"})
        for event in events:
            self.recent(event)
        self.now_ns, self.faulty, self.key = now_ns, False, False

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(20)

    def _routes(self) -> list[Route]:
        """Those of whatever is told by now."""

        class Late(Recent):
            snapshot = staticmethod(lambda now_ns: self.recent.snapshot(now_ns))
            recording_of = staticmethod(lambda request: self.recent.recording_of(request))
            undrawn = staticmethod(lambda: self.recent.undrawn())

        return routes(Late(PageConfig()), lambda: self.now_ns)

    async def _guard(self, request: Request, answer: Callable[[Request], Any]) -> Response:
        self.asked += request.url.path == "/status"
        guarded = request.url.path not in PUBLIC
        if self.key and guarded and request.headers.get("authorization") != f"Bearer {KEY}":
            return PlainTextResponse("no", 401)
        if self.faulty and request.url.path == "/status":
            return PlainTextResponse("no", 503)
        response: Response = await answer(request)
        return response


async def _metrics(request: Request) -> Response:
    return PlainTextResponse("")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    found = Browser(tmp_path_factory.mktemp("browser") / "home")
    yield found
    found.close()


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Served, str]]:
    served = Served()
    url = served.start()
    yield served, url
    served.close()


SEEN_AGAIN: Final = "document.dispatchEvent(new Event('visibilitychange'))"  # it asks at once
LIVE: Final = "document.getElementById('live')?.textContent === 'live'"


def text_of(page: Tab, selector: str) -> str:
    """The text of what is shown there."""
    text: str = page.tell(f"document.querySelector({selector!r}).innerText")
    return text


def keep(name: str, page: Tab) -> None:
    """A screenshot, if somebody wants it."""
    folder = os.environ.get("HEADRACE_SCREENSHOTS")
    if folder:
        (Path(folder) / f"serve-{name}.png").write_bytes(page.shot())


def check_on_a_phone(name: str, page: Tab) -> None:
    """Nothing sticks out, and the page cannot be moved sideways."""
    page.resize(*PHONE)
    needed, wide = page.tell(
        "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    assert needed == wide == PHONE[0]
    keep(f"{name}-phone", page)


@pytest.fixture
def shown(server: tuple[Served, str], browser: Browser) -> Iterator[Callable[..., Tab]]:
    """Opens the page on a scene and waits until it is live."""
    served, url = server
    tabs: list[Tab] = []

    def show(scene: Callable[[], Iterable[Event]], config: PageConfig | None = None) -> Tab:
        served.tell(scene(), scenes.START + 27 * scenes.SECOND, config)
        page = Tab(browser, *WIDE)
        tabs.append(page)
        page.open(url)
        page.until(LIVE)
        return page

    yield show
    for page in tabs:
        assert page.said() == []
        assert all(asked.startswith((url, "data:")) for asked in page.asked())
        page.close()


Show = Callable[..., Tab]


def test_an_empty_server(shown: Show) -> None:
    page = shown(scenes.empty)
    keep("empty", page)
    assert "4 of 4 free" in text_of(page, "#decoders")
    for word in ("No request is open", "No request has ended yet", "None since the start"):
        assert word in text_of(page, "#content")
    assert page.tell("document.getElementById('alarms').hidden") is True
    assert "host clock" in text_of(page, "footer")
    check_on_a_phone("empty", page)


def test_a_busy_server(shown: Show) -> None:
    page = shown(scenes.busy)
    keep("busy", page)
    assert page.tell("document.querySelectorAll('#drawings svg').length") == 6
    assert page.tell("document.querySelectorAll('#drawings .mark.published').length") == 5
    opened = text_of(page, "#open-rows")
    for phase in ("decoding", "prefill", "parked", "waiting", "queued"):
        assert phase in opened
    assert "5.3 MB of 8.0 MB" in opened
    assert page.tell("document.querySelectorAll('#recent-rows tr').length") == 6
    assert "emulated" in text_of(page, "#decoder-list")
    assert "short prompt" in text_of(page, "#recent-rows")
    faults = text_of(page, "#fault-rows")
    for reason in ("deadline", "queue-full", "late"):
        assert reason in faults
    look = "['body', '.cell', '#figures dd'].map((each) => { const style = getComputedStyle("
    look += "document.querySelector(each)); return style.backgroundColor + style.color; })"
    light = page.tell(look)
    page.paint(dark=True)
    assert all(one != other for one, other in zip(light, page.tell(look), strict=True))
    keep("busy-dark", page)
    page.paint(dark=False)
    check_on_a_phone("busy", page)


def test_a_source_that_is_set_aside(shown: Show) -> None:
    page = shown(scenes.failed_source)
    keep("failed-source", page)
    assert f"source rngd of decoder cpu is set aside: {scenes.DEAD}" in text_of(page, "#alarms")
    assert "source-died" in text_of(page, "#fault-rows")
    assert "a source was set aside" in text_of(page, "#fault-rows")
    check_on_a_phone("failed-source", page)


def test_a_server_that_keeps_no_ended_request_says_so(shown: Show) -> None:
    page = shown(scenes.busy, PageConfig(recent=0))
    assert "None are kept: the config has recent = 0" in text_of(page, "#content")
    assert "No request has ended yet" not in text_of(page, "#content")


def test_a_text_that_runs_the_other_way_turns_nothing_beside_it_round(shown: Show) -> None:
    def scene() -> Iterator[Event]:
        yield from scenes.busy()
        yield replace(scenes.arrived(99), model="letters\u202e")

    page = shown(scene)
    assert "letters" in text_of(page, "#open-rows")
    bidi = "[...document.querySelectorAll('#content td, #content th, #content span')].map("
    bidi += "(each) => getComputedStyle(each).unicodeBidi)"
    assert set(page.tell(bidi)) == {"isolate"}


def test_a_quarantined_slot_and_lane(shown: Show) -> None:
    page = shown(scenes.quarantined)
    keep("quarantined", page)
    cells = "[...document.querySelectorAll('.cell.bad')].map((cell) => cell.innerText)"
    lane, slot = page.tell(cells)
    assert "quarantined" in lane
    assert scenes.LOST in lane
    assert "slot 1" in slot
    assert "41 s" in slot
    assert scenes.LOST in text_of(page, "#alarms")
    assert scenes.LOST in text_of(page, "#fault-rows")
    check_on_a_phone("quarantined", page)


def test_what_a_page_says_and_asks_for_would_be_seen(
    server: tuple[Served, str], browser: Browser
) -> None:
    """And the policy of the page refuses scripts that are not its own, and other origins."""
    served, url = server
    served.tell(scenes.empty(), scenes.START + 27 * scenes.SECOND)
    with tab(browser, *WIDE) as page:
        page.open(url)
        page.until(LIVE)
        assert page.said() == []
        assert {url, f"{url}page.css", f"{url}page.js", f"{url}status"} <= page.asked()
        page.tell(
            """console.error("a fault");
            document.body.append(Object.assign(document.createElement("script"), { text: "x=1" }));
            fetch("https://headrace.invalid/").catch(() => 0)"""
        )
        said = "".join(page.said())
        assert "a fault" in said
        assert "script" in said
        assert "https://headrace.invalid/" in said
        assert page.tell("typeof x") == "undefined"


def test_texts_of_clients_are_shown_as_text(shown: Show) -> None:
    evil = '<img src=x onerror="console.log(1)"><b>&amp;'

    def scene() -> Iterator[Event]:
        yield from scenes.empty()
        yield scenes.arrived(1, label=evil)
        yield from scenes.served(2, label=evil, terminal=Terminal.BUG, reason=evil)

    page = shown(scene)
    assert text_of(page, "#recent-rows").count(evil) == 2
    assert evil in text_of(page, "#open-rows")
    assert page.tell("document.querySelectorAll('main img, main b').length") == 0


def test_keys_reach_everything_and_the_focus_survives_an_update(
    shown: Show, server: tuple[Served, str]
) -> None:
    page = shown(scenes.busy)
    reached = set()
    for _ in range(24):
        page.press("Tab")
        reached.add(page.tell("document.activeElement.textContent"))
        outline = page.tell("getComputedStyle(document.activeElement).outlineStyle")
        if page.tell("document.activeElement === document.body"):
            break  # past the last one
        assert outline == "solid"
    assert {"Skip to the figures", "decoders", "faults", "trace", "/status"} <= reached
    page.tell("document.querySelector('#recent-rows a').focus()")
    before = server[0].asked
    page.until("document.getElementById('up').textContent.includes('27 s')")
    server[0].now_ns += scenes.SECOND
    page.until("document.getElementById('up').textContent.includes('28 s')")
    assert server[0].asked > before
    assert page.tell("document.activeElement.textContent") == "trace"
    assert page.tell("document.querySelectorAll('th:not([scope])').length") == 0


def test_a_server_that_fails_is_told_and_asked_less_often(
    server: tuple[Served, str], browser: Browser
) -> None:
    served, url = server
    served.tell(scenes.empty(), scenes.START + 3 * scenes.SECOND)
    with tab(browser, *WIDE) as page:
        page.open(url)
        page.until(LIVE)
        served.faulty = True
        page.until("document.getElementById('live')?.textContent.includes('HTTP 503')")
        assert re.search(r"Next try in \d+ s", text_of(page, "#live"))
        assert "4 of 4 free" in text_of(page, "#decoders")
        served.faulty = False
        page.tell(SEEN_AGAIN)
        page.until(LIVE)


def test_a_key_is_asked_for_and_kept_in_the_tab(
    server: tuple[Served, str], browser: Browser
) -> None:
    served, url = server
    served.tell(scenes.busy(), scenes.START + 27 * scenes.SECOND)
    served.key = True
    with tab(browser, *WIDE) as page:
        page.open(url)
        page.until("document.activeElement?.id === 'key'")
        keep("key", page)
        page.call("Input.insertText", text="a wrong one")
        page.press("Enter")
        page.until("document.getElementById('key-says').textContent.includes('refuses')")
        page.call("Input.insertText", text=KEY)
        page.press("Enter")
        page.until(LIVE)
        assert page.tell("document.cookie + localStorage.length") == "0"
        offered = page.tell(
            """new Promise((done) => {
              URL.createObjectURL = (blob) => { blob.text().then(done); return "#"; };
              document.querySelector("#recent-rows a").click();
            })"""
        )
        assert '"headrace"' in offered


def test_a_page_that_nobody_sees_asks_for_nothing(shown: Show, server: tuple[Served, str]) -> None:
    page = shown(scenes.empty)
    page.tell(
        """Object.defineProperty(document, "hidden", { value: true, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"))"""
    )
    page.tell("fetch('page.css').then((reply) => reply.text())")  # what was under way has come
    before = server[0].asked
    page.tell("new Promise((done) => setTimeout(done, 1200))")  # it would ask each second
    assert server[0].asked == before
    page.tell(
        """Object.defineProperty(document, "hidden", { value: false });
        document.dispatchEvent(new Event("visibilitychange"))"""
    )
    started = time.monotonic()
    while server[0].asked == before:
        assert time.monotonic() - started < 20
        page.tell("new Promise((done) => setTimeout(done, 20))")
