"""`headrace bench routes`: whole against streamed on a real model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from headrace.bench import routes
from headrace.bench.rows import spread, write_rows
from headrace.cli.arguments import check_count, check_output, open_text, read_prompt
from headrace.errors import Refused

_console = Console(highlight=False)


def routes_command(
    *,
    model: str,
    prompt_file: Path,
    repeats: int = 5,
    max_prompt: int = 512,
    group_layers: int = 1,
    busy: bool = False,
    out: Path | None = None,
) -> int:
    """Whole against streamed on a real model: share imported early, tail, prefill slow-down."""
    from headrace.engine.models import resolve

    check_count("--repeats", repeats)
    check_count("--max-prompt", max_prompt)
    check_count("--group-layers", group_layers)
    check_output("--out", out, make_parents=True)
    text = read_prompt(prompt_file)
    directory = resolve(model)
    codec, _ = open_text(directory)
    tokens = codec.encode(text)[:max_prompt]
    if not tokens:
        raise Refused(f"{prompt_file} is empty; give a text with --prompt-file")
    rows = [
        {"model": model, **row}
        for row in routes.run(directory, tokens, repeats, busy=busy, group_layers=group_layers)
    ]
    write_rows(out, "routes", rows)
    _print_routes(rows)
    return 0


def _print_routes(rows: list[dict[str, Any]]) -> None:
    by_route: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_route.setdefault(row["route"], []).append(row)
    for route, mine in by_route.items():
        early = spread([row["nbytes_before_final"] / row["kv_nbytes"] for row in mine])
        _console.print(
            f"{route:>9}: prefill {spread([r['prefill_ns'] / 1e6 for r in mine])} ms  "
            f"tail {spread([r['tail_ns'] / 1e6 for r in mine])} ms  "
            f"decode in the way {spread([r['decode_in_the_way_ns'] / 1e6 for r in mine])} ms  "
            f"early {early}",
            soft_wrap=True,
        )
    streamed = by_route["streamed"][0]
    bound = 1 - streamed["last_group_nbytes"] / streamed["kv_nbytes"]
    pairs = zip(by_route["whole"], by_route["streamed"], strict=True)
    slower = spread([b["prefill_ns"] / a["prefill_ns"] - 1 for a, b in pairs])
    _console.print(f"bound of the early share: {bound:.4f}; prefill slow-down: {slower}")
