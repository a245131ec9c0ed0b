"""The RNGD engine on the vendor's kernels, emulated on the CPU: is it exact, how far from torch.

Real processes and real kernels, and no card. One row for each prompt length: whether all routes had
the same bytes, how far K, V and logits are from torch's in bf16 and both from float32, how many
announcements came before the final logits for each size of a layer group, and the host's time in
each stage of the whole route. Times are those of the CPU that emulates; they tell nothing of a
card. Prompts are random ids, drawn anew from each length.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from headrace.backends.null import NullDecoder, decoder_like
from headrace.bench.rngd_source import STAGES
from headrace.bench.rngd_states import (
    OverBound,
    Prefilled,
    States,
    check_bound,
    distance,
    of_part,
    prefill,
)
from headrace.bench.rows import RowFile
from headrace.bench.stand import Stand
from headrace.errors import Refused
from headrace.runtime.requests import Request
from headrace.runtime.worker import SourceHandle

CLAIM: Final = "rngd emulated"
KEY: Final = ("prompt_tokens",)
ENGINE: Final = "headrace.bench.rngd_source:open"
PARTS: Final = ("K", "V")


@dataclass(frozen=True)
class Setting:
    """What is measured; `model` is its name, `directory` where it lies.

    reference: the directory of the same weights for torch. quantised: whether the kernels have 8
    bit weights. interpreter: of the vendor's environment. groups: sizes of a layer group.
    """

    model: str
    directory: Path
    reference: Path
    quantised: bool
    interpreter: str
    lengths: tuple[int, ...]
    token_buckets: tuple[int, ...]
    groups: tuple[int, ...]
    prefill_chunk: int
    repeats: int
    threads: int

    def facts(self) -> dict[str, Any]:
        """What rows depend on beside their key."""
        kept = ("model", "token_buckets", "groups", "prefill_chunk", "threads")
        return {name: value for name, value in asdict(self).items() if name in kept}


def run(setting: Setting, file: RowFile) -> Iterator[dict[str, Any]]:
    """Measure what `file` does not hold yet, append it there, and yield each row."""
    lengths = tuple(n for n in setting.lengths if {"prompt_tokens": n} not in file)
    if not lengths:
        return
    setting = replace(setting, lengths=lengths)
    rounded, exact = (_torch(setting, dtype) for dtype in ("bfloat16", "float32"))
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        stages = Path(scratch) / "stages.jsonl"
        options = {
            "emulate": True,
            "token_buckets": setting.token_buckets,
            "max_positions": _context(setting),
            "stages": str(stages),
        }
        with _stand(setting, ENGINE, setting.directory, setting.interpreter, options) as stand:
            for at, num_tokens in enumerate(lengths):
                tokens = _prompt(num_tokens, stand.decoder.manifest().vocab_size)
                row = _measured(setting, stand, tokens, stages, (rounded[at], exact[at]))
                yield file.append({"prompt_tokens": num_tokens, **setting.facts(), **row})


def _context(setting: Setting) -> int:
    return max(setting.lengths)


def _prompt(num_tokens: int, vocab_size: int) -> list[int]:
    draw = random.Random(num_tokens)
    return [draw.randrange(vocab_size) for _ in range(num_tokens)]


@contextmanager
def _stand(
    setting: Setting,
    engine: str,
    directory: Path,
    interpreter: str | None,
    options: dict[str, Any],
) -> Iterator[Stand]:
    given = {"model": str(directory), "threads": setting.threads, **options}
    handle = SourceHandle(engine, given, interpreter=interpreter)
    handle.start()
    try:
        decoder = NullDecoder(decoder_like(handle.manifest), context=_context(setting), lanes=1)
    except BaseException:
        handle.close()
        raise
    with Stand(handle, decoder, context=_context(setting)) as stand:
        yield stand


def _torch(setting: Setting, dtype: str) -> list[States]:
    """What torch computes of each prompt, in a process of its own."""
    with _stand(setting, "torch", setting.reference, None, {"dtype": dtype}) as stand:
        vocab_size = stand.decoder.manifest().vocab_size
        return [
            prefill(stand, _prompt(n, vocab_size), prefill_chunk=setting.prefill_chunk).states()
            for n in setting.lengths
        ]


def _measured(
    setting: Setting,
    stand: Stand,
    tokens: Sequence[int],
    stages: Path,
    torches: tuple[States, States],
) -> dict[str, Any]:
    cut = {"prefill_chunk": setting.prefill_chunk}
    whole = prefill(stand, tokens, **cut)  # loads the kernels of these shapes
    stages.write_text("")
    again = [prefill(stand, tokens, **cut) for _ in range(setting.repeats)]
    took = [json.loads(line) for line in stages.read_text().splitlines()]
    chunked = [prefill(stand, tokens, route="chunked", chunk=c, **cut) for c in (0, 7)]
    streamed = {
        size: prefill(stand, tokens, route="streamed", group_layers=size, **cut)
        for size in setting.groups
    }
    others: list[Prefilled] = [*again, *chunked, *streamed.values()]
    return {
        "runs": len(others) + 1,
        "runs_equal": all(whole.same_bytes(other) for other in others),
        "stages_ns": took,
        "groups": [
            {"group_layers": size, **announced(got.request)} for size, got in streamed.items()
        ],
        **_numbers(setting, whole.states(), *torches),
    }


def announced(request: Request) -> dict[str, Any]:
    """Messages of spans, how many came before the final logits were there, and how long before, in
    ns of the source's own clock; negative where it came after.
    """
    *times, final_ns = (message.ready_ns for message, _ in request.trace.source)
    return {
        "messages": len(times),
        "before_logits": sum(at < final_ns for at in times),
        "ahead_ns": [final_ns - at for at in times],
    }


def _numbers(setting: Setting, mine: States, rounded: States, exact: States) -> dict[str, Any]:
    """Distances of the three to each other, and whether the bound holds."""
    pairs = {
        "emulated_torch": (mine, rounded),
        "emulated_float32": (mine, exact),
        "torch_float32": (rounded, exact),
    }
    found: dict[str, Any] = {}
    for name, (one, other) in pairs.items():
        apart = {part: of_part(one, other, at) for at, part in enumerate(PARTS)}
        apart["logits"] = distance(one.logits, other.logits)
        found[name] = {what: each._asdict() for what, each in apart.items()}
    try:
        check_bound(mine, rounded, exact, quantised=setting.quantised)
    except OverBound as exc:
        return {**found, "within_bound": False, "over": str(exc)}
    return {**found, "within_bound": True}


def check(setting: Setting, longest: int) -> None:
    """Refuse what the model cannot hold, and a group size twice."""
    if max(setting.lengths) > longest:
        raise Refused(
            f"{setting.model} holds {longest} positions, and --lengths has "
            f"{max(setting.lengths)}; ask for less",
            field="lengths",
        )


def stage_ms(row: dict[str, Any]) -> dict[str, list[float]]:
    """The host's ms of each stage, by repeat."""
    return {stage: [took[stage] / 1e6 for took in row["stages_ns"]] for stage in STAGES}
