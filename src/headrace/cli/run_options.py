"""The options of `headrace run`, and what of them makes no sense."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.backends.load import check_name
from headrace.cli.arguments import (
    INSTALL,
    check_count,
    check_output,
    check_seconds,
    json_object,
)
from headrace.errors import Refused
from headrace.geometry import Emission
from headrace.messages import MAX_ATTEMPTS, OnFailure, Sampling
from headrace.runtime.log import LEVELS
from headrace.runtime.pairs import check_decoder, check_source, flag_of
from headrace.runtime.requests import ASKED_ROUTES

MAX_SEED = (1 << 63) - 1


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
    "How many tokens to decode at most; 0 = hand the prompt's cache over and decode nothing."
    route: str = "whole"
    "whole, chunked, streamed, auto (the one predicted to be fastest), or compare (all three)."
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
    "torch, cuda, rngd, vllm, replay or module:factory."
    source_options: str = "{}"
    "More options of the source, as a JSON object."
    source_python: str | None = None
    "The interpreter of the source's own environment; rngd's and vllm's are found "
    "if `rngd setup` or `vllm-env` made them."
    emulate: bool = False
    "Run the source's kernels on the CPU, with its vendor's own executor (rngd)."
    decoder: str = "cpu"
    "cpu, cuda, atom, null or module:factory."
    decoder_options: str = "{}"
    "More options of the decoder, as a JSON object."
    decoder_python: str | None = None
    "The interpreter of the decoder's own environment; by default HEADRACE_ATOM_PYTHON for atom."
    compiled: Path | None = None
    "The directory of the compiled model, which atom needs beside --model."
    lanes: int | None = None
    "Active sequences of the decoder; by default 4, and atom has one."
    decode_batch: int = 1
    "Sequences decoded in one forward; 1 = the exact mode. It changes the numbers a little."
    slots: int = 2
    "Slots of the source's slab."
    dtype: str | None = None
    "The weights' and the cache's dtype; by default float32, and bfloat16 with --source rngd."
    threads: int = 1
    "torch threads of each process."
    temperature: float = 0.0
    "0 = greedy."
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    "Of the sampling; by default drawn at random, and told by --json."
    stop: tuple[str, ...] = ()
    "End the text before this string; may be given more than once."
    ignore_eos: bool = False
    "Go on after the model's end-of-text token."
    digest: bool = False
    "Verify every span's bytes as landed."
    poison: bool = False
    "Fill the reserved cells with a pattern first, and publish only if none of it is left."
    on_failure: OnFailure = "fail"
    "When the source fails: fail, retry (it is started again if it died), or local (the owner)."
    max_attempts: int | None = None
    "Attempts in all with --on-failure retry; by default 3."
    deadline: float | None = None
    "Seconds within which the prompt's cache must be handed over, with all attempts."
    progress_timeout: float = 600.0
    "Seconds that a source may be silent before its attempt fails."
    drain_timeout: float = 120.0
    "Seconds that it may keep a slot that is no longer wanted before it is ended."
    control: Path | None = None
    "Make a socket here, at which `headrace owner` asks what is held."
    tune_copies: bool = False
    "Have copies bypass the cache if a probe at the start shows that this is faster."
    trace: Path | None = None
    "Write a trace, for `headrace trace` and Perfetto."
    json: bool = False
    "Print one JSON object."
    log_level: str = "warning"
    log_json: bool = False


def check_options(options: RunOptions) -> None:
    """Refuse what makes no sense, with one sentence, before anything is started."""
    if options.route not in (*ASKED_ROUTES, "compare"):
        routes = ", ".join(ASKED_ROUTES)
        raise Refused(f"unknown route {options.route!r}; choose {routes} or compare")
    if options.log_level.upper() not in LEVELS:
        raise Refused(f"unknown log level {options.log_level!r}; choose {', '.join(LEVELS)}")
    check_name("source", options.source)
    check_name("decoder", options.decoder)
    check_source(options.source, dtype=options.dtype, emulate=options.emulate)
    for name in ("group_layers", "slots", "threads", "decode_batch"):
        check_count(flag_of(name), getattr(options, name))
    if options.lanes is not None:
        check_count("--lanes", options.lanes)
    for name in ("max_tokens", "chunk", "prefill_chunk", "top_k"):
        check_count(flag_of(name), getattr(options, name), least=0)
    if options.context is not None:
        check_count("--context", options.context)
    if options.seed is not None:
        check_count("--seed", options.seed, least=0, limit=MAX_SEED + 1)
    _check_decoder(options)
    if options.max_tokens > 0:
        _check_sampling(options)
    if "" in options.stop:
        raise Refused("--stop is empty; give the text to end before, or leave it out")
    check_output("--trace", options.trace)
    _check_failures(options)


def _check_decoder(options: RunOptions) -> None:
    given = json_object("--decoder-options", options.decoder_options)
    batch = given.get("decode_batch", options.decode_batch)
    if batch != 1 and options.route == "compare":
        raise Refused(
            f"--decode-batch is {batch} and routes are compared bit by bit in the exact mode; "
            "leave --decode-batch out, or choose one route"
        )
    check_decoder(
        options.decoder,
        compiled=options.compiled,
        given=given,
        lanes=options.lanes,
        decode_batch=options.decode_batch,
    )


def _check_failures(options: RunOptions) -> None:
    for name in ("deadline", "progress_timeout", "drain_timeout"):
        seconds = getattr(options, name)
        if seconds is not None:
            check_seconds(flag_of(name), seconds)
    if options.max_attempts is None:
        return
    if options.on_failure != "retry":
        raise Refused(
            f"--max-attempts is for --on-failure retry, and it is {options.on_failure}; leave one "
            "out"
        )
    check_count("--max-attempts", options.max_attempts, limit=MAX_ATTEMPTS + 1)


def _check_sampling(options: RunOptions) -> None:
    try:
        from headrace.engine.sampling import check_sampling
    except ModuleNotFoundError as exc:
        raise Refused(
            f"choosing tokens needs {exc.name}; {INSTALL}, or give --max-tokens 0"
        ) from exc
    except ImportError as exc:  # it is there and cannot be loaded
        why = str(exc).strip().rpartition("\n")[2]  # numpy's is a page, whose last line tells
        raise Refused(f"choosing tokens needs numpy ({why}), or give --max-tokens 0") from exc
    try:
        check_sampling(sampling_of(options))
    except Refused as exc:
        raise Refused(str(exc).replace(exc.field, flag_of(exc.field), 1), field=exc.field) from exc


def sampling_of(options: RunOptions) -> Sampling:
    """How tokens are chosen."""
    return Sampling(options.temperature, options.top_p, options.top_k, options.seed)
