"""Arrivals at the measured capacity and at four times that, by turns: what is refused, and what
the accepted ones come to.

Capacity is what a closed loop with as many clients as lanes completes. Arrivals then come on a
clock of their own, whatever is answered, each up to half an interval early or late.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from headrace.bench.serve.asking import ask, client_of
from headrace.bench.serve.child import Served
from headrace.bench.serve.holding import Write, rest, settle, watch
from headrace.bench.serve.load import bodies_of, closed_loop, warm_up
from headrace.bench.serve.setting import Setting

if TYPE_CHECKING:
    import httpx

PROMPT: Final = 64
ARMS: Final = (1.0, 4.0, 4.0, 1.0)
RAMP: Final = 0.1  # of a phase, whose requests count for no token time


async def run(setting: Setting, write: Write) -> None:
    """Start a server whose queue holds as many requests as it has lanes, and measure it."""
    config = setting.config(queue={"max_requests": setting.lanes})
    write({"measure": "config", "config": setting.told(config)})
    with Served(config) as served:
        await measure(served, setting, write)


async def measure(served: Served, setting: Setting, write: Write) -> None:
    """Capacity, then the arms in A/B/B/A order, with memory looked at meanwhile."""
    sizes = setting.sizes
    bodies = bodies_of(setting, (min(PROMPT, max(sizes.lengths)),), 16)

    def connect() -> httpx.AsyncClient:
        return client_of(served.url)

    async with connect() as client:
        await warm_up(client, bodies, setting.lanes)
    before = await rest(served, connect)
    write(before.row("start"))
    async with connect() as client:
        rate = await _capacity(client, bodies, setting, write)
        watching = asyncio.ensure_future(watch(served, client, sizes.sample_s, write))
        for order, times in enumerate(ARMS):
            place = {"arm": f"{times:g}x", "order": order}
            due_s = arrivals(rate * times, sizes.phase_s, setting.seed + order)
            await open_loop(client, bodies, due_s, write, **place)
        watching.cancel()
        await asyncio.wait([watching])
    write(await settle(served, connect, before))


async def _capacity(
    client: httpx.AsyncClient, bodies: Sequence[dict[str, Any]], setting: Setting, write: Write
) -> float:
    """Requests per s of a closed loop; its rows are kept as an arm of their own."""
    rows: list[dict[str, Any]] = []
    begun_s = time.monotonic()
    place = {"arm": "closed", "order": -1}
    await closed_loop(client, bodies, setting.lanes, setting.sizes.capacity_s, rows.append, **place)
    for row in rows:
        write(row)
    completed = sum(row["kind"] == "ok" for row in rows)
    rate: float = max(1, completed) / (time.monotonic() - begun_s)
    write({"measure": "capacity", "requests_per_s": rate, "clients": setting.lanes})
    return rate


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """When requests are sent, in s from the start of a phase."""
    draw = random.Random(seed)
    each_s = 1 / rate
    count = max(1, int(seconds * rate))
    return sorted((at + 0.5 + draw.uniform(-0.5, 0.5)) * each_s for at in range(count))


async def open_loop(
    client: httpx.AsyncClient,
    bodies: Sequence[dict[str, Any]],
    due_s: Sequence[float],
    write: Write,
    **place: Any,
) -> None:
    """Send each request when it is due, and wait for all answers; a row for each.

    steady: it was sent after the ramp of the phase and answered before its last arrival.
    """
    origin_ns, last_s = time.perf_counter_ns(), due_s[-1]

    async def one(number: int, at_s: float) -> None:
        await asyncio.sleep(max(0.0, at_s - (time.perf_counter_ns() - origin_ns) / 1e9))
        body = bodies[number % len(bodies)]
        answer = await ask(client, body)
        ended_s = (answer.ended_ns - origin_ns) / 1e9
        row = answer.row(origin_ns)
        steady = row["at_s"] > RAMP * last_s and ended_s <= last_s
        prompt = len(body["prompt"])
        write({**row, "number": number, "prompt": prompt, "steady": steady, **place})

    await asyncio.gather(*(one(number, at_s) for number, at_s in enumerate(due_s)))
