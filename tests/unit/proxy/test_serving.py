"""The proxy from start to exit, over a real socket and scripted decoders."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from headrace.errors import Refused
from headrace.proxy import serving
from headrace.proxy.config import ProxyConfig
from headrace.proxy.pool import Pool
from headrace.server.config import HttpConfig
from headrace.server.stopping import ToldToStop
from tests.unit.proxy.stand import EVENTS, ONE, TWO, Decoders

Meanwhile = Callable[..., Awaitable[None]]
WITHIN_S = 30.0


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before


@pytest.fixture
def decoders(monkeypatch: pytest.MonkeyPatch) -> Decoders:
    found = Decoders()
    monkeypatch.setattr(serving, "connections", lambda: found)
    return found


def config(drain_s: float = 30.0, port: int = 0) -> ProxyConfig:
    http = HttpConfig(port=port, drain_timeout_s=drain_s)
    return ProxyConfig(decoders=(ONE, TWO), http=http, log_level="error")


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


async def until(condition: Callable[[], bool]) -> None:
    """Turn the loop until it holds; what is waited for comes over a socket."""
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await asyncio.sleep(0.001)


class Run:
    """One run of `serve`; when it listens, `meanwhile` is begun with its address."""

    def __init__(self, meanwhile: Meanwhile) -> None:
        self.lines: list[str] = []
        self._meanwhile = meanwhile
        self._task: asyncio.Future[None] | None = None

    def serve(self, config: ProxyConfig) -> int:
        """Its exit status."""
        status = serving.serve(config, self._told)
        if self._task is not None:
            self._task.result()
        return status

    def said(self, text: str) -> bool:
        return any(text in line for line in self.lines)

    def _told(self, line: str) -> None:
        self.lines.append(line)
        if line.startswith("listening at "):
            url = line.split()[2].rstrip(",")
            self._task = asyncio.ensure_future(self._meanwhile(self, url))


async def stop(run: Run, url: str) -> None:
    """Do nothing but end it."""
    terminate()


def test_it_listens_once_it_has_looked_at_its_decoders_and_ends_with_0(decoders: Decoders) -> None:
    decoders.refuse[TWO] = httpx.ConnectError("nobody there")
    run = Run(stop)
    assert run.serve(config()) == 0
    warning, listening = run.lines
    assert warning == f"warning: decoder {TWO} is not up: nobody there"
    assert listening.startswith("listening at http://127.0.0.1:")
    assert listening.endswith(", 1 of 2 decoder(s) up, metrics at /metrics")
    assert sorted(decoders.looks) == [ONE, TWO]


@pytest.mark.usefixtures("decoders")
def test_told_to_stop_before_it_has_looked_it_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look(pool: Pool) -> None:
        terminate()
        await asyncio.Event().wait()

    monkeypatch.setattr(Pool, "look_at_all", look)
    run = Run(stop)
    assert run.serve(config()) == 0
    assert run.lines == ["told to stop before it served"]


@pytest.mark.usefixtures("decoders")
def test_told_to_stop_before_there_is_a_loop_it_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(running: Any) -> None:
        running.close()
        raise ToldToStop

    monkeypatch.setattr(asyncio, "run", begin)
    run = Run(stop)
    assert run.serve(config()) == 0
    assert run.lines == ["told to stop before it served"]


@pytest.mark.usefixtures("decoders")
def test_decoders_that_nobody_watches_any_more_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def watch(pool: Pool) -> None:
        raise KeyError("what")

    async def nothing(run: Run, url: str) -> None:
        pass

    monkeypatch.setattr(Pool, "watch", watch)
    with pytest.raises(KeyError, match="what"):
        Run(nothing).serve(config())


def test_a_port_that_is_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(Refused, match="is in use by another process"):
            Run(stop).serve(config(port=taken.getsockname()[1]))


def test_what_is_open_may_finish_and_a_second_signal_ends_the_rest(decoders: Decoders) -> None:
    replies: list[httpx.Response] = []

    async def meanwhile(run: Run, url: str) -> None:
        async with httpx.AsyncClient(timeout=WITHIN_S) as client:

            async def ask(name: str) -> None:
                path = f"{url}/v1/completions"
                replies.append(await client.post(path, json={}, headers={"x-request-id": name}))

            asking = [asyncio.ensure_future(ask(name)) for name in ("first", "second")]
            await until(lambda: len(decoders.calls) == 2)
            terminate()
            await until(lambda: run.said("draining: 2 request(s), at most 30 s"))
            named = {call.headers["x-request-id"]: call for call in decoders.calls}
            named["first"].answer(b"{}")
            await asking[0]
            assert not asking[1].done()
            terminate()
            await asking[1]

    assert Run(meanwhile).serve(config()) == 0
    first, second = replies
    assert (first.status_code, first.text) == (200, "{}")
    assert (second.status_code, second.json()["error"]["code"]) == (503, "shutting-down")
    assert all(call.closed for call in decoders.calls)


def test_a_client_that_reads_nothing_holds_up_no_end(
    decoders: Decoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "LAST_WORDS_S", 0.05)
    monkeypatch.setattr(serving, "BACKSTOP_S", 1000.0)

    with socket.socket() as client:

        async def meanwhile(run: Run, url: str) -> None:
            host, port = url.removeprefix("http://").split(":")
            client.connect((host, int(port)))
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n"
            client.sendall(head + b"\r\n{}")
            await until(lambda: len(decoders.calls) == 1)
            (call,) = decoders.calls
            event = b"data: " + b"x" * (1 << 20) + b"\n\n"
            call.answer(*[event] * 64, kind=EVENTS, end=False)
            await until(lambda: bool(select.select([client], [], [], 0)[0]))
            terminate()
            await until(lambda: run.said("draining: 1 request"))

        assert Run(meanwhile).serve(config(drain_s=0.05)) == 0
        assert decoders.calls[0].closed
