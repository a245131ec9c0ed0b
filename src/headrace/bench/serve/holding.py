"""What a server holds: the ledger that /status tells, and its processes' memory and descriptors."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from headrace.bench.serve.child import Served, ServerFailed, memory_of

if TYPE_CHECKING:
    import httpx

LOOK_S: Final = 0.05
SETTLE_WITHIN_S: Final = 60.0
Write = Callable[[dict[str, Any]], None]


async def status(client: httpx.AsyncClient) -> dict[str, Any]:
    """The JSON of /status."""
    response = await client.get("/status")
    response.raise_for_status()
    return dict(response.json())


def ledger(told: Mapping[str, Any]) -> dict[str, Any]:
    """Lanes, slots and requests of a status, generations left out, so that two can be compared."""
    decoders = told["decoders"]
    slots = Counter(
        slot["state"]
        for decoder in decoders
        for source in decoder["sources"]
        for slot in source["slots"]
    )
    return {
        "states": sorted(decoder["state"] for decoder in decoders),
        "lanes_free": sum(decoder["lanes_free"] for decoder in decoders),
        "lanes_used": sum(len(decoder["lanes"]) for decoder in decoders),
        "slots": dict(sorted(slots.items())),
        "quarantined": sum(len(decoder["quarantined"]) for decoder in decoders),
        "open": told["num_open"],
        "waiting": told["queue"]["waiting"],
    }


def generations(told: Mapping[str, Any]) -> int:
    """The generations of all slots, added up."""
    return sum(
        slot["generation"]
        for decoder in told["decoders"]
        for source in decoder["sources"]
        for slot in source["slots"]
    )


def restarts(told: Mapping[str, Any]) -> int:
    """How often sources were started again."""
    return sum(each["restarts"] for decoder in told["decoders"] for each in decoder["sources"])


def pids(served: Served, told: Mapping[str, Any]) -> dict[str, int]:
    """The processes of a server by their roles."""
    found = {"server": served.pid}
    for decoder in told["decoders"]:
        found["owner"] = decoder["pid"]
        found |= {each["name"]: each["pid"] for each in decoder["sources"]}
    return found


def memory_rows(served: Served, told: Mapping[str, Any], at_s: float) -> list[dict[str, Any]]:
    """A row for each process that runs now."""
    rows = []
    for role, pid in pids(served, told).items():
        try:
            found = memory_of(pid)
        except (OSError, KeyError):  # it died, and is not started again yet
            continue
        rows.append({"measure": "memory", "role": role, "at_s": round(at_s, 3), **found})
    return rows


async def watch(served: Served, client: httpx.AsyncClient, every_s: float, write: Write) -> None:
    """Write a row of memory for each process again and again, until it is cancelled."""
    begun_s = time.monotonic()
    while True:
        for row in memory_rows(served, await status(client), time.monotonic() - begun_s):
            write(row)
        await asyncio.sleep(every_s)


class Rest:
    """A server at rest: its ledger, generations and descriptors, to be compared with later."""

    def __init__(self, served: Served, told: Mapping[str, Any]) -> None:
        self.ledger = ledger(told)
        self.generations = generations(told)
        rows = memory_rows(served, told, 0.0)
        self.fds = {row["role"]: row["fds"] for row in rows}
        self.rss_nbytes = {row["role"]: row["rss_nbytes"] for row in rows}

    def row(self, when: str, **more: Any) -> dict[str, Any]:
        """As a row."""
        return {"measure": "rest", "when": when, **vars(self), **more}


async def rest(served: Served, url_client: Callable[[], httpx.AsyncClient]) -> Rest:
    """How it is at rest, once nothing is open; with a connection of its own, which is closed.

    Raises:
        ServerFailed: something was open, or its owner told nothing, for a minute.
    """
    begun_s = time.monotonic()
    while True:
        async with url_client() as client:
            told = await status(client)
        found = Rest(served, told)
        calm = not (found.ledger["open"] or found.ledger["lanes_used"] or found.ledger["waiting"])
        looked = all((each["looked_s"] or 0) < 0.5 for each in told["decoders"])
        if calm and looked:
            return found
        if time.monotonic() - begun_s > SETTLE_WITHIN_S:
            text = f"the server was not at rest after {SETTLE_WITHIN_S:.0f} s: {found.ledger}"
            raise ServerFailed(text)
        await asyncio.sleep(LOOK_S)


async def settle(
    served: Served, url_client: Callable[[], httpx.AsyncClient], before: Rest
) -> dict[str, Any]:
    """Wait until ledger and descriptors are as before; a row that tells how long it took, or what
    was different at the end. Looks a few times a second, so that times are as coarse as the owner's
    reports are apart.
    """
    begun_s = time.monotonic()
    ledger_s = fds_s = None
    while True:
        async with url_client() as client:
            told = await status(client)
        found, took_s = Rest(served, told), round(time.monotonic() - begun_s, 3)
        fresh = all((each["looked_s"] or 0) < took_s for each in told["decoders"])
        if ledger_s is None and fresh and found.ledger == before.ledger:
            ledger_s = took_s
        if fds_s is None and all(count <= before.fds[role] for role, count in found.fds.items()):
            fds_s = took_s
        if (ledger_s is not None and fds_s is not None) or took_s > SETTLE_WITHIN_S:
            return found.row("end", ledger_s=ledger_s, fds_s=fds_s)
        await asyncio.sleep(LOOK_S)
