"""What the owner of a decoder's table is started with, as `headrace run` would start one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

from headrace.backends.load import check_name, size_options
from headrace.errors import Refused
from headrace.runtime.config import OwnerConfig, SourceConfig
from headrace.runtime.interpreters import check_interpreter
from headrace.runtime.pairs import (
    ATOM,
    LANES,
    NULL,
    REPLAY,
    RNGD_DTYPE,
    Spelling,
    check_decoder,
    check_source,
    dtype_for,
    interpreter_for,
    interpreter_for_decoder,
    is_emulated,
    is_fake,
    options_for,
    options_of,
    pair_name,
)
from headrace.runtime.requests import RequestOptions
from headrace.runtime.supervisor import RestartPolicy
from headrace.server.config import DecoderTable, RequestConfig, RestartTable, ServeConfig

REPLAYED_VOCABULARY = 256  # bytes, which every tokenizer has ids for


KEEP_NOTHING: Final = (ATOM, NULL)
"""The listed decoders that keep no prompts."""


class OwnerStart(NamedTuple):
    """How one owner is started. interpreter: None for this process's own.

    pair: its sources and its decoder, as every figure of them is named.
    """

    config: OwnerConfig
    interpreter: str | None
    pair: str


def owner_config(
    table: DecoderTable,
    config: ServeConfig,
    directory: Path,
    *,
    place: str = "decoders[0]",
) -> OwnerStart:
    """What the owner of `table` is started with, and by which interpreter.

    directory: of its model. place: where the table stands, for refusals.

    Raises:
        Refused: its keys do not go together, or an interpreter cannot run headrace.
        BackendUnavailable: a vendor's environment is not there.
    """
    check_table(table, place=place)
    model = {"model": str(directory), "dtype": dtype_of(table)}
    decoder_options = _decoder_options(table, model)
    spelling = spelling_of(place)
    interpreter = interpreter_for_decoder(
        table.decoder, table.python, decoder_options, spelling=spelling
    )
    if interpreter is not None:
        check_interpreter(interpreter, spelling.first("decoder_python"))
    started = OwnerConfig(
        decoder=table.decoder,
        decoder_options=decoder_options,
        sources=_sources(table, model, place=place),
        context=table.context,
        prefetch_depth=table.prefetch_depth,
        start_timeout_s=table.start_timeout_s,
        progress_timeout_s=table.progress_timeout_s,
        drain_timeout_s=table.drain_timeout_s,
        restart=restart_policy(config.restart),
        local=config.requests.on_failure == "local",
        control=None if table.control is None else str(Path(table.control).absolute()),
        tune_copies=table.tune_copies,
        log_level=config.telemetry.log_level,
        log_json=config.telemetry.log_json,
    )
    return OwnerStart(started, interpreter, _pair(table, decoder_options))


def restart_policy(table: RestartTable) -> RestartPolicy:
    """How what dies is started again."""
    return RestartPolicy(
        first_delay_s=table.first_delay_s,
        factor=table.factor,
        longest_delay_s=table.longest_delay_s,
        max_failures=table.max_failures,
        healthy_after_s=table.healthy_after_s,
    )


def request_options(table: RequestConfig) -> RequestOptions:
    """What a request gets that asks for nothing else."""
    return RequestOptions(
        route=table.route,
        group_layers=table.group_layers,
        chunk=table.chunk,
        emission=table.emission,
        max_tokens=table.max_tokens,
        digest=table.digest,
        on_failure=table.on_failure,
        max_attempts=table.max_attempts,
        prefix=table.prefix,
    )


def check_table(table: DecoderTable, *, place: str = "decoders[0]") -> None:
    """Refuse what a decoder or one of its sources does not take; nothing is started for it."""
    spelling = spelling_of(place)
    _check_listed("decoder", table.decoder, spelling)
    check_decoder(
        table.decoder,
        compiled=_compiled(table),
        given=table.options,
        lanes=table.lanes,
        decode_batch=table.decode_batch,
        spelling=spelling,
    )
    _check_kept(table, place)
    for index, source in enumerate(table.sources):
        spelling = spelling_of(place, index)
        _check_listed("source", source.source, spelling)
        check_source(source.source, dtype=table.dtype, emulate=source.emulate, spelling=spelling)


def dtype_of(table: DecoderTable) -> str:
    """The dtype of weights and cache, which a decoder and all its sources share."""
    wanted = {dtype_for(source.source, table.dtype) for source in table.sources}
    return RNGD_DTYPE if RNGD_DTYPE in wanted else wanted.pop()


def kept_nbytes(table: DecoderTable) -> int:
    """Bytes for prompts that a decoder keeps, by either way to say it."""
    kept = table.options.get("keep_nbytes", table.keep_bytes)
    return kept if type(kept) is int else 0


def kept_key(table: DecoderTable, place: str) -> str:
    """The key that says how many bytes those are."""
    in_options = "keep_nbytes" in table.options
    return f"{place}.options.keep_nbytes" if in_options else f"{place}.keep_bytes"


def spelling_of(place: str, source: int = 0) -> Spelling:
    """What the options of a decoder's pair are called. source: the number of its source."""
    of_source = f"{place}.sources[{source}]"
    keys = {
        "source": f"{of_source}.source",
        "source_python": f"{of_source}.python",
        "source_options": f"{of_source}.options",
        "emulate": f"{of_source}.emulate",
        "decoder_python": f"{place}.python",
        "decoder_options": f"{place}.options",
    }

    def first(option: str) -> str:
        return keys.get(option, f"{place}.{option}")

    return Spelling(first, lambda option: first(option).rpartition(".")[2])


def _decoder_options(table: DecoderTable, model: dict[str, Any]) -> dict[str, Any]:
    own = {**model, "threads": table.threads}
    return {
        **options_of(table.decoder, own, compiled=_compiled(table)),
        **size_options(table.decoder, lanes=table.lanes or LANES, context=table.context),
        **({"decode_batch": table.decode_batch} if table.decode_batch > 1 else {}),
        **({"keep_nbytes": table.keep_bytes} if table.keep_bytes else {}),
        **table.options,
    }


def _sources(table: DecoderTable, model: dict[str, Any], *, place: str) -> tuple[SourceConfig, ...]:
    made = []
    for index, source in enumerate(table.sources):
        options = options_for(
            source.source,
            {**model, "threads": source.threads},
            emulate=source.emulate,
            prefill_chunk=table.prefill_chunk,
        )
        if source.source == REPLAY:
            options["vocab_size"] = REPLAYED_VOCABULARY
        spelling = spelling_of(place, index)
        made.append(
            SourceConfig(
                source.source,
                {**options, **source.options},
                python=interpreter_for(source.source, source.python, spelling=spelling),
                num_slots=source.slots,
                name=source.name or "",
            )
        )
    return tuple(made)


def _check_kept(table: DecoderTable, place: str) -> None:
    if table.keep_bytes and table.decoder in KEEP_NOTHING:
        raise Refused(
            f"{place}.keep_bytes is {table.keep_bytes} and decoder {table.decoder} keeps no "
            "prompts; leave it out",
            field="keep_bytes",
        )
    if table.keep_bytes and "keep_nbytes" in table.options:
        raise Refused(
            f"{place}.keep_bytes is given and keep_nbytes in {place}.options; leave one out",
            field="keep_bytes",
        )


def _check_listed(role: str, name: str, spelling: Spelling) -> None:
    try:
        check_name(role, name)
    except Refused as exc:
        raise Refused(f"{spelling.first(role)}: {exc}", field=role) from exc


def _compiled(table: DecoderTable) -> Path | None:
    return None if table.compiled is None else Path(table.compiled)


def _pair(table: DecoderTable, decoder_options: dict[str, Any]) -> str:
    """Every source by its kind, each kind once."""
    fake = is_fake(table.decoder, decoder_options)
    kinds: dict[tuple[str, bool], int] = {}
    for each in table.sources:
        emulated = is_emulated(each.source, {"emulate": each.emulate, **each.options})
        kinds[each.source, emulated] = kinds.get((each.source, emulated), 0) + 1
    names = []
    for (source, emulated), count in kinds.items():
        name, _, decoder = pair_name(source, table.decoder, emulated=emulated, fake=fake).partition(
            " -> "
        )
        names.append(f"{count} x {name}" if count > 1 else name)
    return f"{', '.join(names)} -> {decoder}"
