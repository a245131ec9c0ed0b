"""What `headrace serve` is started with: headrace.toml, or flags for the simple case.

Each key says what it is: `headrace config show` writes it beside the key, and docs/operate.md has
the same words.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeAlias

from msgspec import Meta, Struct, field

from headrace.geometry import MAX_POSITIONS, Emission
from headrace.messages import MAX_ATTEMPTS, AskedRoute, OnFailure, PrefixAsked

NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z"
ADDRESS: Final = r"^https?://[^@\s]+\Z"  # with `@` there may be a password in it

Count: TypeAlias = Annotated[int, Meta(ge=0, lt=MAX_POSITIONS)]
Positive: TypeAlias = Annotated[int, Meta(ge=1, lt=MAX_POSITIONS)]
Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=1e9)]
Delay: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)]
Name: TypeAlias = Annotated[str, Meta(pattern=NAME)]
ServedName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]


def says(text: str) -> Meta:
    """What a key is, in the words of its docs."""
    return Meta(description=text)


class _Table(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class HttpConfig(_Table, frozen=True, kw_only=True):
    """`[http]`: where it listens and what it takes."""

    host: Annotated[str, says("The address to listen at.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535), says("The port; 0 takes a free one.")] = 8000
    api_key_file: Annotated[
        str | None,
        says(
            "A file with one key a line; whoever sends none of them is refused. Without it and "
            "without HEADRACE_API_KEY in the environment nobody is asked for one."
        ),
    ] = None
    allow_open: Annotated[
        bool, says("Listen beyond this host although nobody is asked for a key.")
    ] = False
    max_body_bytes: Annotated[
        int, Meta(ge=1024, le=1 << 30), says("Most bytes of a request's body.")
    ] = 8 << 20
    max_header_bytes: Annotated[
        int, Meta(ge=1024, le=1 << 20), says("Most bytes of a request's headers.")
    ] = 32 << 10
    max_connections: Annotated[
        int, Meta(ge=1, le=1 << 20), says("Most connections at once; more are answered 503.")
    ] = 1024
    drain_timeout_s: Annotated[
        Seconds, says("How long what runs may go on after SIGTERM, in seconds.")
    ] = 30.0
    keep_alive_s: Annotated[
        Seconds, says("How long an idle connection is kept open, in seconds.")
    ] = 5.0


class QueueConfig(_Table, frozen=True, kw_only=True):
    """`[queue]`: what may wait for a decoder, and who is next."""

    max_requests: Annotated[
        Positive, says("Most requests that wait; above it one is answered 429.")
    ] = 256
    max_bytes: Annotated[
        Annotated[int, Meta(ge=1024, le=1 << 40)],
        says("Most bytes of prompts that wait; above it a request is answered 429."),
    ] = 64 << 20
    deadline_s: Annotated[
        Seconds | None,
        says(
            "Seconds from when a request's body is read until its prompt's cache must be with the "
            "decoder, for requests that name none; without it there is no deadline."
        ),
    ] = None
    long_prompt_tokens: Annotated[
        Count,
        says(
            "Prompts of at least so many tokens never hold all lanes of a decoder that has "
            "several; 0 = no such rule."
        ),
    ] = 0
    patience: Annotated[
        float,
        Meta(ge=0, le=1000),
        says(
            "A prompt may be overtaken by shorter ones that came up to so many times the "
            "difference of their prefill times later."
        ),
    ] = 4.0


class RequestConfig(_Table, frozen=True, kw_only=True):
    """`[requests]`: what a request gets that does not ask for something else."""

    route: Annotated[AskedRoute, says("How the cache is moved.")] = "whole"
    group_layers: Annotated[Positive, says("Layers of one layer group, on route streamed.")] = 1
    chunk: Annotated[
        Count, says("Positions of one transfer chunk; 0 = all, and 256 on route chunked.")
    ] = 0
    emission: Annotated[Emission, says("Layer groups of neighbours, or of one cache geometry.")] = (
        "layers"
    )
    digest: Annotated[bool, says("Verify every span's bytes as landed.")] = False
    on_failure: Annotated[
        OnFailure,
        says("When a source fails: fail, retry on another one, or local (the owner prefills)."),
    ] = "fail"
    max_attempts: Annotated[
        int, Meta(ge=1, le=MAX_ATTEMPTS), says("Attempts in all where on_failure is retry.")
    ] = 3
    prefix: Annotated[
        PrefixAsked,
        says(
            "Whether prompts are kept and gone on from: off, identical ones, or shared beginnings; "
            "needs keep_bytes of the decoder."
        ),
    ] = "off"
    max_tokens: Annotated[
        Positive,
        says(
            "Tokens of /v1/completions without the field; a chat without it goes on to the end of "
            "the context."
        ),
    ] = 16
    max_choices: Annotated[int, Meta(ge=1, le=128), says("The most that `n` may be.")] = 8


class PageConfig(_Table, frozen=True, kw_only=True):
    """`[page]`: the live view."""

    enabled: Annotated[bool, says("Serve the page at /.")] = True
    recent: Annotated[
        int,
        Meta(ge=0, le=1024),
        says("Ended requests that it lists, with their traces; 0 lists and traces none."),
    ] = 64
    look_every_s: Annotated[
        float, Meta(ge=0.05, le=60), says("Seconds between two looks at what the owners hold.")
    ] = 1.0


class TelemetryConfig(_Table, frozen=True, kw_only=True):
    """`[telemetry]`: logs, and where spans go."""

    otlp_endpoint: Annotated[
        Annotated[str, Meta(pattern=ADDRESS)] | None,
        says("Where OpenTelemetry spans are sent (needs headrace[otel])."),
    ] = None
    service_name: Annotated[ServedName, says("What the spans call this service.")] = "headrace"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], says("The least that is logged.")
    ] = "info"
    log_json: Annotated[bool, says("Say and log all as JSON, one object a line.")] = False


class SourceTable(_Table, frozen=True, kw_only=True):
    """`[[decoders.sources]]`: one prefill worker."""

    source: Annotated[str, says("torch, cuda, rngd, vllm, replay or module:factory.")] = "torch"
    name: Annotated[
        Name | None,
        says("What metrics and logs call it; by default what it is, numbered if several."),
    ] = None
    slots: Annotated[int, Meta(ge=1, le=4096), says("Requests that it may hold at once.")] = 2
    threads: Annotated[int, Meta(ge=1, le=4096), says("torch threads of its process.")] = 1
    python: Annotated[
        str | None, says("The interpreter of its own environment; by default this one.")
    ] = None
    emulate: Annotated[
        bool, says("Run its kernels on the CPU, with its vendor's own executor (rngd).")
    ] = False
    options: Annotated[dict[str, Any], says("More options of its own.")] = field(
        default_factory=dict
    )


class DecoderTable(_Table, frozen=True, kw_only=True):
    """`[[decoders]]`: one decoder, its owner process and its sources."""

    name: Annotated[
        Name | None,
        says("What metrics and logs call it; by default what it is, numbered if several."),
    ] = None
    model: Annotated[
        str, Meta(min_length=1), says("A built-in model, a directory, a GGUF file or a hub id.")
    ]
    served_as: Annotated[
        tuple[ServedName, ...],
        says("The names under which requests ask for it; by default `model`."),
    ] = ()
    decoder: Annotated[str, says("cpu, cuda, atom, null or module:factory.")] = "cpu"
    lanes: Annotated[
        Annotated[int, Meta(ge=1, le=4096)] | None,
        says("Active sequences; by default 4, and atom has one."),
    ] = None
    context: Annotated[Positive, says("Positions that a lane and a slot hold.")] = 2048
    dtype: Annotated[
        str | None,
        says("Of weights and cache; by default float32, and bfloat16 with an rngd source."),
    ] = None
    threads: Annotated[int, Meta(ge=1, le=4096), says("torch threads of its process.")] = 1
    decode_batch: Annotated[
        int,
        Meta(ge=1, le=256),
        says("Sequences decoded in one forward; 1 is the exact mode."),
    ] = 1
    prefetch_depth: Annotated[
        Count, says("Requests that are prefilled while no lane is free; 0 = none.")
    ] = 1
    prefill_chunk: Annotated[
        Count, says("Positions computed at once; 0 = all. It changes the numbers a little.")
    ] = 0
    keep_bytes: Annotated[
        int,
        Meta(ge=0, le=1 << 50),
        says("Memory for prompts that are kept beside the lanes, as `prefix` asks; 0 = none."),
    ] = 0
    python: Annotated[
        str | None,
        says("The interpreter of its own environment; by default this one, and atom's is found."),
    ] = None
    compiled: Annotated[
        str | None, says("The directory of the compiled model, which atom needs beside `model`.")
    ] = None
    options: Annotated[dict[str, Any], says("More options of its own.")] = field(
        default_factory=dict
    )
    tune_copies: Annotated[
        bool, says("Have copies bypass the cache if a probe at the start shows it is faster.")
    ] = False
    start_timeout_s: Annotated[
        Seconds, says("How long its sources may take to be ready, in seconds.")
    ] = 600.0
    progress_timeout_s: Annotated[
        Seconds, says("How long a source may be silent before its attempt fails, in seconds.")
    ] = 120.0
    drain_timeout_s: Annotated[
        Seconds,
        says("How long a source may keep a slot that is no longer wanted, in seconds."),
    ] = 30.0
    control: Annotated[
        str | None, says("A socket to make, for `headrace owner status` and `reinstate`.")
    ] = None
    sources: Annotated[
        tuple[SourceTable, ...], Meta(min_length=1, max_length=16), says("Its prefill workers.")
    ] = (SourceTable(),)


class RestartTable(_Table, frozen=True, kw_only=True):
    """`[restart]`: how sources and owners that die are started again."""

    first_delay_s: Annotated[Delay, says("Seconds from the first death to the restart.")] = 0.2
    factor: Annotated[
        float, Meta(ge=1, le=1000), says("How many times longer each further death in a row waits.")
    ] = 2.0
    longest_delay_s: Annotated[Delay, says("The most that it waits, in seconds.")] = 30.0
    max_failures: Annotated[Positive, says("Deaths in a row after which it is set aside.")] = 5
    healthy_after_s: Annotated[
        Delay, says("Seconds that it must live for its earlier deaths to be forgotten.")
    ] = 60.0


class ServeConfig(_Table, frozen=True, kw_only=True):
    """The whole of headrace.toml."""

    decoders: Annotated[tuple[DecoderTable, ...], Meta(min_length=1, max_length=64)]
    http: HttpConfig = HttpConfig()
    queue: QueueConfig = QueueConfig()
    requests: RequestConfig = RequestConfig()
    restart: RestartTable = RestartTable()
    page: PageConfig = PageConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
