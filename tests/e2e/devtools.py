"""A headless Chromium that is told what to do over a pipe: one process for many pages.

It asks for nothing outside this host: the only names that its resolver knows are addresses.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

NAMES: Final = ("chromium", "chromium-browser", "google-chrome")
BROWSER: Final = next((path for name in NAMES if (path := shutil.which(name))), None)
WITHIN_S: Final = 60

_FLAGS: Final = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--remote-debugging-pipe",
)


class Browser:
    """One browser; `call` speaks its protocol, events are kept in order for whoever looks."""

    def __init__(self, place: Path) -> None:
        if BROWSER is None:
            raise LookupError("no browser")
        place.mkdir()
        self.events: list[dict[str, Any]] = []
        self._number = 0
        self._rest = b""
        told, self._to = os.pipe()
        self._from, answers = os.pipe()
        self._log = (place / "log").open("wb")
        # It reads at descriptor 3 and writes at 4, whatever they are here.
        moves = f'exec 3<&{told} 4>&{answers}; exec "$@"'
        self._process = subprocess.Popen(
            [
                "/bin/bash",
                "-c",
                moves,
                "browser",
                BROWSER,
                *_FLAGS,
                f"--user-data-dir={place / 'p'}",
            ],
            env={**os.environ, "HOME": str(place)},
            pass_fds=(told, answers),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        os.close(told)
        os.close(answers)

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Ask and wait for the answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + WITHIN_S
        while True:
            reply = self._next(deadline)
            if reply.get("id") != self._number:
                self.events.append(reply)
                continue
            if "error" in reply:
                raise RuntimeError(f"{method}: {reply['error']}")
            result: dict[str, Any] = reply["result"]
            return result

    def close(self) -> None:
        """End it in good order, or else by force."""
        with suppress(RuntimeError, OSError, TimeoutError):
            self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._log.close()

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._from], [], [], left)[0]:
                raise TimeoutError("the browser does not answer")
            more = os.read(self._from, 1 << 20)
            if not more:
                raise RuntimeError("the browser is gone")
            self._rest += more
        line, self._rest = self._rest.split(b"\0", 1)
        found: dict[str, Any] = json.loads(line)
        return found


class Tab:
    """One page of a browser, of its own storage."""

    def __init__(self, browser: Browser, width: int, height: int) -> None:
        self._browser = browser
        self._context = browser.call("Target.createBrowserContext")["browserContextId"]
        target = browser.call(
            "Target.createTarget", url="about:blank", browserContextId=self._context
        )
        attached = browser.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session: str = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        self.paint(dark=False)

    def resize(self, width: int, height: int) -> None:
        """Make it so many pixels wide, also where no window could be as narrow."""
        size = {"width": width, "height": height}
        self.call("Emulation.setDeviceMetricsOverride", **size, deviceScaleFactor=1, mobile=False)

    def paint(self, *, dark: bool) -> None:
        """As for someone who prefers dark, or light."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Ask the page's part of the browser."""
        return self._browser.call(method, self._session, **params)

    def open(self, url: str) -> None:
        """Go to a page."""
        self.call("Page.navigate", url=url)

    def tell(self, expression: str) -> Any:
        """What a script of ours comes to in the page; a promise is waited for."""
        result = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(str(result["exceptionDetails"]))
        return result["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait until a condition holds in the page, looked at with each of its frames."""
        held = self.tell(
            f"""new Promise((done) => {{
              const since = performance.now();
              const look = () => {{
                if ({condition}) done(true);
                else if (performance.now() - since > 20000) done(false);
                else setTimeout(look, 20);
              }};
              look();
            }})"""
        )
        if held is not True:
            raise TimeoutError(f"it does not come to pass that {condition}")

    def press(self, key: str) -> None:
        """A key goes down and up."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, **_KEYS.get(key, {}))

    def shot(self) -> bytes:
        """The whole page as a PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        reply = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(reply["data"])

    def said(self) -> list[str]:
        """What it wrote to its console, and what the browser complained of."""
        self.tell("0")  # what it said before has come by then
        found = []
        for event in self._mine("Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
            found.append(json.dumps(event["params"])[:400])
        for event in self._mine("Log.entryAdded"):
            entry = event["params"]["entry"]
            found.append(f"{entry['level']}: {entry['text']} {entry.get('url', '')}")
        return found

    def asked(self) -> set[str]:
        """The URLs that it asked for."""
        return {
            event["params"]["request"]["url"] for event in self._mine("Network.requestWillBeSent")
        }

    def close(self) -> None:
        """Forget it and all that it kept."""
        self._browser.call("Target.disposeBrowserContext", browserContextId=self._context)

    def _mine(self, *methods: str) -> list[dict[str, Any]]:
        return [
            event for event in self._browser.events
            if event.get("sessionId") == self._session and event["method"] in methods
        ]  # fmt: skip


_KEYS: Final[dict[str, dict[str, Any]]] = {
    "Tab": {"windowsVirtualKeyCode": 9},
    "Enter": {"windowsVirtualKeyCode": 13, "text": "\r"},
}


@contextmanager
def tab(browser: Browser, width: int, height: int) -> Iterator[Tab]:
    """A page that is closed afterwards."""
    page = Tab(browser, width, height)
    try:
        yield page
    finally:
        page.close()
