"""`headrace bench vllm`: vLLM fed by headrace, beside vLLM by itself and its own connectors."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from headrace.bench.rows import Spread
from headrace.cli.arguments import check_count, check_given
from headrace.cli.bench.arguments import model_name
from headrace.cli.bench.tables import open_rows, print_goals
from headrace.engine import environments
from headrace.engine.environments import VLLM
from headrace.errors import Refused
from headrace.runtime.interpreters import check_interpreter

if TYPE_CHECKING:
    from headrace.bench.vllm.setting import Place, Sizes

MAX_MB_S = 1e6

_console = Console(highlight=False, markup=False)


def vllm_command(
    *cases: str,
    model: str = "smollm2-135m",
    lengths: tuple[int, ...] = (),
    links_mb_s: tuple[float, ...] = (),
    rounds: int | None = None,
    requests: int | None = None,
    prefill_chunk: int = 256,
    seed: int = 1,
    vllm_python: str | None = None,
    quick: bool = False,
    resume: bool = False,
    out: Path | None = None,
) -> int:
    """Engines of vLLM as children in its environment; torch sources in this one.

    Parameters
    ----------
    cases
        tail, idle, aborts, peer; all of them if none is named.
    model
        A built-in model, a directory, a GGUF file or a hub id.
    lengths
        Prompts of `tail`, in tokens; by default 300, 600, 1200 and 2000.
    links_mb_s
        Emulated links of `tail` in MB/s (1e6 bytes), 0 for none; by default 0, 250, 60 and 30.
    rounds
        Of `tail` and `peer`; by default 10 to 4 of `tail`, by the length, and 4 of `peer`.
    requests
        Of `aborts`; by default 500.
    prefill_chunk
        Positions that the source of `tail` computes at once, on all routes; 0 for all.
    seed
        Of prompts, lengths and aborts.
    vllm_python
        The interpreter of vLLM's environment; by default HEADRACE_VLLM_PYTHON, or the one that
        `headrace vllm-env` made.
    quick
        Every part once, in seconds: a test of the benchmark itself.
    resume
        Go on with what --out does not hold; with all cases there it prints their table.
    """
    from headrace.bench import vllm
    from headrace.bench.vllm.setting import Setting
    from headrace.bench.vllm.table import figures

    names = cases or tuple(vllm.CASES)
    _check_names(names, tuple(vllm.CASES))
    check_given("--vllm-python", vllm_python)
    check_count("--prefill-chunk", prefill_chunk, least=0)
    sizes = _sizes(lengths, links_mb_s, rounds, requests, quick=quick)
    setting = Setting(model_name(model), prefill_chunk, seed, sizes)
    file = open_rows(out, vllm.CLAIM, vllm.KEY, setting.same(), resume=resume)
    pending = vllm.pending(file, names)
    if pending:
        vllm.run(setting, _place(model, vllm_python), file, pending, _say)
    _print_tail(file.rows)
    print_goals(_console, figures(file.rows))
    return 0


def _check_names(cases: tuple[str, ...], known: tuple[str, ...]) -> None:
    unknown = next((case for case in cases if case not in known), None)
    if unknown is not None:
        raise Refused(f"unknown case {unknown!r}; known are {', '.join(known)}")


def _sizes(
    lengths: tuple[int, ...],
    links_mb_s: tuple[float, ...],
    rounds: int | None,
    requests: int | None,
    *,
    quick: bool,
) -> Sizes:
    from headrace.bench.vllm.setting import QUICK, Sizes
    from headrace.bench.vllm.tail import ONE_BLOCK

    for num_tokens in lengths:
        check_count("--lengths", num_tokens, least=ONE_BLOCK)
    for link_mb_s in links_mb_s:
        if not 0 <= link_mb_s <= MAX_MB_S:
            raise Refused(f"--links-mb-s is {link_mb_s:g}; it must be 0 for none, or finite")
    sizes = QUICK if quick else Sizes()
    if lengths:
        sizes = replace(sizes, lengths=lengths)
    if links_mb_s:
        sizes = replace(sizes, links_mb_s=links_mb_s)
    if rounds is not None:
        check_count("--rounds", rounds)
        sizes = replace(sizes, rounds=rounds, short_rounds=rounds, long_rounds=rounds)
        sizes = replace(sizes, peer_rounds=rounds)
    if requests is not None:
        check_count("--requests", requests)
        sizes = replace(sizes, requests=requests)
    return sizes


def _place(model: str, vllm_python: str | None) -> Place:
    from headrace.bench.vllm.setting import Place
    from headrace.engine.models import resolve

    python = environments.find(VLLM) if vllm_python is None else vllm_python
    check_interpreter(python, "--vllm-python")
    return Place(resolve(model), python, sys.executable)


def _print_tail(rows: list[dict[str, Any]]) -> None:
    from headrace.bench.vllm.table import points

    for point in points(rows):
        rounds = point.tail["streamed"].samples
        _say(
            f"{point}, {rounds} rounds: median [p10, p90] in ms; T {point.alone:.4g}, last group "
            f"{point.last_share:.4f} of all bytes, fixed {point.fixed:.3g}; of the streamed route "
            f"{point.early:.4f} imported before the source was done"
        )
        for label, ttft in point.ttft.items():
            tail = f"  tail {_short(point.tail[label])}" if label in point.tail else ""
            _say(f"{label:>9}: TTFT {_short(ttft)}{tail}")


def _short(times: Spread) -> str:
    return f"{times.median:.4g} [{times.p10:.4g}, {times.p90:.4g}]"


def _say(text: str) -> None:
    _console.print(text, soft_wrap=True)
