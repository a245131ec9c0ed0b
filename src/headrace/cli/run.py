"""`headrace run`: one prompt through a source and a decoder, by one route or by all three."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.console import Console

from headrace.backends.load import check_name
from headrace.cli.report import as_json, print_comparison, print_result
from headrace.engine.text import ByteText, ModelText, TextCodec, max_positions_of
from headrace.errors import HeadraceError, Refused
from headrace.geometry import Emission
from headrace.messages import Route, Sampling
from headrace.runtime.config import OwnerConfig
from headrace.runtime.log import LEVELS, configure
from headrace.runtime.requests import ROUTES, RequestOptions
from headrace.runtime.router import OwnerClient, RouteResult
from headrace.telemetry.timeline import chrome_trace

WARM_UP_TOKENS = 8
CHUNKED_POSITIONS = 256
CONTEXT_STEP = 64


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of `headrace run`."""

    model: str | None = None
    "A built-in model, a directory, a GGUF file or a hub id."
    prompt: str | None = None
    "The prompt's text."
    prompt_file: Path | None = None
    "Read the prompt from this file."
    max_tokens: int = 32
    "How many tokens to decode at most."
    route: str = "whole"
    "whole, chunked, streamed, or compare (all three)."
    group_layers: int = 1
    "Layers of one layer group (streamed)."
    emit: Emission = "layers"
    "Layer groups of neighbours, or of one cache geometry."
    chunk: int = 0
    "Positions of one transfer chunk; 0 = all, and 256 on the chunked route."
    prefill_chunk: int = 0
    "Positions computed at once; 0 = all. It changes the numbers a little."
    context: int | None = None
    "Positions that a lane and a slot hold; by default what this request needs."
    source: str = "torch"
    "torch, replay or module:factory."
    source_options: str = "{}"
    "More options of the source, as a JSON object."
    source_python: str | None = None
    "The interpreter of the source's own environment."
    decoder: str = "cpu"
    "cpu, null or module:factory."
    lanes: int = 4
    "Active sequences of the decoder."
    slots: int = 2
    "Slots of the source's slab."
    dtype: str = "float32"
    "The weights' and the cache's dtype."
    threads: int = 1
    "torch threads of each process."
    temperature: float = 0.0
    "0 = greedy."
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    "End the text before this string; may be given more than once."
    ignore_eos: bool = False
    "Go on after the model's end-of-text token."
    digest: bool = False
    "Verify every span's bytes as landed."
    trace: Path | None = None
    "Write a Chrome trace (opens in Perfetto)."
    json: bool = False
    "Print one JSON object."
    log_level: str = "warning"
    log_json: bool = False


def run(
    *,
    stdin: bool = False,
    options: Annotated[RunOptions, Parameter(name="*")] = RunOptions(),
) -> int:
    """Prefill a prompt in a source process, hand its KV cache over, and decode.

    The prompt comes from --prompt, from --prompt-file, or from standard input with --stdin or `-`.

    Parameters
    ----------
    stdin
        Read the prompt from standard input; a lone `-` means the same.
    """
    text = _prompt_text(options, from_stdin=stdin)
    _check(options)
    configure(options.log_level, as_json=options.log_json)
    codec, directory = _codec(options)
    tokens = codec.encode(text)
    if not tokens:
        raise Refused("the prompt is empty; give at least one token")
    config = _config(options, directory, len(tokens))
    client = OwnerClient(config)
    try:
        client.start()
        results = _run_routes(client, options, tokens, codec)
    finally:
        client.close()
    if options.trace is not None:
        _write_trace(options.trace, results)
    return _report(options, codec, tokens, results)


def _prompt_text(options: RunOptions, *, from_stdin: bool) -> str:
    given = [options.prompt is not None, options.prompt_file is not None, from_stdin]
    if sum(given) != 1:
        raise Refused("give the prompt once: --prompt TEXT, --prompt-file FILE, or - for stdin")
    if options.prompt is not None:
        return options.prompt
    try:
        if options.prompt_file is not None:
            return options.prompt_file.read_text(encoding="utf-8")
        return sys.stdin.read()
    except (OSError, UnicodeDecodeError) as exc:
        raise Refused(f"the prompt cannot be read: {exc}") from exc


def _check(options: RunOptions) -> None:
    if options.route not in (*ROUTES, "compare"):
        raise Refused(f"unknown route {options.route!r}; choose {', '.join(ROUTES)} or compare")
    if options.log_level.upper() not in LEVELS:
        raise Refused(f"unknown log level {options.log_level!r}; choose {', '.join(LEVELS)}")
    check_name("source", options.source)
    check_name("decoder", options.decoder)
    for name in ("max_tokens", "group_layers", "lanes", "slots", "threads"):
        if getattr(options, name) < 1:
            flag = name.replace("_", "-")
            raise Refused(f"--{flag} is {getattr(options, name)}; it must be at least 1")
    for name in ("chunk", "prefill_chunk", "top_k"):
        if getattr(options, name) < 0:
            flag = name.replace("_", "-")
            raise Refused(f"--{flag} is {getattr(options, name)}; it cannot be negative")
    if options.temperature < 0 or not 0 < options.top_p <= 1:
        raise Refused("--temperature must be 0 or more and --top-p in (0, 1]")
    if options.trace is not None and not options.trace.parent.is_dir():
        raise Refused(f"--trace: {options.trace.parent} is not a directory")


def _codec(options: RunOptions) -> tuple[TextCodec, Path | None]:
    if options.model is None:
        if options.source == "torch" or options.decoder == "cpu":
            raise Refused("give --model; `headrace models list` shows what is built in")
        return ByteText(), None
    from headrace.engine.models import resolve

    directory = resolve(options.model)
    return ModelText(directory), directory


def _config(options: RunOptions, directory: Path | None, num_tokens: int) -> OwnerConfig:
    needed = num_tokens + options.max_tokens - 1
    context = options.context or -(-needed // CONTEXT_STEP) * CONTEXT_STEP
    if directory is not None:
        longest = max_positions_of(directory)
        if needed > longest:
            raise Refused(
                f"the prompt has {num_tokens} tokens and with {options.max_tokens} to decode needs "
                f"{needed} positions, and the model holds {longest}; shorten it or ask for less"
            )
        context = min(context, longest) if options.context is None else context
    if needed > context:
        raise Refused(
            f"the prompt has {num_tokens} tokens and with {options.max_tokens} to decode needs "
            f"{needed} positions, and --context is {context}; raise it or ask for less"
        )
    model: dict[str, Any] = {}
    if directory is not None:
        model = {"model": str(directory), "dtype": options.dtype, "threads": options.threads}
    source: dict[str, Any] = {"vocab_size": 256} if options.source == "replay" else dict(model)
    return OwnerConfig(
        decoder=options.decoder,
        decoder_options={
            **(model if options.decoder != "null" else {}),
            "lanes": options.lanes,
            "context": context,
        },
        source=options.source,
        source_options={**source, **_json_object(options.source_options)},
        context=context,
        source_python=options.source_python,
        num_slots=options.slots,
        log_level=options.log_level,
        log_json=options.log_json,
    )


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as exc:
        raise Refused(f"--source-options is not a JSON object: {exc}") from exc
    return value


def _run_routes(
    client: OwnerClient, options: RunOptions, tokens: list[int], codec: TextCodec
) -> dict[Route, RouteResult]:
    compare = options.route == "compare"
    routes: tuple[Route, ...] = ROUTES if compare else (options.route,)  # type: ignore[assignment]
    asked = RequestOptions(
        group_layers=options.group_layers,
        prefill_chunk=options.prefill_chunk,
        emission=options.emit,
        max_tokens=options.max_tokens,
        stop_tokens=() if options.ignore_eos else codec.stop_tokens,
        sampling=Sampling(options.temperature, options.top_p, options.top_k, options.seed),
        digest=options.digest,
        audit=compare,
        trace=True,
    )
    if compare:  # first use of the kernels and of the memory must not count for one route
        warm = replace(asked, max_tokens=min(2, asked.max_tokens), audit=False, trace=False)
        _one(client, warm, tokens[:WARM_UP_TOKENS], None)
    results: dict[Route, RouteResult] = {}
    for route in routes:
        chunk = options.chunk or (CHUNKED_POSITIONS if route == "chunked" else 0)
        show = _Printer(codec, options.stop, echo=not compare and not options.json)
        results[route] = _one(client, replace(asked, route=route, chunk=chunk), tokens, show)
        show.end()
    return results


class _Printer:
    """Takes tokens as they come: prints their text, and ends the request at a stop string."""

    def __init__(self, codec: TextCodec, stops: tuple[str, ...], *, echo: bool) -> None:
        self._codec = codec
        self._stops = stops
        self._echo = echo
        self._tokens: list[int] = []
        self._printed = 0

    def __call__(self, token: int) -> bool:
        self._tokens.append(token)
        text, stopped = cut_at_stop(self._codec.decode(self._tokens), self._stops)
        if self._echo and not text.endswith("\N{REPLACEMENT CHARACTER}"):
            print(text[self._printed :], end="", flush=True)
            self._printed = max(self._printed, len(text))
        return stopped

    def end(self) -> None:
        if self._echo and self._tokens:
            print()


def cut_at_stop(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """`text` up to the first stop string in it, and whether there was one."""
    found = [at for at in (text.find(stop) for stop in stops if stop) if at >= 0]
    return (text[: min(found)], True) if found else (text, False)


def _one(
    client: OwnerClient, asked: RequestOptions, tokens: list[int], show: _Printer | None
) -> RouteResult:
    label = client.submit(tokens, asked)
    try:
        result = client.result(label, show)
    except KeyboardInterrupt:
        client.withdraw(label)
        client.result(label)
        raise
    ended = result.ended
    if ended.mistake:
        raise Refused(ended.reason, field=ended.mistake)
    if ended.outcome == "failed":
        raise RequestFailed(f"the {asked.route} route failed: {ended.reason}")
    return result


class RequestFailed(HeadraceError):
    """A request ended as failed; the text is its reason."""


def _write_trace(path: Path, results: dict[Route, RouteResult]) -> None:
    runs = [
        (route, result.source_intervals, result.owner_intervals, result.ended.measured)
        for route, result in results.items()
        if result.ended.measured is not None
    ]
    path.write_text(json.dumps(chrome_trace(runs)))


def _report(
    options: RunOptions, codec: TextCodec, tokens: list[int], results: dict[Route, RouteResult]
) -> int:
    texts = {
        route: cut_at_stop(codec.decode(result.tokens), options.stop)[0]
        for route, result in results.items()
    }
    if options.json:
        report = as_json(options.model or options.source, options.route, tokens, texts, results)
        print(json.dumps(report))
        return 0 if report["identical"] is not False else 1
    console = Console(stderr=options.route != "compare", highlight=False)
    if options.route == "compare":
        return 0 if print_comparison(console, tokens, texts, results) else 1
    print_result(console, results[options.route])  # type: ignore[index]
    return 0
