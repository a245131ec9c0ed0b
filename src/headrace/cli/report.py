"""What `headrace run` says of its routes: a JSON object, one line, or a table and a timeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import asdict
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from headrace.cli.shown import Shown
from headrace.messages import Ended, Measured
from headrace.runtime.router import RouteResult
from headrace.telemetry.clocks import Aligned, align
from headrace.telemetry.recording import Run, prompt_digest
from headrace.telemetry.report import report_of
from headrace.telemetry.stamp import stamp
from headrace.telemetry.timeline import draw
from headrace.telemetry.words import overlap


def as_json(
    model: str,
    route: str,
    seed: int | None,
    prompt: list[int],
    shown: Mapping[Any, Shown],
    results: Mapping[Any, RouteResult],
    *,
    emulated: bool,
    fake: bool,
) -> dict[str, Any]:
    """One object with stable keys; times in seconds, sizes in bytes, all times by the host clock.

    The keys of the top level are those of the route asked for, or of `streamed` for a comparison;
    `identical` is null unless routes were compared; then it is of all that was decoded, also after
    a stop string. `seed` is what was sampled with, drawn or given. `emulated` is whether the
    source's kernels ran on the CPU in place of their device, and `fake` whether the decoder ran on
    a fake of its vendor's packages; times then say nothing of a device.
    """
    routes = {name: _figures(result, shown[name]) for name, result in results.items()}
    same = identical(results) if len(results) > 1 else None
    return {
        "model": model,
        "route": route,
        "prompt_tokens": len(prompt),
        "seed": seed,
        "emulated": emulated,
        "fake": fake,
        **(routes.get(route) or routes["streamed"]),
        "identical": None if same is None else all(same.values()),
        "identical_parts": same,
        "routes": routes,
        "stamp": stamp(),
    }


def identical(results: Mapping[Any, RouteResult]) -> dict[str, bool]:
    """Whether all routes gave the same tokens, logits rows and published KV bytes."""
    logits = {result.ended.logits_digest for result in results.values()}
    decoded = any(result.tokens for result in results.values())
    kv = {result.ended.kv_digests for result in results.values()}
    return {
        "tokens": len({tuple(result.tokens) for result in results.values()}) == 1,
        "logits": len(logits) == 1 and not (decoded and "" in logits),
        "kv": len(kv) == 1 and () not in kv,
    }


def failure_text(route: str, ended: Ended) -> str:
    """One sentence about a failed request: its cause, its reason, and those of earlier attempts."""
    cause = f" ({ended.cause})" if ended.cause else ""
    earlier = "; ".join(f"attempt {at}: {why}" for at, why in enumerate(ended.attempts, 1))
    return f"the {route} route failed{cause}: {ended.reason}" + (f"; {earlier}" if earlier else "")


def print_result(console: Console, result: RouteResult) -> None:
    """One line about a single route, on stderr so that stdout is the text alone."""
    measured = result.ended.measured
    for at, why in enumerate(result.ended.attempts, 1):
        console.print(f"attempt {at} failed: {why}", style="dim", markup=False, soft_wrap=True)
    if measured is None:
        text = f"{result.ended.outcome}: {result.ended.reason}"
        console.print(text, style="dim", markup=False, soft_wrap=True)
        return
    console.print(
        f"[dim]{len(result.tokens)} tokens  TTFT {_ms(_ttft(measured))}  prefill "
        f"{_ms(_prefill(measured))}  transfer tail {_ms(measured.tail_ns)}  {_parked(measured)}KV "
        f"{_mb(measured.kv_nbytes)} in {measured.spans} spans[/dim]",
        soft_wrap=True,
    )
    if result.ended.choice is not None:
        text = f"auto took {result.ended.choice.reason}"
        console.print(text, style="dim", markup=False, soft_wrap=True)


def print_comparison(
    console: Console,
    prompt: list[int],
    shown: Mapping[Any, Shown],
    results: Mapping[Any, RouteResult],
) -> bool:
    """The text, a table of the routes, the streamed timeline; returns whether all are identical."""
    console.print(f"[bold]prompt[/bold] {len(prompt)} tokens   [bold]text[/bold]")
    console.print(shown["streamed"].text.strip(), markup=False)
    console.print()
    table = Table(
        box=SIMPLE_HEAD, caption="early: share of KV bytes imported before the prefill ended"
    )
    for name in ("route", "TTFT ms", "prefill ms", "tail ms", "KV MB", "groups", "spans", "early"):
        table.add_column(name, justify="left" if name == "route" else "right", no_wrap=True)
    for route, result in results.items():
        measured = result.ended.measured
        if measured is not None:
            table.add_row(
                route,
                _ms(_ttft(measured)).removesuffix(" ms"),
                f"{_prefill(measured) / 1e6:.1f}",
                f"{measured.tail_ns / 1e6:.2f}",
                f"{measured.kv_nbytes / 1e6:.1f}",
                str(measured.groups),
                str(measured.spans),
                f"{100 * measured.nbytes_before_final / max(1, measured.kv_nbytes):.1f} %",
            )
    console.print(table)
    same = identical(results)
    words = "   ".join(f"{part}: {'yes' if holds else 'no'}" for part, holds in same.items())
    console.print(f"identical on all routes   {words}")
    console.print()
    streamed = results["streamed"]
    if streamed.ended.measured is not None:
        run = align(run_of("streamed", prompt, streamed))
        print_timeline(console, run)
        console.print(": ".join(overlap(report_of(run))), markup=False)
    return all(same.values())


def print_timeline(console: Console, run: Aligned) -> None:
    """Both lanes of a run and its marks."""
    for line in draw(run, width=max(20, min(72, console.width - 48))):
        console.print(line, markup=False)


def run_of(name: str, prompt: list[int], result: RouteResult) -> Run:
    """What a trace keeps of a route's result; `name` is the route that was asked for."""
    ended = result.ended
    choice = ended.choice
    return Run(
        name=name,
        route=name if choice is None else choice.route,
        choice="" if choice is None else choice.reason,
        num_tokens=len(prompt),
        prompt=prompt_digest(prompt),
        outcome=ended.outcome,
        reason=ended.reason,
        source=tuple(result.source_intervals),
        owner=tuple(result.owner_intervals),
        measured=ended.measured,
    )


def _figures(result: RouteResult, shown: Shown) -> dict[str, Any]:
    measured, choice = result.ended.measured, result.ended.choice
    base: dict[str, Any] = {
        "tokens": shown.tokens,
        "text": shown.text,
        "outcome": shown.outcome,
        "finish_reason": shown.finish_reason,
        "cause": result.ended.cause,
        "failed_attempts": list(result.ended.attempts),
        "auto": None if choice is None else asdict(choice),
    }
    if measured is None:
        return base
    ttft_ns = _ttft(measured)
    return {
        **base,
        "ttft_s": None if ttft_ns is None else ttft_ns / 1e9,
        "prefill_s": _prefill(measured) / 1e9,
        "transfer_tail_s": measured.tail_ns / 1e9,
        "tail_from_last_group_s": measured.tail_from_last_group_ns / 1e9,
        "parked_s": measured.parked_ns / 1e9,
        "decode_in_the_way_s": measured.decode_in_the_way_ns / 1e9,
        "kv_bytes": measured.kv_nbytes,
        "groups": measured.groups,
        "spans": measured.spans,
        "imports": measured.imports,
        "bytes_imported_before_prefill_end": measured.nbytes_before_final,
        "last_group_bytes": measured.last_group_nbytes,
        "logits_digest": result.ended.logits_digest,
        "kv_digests": list(result.ended.kv_digests),
    }


def _ttft(measured: Measured) -> int | None:
    """None where no token was asked for."""
    return measured.first_token_ns - measured.submitted_ns if measured.first_token_ns else None


def _prefill(measured: Measured) -> int:
    return measured.source_final_ns - measured.prefill_begun_ns


def _parked(measured: Measured) -> str:
    return f"parked {_ms(measured.parked_ns)}  " if measured.parked_ns else ""


def _ms(nanoseconds: int | None) -> str:
    return "none" if nanoseconds is None else f"{nanoseconds / 1e6:.1f} ms"


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"
