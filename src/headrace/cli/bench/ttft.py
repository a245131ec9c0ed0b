"""`headrace bench ttft`: time to the first token by every route, on models that compute."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from headrace.bench import ttft
from headrace.bench.rows import RowFile, Spread
from headrace.bench.ttft_points import Point, points_of, seconds_of, subjects, within
from headrace.bench.ttft_table import figures, points
from headrace.cli.arguments import check_count, check_output, check_seconds
from headrace.cli.bench.tables import open_rows, print_goals
from headrace.errors import Refused

MODELS = ("smollm2-135m", "gemma3-270m", "qwen3", "exaone4")
MAX_MB_S = 1e6

_console = Console(highlight=False, markup=False)


def ttft_command(
    *,
    models: tuple[str, ...] = MODELS,
    prompts: tuple[int, ...] = (64, 256, 1024, 2048),
    links_mb_s: tuple[float, ...] = (15.0, 30.0, 60.0, 250.0),
    link_prompt: int = 1024,
    prefill_chunk: int = 0,
    minutes: float = 15.0,
    repeats: int = 0,
    layers: int = 8,
    window: int = 512,
    resume: bool = False,
    out: Path | None = None,
) -> int:
    """Time to the first token by every route: torch source, cpu decoder, one thread each.

    Every route serves the same prompt from an idle owner, in turns whose order is reversed in each
    second repeat; `auto` has a source and an owner of its own. A model that is not pulled is left
    out.

    Parameters
    ----------
    models
        Built-in names, model directories, and `qwen3` and `exaone4`: random weights, real KV
        geometry per layer, fewer layers.
    prompts
        Prompt lengths in tokens, without a link.
    links_mb_s
        Emulated links in MB/s (1e6 bytes): the first model over each, the others over the second.
    link_prompt
        Prompt length over links, in tokens; at most 256 for the models after the first.
    prefill_chunk
        Positions computed at once, 0 = all: its own pairing, whose rows are only compared with
        each other. Prompts that are not longer are left out.
    minutes
        Repeats are chosen so that the run takes about this long on two idle cores; each point has
        its least number in any case.
    repeats
        Of each point, instead of choosing them.
    layers, window
        Of the random-weight models: layers, and positions of a sliding layer's window.
    resume
        Go on with the rows that --out holds.
    """
    _check(prompts, links_mb_s)
    check_count("--link-prompt", link_prompt)
    check_count("--prefill-chunk", prefill_chunk, least=0)
    check_count("--repeats", repeats, least=0)
    check_count("--layers", layers, limit=129)
    check_count("--window", window, least=2)
    check_seconds("--minutes", minutes)
    check_output("--out", out, make_parents=True)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        found = subjects(models, Path(folder), layers=layers, window=window, say=_say)
        wanted = points_of(
            found,
            prompts=prompts,
            links_mb_s=links_mb_s,
            link_prompt=link_prompt,
            prefill_chunk=prefill_chunk,
        )
        if not wanted:
            raise Refused(f"no prompt is longer than --prefill-chunk {prefill_chunk}; give one")
        todo = within(wanted, minutes * 60, repeats)
        ttft.check_points(todo)
        shapes = {"layers": layers, "window": window}
        file = open_rows(out, ttft.CLAIM, ttft.KEY, shapes, resume=resume)
        _run(todo, file)
    _print_rows(file.rows)
    return 0


def _check(prompts: tuple[int, ...], links_mb_s: tuple[float, ...]) -> None:
    if not (prompts or links_mb_s):
        raise Refused("--prompts and --links-mb-s are both empty; give a prompt length or a link")
    for num_tokens in prompts:
        check_count("--prompts", num_tokens)
    for link_mb_s in links_mb_s:
        if not 0 < link_mb_s <= MAX_MB_S:
            raise Refused(f"--links-mb-s is {link_mb_s:g}; it must be above 0, and finite")


def _run(todo: list[Point], file: RowFile) -> None:
    minutes = seconds_of(todo) / 60
    _say(f"{len(todo)} points, about {minutes:.1f} minutes from the start")
    last = None
    for row in ttft.run(todo, file):
        where = points([row])[0].key
        if where != last:
            _say(f"{where} ...")
        last = where


def _say(text: str) -> None:
    _console.print(text, soft_wrap=True)


def _print_rows(rows: list[dict[str, Any]]) -> None:
    for point in points(rows):
        _say(f"\n{point.key}, {point.repeats} repeats: median [p10, p90] in ms")
        for line in point.lines():
            ratio = "" if line.ttft_ratio is None else f" ({line.ttft_ratio.median:.4f} of whole)"
            hidden = "n/a" if line.hidden is None else f"{line.hidden:.3f}"
            saved = "n/a" if line.saved is None else f"{line.saved:.3f}"
            _say(
                f"{line.label:>11}: prefill {_short(line.prefill_ms)}  tail {_short(line.tail_ms)}"
                f"  TTFT {_short(line.ttft_ms)}{ratio}  groups {line.groups}"
                f"  early {line.early:.3f}  hidden {hidden} of at most {line.bound:.3f}"
                f"  saved {saved}"
                f"{'  took ' if line.note else ''}{line.note}"
            )
    _say("")
    print_goals(_console, figures(rows))


def _short(times: Spread) -> str:
    return f"{times.median:.4g} [{times.p10:.4g}, {times.p90:.4g}]"
