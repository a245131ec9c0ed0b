"""Clients that leave at a random moment of their request: what is held afterwards, and how soon
nothing is.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from headrace.bench.serve.asking import Answer, ask, begun, client_of, texts_of
from headrace.bench.serve.child import Served
from headrace.bench.serve.holding import Write, rest, settle, status, watch
from headrace.bench.serve.load import bodies_of, warm_up
from headrace.bench.serve.setting import Setting

if TYPE_CHECKING:
    import httpx

NUM_PROMPTS: Final = 16
LOOK_EVERY_S: Final = 0.25


async def run(setting: Setting, write: Write) -> None:
    """Start a server that looks at its owner four times a second, and measure it."""
    config = setting.config(page={"look_every_s": LOOK_EVERY_S})
    write({"measure": "config", "config": setting.told(config)})
    with Served(config) as served:
        await measure(served, setting, write)


async def measure(served: Served, setting: Setting, write: Write) -> None:
    """Leave, wait until all is free, and ask once more."""
    sizes = setting.sizes
    bodies = [
        {**body, "max_tokens": sizes.leaver_tokens}
        for body in bodies_of(setting, sizes.lengths, NUM_PROMPTS)
    ]

    def connect() -> httpx.AsyncClient:
        return client_of(served.url)

    async with connect() as client:
        await warm_up(client, bodies, sizes.leavers)
        expected = await texts_of(client, bodies[:1])
        alone_s = await _alone_s(client, bodies)
    before = await rest(served, connect)
    write(before.row("start"))
    async with connect() as client:
        watching = asyncio.ensure_future(watch(served, client, sizes.sample_s, write))
        numbers = iter(range(sizes.disconnects))
        draw = random.Random(setting.seed)
        leavers = (
            _leaver(client, bodies, numbers, alone_s, draw, write) for _ in range(sizes.leavers)
        )
        await asyncio.gather(*leavers)
        watching.cancel()
        await asyncio.wait([watching])
    write(await settle(served, connect, before))
    async with connect() as client:
        exact = await texts_of(client, bodies[:1]) == expected
    write({"measure": "after", "exact": exact})


async def _alone_s(client: httpx.AsyncClient, bodies: Sequence[Mapping[str, Any]]) -> list[float]:
    """How long each request takes alone; beside others few are over as soon as that."""
    answers = [await ask(client, body) for body in bodies]
    return [(answer.ended_ns - answer.begun_ns) / 1e9 for answer in answers]


async def _leaver(
    client: httpx.AsyncClient,
    bodies: Sequence[Mapping[str, Any]],
    numbers: Iterator[int],
    alone_s: Sequence[float],
    draw: random.Random,
    write: Write,
) -> None:
    for number in numbers:
        answer, label = begun(), f"leaver-{number}"
        headers = {"X-Request-Id": label}
        body = bodies[number % len(bodies)]
        asking = asyncio.ensure_future(ask(client, body, answer=answer, headers=headers))
        if number % 4 == 3:
            await _after_chunks(answer, asking, draw.randrange(1, body["max_tokens"]))
        else:
            await asyncio.wait([asking], timeout=draw.uniform(0, alone_s[number % len(bodies)]))
        phase = await _phase(client, label)
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
        write(
            {
                "measure": "leave",
                "number": number,
                "phase": phase,
                "prompt": len(body["prompt"]),
                "after_s": round((time.perf_counter_ns() - answer.begun_ns) / 1e9, 4),
                "tokens": answer.tokens,
                "status": answer.status,
                "finished": answer.finished,
                "error": answer.error,
            }
        )


async def _after_chunks(answer: Answer, asking: asyncio.Future[Answer], num_chunks: int) -> None:
    """Wait for so many chunks, or for the end."""
    for _ in itertools.repeat(None, num_chunks):
        more = asyncio.ensure_future(answer.more.wait())
        waited: list[asyncio.Future[Any]] = [more, asking]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        more.cancel()
        answer.more.clear()
        if asking.done():
            return


async def _phase(client: httpx.AsyncClient, label: str) -> str:
    """Where a request is, just before its client leaves."""
    told = await status(client)
    mine = next((each for each in told["open"] if each["label"] == label), None)
    if mine is None:
        return "over" if any(each["label"] == label for each in told["ended"]) else "not admitted"
    (choice,) = mine["choices"]
    if choice["phase"] == "prefill" and 0 < choice["bytes_imported"] < choice["bytes_total"]:
        return "importing"
    return str(choice["phase"])
