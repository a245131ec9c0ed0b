"""`headrace run`: one prompt through a source and a decoder, by one route or by all three."""

from __future__ import annotations

import json
import secrets
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from headrace.backends.load import size_options
from headrace.cli.arguments import (
    is_text,
    json_object,
    open_text,
    read_prompt,
)
from headrace.cli.report import (
    as_json,
    failure_text,
    print_comparison,
    print_result,
    run_of,
)
from headrace.cli.run_options import RunOptions, check_options, sampling_of
from headrace.cli.shown import Printer, shown_of
from headrace.engine.text import ByteText, TextCodec
from headrace.errors import HeadraceError, Refused
from headrace.geometry import MAX_POSITIONS
from headrace.messages import AskedRoute
from headrace.runtime.config import OwnerConfig, SourceConfig
from headrace.runtime.log import configure
from headrace.runtime.pairs import (
    LANES,
    REPLAY,
    TAKE_A_MODEL,
    WITH_A_MODEL,
    dtype_for,
    interpreter_for,
    interpreter_for_decoder,
    is_emulated,
    is_fake,
    options_for,
    options_of,
    pair_name,
)
from headrace.runtime.requests import MAX_ATTEMPTS_BY_DEFAULT, ROUTES, RequestOptions
from headrace.runtime.router import OwnerClient, RouteResult
from headrace.runtime.supervisor import RestartPolicy
from headrace.telemetry.chrome import encode
from headrace.telemetry.recording import Recording
from headrace.telemetry.stamp import stamp

WARM_UP_TOKENS = 8
CHUNKED_POSITIONS = 256
CONTEXT_STEP = 64
WITHDRAWN_WITHIN_S = 5.0

_DEFAULTS = RunOptions()


def run(
    *,
    stdin: bool = False,
    options: Annotated[RunOptions, Parameter(name="*")] = _DEFAULTS,
) -> int:
    """Prefill a prompt in a source process, hand its KV cache over, and decode.

    The prompt comes from --prompt, from --prompt-file, or from standard input with --stdin or `-`.

    Parameters
    ----------
    stdin
        Read the prompt from standard input; a lone `-` means the same.
    """
    check_options(options)
    text = _prompt_text(options, from_stdin=stdin)
    configure(options.log_level, as_json=options.log_json)
    codec, directory, longest = _codec(options)
    tokens = codec.encode(text)
    if not tokens:
        raise Refused("the prompt is empty; give at least one token")
    if options.temperature > 0 and options.seed is None:  # one for all routes
        options = replace(options, seed=secrets.randbits(32))
    config = _config(options, directory, longest, len(tokens))
    marks = _marks(config)
    pair = pair_name(options.source, options.decoder, **marks)
    interpreter = interpreter_for_decoder(
        options.decoder, options.decoder_python, config.decoder_options
    )
    client = OwnerClient(config, interpreter=interpreter)
    results: dict[AskedRoute, RouteResult] = {}
    try:
        client.start()
        _run_routes(client, options, tokens, codec, results)
    except (HeadraceError, KeyboardInterrupt):
        if options.trace is not None and results:
            _write_trace(options.trace, tokens, results, pair)
        raise
    finally:
        client.close()
    status = _report(options, codec, tokens, results, marks)
    if options.trace is not None:
        _write_trace(options.trace, tokens, results, pair)
    return status


def _prompt_text(options: RunOptions, *, from_stdin: bool) -> str:
    given = [options.prompt is not None, options.prompt_file is not None, from_stdin]
    if sum(given) != 1:
        raise Refused("give the prompt once: --prompt TEXT, --prompt-file FILE, or - for stdin")
    if options.prompt is not None:
        text = options.prompt
    elif options.prompt_file is not None:
        text = read_prompt(options.prompt_file)
    else:
        text = _read_stdin()
    if not is_text(text):
        raise Refused("the prompt is not UTF-8 text; give it as UTF-8")
    return text


def _read_stdin() -> str:
    if sys.stdin is None:  # closed by whoever started this process
        raise Refused("standard input is closed; give --prompt TEXT or --prompt-file FILE")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as exc:
        raise Refused("the prompt on standard input is not UTF-8 text; give it as UTF-8") from exc
    except OSError as exc:
        raise Refused(f"standard input cannot be read: {exc.strerror}") from exc


def _codec(options: RunOptions) -> tuple[TextCodec, Path | None, int]:
    """The codec, the model's directory if there is a model, and the most positions it holds."""
    if options.model is None:
        if options.source in TAKE_A_MODEL or options.decoder in WITH_A_MODEL:
            raise Refused("give --model; `headrace models list` shows what is built in")
        return ByteText(), None, MAX_POSITIONS - 1
    from headrace.engine.models import resolve

    directory = resolve(options.model)
    codec, longest = open_text(directory)
    return codec, directory, longest


def _marks(config: OwnerConfig) -> dict[str, bool]:
    """What of a pair is no device of its own: what every figure of it is shown with."""
    (source,) = config.sources
    return {
        "emulated": is_emulated(source.source, source.options),
        "fake": is_fake(config.decoder, config.decoder_options),
    }


def _config(
    options: RunOptions, directory: Path | None, longest: int, num_tokens: int
) -> OwnerConfig:
    needed = num_tokens + max(options.max_tokens - 1, 0)
    if needed > longest:
        raise Refused(
            f"the prompt has {num_tokens} tokens and with {options.max_tokens} to decode needs "
            f"{needed} positions, and the model holds {longest}; shorten it or ask for less"
        )
    context = options.context or min(-(-needed // CONTEXT_STEP) * CONTEXT_STEP, longest)
    if needed > context:
        raise Refused(
            f"the prompt has {num_tokens} tokens and with {options.max_tokens} to decode needs "
            f"{needed} positions, and --context is {context}; raise it or ask for less"
        )
    model: dict[str, Any] = {}
    if directory is not None:
        dtype = dtype_for(options.source, options.dtype)
        model = {"model": str(directory), "dtype": dtype, "threads": options.threads}
    source = options_for(
        options.source, model, emulate=options.emulate, prefill_chunk=options.prefill_chunk
    )
    if options.source == REPLAY:
        source["vocab_size"] = 256
    return OwnerConfig(
        decoder=options.decoder,
        decoder_options={
            **options_of(options.decoder, model, compiled=options.compiled),
            **size_options(options.decoder, lanes=options.lanes or LANES, context=context),
            **({"decode_batch": options.decode_batch} if options.decode_batch > 1 else {}),
            **json_object("--decoder-options", options.decoder_options),
        },
        sources=(
            SourceConfig(
                options.source,
                {**source, **json_object("--source-options", options.source_options)},
                python=interpreter_for(options.source, options.source_python),
                num_slots=options.slots,
            ),
        ),
        context=context,
        progress_timeout_s=options.progress_timeout,
        drain_timeout_s=options.drain_timeout,
        restart=RestartPolicy() if options.on_failure == "retry" else None,
        local=options.on_failure == "local",
        tune_copies=options.tune_copies,
        control=None if options.control is None else str(options.control.absolute()),
        log_level=options.log_level,
        log_json=options.log_json,
    )


def _run_routes(
    client: OwnerClient,
    options: RunOptions,
    tokens: list[int],
    codec: TextCodec,
    results: dict[AskedRoute, RouteResult],
) -> None:
    """Fill `results` as they come, so that they are there if a later route fails."""
    compare = options.route == "compare"
    routes: tuple[AskedRoute, ...] = (
        ROUTES if compare else (options.route,)  # type: ignore[assignment]
    )
    asked = RequestOptions(
        group_layers=options.group_layers,
        prefill_chunk=options.prefill_chunk,
        emission=options.emit,
        max_tokens=options.max_tokens,
        stop_tokens=_stop_tokens(options, codec),
        sampling=sampling_of(options),
        digest=options.digest,
        poison=options.poison,
        deadline_s=options.deadline,
        on_failure=options.on_failure,
        max_attempts=options.max_attempts or MAX_ATTEMPTS_BY_DEFAULT,
        audit=compare,
        trace=compare or options.trace is not None,
    )
    if compare:  # first use of the kernels and of the memory must not count for one route
        warm = replace(asked, max_tokens=min(2, asked.max_tokens), audit=False, trace=False)
        _one(client, warm, tokens[:WARM_UP_TOKENS], None)
    for route in routes:
        chunk = options.chunk or (CHUNKED_POSITIONS if route == "chunked" else 0)
        mine = replace(asked, route=route, chunk=chunk)
        # A comparison goes on past a stop string: the rows compared are then the same.
        show = None if compare else Printer(codec, options.stop, echo=not options.json)
        try:
            results[route] = _one(client, mine, tokens, show)
        except RequestFailed as exc:
            results[route] = exc.result
            raise
        if show is not None:
            show.end()


def _stop_tokens(options: RunOptions, codec: TextCodec) -> tuple[int, ...]:
    return () if options.ignore_eos else codec.stop_tokens


def _one(
    client: OwnerClient, asked: RequestOptions, tokens: list[int], show: Printer | None
) -> RouteResult:
    label = client.submit(tokens, asked)
    try:
        result = client.result(label, show)
    except KeyboardInterrupt:
        with suppress(HeadraceError):  # dead, or its device hangs: it is ended by force
            client.withdraw(label)
            client.result(label, within_s=WITHDRAWN_WITHIN_S)
        raise
    ended = result.ended
    if ended.mistake:
        raise Refused(ended.reason, field=ended.mistake)
    if ended.outcome == "failed":
        raise RequestFailed(asked.route, result)
    return result


class RequestFailed(HeadraceError):
    """A request ended as failed; the text is its reason."""

    def __init__(self, route: AskedRoute, result: RouteResult) -> None:
        super().__init__(failure_text(route, result.ended))
        self.result = result


def _write_trace(
    path: Path, tokens: list[int], results: dict[AskedRoute, RouteResult], pair: str
) -> None:
    runs = tuple(run_of(route, tokens, result) for route, result in results.items())
    path.write_bytes(encode(Recording(runs=runs, stamp=stamp() | {"pair": pair})))


def _report(
    options: RunOptions,
    codec: TextCodec,
    tokens: list[int],
    results: dict[AskedRoute, RouteResult],
    marks: dict[str, bool],
) -> int:
    stop_tokens = _stop_tokens(options, codec)
    shown = {
        route: shown_of(result, codec, options.stop, stop_tokens)
        for route, result in results.items()
    }
    if options.json:
        model = options.model or options.source
        report = as_json(model, options.route, options.seed, tokens, shown, results, **marks)
        print(json.dumps(report))
        return 0 if report["identical"] is not False else 1
    console = Console(stderr=options.route != "compare", highlight=False)
    if any(marks.values()):
        pair = pair_name(options.source, options.decoder, **marks)
        console.print(pair, style="dim", markup=False, soft_wrap=True)
    if options.route == "compare":
        return 0 if print_comparison(console, tokens, shown, results) else 1
    print_result(console, results[options.route])  # type: ignore[index]
    return 0
