"""`python -m headrace.testing.fault_lab`: run schedules, see one again, or hunt known bugs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from headrace.errors import Refused
from headrace.testing.fault_lab.bugs import find_bug, planted
from headrace.testing.fault_lab.choices import from_text
from headrace.testing.fault_lab.hunting import hunt_all
from headrace.testing.fault_lab.report import COUNTED, Tally, never_taken, run_record
from headrace.testing.fault_lab.safety import RULES
from headrace.testing.fault_lab.schedule import run_schedule
from headrace.testing.fault_lab.shrink import shrink
from headrace.testing.planting import Mutant


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 if no rule was broken (or all bugs were found), 1 if one was, 2 on misuse."""
    asked = _parser().parse_args(arguments)
    try:
        bug = find_bug(asked.bug) if asked.bug else None
        if asked.replay is not None and asked.one_lane:
            raise Refused("a replayed text says by itself what was drawn; leave --one-lane out")
        if asked.replay is not None:
            return _replay(asked.replay, bug)
        if asked.mutants:
            most = asked.schedules or 2000
            return hunt_all(most, asked.seed, asked.jobs, asked.out, one_lane=asked.one_lane)
        if bug is not None:
            return _show_bug(bug, asked)
        return _record(asked)
    except Refused as exc:
        print(f"fault lab: {exc}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m headrace.testing.fault_lab", description=__doc__
    )
    parser.add_argument(
        "--schedules", type=int, default=0, help="distinct ones; 1000, hunting 2000"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--one-lane",
        action="store_true",
        help="draw settings with one lane, and with two slots a source and two requests at least; "
        "with a prefetch depth above 0, which three in four have, requests may be parked",
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, help="file of rows, one JSON object a line")
    parser.add_argument("--time-limit", type=float, help="seconds; stop after the batch that runs")
    parser.add_argument("--shrink-s", type=float, default=20.0, help="seconds to shrink a finding")
    parser.add_argument("--replay", metavar="TEXT", help="show one schedule step by step")
    parser.add_argument("--mutants", action="store_true", help="hunt every known bug")
    parser.add_argument("--bug", default="", help="plant the known bug of this text")
    return parser


def _record(asked: argparse.Namespace) -> int:
    total = run_record(
        asked.schedules or 1000,
        asked.seed,
        jobs=asked.jobs,
        out=asked.out,
        time_limit_s=asked.time_limit,
        one_lane=asked.one_lane,
    )
    _print_tally(total)
    if not total.findings:
        return 0
    first = total.findings[0]
    print(f"\nseed {first.seed} breaks rule {first.rule} ({RULES[first.rule]}): {first.text}")
    with planted(None):
        small = shrink(run_schedule(first.seed, one_lane=asked.one_lane), asked.shrink_s)
    print(f"shrunk to {small.num_steps} steps in {small.num_tried} tries; see it by\n")
    print(small.command())
    return 1


def _print_tally(total: Tally) -> None:
    for name in COUNTED:
        counts = getattr(total, name).most_common()
        print(f"{name}: {', '.join(f'{kind} {count}' for kind, count in counts)}")
    missing = [" ".join(transition) for transition in never_taken(total.transitions)]
    print(f"transitions taken: {len(total.transitions)}; never: {', '.join(missing) or 'none'}")
    print(
        f"{len(total.fingerprints)} distinct schedules of {total.num_schedules}, "
        f"{total.num_steps} steps, {len(total.findings)} violations"
    )


def _replay(text: str, bug: Mutant | None) -> int:
    with planted(bug):
        seen = run_schedule(recorded=from_text(text), tracing=True)
    for number, line in enumerate(seen.trace, 1):
        print(f"{number:4d}. {line}")
    if seen.broken is None:
        print("everything came to rest and no rule was broken")
        return 0
    print(f"broken: {seen.broken}")
    return 1


def _show_bug(bug: Mutant, asked: argparse.Namespace) -> int:
    most = asked.schedules or 2000
    with planted(bug):
        for at in range(most):
            seen = run_schedule(asked.seed + at, one_lane=asked.one_lane)
            if seen.broken is not None:
                small = shrink(seen, asked.shrink_s)
                print(f"found by schedule {at + 1}: {seen.broken}")
                print(f"shrunk from {seen.num_steps} to {small.num_steps} steps; see it by\n")
                print(small.command(bug.text))
                return 1
    print(f"not found by {most} schedules")
    return 0


if __name__ == "__main__":
    sys.exit(main())
