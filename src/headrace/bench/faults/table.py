"""The figures of the fault benchmark, each with its goal, from rows alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from headrace.bench.rows import percentile

Rows = list[dict[str, Any]]
EXIT_SLACK_MS = 50.0
SLACK_MS = 5.0
WHO = {False: "owner idle", True: "another decodes"}


class Figure(NamedTuple):
    """One line of the table; `met` is None where there is no goal."""

    name: str
    goal: str
    result: str
    met: bool | None


def figures(rows: Iterable[dict[str, Any]]) -> Iterator[Figure]:
    """All figures that the rows have what is needed for."""
    by: dict[str, Rows] = {}
    for row in rows:
        by.setdefault(row["measure"], []).append(row)
    if "death" in by:
        yield from _deaths(by["death"])
    yield from _cancels(by.get("cancel", []), by.get("cancel over router", []))
    yield from _legacy(by)
    yield from _neighbours(by.get("death", []) + by.get("cancel", []))
    for row in by.get("leaks", []):
        yield _leaks(row)
    yield from _detection(by.get("detection", []))
    yield from _digests(by.get("digest", []))
    for row in by.get("books", []):
        yield Figure(f"{row['call']}, us", "stated", _spelled([ns / 1e3 for ns in row["ns"]]), None)


def _deaths(rows: Rows) -> Iterator[Figure]:
    for size_mb in sorted({row["size_mb"] for row in rows}):
        mine = [row for row in rows if row["size_mb"] == size_mb]
        plain = [row["ns"] / 1e6 for row in mine if row["form"] == "plain"]
        owners = [row for row in mine if row["form"] == "owner"]
        for decoding in (False, True):
            these = [row for row in owners if row["decoding"] == decoding]
            if these:
                yield from _deaths_of(these, plain, f"{WHO[decoding]}, {size_mb} MiB slab")
        name = f"rest of the turn that lets go of a dead source's slab of {size_mb} MiB, ms"
        longer = [(row["turned_ns"] - row["ns"]) / 1e6 for row in owners]
        yield Figure(name, "stated", _spelled(longer), None)


def _deaths_of(rows: Rows, plain: list[float], where: str) -> Iterator[Figure]:
    taken = [row["ns"] / 1e6 for row in rows]
    step = _step(rows)
    for percent in (50, 99):
        exit_ms = percentile(plain, percent)
        yield _bounded(
            f"kill -9 to slots free, {where}, p{percent}, ms",
            percentile(taken, percent),
            exit_ms + step + EXIT_SLACK_MS,
            f"its plain exit {exit_ms:.2f} + {_with(step)}{EXIT_SLACK_MS:.0f}",
        )


def _step(rows: Rows) -> float:
    """A decode step in ms, p99; 0 where nobody decoded."""
    steps = [ns / 1e6 for row in rows for ns in row["steps_ns"]]
    return percentile(steps, 99) if steps else 0.0


def _with(step: float) -> str:
    return f"a decode step {step:.2f} + " if step else ""


def _cancels(rows: Rows, over_router: Rows) -> Iterator[Figure]:
    """With a neighbour that decodes, and with an idle owner, apart."""
    rows = [row for row in rows if row["outcome"] == "cancelled"]
    for decoding in (False, True):
        mine = [row for row in rows if row["decoding"] == decoding]
        if mine:
            yield from _cancels_of(mine, WHO[decoding])
    turns = [row["turn_ns"] for row in rows]
    routed = [row["terminal_ns"] / 1e6 for row in over_router if row["outcome"] == "cancelled"]
    if routed and turns:
        turn = percentile(turns, 99) / 1e6
        yield _bounded(
            "cancel to terminal over a router, p99, ms",
            percentile(routed, 99),
            turn + SLACK_MS,
            f"one owner turn, p99 {turn:.2f}, + {SLACK_MS:.0f}",
        )


def _cancels_of(rows: Rows, who: str) -> Iterator[Figure]:
    turn = percentile([row["turn_ns"] for row in rows], 99) / 1e6
    step = _step(rows)
    chunk = percentile([ns for row in rows for ns in row["chunk_ns"]], 99) / 1e6
    yield _bounded(
        f"cancel to terminal, {who}, p99, ms",
        percentile([row["terminal_ns"] / 1e6 for row in rows], 99),
        turn + SLACK_MS,
        f"one owner turn, p99 {turn:.2f}, + {SLACK_MS:.0f}",
    )
    flying = sum(row["imports_in_flight"] > 0 for row in rows)
    waited = sum(not row["slot_held_when_lane_was_free"] for row in rows)
    yield _bounded(
        f"cancel to lane free, {who}, imports in flight in {flying} of {len(rows)}, p99, ms",
        percentile([row["lane_ns"] / 1e6 for row in rows], 99),
        chunk + step + SLACK_MS,
        f"an import chunk {chunk:.2f} + {_with(step)}{SLACK_MS:.0f}; source waited for in {waited}",
    )
    after = [ns / 1e6 for row in rows if (ns := row["slot_after_sink_call_ns"]) is not None]
    if after:
        yield _bounded(
            f"cancel to slot free, {who}, after the source's next sink call, p99, ms",
            percentile(after, 99),
            step + SLACK_MS,
            f"{_with(step)}{SLACK_MS:.0f}",
        )


def _legacy(by: dict[str, Rows]) -> Iterator[Figure]:
    after = [row["slot_after_prefill_ns"] for row in by.get("cancel legacy", [])]
    ended = [ns / 1e6 for ns in after if ns is not None]
    if ended:
        name = "cancel to slot free, legacy engine, after its prefill ended, p99, ms"
        text = f"{SLACK_MS:.0f} after that"
        yield _bounded(name, percentile(ended, 99), SLACK_MS, text)
    killed = [row["slot_after_deadline_ns"] / 1e6 for row in by.get("cancel stuck", [])]
    if killed:
        exits = [row["ns"] / 1e6 for row in by.get("death", []) if row["form"] == "plain"]
        bound = (percentile(exits, 99) if exits else 0.0) + EXIT_SLACK_MS
        name = "cancel to slot given up, legacy engine, after the drain deadline, p99, ms"
        yield _bounded(name, percentile(killed, 99), bound, "one exit time + 50")


def _neighbours(rows: Rows) -> Iterator[Figure]:
    compared = sum(row.get("neighbours", 0) for row in rows)
    changed = sum(row.get("neighbours_changed", 0) for row in rows)
    if compared:
        name = "neighbours failed or changed by another's fault"
        yield Figure(name, "0", f"{changed} of {compared}", changed == 0)


def _leaks(row: dict[str, Any]) -> Figure:
    before, after = row["before"], row["after"]
    grown = {name: after[name] - before[name] for name in before if after[name] != before[name]}
    text = ", ".join(f"{name} {change:+d}" for name, change in grown.items()) or "0"
    name = f"left behind by {row['cycles']} kill cycles, {row['size_mb']} MiB slab"
    return Figure(name, "0", text, not grown)


def _detection(rows: Rows) -> Iterator[Figure]:
    for fault in dict.fromkeys(row["fault"] for row in rows):
        mine = [row for row in rows if row["fault"] == fault]
        with_digest = [row for row in mine if row["digest"]]
        found = sum(row["found"] for row in with_digest)
        without = sum(row["found"] for row in mine if not row["digest"])
        named = sum(row["layer_named"] for row in with_digest)
        if fault == "sound":
            result, wanted = f"{found} of {len(with_digest)} refused", 0
        else:
            result = f"{found} of {len(with_digest)} found, {named} by layer; {without} without"
            wanted = len(with_digest)
        goal = "none" if fault == "sound" else "all"
        yield Figure(f"{fault} spans, digest mode", goal, result, found == wanted)


def _digests(rows: Rows) -> Iterator[Figure]:
    for size_mb in sorted({row["size_mb"] for row in rows}):
        mine = [row for row in rows if row["size_mb"] == size_mb]
        for variant in dict.fromkeys(row["variant"] for row in mine):
            these = [row for row in mine if row["variant"] == variant]
            figures = [
                f"{name} {_spelled([row[key] / 1e6 for row in these])}"
                for name, key in (("import", "import_ns"), ("TTFT", "ttft_ns"))
            ]
            yield Figure(f"{variant}, {size_mb} MiB, ms", "stated", "; ".join(figures), None)


def _bounded(name: str, result: float, bound: float, text: str) -> Figure:
    return Figure(name, f"{text} = {bound:.2f}", f"{result:.2f}", result <= bound)


def _spelled(samples: list[float]) -> str:
    return f"p50 {percentile(samples, 50):.3g}, p99 {percentile(samples, 99):.3g}"
