"""What `headrace serve` is started with: headrace.toml, or flags for the simple case."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct, field

from headrace.geometry import Emission
from headrace.messages import AskedRoute, OnFailure, PrefixAsked

Count: TypeAlias = Annotated[int, Meta(ge=0)]
Positive: TypeAlias = Annotated[int, Meta(ge=1)]
Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=1e9)]
Name: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class _Table(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class HttpConfig(_Table, frozen=True, kw_only=True):
    """`[http]`: where it listens and what it takes.

    api_key_file: one key a line; whoever sends none of them is refused. Without it (and without
    HEADRACE_API_KEY) nobody is asked for one. max_body_bytes, max_header_bytes: of one request.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    api_key_file: str | None = None
    max_body_bytes: Positive = 8 << 20
    max_header_bytes: Annotated[int, Meta(ge=1024, le=1 << 20)] = 32 << 10
    max_connections: Positive = 1024
    drain_timeout_s: Seconds = 30.0
    keep_alive_s: Seconds = 5.0


class QueueConfig(_Table, frozen=True, kw_only=True):
    """`[queue]`: what may wait for an owner, and who is next.

    max_requests, max_bytes: above either, a request is answered 429. deadline_s: of a request that
    names none, from its arrival to its published cache; None = none. long_prompt_tokens: prompts of
    at least so many positions never hold all lanes of a decoder that has several; 0 = no such rule.
    patience: a prompt may be overtaken by shorter ones that came up to so many times the difference
    of their prefill times later.
    """

    max_requests: Positive = 256
    max_bytes: Positive = 64 << 20
    deadline_s: Seconds | None = None
    long_prompt_tokens: Count = 0
    patience: Annotated[float, Meta(ge=0, le=1000)] = 4.0


class RequestConfig(_Table, frozen=True, kw_only=True):
    """`[requests]`: what a request gets that does not ask for something else.

    route, group_layers, chunk, emission, on_failure, prefix: as in `headrace run`. max_tokens: of
    /v1/completions without the field; a chat without it goes on to the end of the context.
    """

    route: AskedRoute = "whole"
    group_layers: Positive = 1
    chunk: Count = 0
    emission: Emission = "layers"
    digest: bool = False
    on_failure: OnFailure = "fail"
    max_attempts: Annotated[int, Meta(ge=1, le=16)] = 3
    prefix: PrefixAsked = "off"
    max_tokens: Positive = 16
    max_choices: Annotated[int, Meta(ge=1, le=128)] = 8


class PageConfig(_Table, frozen=True, kw_only=True):
    """`[page]`: the live view. recent: requests whose traces are kept for it; 0 traces none."""

    enabled: bool = True
    recent: Annotated[int, Meta(ge=0, le=1024)] = 64
    look_every_s: Annotated[float, Meta(ge=0.05, le=60)] = 1.0


class TelemetryConfig(_Table, frozen=True, kw_only=True):
    """`[telemetry]`: otlp_endpoint: where spans are sent (needs headrace[otel]), or None."""

    otlp_endpoint: str | None = None
    service_name: str = "headrace"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_json: bool = False


class SourceTable(_Table, frozen=True, kw_only=True):
    """`[[decoders.sources]]`: one prefill worker.

    name: by default its kind, with a number where a decoder has several of it. slots: requests that
    it may hold at once. python: the interpreter of its own environment. options: more of the
    source's own.
    """

    source: str = "torch"
    name: Name | None = None
    slots: Positive = 2
    threads: Positive = 1
    python: str | None = None
    emulate: bool = False
    options: dict[str, Any] = field(default_factory=dict)


class DecoderTable(_Table, frozen=True, kw_only=True):
    """`[[decoders]]`: one decoder, its owner process and its sources.

    model: a built-in model, a directory, a GGUF file or a hub id. served_as: the names under which
    requests ask for it, by default `model`. lanes: active sequences, None = the decoder's default.
    context: positions of a lane. prefetch_depth: requests prefilled while no lane is free.
    """

    name: Name | None = None
    model: str
    served_as: tuple[str, ...] = ()
    decoder: str = "cpu"
    lanes: Positive | None = None
    context: Positive = 2048
    dtype: str | None = None
    threads: Positive = 1
    decode_batch: Positive = 1
    prefetch_depth: Count = 1
    prefill_chunk: Count = 0
    python: str | None = None
    compiled: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    start_timeout_s: Seconds = 600.0
    progress_timeout_s: Seconds = 120.0
    drain_timeout_s: Seconds = 30.0
    control: str | None = None
    sources: Annotated[tuple[SourceTable, ...], Meta(min_length=1)] = (SourceTable(),)


class RestartTable(_Table, frozen=True, kw_only=True):
    """`[restart]`: how sources and owners that die are started again; see `RestartPolicy`."""

    first_delay_s: Annotated[float, Meta(ge=0)] = 0.2
    factor: Annotated[float, Meta(ge=1)] = 2.0
    longest_delay_s: Annotated[float, Meta(ge=0)] = 30.0
    max_failures: Positive = 5
    healthy_after_s: Annotated[float, Meta(ge=0)] = 60.0


class ServeConfig(_Table, frozen=True, kw_only=True):
    """The whole of headrace.toml."""

    decoders: Annotated[tuple[DecoderTable, ...], Meta(min_length=1)]
    http: HttpConfig = HttpConfig()
    queue: QueueConfig = QueueConfig()
    requests: RequestConfig = RequestConfig()
    restart: RestartTable = RestartTable()
    page: PageConfig = PageConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
