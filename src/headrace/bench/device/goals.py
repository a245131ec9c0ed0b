"""The goals of the device check, each held against the rows of its step.

What must hold is judged on the fake device too, where it says that the code keeps the rules. Speeds
are not: the fake device has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from headrace.bench.curve_table import cells
from headrace.bench.device.plan import SIZES, Kind
from headrace.bench.device.runner import Done
from headrace.bench.device.stated import PINNED, hand_offs, overlap, rates, sweep, tails, ttft
from headrace.bench.device.verdict import Rows, Verdict, Word, why_not
from headrace.bench.load_table import figures as load_figures
from headrace.bench.rows import spread

LINK_SHARE: Final = 0.9
JUDGED_ROUTE: Final = "streamed-4"


def judge(kind: Kind, results: Sequence[Done], rows: Mapping[str, Rows]) -> list[Verdict]:
    """Every goal, in the order of the steps; `rows` by step."""
    by_step = {done.step: done for done in results}

    def of(step: str) -> tuple[Done, Rows]:
        return by_step.get(step, Done(step, "left out", 0.0, "it was not asked for")), rows.get(
            step, []
        )

    link = [row for row in rows.get("link", []) if row["measure"] == "link"]
    verdicts = [
        _rules("cuda -> cuda keeps the rules", *of("check-cuda")),
        _rules("torch -> cuda keeps the rules", *of("check-torch")),
        _exact(*of("exactness")),
        _import_rate(*of("curve"), link, SIZES[kind].judged_gb),
        _tails(*of("curve")),
        *_token_time(*of("neighbours")),
        sweep(*of("link")),
        *rates(rows.get("curve", []), link),
        *tails(rows.get("curve", [])),
        overlap(*of("trace")),
        *ttft(*of("ttft")),
    ]
    return verdicts if kind == "real" else [_of_fake(each) for each in verdicts]


def _of_fake(verdict: Verdict) -> Verdict:
    """What must hold is kept; a speed of the fake device is none."""
    if verdict.must or verdict.word == "not run":
        return verdict
    why = "measured on the fake device, which has no speed"
    return verdict._replace(word="not run", why=why, found=f"fake: {verdict.found}")


def _rules(name: str, done: Done, rows: Rows) -> Verdict:
    """A failed case is a miss, however the step ended; cases that were not run are told."""
    goal = "every case of headrace check that is asked for holds"
    asked = rows[0]["asked"] if rows else []
    failed = [row["case"] for row in rows if row["result"] == "failed"]
    held = [row["case"] for row in rows if row["result"] in ("ok", "skipped")]
    found = f"{len(held)} of {len(asked) or 'the'} cases hold"
    if failed:
        return Verdict(name, goal, "missed", found, True, f"failed: {', '.join(failed)}")
    left = [case for case in asked if case not in held]
    if rows and not left:
        return Verdict(name, goal, "met", found, must=True)
    return Verdict(name, goal, "not run", found, True, why_not(done, f"not run: {', '.join(left)}"))


def _exact(done: Done, rows: Rows) -> Verdict:
    name, goal = "routes are exact", "tokens, logits and cells equal to the whole route's"
    measured = [row for row in rows if "skipped" not in row]
    skipped = [f"{row['model']}: {row['skipped']}" for row in rows if "skipped" in row]
    different = [row for row in measured if not row["identical"]]
    models = dict.fromkeys(f"{row['model']} from {row['source']}" for row in measured)
    found = f"{len(measured) - len(different)} of {len(measured)} runs equal: {', '.join(models)}"
    if different:
        where = "; ".join(
            f"{row['model']} from {row['source']}, {row['prompt_tokens']} tokens, {row['route']}"
            for row in different
        )
        return Verdict(name, goal, "missed", found, True, f"different: {where}")
    why = "; ".join(skipped)
    if not measured or done.state != "done":
        return Verdict(name, goal, "not run", found, True, why_not(done, why))
    return Verdict(name, goal, "met", found, True, f"left out: {why}" if why else "")


def _import_rate(done: Done, rows: Rows, link: Rows, size_gb: float) -> Verdict:
    name = f"import rate at {1000 * size_gb:g} MB, pinned, to the link's own"
    goal = f">= {LINK_SHARE:g}"
    mine = [
        row["kv_nbytes"] / row["import_ns"]
        for row in hand_offs(rows)
        if (row["size_gb"], row["route"], row["slab"]) == (size_gb, "whole", PINNED)
    ]
    own = [
        row["nbytes"] / row["ns"]
        for row in link
        if (row["size_gb"], row["slab"]) == (size_gb, PINNED)
    ]
    if not mine or not own:
        return Verdict(name, goal, "not run", "", why=why_not(done, "no rows of both"))
    if not all(row["registered"] for row in [*_pinned(hand_offs(rows)), *_pinned(link)]):
        return Verdict(name, goal, "not run", "", why="memory could not be pinned; see the logs")
    rate, best = spread(mine), spread(own)
    share = rate.median / best.median
    found = f"{share:.3f}: {rate} GB/s of {best} GB/s"
    word: Word = "met" if share >= LINK_SHARE else "missed"
    return Verdict(name, goal, word, found)


def _tails(done: Done, rows: Rows) -> Verdict:
    """Every size of one streamed route; where a size hides nothing there is no goal."""
    name = f"tail of {JUDGED_ROUTE}, pinned, paced source"
    goal = "<= 1.25 x (T x last group's share + fixed)"
    mine = [row for row in rows if row.get("slab") == PINNED]
    figures = [
        figure
        for cell in cells(mine)
        for figure in cell.figures()
        if figure.name.startswith("tail") and JUDGED_ROUTE in figure.name
    ]
    if not figures:
        return Verdict(name, goal, "not run", "", why=why_not(done, "no size hides anything"))
    found = "; ".join(f"{each.name}: {each.result} ({each.goal})" for each in figures)
    missed = [each.name for each in figures if each.met is False]
    if missed:
        return Verdict(name, goal, "missed", found, why=f"missed: {'; '.join(missed)}")
    return Verdict(name, goal, "met", found)


def _token_time(done: Done, rows: Rows) -> Iterator[Verdict]:
    figures = [each for each in load_figures(rows) if each.name.startswith("token time")]
    judged = [each for each in figures if each.met is not None]
    if not judged:
        name = "token time of neighbours, imports copied to imports discarded"
        yield Verdict(name, "<= 1.02", "not run", "", why=why_not(done, "no rows"))
    for each in judged:
        # An arm whose imports are copied is called `real`, which is also what a device may be.
        name = each.name.replace("real to discarded", "imports copied to imports discarded")
        yield Verdict(name, each.goal, "met" if each.met else "missed", each.result)


def _pinned(rows: Rows) -> Rows:
    return [row for row in rows if row["slab"] == PINNED]
