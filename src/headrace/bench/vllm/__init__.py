"""vLLM fed by headrace, measured from its own engine, beside what vLLM has of its own.

A vLLM engine is a child in vLLM's environment, in this package's `child`, and does what it is told:
it is asked one prompt, or many, and tells what that took. Its KV connector is the one that users
load, with an emulated link before the blocks (`connector`). Sources, engines and whoever asks share
the machine, with one thread each. Prompts are random ids of a seed, answers greedy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from headrace.bench.rows import RowFile
from headrace.bench.stand import load_1min
from headrace.bench.vllm import aborts, idle, peer, tail
from headrace.bench.vllm.setting import Place, Setting

CLAIM: Final = "vllm"
KEY: Final = ("case", "measure", "prompt_tokens", "link_mb_s", "label", "repeat")
Run = Callable[[Setting, Place, RowFile, Callable[[str], None]], None]

CASES: Final[Mapping[str, Run]] = {
    "tail": tail.run,
    "idle": idle.run,
    "aborts": aborts.run,
    "peer": peer.run,
}


def pending(file: RowFile, cases: Sequence[str]) -> list[str]:
    """The cases that `file` does not hold to their end."""
    return [case for case in cases if {"case": case, "measure": "end"} not in file]


def run(
    setting: Setting,
    place: Place,
    file: RowFile,
    cases: Sequence[str],
    say: Callable[[str], None],
) -> None:
    """Run cases; an `end` row closes each.

    Raises:
        EngineFailed: an engine could not start, or did not answer.
    """
    for case in cases:
        say(f"{case} ...")
        begun_s = time.monotonic()
        CASES[case](setting, place, file, say)
        took_s = round(time.monotonic() - begun_s, 1)
        end = {"case": case, "measure": "end", "took_s": took_s, "load_1min": load_1min()}
        file.append({**end, **setting.facts()})
