"""`headrace bench batch`: what batched decode is worth."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from headrace.bench import batch
from headrace.bench.batch import CLAIM, KEY, Setting, gains
from headrace.cli.arguments import check_count
from headrace.cli.bench.arguments import model_name
from headrace.cli.bench.tables import open_rows
from headrace.errors import Refused

MOST_ENTRIES = 256

_console = Console(highlight=False)


def batch_command(
    *,
    model: str = "smollm2-135m",
    active: tuple[int, ...] = (1, 4, 8),
    batches: tuple[int, ...] = (2, 4, 8),
    prompt: int = 128,
    steps: int = 8,
    repeats: int = 10,
    threads: int = 1,
    dtype: str = "float32",
    resume: bool = False,
    out: Path | None = None,
) -> int:
    """Tokens per second of batched decode on a CPU, as ratios to one sequence per forward.

    Parameters
    ----------
    model
        A built-in model, a directory, a GGUF file or a hub id.
    active
        How many entries decode at once.
    batches
        Values of --decode-batch.
    prompt
        Positions that each entry has when it begins.
    steps
        Tokens of each entry in a block.
    repeats
        Of four blocks each: exact, batched, batched, exact.
    resume
        Go on with the rows that --out holds.
    """
    _check("--active", active, least=1)
    _check("--batches", batches, least=2)
    for flag, count in (("--prompt", prompt), ("--steps", steps), ("--repeats", repeats)):
        check_count(flag, count)
    check_count("--threads", threads)
    from headrace.engine.models import resolve

    directory = resolve(model)
    name = model_name(model)
    setting = Setting(name, directory, active, batches, prompt, steps, repeats, threads, dtype)
    batch.check(setting)
    file = open_rows(out, CLAIM, KEY, setting.facts(), resume=resume)
    for row in batch.run(setting, file):
        if row["order"] == 0 and row["active"] == active[0] and row["decode_batch"] == batches[0]:
            _console.print(f"repeat {row['repeat'] + 1} of {repeats}")
    table = Table("entries", "batch", "exact, tokens/s", "batched, tokens/s", "batched / exact")
    for (entries, size), gain in gains(file.rows).items():
        table.add_row(
            str(entries), str(size), f"{gain.exact:.1f}", f"{gain.batched:.1f}", str(gain.ratio)
        )
    _console.print(table)
    return 0


def _check(flag: str, counts: tuple[int, ...], *, least: int) -> None:
    if not counts:
        raise Refused(f"{flag} is empty; give at least one number")
    for count in counts:
        check_count(flag, count, least=least, limit=MOST_ENTRIES + 1)
