"""What `headrace serve` does under load, faults and nonsense: over HTTP, with the server a child.

Each case starts a server of its own, warms it up, and writes raw rows; `table` reads figures from
them. Clients run in this process on the same host, so their CPU time is a part of what is measured,
and all times are of the client's clock. Prompts are sent as token ids, greedy, and go on to their
last token (`ignore_eos`), so that every request of a kind is the same work.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from headrace.bench.rows import RowFile
from headrace.bench.serve import (
    disconnects,
    kills,
    load,
    malformed,
    mixed,
    overhead,
    overload,
)
from headrace.bench.serve.setting import Setting
from headrace.bench.stand import load_1min

CLAIM: Final = "serve"
KEY: Final = ("case", "measure")
Run = Callable[[Setting, Callable[[dict[str, Any]], None]], Awaitable[None]]

CASES: Final[Mapping[str, Run]] = {
    "load": load.run,
    "overload": overload.run,
    "disconnects": disconnects.run,
    "kills": kills.run,
    "malformed": malformed.run,
    "overhead": overhead.run,
    "mixed": mixed.run,
}


def run(setting: Setting, file: RowFile, cases: Sequence[str], say: Callable[[str], None]) -> None:
    """Run the cases that `file` does not hold to their end; an `end` row closes each."""
    for case in cases:
        if {"case": case, "measure": "end"} in file:
            say(f"{case}: its rows are there")
            continue
        say(f"{case} ...")
        run_case(case, setting, file)


def run_case(case: str, setting: Setting, file: RowFile) -> None:
    """Run one case."""
    begun_s = time.monotonic()

    def write(row: dict[str, Any]) -> None:
        file.append({"case": case, **row})

    asyncio.run(_awaited(CASES[case](setting, write)))
    took_s = round(time.monotonic() - begun_s, 1)
    write({"measure": "end", "took_s": took_s, "load_1min": load_1min(), **setting.facts()})


async def _awaited(work: Awaitable[None]) -> None:
    await work
