"""Hunts every known bug and says how many schedules each took."""

from __future__ import annotations

import json
import multiprocessing
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from headrace.bench.rows import stamp
from headrace.testing.fault_lab.bugs import ALL_BUGS, LAB_BUGS, hunt
from headrace.testing.mutants import EQUIVALENT


def hunt_all(
    most: int, first_seed: int, jobs: int, out: Path | None, *, one_lane: bool = False
) -> int:
    """Hunt all bugs with up to `most` schedules each and print a table.

    Returns an exit status: 1 if a bug that changes nothing was found, which it cannot be.
    """
    rows = []
    for row in _hunted(most, first_seed, jobs, one_lane):
        rows.append(row)
        found = f"schedule {row['found_at']}" if row["found_at"] else f"not within {most}"
        print(f"{row['kind']:10s} {found:>18s}  rule {row['rule']}  {row['bug']}", flush=True)
    seeded = [row for row in rows if row["kind"] != "shielded"]
    found_at = sorted(row["found_at"] for row in seeded if row["found_at"])
    missed = [row["bug"] for row in seeded if not row["found_at"]]
    odd = [row["bug"] for row in rows if row["kind"] == "shielded" and row["found_at"]]
    summary: dict[str, Any] = {
        "summary": True,
        "most": most,
        "seed": first_seed,
        "one_lane": one_lane,
        "seeded": len(seeded),
        "found": len(found_at),
        "median": statistics.median(found_at) if found_at else None,
        "latest": max(found_at, default=None),
        "missed": missed,
        "shielded_and_found": odd,
    }
    print(f"{len(found_at)} of {len(seeded)} bugs found; median schedule {summary['median']}")
    for text in missed:
        print(f"not found within {most}: {text}")
    for text in odd:
        print(f"found although it changes nothing: {text}")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        lines = [{"claim": "fault-lab-bugs", "stamp": stamp()}, *rows, summary]
        out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 1 if odd else 0


def _hunted(most: int, first_seed: int, jobs: int, one_lane: bool) -> Iterator[dict[str, Any]]:
    count = len(ALL_BUGS) + len(EQUIVALENT)
    look = partial(_hunt_one, most, first_seed, one_lane)
    if jobs <= 1:
        yield from map(look, range(count))
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(look, range(count))


def _hunt_one(most: int, first_seed: int, one_lane: bool, number: int) -> dict[str, Any]:
    """One bug, by its number, since a bug does not travel between processes."""
    bug = (*ALL_BUGS, *EQUIVALENT)[number]
    hunted = hunt(bug, most, first_seed, one_lane=one_lane)
    broken = hunted.seen.broken if hunted.seen else None
    kind = "shielded" if bug in EQUIVALENT else "bytes" if bug in LAB_BUGS else "machine"
    return {
        "bug": bug.text,
        "kind": kind,
        "walk_instance": bug.instance,
        "found_at": hunted.at,
        "rule": broken.number if broken else None,
        "finding": broken.text[:200] if broken else "",
    }
