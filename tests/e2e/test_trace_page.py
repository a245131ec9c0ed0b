"""The page of a trace in a real browser: it shows something, says nothing, asks for nothing.

Needs chromium on PATH. Its own requests end at a resolver that knows no name, so that nothing
leaves this host; what counts is what a page asks for.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import struct
import subprocess
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from headrace.cli import run_command
from headrace.telemetry.chrome import encode
from headrace.telemetry.recording import Recording, Run
from tests.unit.telemetry.scenes import cancelled, streamed, whole

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), None)
WITHIN_S = 120
PHONE_PX = 360
OF_THE_BROWSER = "not an origin"  # who its network log says began a request that no page made

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason=f"no browser: none of {', '.join(NAMES)} is on PATH"
)

DARK = ("--blink-settings=preferredColorScheme=0",)
BLANK = "<!DOCTYPE html><html><head><title>blank</title></head><body></body></html>"
NOISY = """<!DOCTYPE html><html><head><title>noisy</title></head><body>
<script>console.error("a fault")</script><img src="https://headrace.invalid/a.png" alt=""/>
</body></html>"""


class Seen(NamedTuple):
    """What a browser showed of a page, told of it, and was asked for by it."""

    pixels: bytes
    console: list[str]
    requests: list[str]
    dom: str


def browse(page: Path, place: Path, *more: str) -> Seen:
    """Open a page in a fresh profile, with a screenshot."""
    assert BROWSER is not None
    place.mkdir()
    shot, log = place / "shot.png", place / "net.json"
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--no-first-run",
        "--hide-scrollbars",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--enable-logging=stderr",
        "--log-level=0",
        "--virtual-time-budget=5000",
        "--window-size=900,1400",
        f"--user-data-dir={place / 'profile'}",
        f"--log-net-log={log}",
        f"--screenshot={shot}",
        "--dump-dom",
    ]
    done = subprocess.run(
        [BROWSER, *flags, *more, page.as_uri()],
        env={**os.environ, "HOME": str(place)},
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return Seen(_raw_pixels(shot), told, sorted(_requests(log)), done.stdout)


def _requests(log: Path) -> set[str]:
    """The URLs that pages asked for, but for files."""
    events = json.loads(log.read_text(encoding="utf-8"))["events"]
    asked = [event.get("params", {}) for event in events]
    return {
        params["url"]
        for params in asked
        if params.get("initiator", OF_THE_BROWSER) != OF_THE_BROWSER
        and not params["url"].startswith(("file:", "data:"))
    }


def _raw_pixels(png: Path) -> bytes:
    """The filtered rows of a PNG; those of one colour are nearly all zeros."""
    content, at, packed = png.read_bytes(), 8, b""
    while at < len(content):
        nbytes, kind = struct.unpack(">I4s", content[at : at + 8])
        packed += content[at + 8 : at + 8 + nbytes] if kind == b"IDAT" else b""
        at += 12 + nbytes
    return zlib.decompress(packed)


def drawn(pixels: bytes) -> int:
    """How many bytes of the rows say that something changes there."""
    return len(pixels) - pixels.count(0)


def page_of(runs: Sequence[Run], place: Path) -> Path:
    """What `headrace trace --html` writes."""
    file, page = place / "trace.json", place / "page.html"
    file.write_bytes(encode(Recording(runs=tuple(runs))))
    assert run_command(["trace", str(file), "--html", str(page)]) == 0
    return page


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("page")
    return page_of([whole(), streamed(), cancelled()], place)


def test_a_page_is_shown_offline_without_a_word(page: Path, tmp_path: Path) -> None:
    blank = tmp_path / "blank.html"
    blank.write_text(BLANK)
    nothing = browse(blank, tmp_path / "blank")
    light = browse(page, tmp_path / "light")
    dark = browse(page, tmp_path / "dark", *DARK)
    for seen in (light, dark):
        assert seen.console == []
        assert seen.requests == []
        assert drawn(seen.pixels) > 20 * drawn(nothing.pixels)
    assert light.pixels != dark.pixels
    assert '<svg role="img"' in light.dom


def test_what_a_page_says_and_asks_for_would_be_seen(tmp_path: Path) -> None:
    noisy = tmp_path / "noisy.html"
    noisy.write_text(NOISY)
    seen = browse(noisy, tmp_path / "noisy")
    assert any("a fault" in line for line in seen.console)
    assert seen.requests == ["https://headrace.invalid/a.png"]


def test_nothing_sticks_out_on_a_phone(page: Path, tmp_path: Path) -> None:
    """In a frame, since a window cannot be as narrow as that."""
    content = html.escape(page.read_text(encoding="utf-8"))
    frame = tmp_path / "frame.html"
    frame.write_text(
        f"""<!DOCTYPE html><html><body>
<iframe id="phone" style="width:{PHONE_PX}px;height:600px;border:0" srcdoc="{content}"></iframe>
<p id="told"></p>
<script>
const phone = document.getElementById("phone");
phone.addEventListener("load", () => {{
  const root = phone.contentDocument.documentElement;
  document.getElementById("told").textContent = `${{root.scrollWidth}} of ${{root.clientWidth}}`;
}});
</script></body></html>""",
        encoding="utf-8",
    )
    seen = browse(frame, tmp_path / "phone")
    found = re.search(r'id="told">(\d+) of (\d+)<', seen.dom)
    assert found is not None
    needed, wide = map(int, found.groups())
    assert needed == wide <= PHONE_PX
