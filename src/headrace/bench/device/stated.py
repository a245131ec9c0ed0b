"""What the device check states beside its goals: figures that nothing is held against."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from headrace.bench.device.runner import Done
from headrace.bench.device.verdict import Rows, Verdict, why_not
from headrace.bench.rows import spread

PINNED: Final = "pinned"
SLABS: Final = (PINNED, "pageable")
NEAR_BEST: Final = 0.9


def hand_offs(rows: Rows) -> Rows:
    """The curve's rows of a size, without those of the fixed cost."""
    return [row for row in rows if row["measure"] == "hand-off"]


def sweep(done: Done, rows: Rows) -> Verdict:
    """The smallest chunk, with the fewest in flight, that comes near the best rate."""
    name = "chunks to the device"
    found = []
    for slab in SLABS:
        rates_of: dict[tuple[int, int], list[float]] = {}
        for row in rows:
            if row["measure"] == "sweep" and row["slab"] == slab:
                key = row["chunk_mib"], row["in_flight"]
                rates_of.setdefault(key, []).append(row["nbytes_per_s"] / 1e9)
        if not rates_of:
            continue
        medians = {key: spread(each).median for key, each in rates_of.items()}
        best = max(medians.values())
        mib, depth = min(key for key, rate in medians.items() if rate >= NEAR_BEST * best)
        found.append(f"{slab}: {best:.2f} GB/s at best, {mib} MiB x {depth} come near it")
    if not found:
        return Verdict(name, "stated", "not run", "", why=why_not(done, "no rows"))
    return Verdict(name, "stated", "stated", "; ".join(found))


def rates(rows: Rows, link: Rows) -> Iterator[Verdict]:
    """Import rates of the whole route by size, to the link's own with pinned memory."""
    own: dict[float, list[float]] = {}
    for row in link:
        if row["slab"] == PINNED:
            own.setdefault(row["size_gb"], []).append(row["nbytes"] / row["ns"])
    for slab in SLABS:
        mine: dict[float, list[float]] = {}
        for row in hand_offs(rows):
            if (row["slab"], row["route"]) == (slab, "whole"):
                rate = row["kv_nbytes"] / row["import_ns"]
                mine.setdefault(row["size_gb"], []).append(rate)
        parts = [
            f"{size_gb:g} GB {spread(each).median / spread(own[size_gb]).median:.3f}"
            for size_gb, each in sorted(mine.items())
            if size_gb in own
        ]
        if parts:
            name = f"import rate by size, {slab} slabs, to the pinned link's own"
            yield Verdict(name, "stated", "stated", ", ".join(parts))


def tails(rows: Rows) -> Iterator[Verdict]:
    """The transfer tail of every route by size, in ms."""
    for slab in SLABS:
        by_size: dict[float, dict[str, list[float]]] = {}
        for row in hand_offs(rows):
            if row["slab"] == slab:
                routes = by_size.setdefault(row["size_gb"], {})
                routes.setdefault(row["route"], []).append(row["tail_ns"] / 1e6)
        for size_gb, routes in sorted(by_size.items()):
            parts = [f"{route} {spread(each).median:.3g}" for route, each in routes.items()]
            name = f"tails at {size_gb:g} GB, {slab} slab, paced source, ms"
            yield Verdict(name, "stated", "stated", ", ".join(parts))


def overlap(done: Done, rows: Rows) -> Verdict:
    """No goal: what the devices' own clocks show, or that they show nothing."""
    name, goal = "kernel overlap of a streamed hand-off", "stated"
    mine = [row for row in rows if row["route"] == "streamed"]
    if not mine:
        return Verdict(name, goal, "not run", "", why=why_not(done, "no rows"))
    row = mine[0]
    clocks = f"source by {row['source_clock']} clock, owner by {row['owner_clock']} clock"
    if row["kernel_overlap_ns"] is None:
        found = f"none can be claimed: {clocks}"
    else:
        ms, error_us = row["kernel_overlap_ns"] / 1e6, row["error_ns"] / 1e3
        within = f"each stretch beyond its error of {error_us:g} us"
        found = f"{ms:.3f} ms, gaps between kernels included, {within}: {clocks}"
    return Verdict(name, goal, "stated", found)


def ttft(done: Done, rows: Rows) -> Iterator[Verdict]:
    """No goal: a few layers are not a model."""
    lengths = sorted({row["prompt_tokens"] for row in rows})
    if not lengths:
        yield Verdict(
            "TTFT, streamed to whole", "stated", "not run", "", why=why_not(done, "no rows")
        )
    for num_tokens in lengths:
        name = f"TTFT at {num_tokens} tokens, streamed to whole"
        mine = [row for row in rows if row["prompt_tokens"] == num_tokens]
        times = {
            route: [row["ttft_ns"] / 1e6 for row in mine if row.get("route") == route]
            for route in ("whole", "streamed")
        }
        if not all(times.values()):
            why = "; ".join(row["skipped"] for row in mine if "skipped" in row)
            yield Verdict(
                name, "stated", "not run", "", why=why or why_not(done, "no rows of both")
            )
            continue
        whole, streamed = spread(times["whole"]), spread(times["streamed"])
        ratio = streamed.median / whole.median
        yield Verdict(name, "stated", "stated", f"{ratio:.4f}: {streamed} ms of {whole} ms")
