"""Sources that are killed again and again under load: every accepted request ends with exactly its
text, or with an error.

Sources are never set aside here: `[restart]` forgets a death after 1 s of life and allows 1000 in a
row, since a kill every few seconds is the experiment. Requests fail, or are retried on another
attempt, by turns.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from headrace.bench.serve.asking import ask, client_of, texts_of
from headrace.bench.serve.child import Served, parent_of
from headrace.bench.serve.holding import (
    SETTLE_WITHIN_S,
    Write,
    rest,
    restarts,
    settle,
    status,
)
from headrace.bench.serve.load import PAUSE_S, bodies_of, warm_up
from headrace.bench.serve.setting import Setting

if TYPE_CHECKING:
    import httpx

NUM_PROMPTS: Final = 12
CLIENTS: Final = 4
SOURCES: Final = (2, 1)
RESTART: Final = {"healthy_after_s": 1.0, "max_failures": 1000, "longest_delay_s": 1.0}
LOOK: Final = {"look_every_s": 0.25}  # what is killed is known by a report at most so old
ON_FAILURE: Final = ("fail", "retry")


async def run(setting: Setting, write: Write) -> None:
    """Measure a decoder with two sources, and one with a single source."""
    for sources in SOURCES:
        config = setting.config(sources=sources, restart=RESTART, page=LOOK)
        write({"measure": "config", "sources": sources, "config": setting.told(config)})

        def placed(row: dict[str, Any], sources: int = sources) -> None:
            write({**row, "sources": sources})

        with Served(config) as served:
            await measure(served, setting, placed)


async def measure(served: Served, setting: Setting, write: Write) -> None:
    """References first, then kills under load, then references once more."""
    sizes = setting.sizes
    bodies = bodies_of(setting, sizes.lengths, NUM_PROMPTS)

    def connect() -> httpx.AsyncClient:
        return client_of(served.url)

    async with connect() as client:
        await warm_up(client, bodies, CLIENTS)
        expected = await texts_of(client, bodies)
    before = await rest(served, connect)
    write(before.row("start"))
    async with connect() as client:
        killing = asyncio.ensure_future(_kill(served, client, sizes.kill_every_s, write))
        until_s = time.monotonic() + sizes.kills_s
        loads = (_client(client, at, bodies, expected, until_s, write) for at in range(CLIENTS))
        await asyncio.gather(*loads)
        killing.cancel()
        with suppress(asyncio.CancelledError):
            await killing
        told = await _when_all_serve(client)
    write({"measure": "restarts", "restarts": restarts(told)})
    write(await settle(served, connect, before))
    async with connect() as client:
        exact = await texts_of(client, bodies) == expected
    write({"measure": "after", "exact": exact})


async def _client(
    client: httpx.AsyncClient,
    at: int,
    bodies: Sequence[Mapping[str, Any]],
    expected: Sequence[str],
    until_s: float,
    write: Write,
) -> None:
    number, origin_ns = at, time.perf_counter_ns()
    while time.monotonic() < until_s:
        which = number % len(bodies)
        on_failure = ON_FAILURE[number // CLIENTS % len(ON_FAILURE)]
        answer = await ask(client, {**bodies[which], "on_failure": on_failure})
        row = answer.row(origin_ns)
        del row["gaps_us"]
        row |= {"number": number, "prompt": len(bodies[which]["prompt"]), "on_failure": on_failure}
        row["verdict"] = verdict(row["kind"], answer.text, expected[which])
        write(row)
        number += CLIENTS
        if answer.kind != "ok":
            await asyncio.sleep(PAUSE_S)


def verdict(kind: str, text: str, expected: str) -> str:
    """`exact`; `error` with a text that is right as far as it goes; else `wrong`."""
    if kind == "ok":
        return "exact" if text == expected else "wrong"
    return "error" if expected.startswith(text) else "wrong"


async def _kill(served: Served, client: httpx.AsyncClient, every_s: float, write: Write) -> None:
    """Kill a source in service, by turns, and each only if it is a grandchild of this process."""
    begun_s, count = time.monotonic(), 0
    while True:
        await asyncio.sleep(max(0.0, begun_s + (count + 1) * every_s - time.monotonic()))
        (decoder,) = (await status(client))["decoders"]
        sources = decoder["sources"]
        victim = sources[count % len(sources)]
        ours = parent_of(victim["pid"]) == decoder["pid"] and (
            parent_of(decoder["pid"]) == served.pid
        )
        killed = victim["state"] == "in service" and ours
        if killed:
            with suppress(ProcessLookupError):
                os.kill(victim["pid"], signal.SIGKILL)
        at_s = round(time.monotonic() - begun_s, 3)
        row = {"measure": "kill", "at_s": at_s, "source": victim["name"], "killed": killed}
        write({**row, "state": victim["state"]})
        count += 1


async def _when_all_serve(client: httpx.AsyncClient) -> dict[str, Any]:
    """The status once every source is in service again, or after a minute; told after the call."""
    begun_s = time.monotonic()
    while True:
        told, took_s = await status(client), time.monotonic() - begun_s
        fresh = all((each["looked_s"] or 0) < took_s for each in told["decoders"])
        states = {each["state"] for decoder in told["decoders"] for each in decoder["sources"]}
        if (fresh and states == {"in service"}) or took_s > SETTLE_WITHIN_S:
            return told
        await asyncio.sleep(PAUSE_S)
