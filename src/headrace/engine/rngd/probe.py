"""Find out on a card what is stated nowhere, and write it down: `headrace rngd probe`.

Each step is tried on its own; the record is written after each, so that a vendor's library that
aborts leaves a record that names the step. With `--emulate` only the steps that need no card are
taken, and no engine accepts that record for a card.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from headrace.engine import records
from headrace.engine.rngd import cards, record
from headrace.engine.rngd.furiosa import sdk_named, set_fusion_once
from headrace.engine.rngd.probe_steps import STEPS, Bench
from headrace.engine.rngd.probes import PES_PER_CARD
from headrace.engine.rngd.record import Record
from headrace.engine.rngd.sdk import Sdk
from headrace.errors import HeadraceError


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 the engine can use what was found, 1 it cannot, 2 nothing could be probed."""
    parser = argparse.ArgumentParser(prog="headrace.engine.rngd.probe")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--chips", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--emulate", action="store_true")
    parser.add_argument("--sdk", help="module:factory of a fake, for tests")
    asked = parser.parse_args(arguments)
    try:
        made, path = probe(
            sdk_named(asked.sdk), asked.device, asked.chips, emulate=asked.emulate, out=asked.out
        )
    except HeadraceError as exc:
        print(f"headrace: {exc}", file=sys.stderr)
        return 2
    print(path)
    if asked.emulate:
        return 0 if made.fact("emulation", "agrees") is True else 1
    try:
        record.reads_of(made, path)
    except HeadraceError as exc:
        print(f"headrace: {exc}", file=sys.stderr)
        return 1
    return 0


def probe(
    sdk: Sdk,
    device: int,
    chips: int,
    *,
    emulate: bool = False,
    out: Path | None = None,
    say: Callable[[str], None] | None = None,
) -> tuple[Record, Path]:
    """Take every step and write the record after each; returns it and where it lies.

    Raises:
        BackendUnavailable: there is no such card, or this process has one of other chips.
    """
    say = say or (lambda text: print(text, file=sys.stderr, flush=True))
    # A device spans as many cards as chips: number N begins at card N times chips.
    card: dict[str, Any] = {"emulated": True}
    if not emulate:
        card = cards.describe(sdk.smi, device * chips)
        # Before any step: whatever asks for a device first would fix it at one PE.
        set_fusion_once(sdk.torch, PES_PER_CARD * chips)
    own = record.path_of(sdk, card, chips)
    path = out or own
    made = Record(
        sdk=sdk.name, packages=dict(sdk.versions), card=card, chips=chips, made=records.now()
    )
    say(f"probe: the record is {path}")
    bench = Bench(sdk, device, chips, _opener(sdk, device, chips, say), say)
    steps = (
        (step.name, partial(step.take, bench))
        for step in STEPS
        if not (emulate and step.needs_card)
    )
    made = records.take_all(made, steps, path, say)
    if path != own and not emulate:
        records.write(made, own)  # where the source looks
    return made, path


def _opener(sdk: Sdk, device: int, chips: int, say: Callable[[str], None]) -> Callable[..., Any]:
    from headrace.engine.rngd.card import CardExecutor
    from headrace.engine.rngd.compiled import CompiledKernels

    cache = CompiledKernels(sdk, say)
    return lambda reads: CardExecutor(sdk, device, chips=chips, reads=reads, cache=cache, told=say)


if __name__ == "__main__":
    sys.exit(main())
