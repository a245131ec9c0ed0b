"""Runs schedules by the thousand and adds up what they came to, in rows fit to be kept."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Final

from headrace.bench.rows import stamp
from headrace.protocol.handoff import Handoff
from headrace.protocol.machine import Machine
from headrace.protocol.slots import Slot
from headrace.protocol.source import SourceAttempt
from headrace.testing.explorer import recording
from headrace.testing.fault_lab.bounds import tiny_bounds
from headrace.testing.fault_lab.choices import to_text
from headrace.testing.fault_lab.schedule import Seen, run_schedule

CLAIM: Final = "fault-lab"
BATCH: Final = 1000
COUNTED: Final = ("outcomes", "dropped", "faults", "parked")
MACHINES: Final[tuple[type[Machine[Any, Any]], ...]] = (Handoff, Slot, SourceAttempt)

Transition = tuple[str, str, str]  # machine, state, event


@dataclass
class Finding:
    """One schedule that broke a rule."""

    seed: int
    rule: int
    text: str
    replay: str


@dataclass
class Tally:
    """What some schedules came to, all in all."""

    num_schedules: int = 0
    num_steps: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    parked: Counter[str] = field(default_factory=Counter)
    transitions: set[Transition] = field(default_factory=set)
    fingerprints: set[int] = field(default_factory=set)
    findings: list[Finding] = field(default_factory=list)

    def add(self, seen: Seen, seed: int) -> None:
        """One more schedule."""
        self.num_schedules += 1
        self.num_steps += seen.num_steps
        self.outcomes.update(seen.outcomes)
        self.dropped.update(seen.dropped)
        self.faults.update(seen.faults)
        self.parked.update(seen.parked)
        self.fingerprints.add(seen.fingerprint)
        if seen.broken is not None:
            broken, text = seen.broken, to_text(seen.recorded)
            self.findings.append(Finding(seed, broken.number, broken.text, text))

    def merge(self, other: Tally) -> int:
        """Another tally's schedules too; returns how many of them were new."""
        before = len(self.fingerprints)
        self.num_schedules += other.num_schedules
        self.num_steps += other.num_steps
        for name in COUNTED:
            getattr(self, name).update(getattr(other, name))
        self.transitions |= other.transitions
        self.fingerprints |= other.fingerprints
        self.findings += other.findings
        return len(self.fingerprints) - before

    def reached(self) -> dict[str, Any]:
        """How many schedules differ, and what of the machines' tables was taken."""
        return {
            "distinct": len(self.fingerprints),
            "transitions": len(self.transitions),
            "never_taken": [" ".join(transition) for transition in never_taken(self.transitions)],
        }

    def facts(self) -> dict[str, Any]:
        """Counts for a row."""
        return {
            "schedules": self.num_schedules,
            "steps": self.num_steps,
            **{name: dict(getattr(self, name).most_common()) for name in COUNTED},
            "violations": [vars(finding) for finding in self.findings],
        }


def run_batch(first_seed: int, count: int, *, one_lane: bool = False) -> Tally:
    """Run the schedules of `count` seeds; `one_lane`: see `run_schedule`."""
    tally = Tally()
    taken: set[tuple[type, Enum, Enum]] = set()
    with tiny_bounds(), recording(taken):
        for seed in range(first_seed, first_seed + count):
            tally.add(run_schedule(seed, one_lane=one_lane), seed)
    tally.transitions = {
        (machine.__name__, state.name, event.name)
        for machine, state, event in taken
        if machine in MACHINES
    }
    return tally


NOT_IN_THE_LAB: Final[frozenset[Transition]] = frozenset([("Handoff", "RESERVED", "SEAL")])
"""What only a prompt that the decoder kept takes: the lab's requests keep none, the walk's do."""


def never_taken(taken: Iterable[Transition]) -> list[Transition]:
    """The transitions of the machines' tables that are not among `taken`, though the lab could."""
    table = {
        (machine.__name__, state.name, event.name)
        for machine in MACHINES
        for state, row in machine.TABLE.items()
        for event in row
    }
    return sorted(table - set(taken) - NOT_IN_THE_LAB)


def run_record(
    num_distinct: int,
    first_seed: int,
    *,
    jobs: int = 1,
    out: Path | None = None,
    time_limit_s: float | None = None,
    one_lane: bool = False,
    tell: Callable[[str], None] = print,
) -> Tally:
    """Run until `num_distinct` different schedules were run, or the time is over.

    `out` gets a stamp, one row per batch as it is done, and a last row that adds up.
    """
    began_s = time.monotonic()
    total = Tally()
    run = partial(run_batch, one_lane=one_lane)
    with _writing(out) as write, closing(_batches(run, first_seed, num_distinct, jobs)) as batches:
        write({"claim": CLAIM, "one_lane": one_lane, "stamp": stamp()})
        for seed, batch in batches:
            num_new = total.merge(batch)
            took_s = time.monotonic() - began_s
            write({"first_seed": seed, "new": num_new, "at_s": round(took_s, 3), **batch.facts()})
            distinct = len(total.fingerprints)
            tell(
                f"{distinct} distinct schedules, {total.num_steps} steps, {took_s:.0f} s, "
                f"{len(total.findings)} violations"
            )
            if distinct >= num_distinct or (time_limit_s and took_s >= time_limit_s):
                break
        wall_s = round(time.monotonic() - began_s, 3)
        asked = {"summary": True, "seed": first_seed, "jobs": jobs, "wall_s": wall_s}
        write({**asked, **total.reached(), **total.facts()})
    return total


def _batches(
    run: Callable[[int, int], Tally], first_seed: int, num_distinct: int, jobs: int
) -> Generator[tuple[int, Tally], None, None]:
    """Batch after batch without an end, in the order of their seeds."""
    size = min(BATCH, num_distinct)
    if jobs <= 1:
        seed = first_seed
        while True:
            yield seed, run(seed, size)
            seed += size
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context) as pool:
        waiting = [pool.submit(run, first_seed + at * size, size) for at in range(jobs + 1)]
        begun = len(waiting)
        done = 0
        try:
            while True:
                tally = waiting.pop(0).result()
                yield first_seed + done * size, tally
                done += 1
                waiting.append(pool.submit(run, first_seed + begun * size, size))
                begun += 1
        finally:
            for future in waiting:
                future.cancel()


@contextmanager
def _writing(path: Path | None) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A call that writes one row; each is on disk when the next begins."""
    if path is None:
        yield lambda row: None
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lines:

        def write(row: dict[str, Any]) -> None:
            lines.write(json.dumps(row) + "\n")
            lines.flush()

        yield write
