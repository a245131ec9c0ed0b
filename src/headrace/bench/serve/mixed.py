"""Long prompts and short ones between them, by the queue's rule and first come, first served; and
two clients, of which one asks for all it can get.

Long prompts come at random, at a rate that keeps a source busy for most of the time. All arms get
the same arrivals; each has a server of its own, in A/B/B/A order.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headrace.bench.serve.asking import ask, body_of, client_of, prompts_of
from headrace.bench.serve.child import Served
from headrace.bench.serve.holding import Write
from headrace.bench.serve.load import warm_up
from headrace.bench.serve.setting import Setting

if TYPE_CHECKING:
    import httpx

PATIENCE: Final[Mapping[str, Mapping[str, float]]] = {"rule": {}, "FIFO": {"patience": 0.0}}
ARMS: Final = ("rule", "FIFO", "FIFO", "rule")
BUSY: Final = 0.85  # the share of time for which long prompts alone keep a source busy
SHORT_BETWEEN: Final = 4  # short requests for each long one
TOKENS: Final = 8
GREEDY: Final = 16  # requests in flight of the client that asks for all it can get
KEYS: Final = {"modest": "a-modest-client", "greedy": "a-greedy-client"}


class Bodies(NamedTuple):
    """Long requests and short ones."""

    long: list[dict[str, Any]]
    short: list[dict[str, Any]]


async def run(setting: Setting, write: Write) -> None:
    """Measure the arms, then the two clients."""
    long_s = None
    for order, arm in enumerate(ARMS):
        config = setting.config(queue=PATIENCE[arm])
        write({"measure": "config", "arm": arm, "config": setting.told(config)})
        with Served(config) as served:
            long_s = await measure(served, setting, write, long_s, arm=arm, order=order)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        keys = Path(folder, "keys")
        keys.touch(0o600)
        keys.write_text("".join(f"{key}\n" for key in KEYS.values()))
        config = setting.config(http={"api_key_file": str(keys)})
        told = setting.config(http={"api_key_file": "a file of two keys"})
        write({"measure": "config", "arm": "two keys", "config": setting.told(told)})
        with Served(config) as served:
            await share(served, setting, write)


async def measure(
    served: Served, setting: Setting, write: Write, long_s: float | None, **place: Any
) -> float:
    """One arm; returns the time of a long prompt alone, which sets the pace of all arms."""
    bodies = bodies_of(setting)
    async with client_of(served.url) as client:
        await warm_up(client, bodies.long, 1)
        await warm_up(client, bodies.short, 2)
        if long_s is None:
            long_s = await _alone_s(client, bodies.long[:3])
            write({"measure": "alone", "long_s": long_s})
        due = arrivals(long_s / BUSY, setting.sizes.mixed_s, setting.seed)
        await _arrive(client, bodies, due, write, **place)
    return long_s


def bodies_of(setting: Setting) -> Bodies:
    """Eight prompts of each length."""
    made = []
    for length in (setting.sizes.long, setting.sizes.short):
        prompts = prompts_of(setting.directory, (length,), 8, setting.seed)
        made.append([body_of(setting.model, prompt, TOKENS) for prompt in prompts])
    return Bodies(*made)


async def _alone_s(client: httpx.AsyncClient, bodies: Sequence[dict[str, Any]]) -> float:
    """The TTFT of a long prompt on an idle server, in s."""
    times = []
    for body in bodies:
        answer = await ask(client, body)
        times.append((answer.ttft_ns or answer.ended_ns - answer.begun_ns) / 1e9)
    return median(times)


def arrivals(each_s: float, seconds: float, seed: int) -> list[tuple[float, str]]:
    """When what comes: long ones and short ones at random, each by its own rate."""
    draw = random.Random(seed)
    due = []
    for kind, mean_s in (("long", each_s), ("short", each_s / SHORT_BETWEEN)):
        at_s = draw.expovariate(1 / mean_s)
        while at_s < seconds:
            due.append((at_s, kind))
            at_s += draw.expovariate(1 / mean_s)
    return sorted(due) or [(0.0, "long"), (0.0, "short")]


async def _arrive(
    client: httpx.AsyncClient,
    bodies: Bodies,
    due: Sequence[tuple[float, str]],
    write: Write,
    **place: Any,
) -> None:
    origin_ns = time.perf_counter_ns()

    async def one(number: int, at_s: float, kind: str) -> None:
        await asyncio.sleep(max(0.0, at_s - (time.perf_counter_ns() - origin_ns) / 1e9))
        mine = bodies.long if kind == "long" else bodies.short
        row = (await ask(client, mine[number % len(mine)])).row(origin_ns)
        del row["gaps_us"]
        write({**row, "number": number, "length": kind, **place})

    await asyncio.gather(*(one(number, *each) for number, each in enumerate(due)))


async def share(served: Served, setting: Setting, write: Write) -> None:
    """The modest client alone, then beside the greedy one."""
    bodies = bodies_of(setting).short
    async with (
        client_of(served.url, KEYS["modest"]) as modest,
        client_of(served.url, KEYS["greedy"]) as greedy,
    ):
        await warm_up(modest, bodies, 2)
        for beside in (False, True):
            until_s = time.monotonic() + setting.sizes.mixed_s / 2
            others = [
                _one_by_one(greedy, bodies, write, until_s, "greedy", beside)
                for _ in range(GREEDY if beside else 0)
            ]
            mine = _one_by_one(modest, bodies, write, until_s, "modest", beside)
            await asyncio.gather(mine, *others)


async def _one_by_one(
    client: httpx.AsyncClient,
    bodies: Sequence[dict[str, Any]],
    write: Write,
    until_s: float,
    who: str,
    beside: bool,
) -> None:
    """Ask again as soon as it was answered, once at least."""
    origin_ns = time.perf_counter_ns()
    for number in itertools.count():
        row = (await ask(client, bodies[number % len(bodies)])).row(origin_ns)
        del row["gaps_us"]
        write({**row, "measure": "share", "client": who, "beside": beside})
        if time.monotonic() >= until_s:
            return
        if row["kind"] != "ok":
            await asyncio.sleep(0.1)
