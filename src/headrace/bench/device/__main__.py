"""`python -m headrace.bench.device FOLDER` is the device check; the script of it calls this."""

from __future__ import annotations

import argparse
import importlib
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from headrace.bench.device.occupied import ask_users
from headrace.bench.device.place import MODELS, Place
from headrace.bench.device.plan import STEPS, TOTAL_S, step_of
from headrace.bench.device.runner import (
    REFUSED,
    check_folder,
    command_for,
    run_steps,
)
from headrace.bench.device.summary import summarise
from headrace.errors import HeadraceError, Refused


def main(arguments: Sequence[str]) -> int:
    """Run the check, or one step of it; 0, 1 if what must hold does not, 2 for a mistake."""
    asked = _parser().parse_args(arguments)
    place = Place("fake" if asked.fake else "real", asked.folder.absolute(), asked.share_device)
    try:
        if asked.step:
            return _run_one(place, asked.step)
        return run(place, tuple(asked.only), asked.seconds)
    except Refused as exc:
        print(exc, flush=True)
        return REFUSED
    except HeadraceError as exc:
        print(f"{type(exc).__name__}: {exc}", flush=True)
        return 1 if asked.step else REFUSED


def run(place: Place, only: Sequence[str] = (), total_s: float = TOTAL_S) -> int:
    """Run all steps, or those named, and write the summary; 1 if what must hold does not.

    Raises:
        Refused: the folder is not empty, or the device is occupied. BackendUnavailable: no GPU.
    """
    check_folder(place.folder, place.kind)
    if place.kind == "real":
        _refuse_occupied(share=place.share_device)
    steps = [step for step in STEPS if not only or step.name in only]
    command = command_for(place.kind, place.folder, share_device=place.share_device)
    try:
        results = run_steps(steps, command, place.folder, _say, total_s=total_s)
    finally:
        shutil.rmtree(place.folder / MODELS, ignore_errors=True)
    summary = summarise(place.kind, place.folder, results)
    _say(summary.text)
    return 0 if summary.holds else 1


def _refuse_occupied(*, share: bool) -> None:
    told = ask_users()
    if told and not share:
        raise Refused(
            f"the GPU is in use: {'; '.join(told)}. End that first, or give --share-device, after "
            "which no time says much"
        )


def _run_one(place: Place, name: str) -> int:
    """One step in this process. An interrupt is the end of its time: what it wrote is kept."""
    step = step_of(name)
    module = importlib.import_module(f"headrace.bench.device.steps.{step.module}")
    module.run(place, step.name, _say)
    return 0


def _say(text: str) -> None:
    print(text, flush=True)


def _parser() -> argparse.ArgumentParser:
    names = [step.name for step in STEPS]
    parser = argparse.ArgumentParser(
        prog="device_check.sh",
        description="What a GPU has to show, in one folder and under ten minutes.",
    )
    parser.add_argument("folder", type=Path, help="where all files go; new or empty")
    parser.add_argument("--fake", action="store_true", help="a dry run on the fake device, tiny")
    parser.add_argument("--share-device", action="store_true", help="although others use it")
    parser.add_argument("--only", action="append", choices=names, default=[], help="this step")
    parser.add_argument("--seconds", type=float, default=TOTAL_S, help="of all steps together")
    parser.add_argument("--step", choices=names, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
