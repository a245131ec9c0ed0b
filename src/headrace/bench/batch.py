"""What batched decode is worth: tokens per second against one sequence per forward.

All decoders share one model in this process. A block feeds the same number of entries the same
number of steps; a repeat is four blocks, exact, batched, batched, exact, and its ratio is the time
of the exact ones over that of the batched ones. `active` entries of `prompt` tokens decode at once;
where they are fewer than the batch, its other rows are computed for nothing. The cells of the
prompts are zeros, which cost what others cost.

Rows tell whether the rows of a batch rounded alike when it was opened (`rows_alike`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headrace.bench.rows import RowFile, Spread, busy_share, spread
from headrace.bench.stand import load_1min
from headrace.engine.text import max_positions_of
from headrace.errors import Refused

if TYPE_CHECKING:
    from headrace.backends.cpu import CpuDecoder

CLAIM: Final = "batch"
KEY: Final = ("active", "decode_batch", "repeat", "order")
ARMS: Final = ("exact", "batched", "batched", "exact")
_TOKENS: Final = 7  # fed by turns: which they are costs nothing


@dataclass(frozen=True)
class Setting:
    """What is measured; `model` is its name, `directory` where it lies."""

    model: str
    directory: Path
    active: tuple[int, ...]
    batches: tuple[int, ...]
    prompt: int
    steps: int
    repeats: int
    threads: int
    dtype: str

    def facts(self) -> dict[str, Any]:
        """What rows depend on beside their key."""
        kept = ("model", "prompt", "steps", "threads", "dtype")
        return {name: value for name, value in asdict(self).items() if name in kept}


class Gain(NamedTuple):
    """Of one batch at one number of entries: tokens per second of both, and ratios by repeat."""

    exact: float
    batched: float
    ratio: Spread


def check(setting: Setting) -> None:
    """Refuse what the model cannot hold."""
    longest, needed = max_positions_of(setting.directory), setting.prompt + setting.steps
    if needed > longest:
        raise Refused(
            f"{setting.model} holds {longest} positions, and a prompt of {setting.prompt} with "
            f"{setting.steps} steps needs {needed}; ask for less",
            field="prompt",
        )


def run(setting: Setting, file: RowFile) -> Iterator[dict[str, Any]]:
    """Measure what `file` does not hold yet, append it there, and yield each row."""
    check(setting)
    with ExitStack() as stack:
        decoders = {
            batch: stack.enter_context(closing(decoder))
            for batch, decoder in _decoders(setting).items()
        }
        for decoder in decoders.values():
            _block(decoder, 1, setting)  # first use of the kernels and of the memory
        for repeat in range(setting.repeats):
            for active in setting.active:
                for batch in setting.batches:
                    place = {"active": active, "decode_batch": batch, "repeat": repeat}
                    if place | {"order": len(ARMS) - 1} in file:
                        continue
                    for order, arm in enumerate(ARMS):
                        decoder = decoders[1 if arm == "exact" else batch]
                        row = {**place, "order": order, "arm": arm, **setting.facts()}
                        yield file.append(row | _measured(decoder, active, setting))


def _decoders(setting: Setting) -> dict[int, CpuDecoder]:
    """A decoder of each batch, and of 1, all with the same weights."""
    from headrace.backends.cpu import CpuDecoder
    from headrace.engine.loading import load_model

    model = load_model(setting.directory, dtype=setting.dtype, threads=setting.threads)
    lanes, context = max(setting.active), setting.prompt + setting.steps
    return {batch: CpuDecoder(model, lanes, context, batch) for batch in (1, *setting.batches)}


def _measured(decoder: CpuDecoder, active: int, setting: Setting) -> dict[str, Any]:
    busy = busy_share(0.05)
    wall_ns = _block(decoder, active, setting)
    return {
        "wall_ns": wall_ns,
        "tokens": active * setting.steps,
        "rows_alike": decoder.rows_alike,
        "pairing": decoder.facts,
        "busy_before": round(busy, 3),
        "load_1min": load_1min(),
    }


def _block(decoder: CpuDecoder, active: int, setting: Setting) -> int:
    """ns of all steps of `active` entries, as an owner takes them: a batch of them at a time."""
    entries = [decoder.publish(decoder.reserve(setting.prompt)) for _ in range(active)]
    batch = decoder.caps.decode_batch
    groups = [entries[at : at + batch] for at in range(0, active, batch)]
    begun_ns = time.perf_counter_ns()
    for step in range(setting.steps):
        for group in groups:
            decoder.decode_step([(entry, step % _TOKENS) for entry in group])
    wall_ns = time.perf_counter_ns() - begun_ns
    for entry in entries:
        decoder.free(entry)
    return wall_ns


def gains(rows: Sequence[dict[str, Any]]) -> dict[tuple[int, int], Gain]:
    """By number of entries and batch, of the repeats whose four blocks are there."""
    found: dict[tuple[int, int], dict[tuple[int, int], dict[str, list[float]]]] = {}
    for row in rows:
        repeats = found.setdefault((row["active"], row["decode_batch"]), {})
        arms = repeats.setdefault((row["run"], row["repeat"]), {"exact": [], "batched": []})
        arms[row["arm"]].append(row["wall_ns"] / row["tokens"])
    measured = {}
    for key, repeats in sorted(found.items()):
        whole = [arms for arms in repeats.values() if sum(map(len, arms.values())) == len(ARMS)]
        if whole:
            ns = {arm: median([sum(each[arm]) / 2 for each in whole]) for arm in whole[0]}
            ratios = [sum(arms["exact"]) / sum(arms["batched"]) for arms in whole]
            measured[key] = Gain(1e9 / ns["exact"], 1e9 / ns["batched"], spread(ratios))
    return measured
