"""Requests that are none, and ten thousand mutated bodies: no 5xx, no hang, nothing left behind."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from headrace.bench.serve.asking import client_of, texts_of
from headrace.bench.serve.child import Served
from headrace.bench.serve.holding import Write, rest, settle, watch
from headrace.bench.serve.load import bodies_of, warm_up
from headrace.bench.serve.nonsense import Nonsense, mutated, table
from headrace.bench.serve.setting import Setting

if TYPE_CHECKING:
    import httpx

WITHIN_S: Final = 10.0
MORE_WITHIN_S: Final = 0.2  # what an unfinished request may be answered without its rest
FUZZ_WITHIN_S: Final = 120.0
FUZZERS: Final = 6
CONTEXT: Final = 256
"""A mutated chat that lost its max_tokens goes on to the end of the context."""


async def run(setting: Setting, write: Write) -> None:
    """Start a server with a short context, and measure it."""
    config = setting.config()
    config["decoders"][0]["context"] = min(CONTEXT, setting.context)
    write({"measure": "config", "config": setting.told(config)})
    with Served(config) as served:
        await measure(served, setting, write)


async def measure(served: Served, setting: Setting, write: Write) -> None:
    """The table through raw sockets, then the mutations, then a good request once more."""
    sizes = setting.sizes
    bodies = bodies_of(setting, (min(32, *sizes.lengths),), 2)

    def connect() -> httpx.AsyncClient:
        return client_of(served.url)

    async with connect() as client:
        await warm_up(client, bodies, FUZZERS)
        expected = await texts_of(client, bodies[:1])
    before = await rest(served, connect)
    write(before.row("start"))
    async with connect() as client:
        watching = asyncio.ensure_future(watch(served, client, sizes.sample_s, write))
        for each in table(setting.model, sizes.malformed):
            write(await _sent(served.url, each))
        await _fuzz(served.url, setting, write)
        watching.cancel()
        await asyncio.wait([watching])
    write(await settle(served, connect, before))
    async with connect() as client:
        exact = await texts_of(client, bodies[:1]) == expected
    write({"measure": "after", "exact": exact, "alive": served.alive})


async def _sent(url: str, nonsense: Nonsense) -> dict[str, Any]:
    """Send it through a socket of its own; a row with the status, or `closed`, or `hang`."""
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    begun_s = time.monotonic()
    try:
        outcome = await _outcome(reader, writer, nonsense)
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
    return {
        "measure": "malformed",
        "name": nonsense.name,
        "nbytes": len(nonsense.raw),
        "outcome": outcome,
        "took_ms": round((time.monotonic() - begun_s) * 1e3, 2),
    }


async def _outcome(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, nonsense: Nonsense
) -> str:
    try:
        writer.write(nonsense.raw)
        with suppress(TimeoutError):
            async with asyncio.timeout(WITHIN_S):
                await writer.drain()
        line = await _line(reader, WITHIN_S if nonsense.whole else MORE_WITHIN_S)
        if line is None and not nonsense.whole:
            writer.write_eof()  # the rest never comes
            line = await _line(reader, WITHIN_S)
    except OSError:  # refused before all was sent
        return "closed"
    if line is None:
        return "hang"
    words = line.split()
    return words[1].decode("latin-1") if len(words) > 1 else "closed"


async def _line(reader: asyncio.StreamReader, seconds: float) -> bytes | None:
    """The status line; empty if the connection was closed, None if nothing came."""
    try:
        async with asyncio.timeout(seconds):
            return await reader.readline()
    except TimeoutError:
        return None


async def _fuzz(url: str, setting: Setting, write: Write) -> None:
    """All mutated bodies; a row of counts, and one for each that was not as it should be."""
    counts: Counter[str] = Counter()
    cases = mutated(setting.model, setting.sizes.fuzz, setting.seed)
    begun_s = time.monotonic()
    async with client_of(url) as client:
        await asyncio.gather(*(_fuzzer(client, cases, counts, write) for _ in range(FUZZERS)))
    took_s = round(time.monotonic() - begun_s, 1)
    write({"measure": "fuzz", "counts": dict(sorted(counts.items())), "took_s": took_s})


async def _fuzzer(
    client: httpx.AsyncClient,
    cases: Iterator[tuple[str, bytes]],
    counts: Counter[str],
    write: Write,
) -> None:
    import httpx

    headers = {"Content-Type": "application/json"}
    for path, raw in cases:
        try:
            response = await client.post(path, content=raw, headers=headers, timeout=FUZZ_WITHIN_S)
            outcome = str(response.status_code)
            if response.status_code == 200 and b'data: {"error"' in response.content:
                outcome = "200 and an error event"
        except httpx.TimeoutException:
            outcome = "hang"
        except httpx.HTTPError as exc:
            outcome = type(exc).__name__
        counts[outcome] += 1
        if not is_well(outcome):
            write({"measure": "fault", "path": path, "body": raw.hex(), "outcome": outcome})


def is_well(outcome: str) -> bool:
    """Whether nonsense may be answered so: by any status below 500, or by closing."""
    return outcome == "closed" or (outcome.isdigit() and int(outcome) < 500)
