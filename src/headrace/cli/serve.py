"""`headrace serve`: an OpenAI-compatible endpoint, by a config file or by flags."""

from __future__ import annotations

import logging
import re
import sys
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from cyclopts import Parameter
from msgspec import structs

from headrace.cli.arguments import json_object
from headrace.engine.models import resolve
from headrace.engine.text import max_positions_of
from headrace.errors import BackendUnavailable, HeadraceError, Refused
from headrace.geometry import Emission
from headrace.messages import OnFailure, PrefixAsked
from headrace.runtime.pairs import flag_of
from headrace.server.config import DecoderTable, ServeConfig
from headrace.server.config_file import config_of, read_config
from headrace.server.config_keys import key_at
from headrace.server.stopping import ToldToStop, stoppable

NEEDED: Final = ("starlette", "uvicorn", "prometheus_client", "jinja2", "tokenizers")
INSTALL: Final = "run: pip install 'headrace[server,cpu]'"
WITH_A_FILE: Final = ("config", "host", "port", "log_level", "log_json")
"""The flags that go with --config, over what the file says."""

_OF_THIS_HOST = ("http.host", "http.port")  # of the address, which may be a flag's
_HTTP = ("host", "port", "api_key_file", "allow_open")
_REQUESTS = ("route", "group_layers", "chunk", "emission", "on_failure", "prefix")
_TELEMETRY = ("log_level", "log_json")
_SOURCE = {
    "source": "source",
    "slots": "slots",
    "threads": "threads",
    "source_python": "python",
    "emulate": "emulate",
    "source_options": "options",
}
_DECODER = {
    "model": "model",
    "served_as": "served_as",
    "decoder": "decoder",
    "lanes": "lanes",
    "context": "context",
    "dtype": "dtype",
    "threads": "threads",
    "decode_batch": "decode_batch",
    "prefetch_depth": "prefetch_depth",
    "prefill_chunk": "prefill_chunk",
    "keep_bytes": "keep_bytes",
    "decoder_python": "python",
    "compiled": "compiled",
    "decoder_options": "options",
    "control": "control",
}
_PLACE = re.compile(
    r"(?<![\w/])(?:decoders\[0\](?:\.sources\[0\])?(?:\.[a-z_]+)?|(?:http|requests|telemetry)\.[a-z_]+)\b"
    r"|decoders\[0\](?:\.sources\[0\])?"
)
_OTHERWISE: Final = {
    "decoders[0]": "--decoder",
    "decoders[0].python": "--decoder-python",
    "decoders[0].options": "--decoder-options",
    "decoders[0].sources[0]": "--source",
    "decoders[0].sources[0].python": "--source-python",
    "decoders[0].sources[0].options": "--source-options",
}


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The options of `headrace serve`; None = not given."""

    config: Path | None = None
    "A headrace.toml; `headrace config show` prints one to begin with."
    host: str | None = None
    "The address to listen at; by default 127.0.0.1."
    port: int | None = None
    "The port; 0 takes a free one. By default 8000."
    model: str | None = None
    "A built-in model, a directory, a GGUF file or a hub id."
    served_as: Annotated[tuple[str, ...] | None, Parameter(negative="")] = None
    "A name under which requests ask for it; may be given more than once."
    source: str | None = None
    "torch, cuda, rngd, vllm, replay or module:factory; by default torch."
    slots: int | None = None
    "Requests that the source may hold at once; by default 2."
    source_python: str | None = None
    "The interpreter of the source's own environment."
    source_options: str | None = None
    "More options of the source, as a JSON object."
    emulate: Annotated[bool | None, Parameter(negative="")] = None
    "Run the source's kernels on the CPU, with its vendor's own executor (rngd)."
    decoder: str | None = None
    "cpu, cuda, atom, null or module:factory; by default cpu."
    lanes: int | None = None
    "Active sequences of the decoder; by default 4, and atom has one."
    context: int | None = None
    "Positions that a lane and a slot hold; by default 2048, or the model's most if fewer."
    decoder_python: str | None = None
    "The interpreter of the decoder's own environment."
    decoder_options: str | None = None
    "More options of the decoder, as a JSON object."
    compiled: str | None = None
    "The directory of the compiled model, which atom needs beside --model."
    dtype: str | None = None
    "The weights' and the cache's dtype; by default float32, and bfloat16 with --source rngd."
    threads: int | None = None
    "torch threads of each process; by default 1."
    decode_batch: int | None = None
    "Sequences decoded in one forward; 1 = the exact mode."
    prefetch_depth: int | None = None
    "Requests that are prefilled while no lane is free; by default 1."
    prefill_chunk: int | None = None
    "Positions computed at once; 0 = all. It changes the numbers a little."
    keep_bytes: int | None = None
    "Memory for prompts that the decoder keeps beside its lanes; by default 0, none."
    control: str | None = None
    "Make a socket here, at which `headrace owner` asks what is held."
    route: str | None = None
    "whole, chunked, streamed or auto, for requests that name none; by default whole."
    group_layers: int | None = None
    "Layers of one layer group (streamed)."
    chunk: int | None = None
    "Positions of one transfer chunk; 0 = all, and 256 on the chunked route."
    emission: Emission | None = None
    "Layer groups of neighbours, or of one cache geometry."
    on_failure: OnFailure | None = None
    "When a source fails: fail, retry, or local (the owner)."
    prefix: PrefixAsked | None = None
    "Whether prompts are kept and gone on from: off, identical or shared; needs --keep-bytes."
    api_key_file: str | None = None
    "A file with one key a line; whoever sends none of them is refused."
    allow_open: Annotated[bool | None, Parameter(negative="")] = None
    "Listen beyond this host although nobody is asked for a key."
    log_level: str | None = None
    "debug, info, warning or error; by default info."
    log_json: Annotated[bool | None, Parameter(negative="")] = None
    "Say and log all as JSON, one object a line."

    def given(self) -> dict[str, Any]:
        """The options that were given, by name."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


_DEFAULTS: Final = ServeOptions()
_FLAGS: Final = frozenset(each.name for each in fields(ServeOptions))


def serve(options: Annotated[ServeOptions, Parameter(name="*")] = _DEFAULTS) -> int:
    """Serve models over HTTP, as OpenAI's clients ask for them, until SIGTERM.

    `headrace serve --model smollm2-135m` for one decoder with one source on this host, or
    `headrace serve --config headrace.toml` for more.
    """
    given = options.given()
    try:
        with stoppable():
            return _serve(given)
    except ToldToStop:
        return 0


def _serve(given: dict[str, Any]) -> int:
    config = _of_file(given) if "config" in given else _of_flags(given)
    _check_installed()
    from headrace.server import serving

    try:
        return serving.serve(config, _tell)
    except HeadraceError as exc:
        told = _placed(exc, given)
        if config.telemetry.log_json:
            return _logged(told)
        raise told from exc


def _placed(exc: HeadraceError, given: dict[str, Any]) -> HeadraceError:
    """An error with what its user wrote the config in: a file, or flags.

    What this host lacks just now is no mistake, so its exit status is not that of one.
    """
    if isinstance(exc, Refused) and exc.shortage:
        return HeadraceError(str(exc))
    with_a_file = "config" in given
    if isinstance(exc, BackendUnavailable) and not with_a_file:
        hint = in_flags(exc.hint)
        return BackendUnavailable(exc.vendor, exc.stage, exc.probe, exc.detail, hint)
    if not isinstance(exc, Refused) or (with_a_file and exc.field in _OF_THIS_HOST):
        return exc
    text = f"{given['config']}: {exc}" if with_a_file else in_flags(str(exc))
    return Refused(text, field=exc.field)


def _logged(exc: HeadraceError) -> int:
    """Log what ends it, a line of JSON as all others are; returns the exit status."""
    from headrace.cli import FAILURE, MISTAKE

    logging.getLogger("headrace.server").error("%s", " ".join(str(exc).splitlines()))
    return MISTAKE if isinstance(exc, Refused | BackendUnavailable) else FAILURE


def in_flags(text: str) -> str:
    """A sentence about a config, with its keys as the flags that gave their values."""
    return _PLACE.sub(_in_flags, text)


def _in_flags(found: re.Match[str]) -> str:
    place = found[0]
    if place in _OTHERWISE:
        return _OTHERWISE[place]
    name = place.rpartition(".")[2]
    return flag_of(name) if name in _FLAGS and key_at(place) is not None else place


def _tell(line: str, *, level: int = logging.INFO) -> None:
    word = "warning: " if level == logging.WARNING else ""
    print(f"headrace: {word}{line}", file=sys.stderr, flush=True)


def _check_installed() -> None:
    for name in NEEDED:
        if find_spec(name) is None:
            raise Refused(f"headrace serve needs {name}, which is not installed; {INSTALL}")


def _of_file(given: dict[str, Any]) -> ServeConfig:
    """The config of --config, with the flags that go over it."""
    other = next((name for name in given if name not in WITH_A_FILE), None)
    if other is not None:
        raise Refused(
            f"{flag_of(other)} does not go with --config; set it in the file, or leave --config "
            "out",
            field=other,
        )
    config = msgspec.to_builtins(read_config(given["config"]))
    return _converted(
        {
            **config,
            "http": {**config["http"], **_taken(given, _HTTP)},
            "telemetry": {**config["telemetry"], **_taken(given, _TELEMETRY)},
        }
    )


def _of_flags(given: dict[str, Any]) -> ServeConfig:
    """A config of one decoder with one source."""
    if "model" not in given:
        raise Refused(
            "give --model NAME, or --config FILE; `headrace models list` shows the models that "
            "are built in, and `headrace config show` a file",
            field="model",
        )
    for name in ("source_options", "decoder_options"):
        if name in given:
            given = {**given, name: json_object(flag_of(name), given[name])}
    source = {key: given[name] for name, key in _SOURCE.items() if name in given}
    decoder = {key: given[name] for name, key in _DECODER.items() if name in given}
    config = _converted(
        {
            "decoders": [{**decoder, "sources": [source]}],
            "http": _taken(given, _HTTP),
            "requests": _taken(given, _REQUESTS),
            "telemetry": _taken(given, _TELEMETRY),
        }
    )
    if "context" in given:
        return config
    (table,) = config.decoders
    table = structs.replace(table, context=_context_of(table))
    return structs.replace(config, decoders=(table,))


def _taken(given: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: given[name] for name in names if name in given}


def _context_of(table: DecoderTable) -> int:
    """The default context, or the model's most if that is less."""
    try:
        return min(table.context, max_positions_of(resolve(table.model)))
    except (OSError, AttributeError, TypeError, ValueError):
        return table.context  # the check of the model says what is wrong with its config


def _converted(raw: dict[str, Any]) -> ServeConfig:
    """The config of what flags gave, alone or over a file that was read before."""
    try:
        return config_of(raw)
    except Refused as exc:
        raise Refused(in_flags(str(exc)), field=exc.field) from exc
