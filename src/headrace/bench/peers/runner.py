"""Sizes, rounds and transports, one row each.

In a round every transport moves the same number of bytes once, in an order that is turned from
round to round. Just before, the target's process copies as many bytes within its own memory: all
ratios are to that. The first transfer of a pair that was made ready is a small one that counts only
for wrong bytes.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from headrace.bench.peers.environments import environment_of
from headrace.bench.peers.handoff import SETTINGS, Handoff
from headrace.bench.peers.pair import Copied, Moved, Pair
from headrace.bench.peers.transports import HEADRACE, Transport, peers_named
from headrace.bench.rows import RowFile, busy_share
from headrace.engine.capacity import available_nbytes, require_memory
from headrace.errors import HeadraceError

KEY = ("transport", "size_mib", "round")
DEADLINE_S = 30.0
WARM_UP_NBYTES = 16 << 20
BUSY_S = 0.05
SHARE_OF_SIZE = 5  # memory of one transport: source, target, two for the reference, one in between


class Mover(Protocol):
    """What moves bytes: `pair.Pair` or `handoff.Handoff`."""

    def start(self) -> str: ...
    def open(self, nbytes: int) -> None: ...
    def memcpy(self, nbytes: int) -> Copied: ...
    def transfer(self, nbytes: int, seed: int) -> Moved: ...
    def close(self) -> None: ...
    def end(self) -> None: ...


@dataclass
class _Entrant:
    """One transport in the run. lost: why it is measured no more, by size in MiB."""

    name: str
    facts: dict[str, Any]
    make: Callable[[], Mover]
    restless: bool = False
    mover: Mover | None = None
    is_open: bool = False
    lost: dict[int, str] = field(default_factory=dict)


def run(
    names: Sequence[str],
    sizes_mib: Sequence[int],
    rounds: int,
    environments: Path,
    file: RowFile,
    *,
    deadline_s: float = DEADLINE_S,
    more: Sequence[Transport] = (),
) -> Generator[dict[str, Any], None, None]:
    """Measure what `file` does not hold yet, add it there, and give each new row.

    `more`: transports beside the known ones. What cannot run gives rows with `skipped`, what did
    not come to its end one with `failed`, each with the reason.

    Raises:
        Refused: a name is unknown, or there is too little memory for the largest size.
    """
    entrants = [
        *(_headrace(name, deadline_s) for name in HEADRACE if name in names),
        *(_peer(each, environments, deadline_s) for each in (*peers_named(names), *more)),
    ]
    require_memory(SHARE_OF_SIZE * (max(sizes_mib) << 20), f"{max(sizes_mib)} MiB of each side")
    seeds = itertools.count(1)
    with ExitStack() as stack:
        for entrant in entrants:
            stack.callback(_end, entrant)
        for size_mib in sizes_mib:
            for entrant in entrants:
                _close(entrant)
            roomy = SHARE_OF_SIZE * len(entrants) * (size_mib << 20) < available_nbytes() // 2
            for number in range(rounds):
                for order, entrant in enumerate(_turned(entrants, number, rounds)):
                    row = {"transport": entrant.name, "size_mib": size_mib, "round": number}
                    if row in file:
                        continue
                    measured = _measure(entrant, size_mib, seeds, keep=roomy)
                    row = {**row, "order": order, **entrant.facts, **measured}
                    file.append(row)
                    yield row


def _headrace(name: str, deadline_s: float) -> _Entrant:
    facts = {"copies": 1 if name == "headrace-1-copy" else 2, "settings": SETTINGS[name]}
    return _Entrant(name, {**facts, "package": "headrace"}, lambda: Handoff(name, deadline_s))


def _peer(transport: Transport, environments: Path, deadline_s: float) -> _Entrant:
    facts = {"copies": transport.copies, "settings": transport.settings}

    def make() -> Mover:
        return Pair(transport, environment_of(transport.family, environments), deadline_s)

    return _Entrant(
        transport.name, {**facts, "package": transport.package}, make, transport.restless
    )


def _turned(entrants: list[_Entrant], number: int, rounds: int) -> list[_Entrant]:
    """The entrants, begun elsewhere in each round, so that each comes early and late."""
    first = number * len(entrants) // rounds
    return entrants[first:] + entrants[:first]


def _measure(
    entrant: _Entrant, size_mib: int, seeds: Iterator[int], *, keep: bool
) -> dict[str, Any]:
    """One transfer, or why there is none."""
    if size_mib in entrant.lost:
        return {"skipped": entrant.lost[size_mib]}
    nbytes = size_mib << 20
    try:
        mover = _started(entrant)
        before = _before(mover, nbytes) if entrant.restless else None  # open, it would disturb it
        is_warm = _open(entrant, mover, nbytes)
    except HeadraceError as exc:
        entrant.lost[size_mib] = str(exc)
        _end(entrant)
        return {"skipped": str(exc)}
    try:
        wrong_nbytes = 0
        if not is_warm:
            warm_up = mover.transfer(min(nbytes, WARM_UP_NBYTES), next(seeds))
            wrong_nbytes = warm_up.wrong_nbytes
        busy, copied = before or _before(mover, nbytes)
        moved = mover.transfer(nbytes, next(seeds))
    except HeadraceError as exc:
        entrant.lost[size_mib] = f"failed before at this size: {exc}"
        _end(entrant)
        return {"failed": str(exc)}
    if entrant.restless or not keep:
        _close(entrant)
    wrong_nbytes += moved.wrong_nbytes
    return {"nbytes": nbytes, "wrong_nbytes": wrong_nbytes, **_figures(moved, copied, busy)}


def _started(entrant: _Entrant) -> Mover:
    mover = entrant.mover
    if mover is None:
        mover = entrant.make()
        entrant.mover = mover
        entrant.facts["version"] = mover.start()
    return mover


def _open(entrant: _Entrant, mover: Mover, nbytes: int) -> bool:
    """Make it ready for one size; whether it was."""
    was_open = entrant.is_open
    if not was_open:
        mover.open(nbytes)
        entrant.is_open = True
    return was_open


def _before(mover: Mover, nbytes: int) -> tuple[float, Copied]:
    """How busy the machine is, then the reference."""
    return busy_share(BUSY_S), mover.memcpy(nbytes)


def _figures(moved: Moved, copied: Copied, busy: float) -> dict[str, Any]:
    return {
        "wall_ns": moved.wall_ns,
        "cpu_ns": moved.cpu_ns,
        "memcpy_wall_ns": copied.wall_ns,
        "memcpy_cpu_ns": copied.cpu_ns,
        "wall_ratio": copied.wall_ns / max(moved.wall_ns, 1),
        "cpu_ratio": copied.cpu_ns / max(moved.cpu_ns, 1),
        "busy_before": round(busy, 3),
        "load_1min": os.getloadavg()[0],
    }


def _close(entrant: _Entrant) -> None:
    if entrant.mover is None or not entrant.is_open:
        return
    entrant.is_open = False
    try:
        entrant.mover.close()
    except HeadraceError:  # it is made anew when it is wanted again
        _end(entrant)


def _end(entrant: _Entrant) -> None:
    mover, entrant.mover = entrant.mover, None
    entrant.is_open = False
    if mover is not None:
        mover.end()
