"""`headrace bench prefix`: the first token of a prompt that the decoder has kept."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from headrace.bench import prefix
from headrace.bench.prefix_table import GOAL, lines, worst_identical
from headrace.cli.arguments import check_count
from headrace.cli.bench.tables import open_rows

_console = Console(highlight=False)


def prefix_command(
    *,
    model: str = "smollm2-135m",
    tokens: int = 1000,
    rest: int = 100,
    repeats: int = 5,
    out: Path | None = None,
    resume: bool = False,
) -> int:
    """Time to the first token of a prompt that is kept, in part or all, against a cold one.

    Parameters
    ----------
    model
        A built-in model or a directory.
    tokens
        Tokens of the prompt that is kept.
    rest
        Tokens more of the prompt that goes on from it.
    repeats
        How often each is served, every time with a prompt that nobody has seen.
    resume
        Go on with the rows that --out holds.
    """
    from headrace.bench.ttft_points import subject_of
    from headrace.engine.models import resolve

    for flag, count in (("--tokens", tokens), ("--rest", rest), ("--repeats", repeats)):
        check_count(flag, count)
    subject = subject_of(model, resolve(model))
    settings = prefix.Settings(subject.name, subject.directory, subject.vocab_size, tokens, rest)
    file = open_rows(out, prefix.CLAIM, prefix.KEY, {}, resume=resume)
    for row in prefix.run(settings, repeats, file):
        text = f"{row['kind']} {row['repeat']} {row['label']}: {row['ttft_ns'] / 1e6:.1f} ms"
        _console.print(text, soft_wrap=True)
    table = Table("owner", "prompt", "TTFT ms", "of cold", "what was kept")
    for line in lines(file.rows):
        table.add_row(line.kind, line.label, str(line.ttft_ms), str(line.ratio), line.taken)
    _console.print(table)
    worst = worst_identical(file.rows)
    if worst is not None:
        word = "met" if worst.median < GOAL else "missed"
        _console.print(f"a repeated prompt under {GOAL:.0%} of a cold one: {word} ({worst})")
    return 0
