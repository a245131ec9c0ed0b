"""What `kv_connector_extra_config` says, and what of vLLM's own configuration is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from headrace.errors import Refused
from headrace.geometry import Emission
from headrace.messages import AskedRoute
from headrace.runtime.config import SourceConfig, names_of
from headrace.runtime.pairs import TAKE_A_MODEL, Spelling, interpreter_for
from headrace.runtime.requests import ASKED_ROUTES, RequestOptions
from headrace.runtime.supervisor import RestartPolicy

ROUTE_PARAM: Final = "headrace_route"
_SPELLING: Final = Spelling(
    lambda name: f"`{name.removeprefix('source_')}` of a source",
    lambda name: f"`{name.removeprefix('source_')}`",
)
_SINGLE: Final = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
)


class Settings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`kv_connector_extra_config` of a consumer.

    sources: as in `headrace serve`: `source` and what of `options`, `python`, `num_slots`, `name`
    it needs; a source with a model takes vLLM's by default, in vLLM's dtype.
    load: which prompts are prefilled by a source: those whose `kv_transfer_params` say
    `do_remote_prefill` (`asked`), or `always`. min_tokens: shorter prompts are vLLM's own.
    max_waiting: prompts that may wait for a slot of a source; more are vLLM's own. context: the
    longest prompt that is loaded, in tokens, which sizes the slots; by default the longest that
    vLLM and all sources take.
    route, group_layers, chunk, prefill_chunk, emission, digest, poison, deadline_s, on_failure,
    max_attempts: as of any request, see `RequestOptions`; a prompt may name its own route as
    `headrace_route`.
    restart: whether a source that dies is started again. trace_dir: where each load leaves its
    timeline, None for nowhere. idle_wait_ms: how long the engine may sleep in a step that computes
    nothing while prompts are being loaded.
    """

    sources: tuple[SourceConfig, ...]
    load: Literal["asked", "always"] = "asked"
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    max_waiting: Annotated[int, Meta(ge=0)] = 64
    context: Annotated[int, Meta(ge=1)] | None = None
    route: AskedRoute = "whole"
    group_layers: Annotated[int, Meta(ge=1)] = 1
    chunk: Annotated[int, Meta(ge=0)] = 0
    prefill_chunk: Annotated[int, Meta(ge=0)] = 0
    emission: Emission = "layers"
    digest: bool = False
    poison: bool = False
    deadline_s: Annotated[float, Meta(gt=0)] | None = 600.0
    on_failure: Literal["fail", "retry"] = "fail"
    max_attempts: Annotated[int, Meta(ge=1)] = 3
    restart: bool = True
    progress_timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    drain_timeout_s: Annotated[float, Meta(gt=0)] = 120.0
    start_timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    trace_dir: str | None = None
    idle_wait_ms: Annotated[float, Meta(ge=0, le=1000)] = 20.0

    def options(self, route: AskedRoute) -> RequestOptions:
        """Of one prompt: it is published, and vLLM decodes it."""
        cut = route != "auto"  # which cuts by itself
        return RequestOptions(
            route=route,
            group_layers=self.group_layers if cut else 1,
            chunk=self.chunk if cut else 0,
            prefill_chunk=self.prefill_chunk,
            emission=self.emission,
            max_tokens=0,
            digest=self.digest,
            poison=self.poison,
            trace=self.trace_dir is not None,
            deadline_s=self.deadline_s,
            on_failure=self.on_failure,
            max_attempts=self.max_attempts,
        )

    @property
    def policy(self) -> RestartPolicy | None:
        return RestartPolicy() if self.restart else None


def read_settings(extra: Mapping[str, Any]) -> Settings:
    """The settings of a consumer, with each source's name.

    Raises:
        Refused: a key is unknown, missing or of a wrong value; the text names it.
    """
    try:
        settings = msgspec.convert(dict(extra), Settings)
    except msgspec.ValidationError as exc:
        known = ", ".join(Settings.__struct_fields__)
        hint = f"; its keys are {known}" if "unknown field" in str(exc) else ""
        raise Refused(f"kv_connector_extra_config: {exc}{hint}", field="extra_config") from exc
    names = names_of(settings.sources)
    sources = tuple(
        replace(each, name=name) for each, name in zip(settings.sources, names, strict=True)
    )
    settings.options(settings.route).check_values()
    if settings.trace_dir is not None and not Path(settings.trace_dir).is_dir():
        raise Refused(f"trace_dir: {settings.trace_dir} is not a directory", field="trace_dir")
    return replace(settings, sources=sources)


def with_model(
    source: SourceConfig, directory: str, dtype: str, prefill_chunk: int
) -> SourceConfig:
    """A source with vLLM's model and dtype, unless it names its own, and its interpreter.

    prefill_chunk: of the prompts, which a vLLM source is started with.

    Raises:
        Refused, BackendUnavailable: its interpreter cannot run headrace, or there is none.
    """
    options = dict(source.options)
    if source.source in TAKE_A_MODEL:
        options.setdefault("model", directory)
        if source.source != "rngd":
            options.setdefault("dtype", dtype)
        if source.source == "vllm":
            options.setdefault("prefill_chunk", prefill_chunk)
    python = interpreter_for(source.source, source.python, spelling=_SPELLING)
    return replace(source, options=options, python=python)


def check_engine(vllm_config: Any) -> None:
    """Refuse what of vLLM's own configuration the connector was not built for.

    Raises:
        Refused: the text says what to change.
    """
    parallel = vllm_config.parallel_config
    for name in _SINGLE:
        number = int(getattr(parallel, name, 1))
        if number != 1:
            raise Refused(
                f"vLLM runs with {name} {number}, and headrace's connector feeds one worker; run "
                "it with 1",
                field=name,
            )
    if vllm_config.speculative_config is not None:
        raise Refused(
            "vLLM runs with a draft model, whose cache headrace's sources do not fill; run it "
            "without speculative decoding",
            field="speculative_config",
        )
    model = vllm_config.model_config
    if getattr(model, "is_encoder_decoder", False):
        raise Refused("an encoder-decoder model is not supported", field="model")
    if getattr(model, "enable_sleep_mode", False):
        raise Refused(
            "vLLM runs with enable_sleep_mode, which unmaps blocks that a load may be written to; "
            "run it without",
            field="enable_sleep_mode",
        )
    own = model.model_arch_config.quantization_config  # as the checkpoint's own files say
    overrides = {
        "hf_overrides": model.hf_overrides,
        "hf_config_path": model.hf_config_path,
        "quantization": model.quantization if own is None else None,
        "quantization_config": model.quantization_config,
        "load_format": vllm_config.load_config.load_format == "dummy",
    }
    for name, given in overrides.items():
        if given:
            raise Refused(
                f"vLLM runs with {name}, so that it computes with another model than the sources "
                "load from its directory; run it without, or change the directory's files",
                field=name,
            )


def route_of(params: Mapping[str, Any] | None, settings: Settings) -> AskedRoute | None:
    """The route of a prompt with these `kv_transfer_params`; None if vLLM prefills it by itself.

    Raises:
        Refused: its parameters make no sense.
    """
    asked = {} if params is None else params
    if not isinstance(asked, Mapping):
        raise Refused(f"kv_transfer_params is {asked!r}; it is an object")
    remote = asked.get("do_remote_prefill", settings.load == "always")
    if not isinstance(remote, bool):
        raise Refused(f"do_remote_prefill is {remote!r}; it is true or false")
    route = asked.get(ROUTE_PARAM, settings.route)
    if route not in ASKED_ROUTES:
        raise Refused(f"{ROUTE_PARAM} is {route!r}; it is one of {', '.join(ASKED_ROUTES)}")
    return route if remote else None
