"""`headrace bench rngd`: the RNGD engine emulated on a CPU, against torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from headrace.bench.rows import spread
from headrace.cli.arguments import check_count
from headrace.cli.bench.arguments import model_name
from headrace.cli.bench.tables import open_rows
from headrace.errors import Refused
from headrace.runtime.pairs import interpreter_for

_STAGES = ("first", "attention", "mid", "last")
_PAIRS = ("emulated_torch", "emulated_float32", "torch_float32")

_console = Console(highlight=False)


def rngd_command(
    *,
    model: str = "smollm2-135m",
    reference: str | None = None,
    lengths: tuple[int, ...] = (1, 63, 64, 65, 128, 257),
    token_buckets: tuple[int, ...] = (64, 128),
    groups: tuple[int, ...] = (1, 3, 10),
    prefill_chunk: int = 0,
    repeats: int = 5,
    threads: int = 1,
    source_python: str | None = None,
    resume: bool = False,
    out: Path | None = None,
) -> int:
    """The vendor's kernels emulated on this CPU: exactness, numbers, announcements. No card.

    Parameters
    ----------
    model
        A built-in model, a directory or a hub id.
    reference
        The same weights for torch, where it cannot load the model's own 8 bit ones.
    lengths
        Tokens of the prompts.
    token_buckets
        As the source takes them: longer prompts are computed in chunks.
    groups
        Layers of a layer group, for the announcements.
    repeats
        Of the whole route, for the times of the stages.
    source_python
        The interpreter of the vendor's environment.
    resume
        Go on with the rows that --out holds.
    """
    _check("--lengths", lengths)
    _check("--token-buckets", token_buckets)
    _check("--groups", groups)
    check_count("--prefill-chunk", prefill_chunk, least=0)
    check_count("--repeats", repeats)
    check_count("--threads", threads)
    interpreter = interpreter_for("rngd", source_python)
    if interpreter is None:
        raise Refused("no interpreter for the rngd source; give --source-python")
    from headrace.bench import rngd
    from headrace.engine.models import resolve
    from headrace.engine.rngd import geometry

    directory = resolve(model)
    config = geometry.read_config(directory)
    family = geometry.family_of(config)
    setting = rngd.Setting(
        model_name(model),
        directory,
        directory if reference is None else resolve(reference),
        family.quantised,
        interpreter,
        lengths,
        token_buckets,
        groups,
        prefill_chunk,
        repeats,
        threads,
    )
    rngd.check(setting, geometry.longest(family, config))
    file = open_rows(out, rngd.CLAIM, rngd.KEY, setting.facts(), resume=resume)
    for row in rngd.run(setting, file):
        _console.print(f"{row['prompt_tokens']} tokens")
    rows = sorted(file.rows, key=lambda row: int(row["prompt_tokens"]))
    for table in (_exactness(rows), _numbers(rows), _announcements(rows), _stages(rows)):
        _console.print(table)
    return 0 if all(row["runs_equal"] and row["within_bound"] for row in rows) else 1


def _check(flag: str, counts: Sequence[int]) -> None:
    if not counts or len(set(counts)) != len(counts):
        raise Refused(f"{flag} is empty or names a number twice; give different numbers")
    for count in counts:
        check_count(flag, count)


def _exactness(rows: list[dict[str, Any]]) -> Table:
    table = Table("tokens", "runs", "same bytes", "bound", title="Emulated on a CPU: all routes")
    for row in rows:
        same = "yes" if row["runs_equal"] else "NO"
        bound = "holds" if row["within_bound"] else row["over"]
        table.add_row(str(row["prompt_tokens"]), str(row["runs"]), same, bound)
    return table


def _numbers(rows: list[dict[str, Any]]) -> Table:
    """Of emulated to torch in bf16, and of either to float32."""
    table = Table(title="Emulated on a CPU: largest difference, and rms of all")
    for heading in ("tokens", "", "to torch bf16", "to float32", "torch bf16 to float32"):
        table.add_column(heading)
    for row in rows:
        for at, what in enumerate(("K", "V", "logits")):
            pairs = (row[name][what] for name in _PAIRS)
            cells = [f"{apart['max']:.3g}, {apart['rms']:.2g}" for apart in pairs]
            table.add_row("" if at else str(row["prompt_tokens"]), what, *cells)
    return table


def _announcements(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Emulated on a CPU: announcements before the final logits")
    for heading in ("tokens", "group, layers", "announcements", "before the logits"):
        table.add_column(heading)
    for row in rows:
        for at, group in enumerate(row["groups"]):
            tokens = "" if at else str(row["prompt_tokens"])
            counts = (group[name] for name in ("group_layers", "messages", "before_logits"))
            table.add_row(tokens, *map(str, counts))
    return table


def _stages(rows: list[dict[str, Any]]) -> Table:
    from headrace.bench.rngd import stage_ms

    table = Table("tokens", *_STAGES, title="Emulated on a CPU: host ms in each stage")
    for row in rows:
        times = stage_ms(row)
        table.add_row(str(row["prompt_tokens"]), *(str(spread(times[each])) for each in _STAGES))
    return table
