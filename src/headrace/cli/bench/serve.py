"""`headrace bench serve`: `headrace serve` under load, overload, faults and nonsense."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from headrace.backends.load import check_name
from headrace.cli.arguments import check_count, check_seconds
from headrace.cli.bench.arguments import json_object, model_name
from headrace.cli.bench.tables import open_rows, print_goals
from headrace.errors import Refused
from headrace.runtime.requests import ASKED_ROUTES

if TYPE_CHECKING:
    from headrace.bench.serve.setting import Sizes

_console = Console(highlight=False, markup=False)


def serve_command(
    *cases: str,
    model: str = "smollm2-135m",
    route: str = "whole",
    source: str = "torch",
    source_options: str = "{}",
    decoder: str = "cpu",
    decoder_options: str = "{}",
    lanes: int = 4,
    slots: int = 2,
    context: int = 1024,
    threads: int = 1,
    seed: int = 1,
    clients: int | None = None,
    minutes: float | None = None,
    quick: bool = False,
    resume: bool = False,
    out: Path | None = None,
) -> int:
    """A server as a child process, over HTTP: each case starts its own and ends it.

    Parameters
    ----------
    cases
        load, overload, disconnects, kills, malformed, overhead, mixed; all of them if none is
        named.
    model
        A built-in model, a directory, a GGUF file or a hub id.
    route
        How caches are moved.
    source, decoder
        As for `headrace serve`.
    seed
        Of prompts, arrivals, moments of leaving, and mutations.
    clients, minutes
        Of the load; by default 8 for 10 minutes.
    quick
        Every part once, in seconds: a test of the benchmark itself.
    resume
        Go on with the cases that --out does not hold to their end.
    """
    _check_installed()
    from headrace.bench import serve
    from headrace.bench.serve.setting import Setting
    from headrace.bench.serve.table import figures
    from headrace.engine.models import resolve

    _check_names(cases, tuple(serve.CASES), route, source, decoder)
    counts = {"--lanes": lanes, "--slots": slots, "--context": context, "--threads": threads}
    for flag, value in counts.items():
        check_count(flag, value)
    sizes = _sizes(clients, minutes, quick=quick)
    setting = Setting(
        model=model_name(model),
        directory=resolve(model),
        route=route,
        source=source,
        source_options=json_object("--source-options", source_options),
        decoder=decoder,
        decoder_options=json_object("--decoder-options", decoder_options),
        lanes=lanes,
        slots=slots,
        context=context,
        threads=threads,
        seed=seed,
        sizes=sizes,
    )
    setting.check()
    file = open_rows(out, serve.CLAIM, serve.KEY, setting.same(), resume=resume)
    serve.run(setting, file, cases or tuple(serve.CASES), _say)
    print_goals(_console, figures(file.rows))
    return 0


def _check_installed() -> None:
    if find_spec("httpx") is None:
        raise Refused(
            "bench serve needs httpx, which is not installed; "
            "run: pip install 'headrace[bench,server]'"
        )


def _check_names(
    cases: tuple[str, ...], known: tuple[str, ...], route: str, source: str, decoder: str
) -> None:
    unknown = next((case for case in cases if case not in known), None)
    if unknown is not None:
        raise Refused(f"unknown case {unknown!r}; known are {', '.join(known)}")
    if route not in ASKED_ROUTES:
        raise Refused(f"unknown route {route!r}; choose {', '.join(ASKED_ROUTES)}", field="route")
    check_name("source", source)
    check_name("decoder", decoder)


def _sizes(clients: int | None, minutes: float | None, *, quick: bool) -> Sizes:
    from headrace.bench.serve.setting import QUICK, Sizes

    sizes = QUICK if quick else Sizes()
    if clients is not None:
        check_count("--clients", clients)
        sizes = replace(sizes, clients=clients)
    if minutes is not None:
        check_seconds("--minutes", minutes)
        sizes = replace(sizes, load_s=60 * minutes)
    return sizes


def _say(text: str) -> None:
    _console.print(text, soft_wrap=True)
