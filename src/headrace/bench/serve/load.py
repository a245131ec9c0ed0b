"""Clients in a closed loop, for minutes: what fails, times, memory, and the ledger at the end."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from headrace.bench.serve.asking import Answer, ask, body_of, client_of, prompts_of, texts_of
from headrace.bench.serve.child import Served
from headrace.bench.serve.holding import Write, rest, settle, watch
from headrace.bench.serve.setting import Setting

if TYPE_CHECKING:
    import httpx

NUM_PROMPTS = 32
PAUSE_S = 0.2  # after a request that failed, so that a server that refuses is not asked in a spin


async def run(setting: Setting, write: Write) -> None:
    """Start a server and measure it."""
    config = setting.config()
    write({"measure": "config", "config": setting.told(config)})
    with Served(config) as served:
        await measure(served, setting, write)


async def measure(served: Served, setting: Setting, write: Write) -> None:
    """A warm-up, rest, the load with memory looked at meanwhile, and rest again."""
    sizes = setting.sizes
    bodies = bodies_of(setting, sizes.lengths, NUM_PROMPTS)

    def connect() -> httpx.AsyncClient:
        return client_of(served.url)

    async with connect() as client:
        await warm_up(client, bodies, sizes.clients)
    before = await rest(served, connect)
    write(before.row("start"))
    async with connect() as client:
        watching = asyncio.ensure_future(watch(served, client, sizes.sample_s, write))
        await closed_loop(client, bodies, sizes.clients, sizes.load_s, write)
        watching.cancel()
        await asyncio.wait([watching])
    write(await settle(served, connect, before))


def bodies_of(setting: Setting, lengths: Sequence[int], count: int) -> list[dict[str, Any]]:
    """Requests of `count` prompts of these lengths."""
    prompts = prompts_of(setting.directory, lengths, count, setting.seed)
    return [body_of(setting.model, prompt, setting.sizes.tokens) for prompt in prompts]


async def warm_up(
    client: httpx.AsyncClient, bodies: Sequence[dict[str, Any]], at_once: int
) -> None:
    """First use of the kernels, of all memory and of all connections."""
    await texts_of(client, bodies[:2])
    await asyncio.gather(
        *(ask(client, body) for body in itertools.islice(itertools.cycle(bodies), 2 * at_once))
    )


async def closed_loop(
    client: httpx.AsyncClient,
    bodies: Sequence[dict[str, Any]],
    clients: int,
    seconds: float,
    write: Write,
    **place: Any,
) -> None:
    """Each client asks again as soon as it was answered; a row for each answer."""
    origin_ns, until_s = time.perf_counter_ns(), time.monotonic() + seconds
    numbers = itertools.count()

    def told(answer: Answer, number: int) -> None:
        prompt = len(bodies[number % len(bodies)]["prompt"])
        write({**answer.row(origin_ns), "number": number, "prompt": prompt, **place})

    going = (
        _client(client, bodies, numbers, lambda: time.monotonic() < until_s, told)
        for _ in range(clients)
    )
    await asyncio.gather(*going)


async def _client(
    client: httpx.AsyncClient,
    bodies: Sequence[dict[str, Any]],
    numbers: Iterator[int],
    wanted: Callable[[], bool],
    told: Callable[[Answer, int], None],
) -> None:
    while wanted():
        number = next(numbers)
        answer = await ask(client, bodies[number % len(bodies)])
        told(answer, number)
        if answer.kind != "ok":
            await asyncio.sleep(PAUSE_S)
