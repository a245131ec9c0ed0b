"""`headrace bench lane`: the next request at a decoder that has one lane."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from headrace.backends.load import check_name
from headrace.bench import lane
from headrace.bench.geometries import GEOMETRIES
from headrace.bench.lane import Setting
from headrace.bench.lane_table import figures, lines
from headrace.bench.paced_lane import FACTORY as PACED_LANE
from headrace.bench.rows import Spread
from headrace.cli.arguments import check_count, check_output, json_object
from headrace.cli.bench.arguments import model_name
from headrace.cli.bench.tables import open_rows, print_goals
from headrace.errors import Refused
from headrace.runtime import elsewhere
from headrace.runtime.pairs import (
    TAKE_A_MODEL,
    WITH_A_MODEL,
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

PACED: Final = "paced"
MAX_RATE = 1e6
MAX_SHARE = 100.0

_console = Console(highlight=False)


@dataclass(frozen=True, kw_only=True)
class LaneOptions:
    """The options of `headrace bench lane`."""

    decoder: str = PACED
    "`paced` (memory, a set rate and step), cpu, cuda, atom or module:factory; it has one lane."
    source: str | None = None
    "`paced`, a listed one or module:factory; by default paced for a paced decoder, else torch."
    model: str = "smollm2-135m"
    "Of what computes: a built-in model, a directory, a GGUF file or a hub id."
    dtype: str | None = None
    "The weights' and the cache's dtype; by default float32, and bfloat16 with --source rngd."
    geometry: str = "llama-3.1-8b"
    "Of a paced decoder."
    decoder_options: str = "{}"
    "More options of the decoder, as a JSON object."
    decoder_python: str | None = None
    "The interpreter of the decoder's own environment; by default HEADRACE_ATOM_PYTHON for atom."
    compiled: Path | None = None
    "The directory of the compiled model, which atom needs beside --model."
    source_options: str = "{}"
    "More options of the source, as a JSON object."
    source_python: str | None = None
    "The interpreter of the source's own environment; rngd's is found if `rngd setup` made it."
    emulate: bool = False
    "Run the source's kernels on the CPU, with its vendor's own executor (rngd)."
    prompt: int = 512
    "Tokens of each prompt."
    group_layers: int = 1
    "Layers of a group, where B is streamed."
    shares: tuple[float, ...] = (0.25, 0.6, 1.5)
    "When A ends, as shares of B's prefill."
    prefill_mb_s: float = 200.0
    "KV of a paced prefill, MB/s (1e6 bytes)."
    import_mb_s: float = 1000.0
    "The rate of a paced decoder's imports, MB/s."
    step_ms: float = 10.0
    "The time of a paced decoder's decode step."
    most_tokens: int = 512
    "That A may need; its lane holds the prompt and these."
    repeats: int = 10
    "Each takes every mode twice."
    resume: bool = False
    "Go on with the rows that --out holds."
    out: Path | None = None
    "The file of rows."


def lane_command(options: Annotated[LaneOptions, Parameter(name="*")] = LaneOptions()) -> int:
    """Two requests back to back at a decoder of one lane: from the end of A to B's first token.

    Without prefetch, with prefetch by the whole route, and with prefetch streamed, where what came
    before the lane was free is imported from its slot and the rest live.
    """
    _check(options)
    setting = _setting(options)
    interpreter = interpreter_for_decoder(
        options.decoder, options.decoder_python, setting.decoder_options
    )
    if interpreter is not None:
        _print_rows(_rows_from(interpreter, setting, options.out, resume=options.resume))
        return 0
    file = open_rows(
        options.out, lane.CLAIM, lane.KEY, _settings_of(setting), resume=options.resume
    )
    for row in lane.run(setting, file):
        _print_row(row)
    _print_rows(file.rows)
    return 0


def _check(options: LaneOptions) -> None:
    _check_figures(options)
    source = _source_of(options)
    if source != PACED:
        check_name("source", source)
    check_source(source, dtype=options.dtype, emulate=options.emulate)
    if options.decoder != PACED:
        check_name("decoder", options.decoder)
    elif options.geometry not in GEOMETRIES:
        known = ", ".join(GEOMETRIES)
        raise Refused(
            f"unknown geometry {options.geometry!r}; known are {known}", field="--geometry"
        )
    given = json_object("--decoder-options", options.decoder_options)
    check_decoder(options.decoder, compiled=options.compiled, given=given)


def _check_figures(options: LaneOptions) -> None:
    for flag, count in (
        ("--prompt", options.prompt),
        ("--group-layers", options.group_layers),
        ("--most-tokens", options.most_tokens),
        ("--repeats", options.repeats),
    ):
        check_count(flag, count)
    for flag, rate in (
        ("--prefill-mb-s", options.prefill_mb_s),
        ("--import-mb-s", options.import_mb_s),
        ("--step-ms", options.step_ms),
    ):
        _check_within(flag, rate, MAX_RATE)
    if not options.shares:
        raise Refused("--shares is empty; give at least one", field="--shares")
    for share in options.shares:
        _check_within("--shares", share, MAX_SHARE)


def _rows_from(
    interpreter: str, setting: Setting, out: Path | None, *, resume: bool
) -> list[dict[str, Any]]:
    """Measure in the decoder's environment, where it is opened; the source stays in this one."""
    check_output("--out", out, make_parents=True)
    if resume and out is None:
        raise Refused("--resume goes on with the rows of --out; name it", field="--resume")
    there = {**asdict(setting), "source_python": setting.source_python or sys.executable}
    asked = {
        "setting": there,
        "settings": _settings_of(setting),
        "out": None if out is None else str(out.absolute()),
        "resume": resume,
    }
    rows: list[dict[str, Any]] = elsewhere.call(
        interpreter, f"{lane.__name__}:{lane.run_asked.__name__}", asked, told=_print_row
    )
    return rows


def _print_row(row: dict[str, Any]) -> None:
    where = f"A ends at {row['share']:g}, {row['repeat']}.{row['half']} {row['mode']}"
    _console.print(f"{where}: {row['gap_ns'] / 1e6:.1f} ms", soft_wrap=True)


def _setting(options: LaneOptions) -> Setting:
    """What is measured, of options that were checked."""
    source = _source_of(options)
    model = _model_of(options, source)
    decoder_options = _decoder_options(options, model)
    decoder_options |= json_object("--decoder-options", options.decoder_options)
    source_options = options_for(
        source, model if source in TAKE_A_MODEL else {}, emulate=options.emulate
    )
    source_options |= json_object("--source-options", options.source_options)
    return Setting(
        name=_name(options, source, decoder_options, source_options),
        decoder=PACED_LANE if options.decoder == PACED else options.decoder,
        source=source,
        num_tokens=options.prompt,
        decoder_options=decoder_options,
        source_options=source_options,
        source_python=interpreter_for(source, options.source_python),
        prefill_mb_s=options.prefill_mb_s,
        group_layers=options.group_layers,
        shares=options.shares,
        repeats=options.repeats,
        most_tokens=options.most_tokens,
    )


def _source_of(options: LaneOptions) -> str:
    return options.source or (PACED if options.decoder == PACED else "torch")


def _model_of(options: LaneOptions, source: str) -> dict[str, Any]:
    """The options of what computes; empty where nothing does."""
    if options.decoder not in WITH_A_MODEL and source not in TAKE_A_MODEL:
        return {}
    from headrace.engine.models import resolve

    dtype = dtype_for(source, options.dtype)
    return {"model": str(resolve(options.model)), "dtype": dtype, "threads": 1}


def _decoder_options(options: LaneOptions, model: dict[str, Any]) -> dict[str, Any]:
    if options.decoder == PACED:
        return {
            "geometry": options.geometry,
            "context": options.prompt + options.most_tokens,
            "mb_per_s": options.import_mb_s,
            "step_ms": options.step_ms,
        }
    own = model if options.decoder in WITH_A_MODEL else {}
    return options_of(options.decoder, own, compiled=options.compiled)


def _name(
    options: LaneOptions,
    source: str,
    decoder_options: dict[str, Any],
    source_options: dict[str, Any],
) -> str:
    """What rows call the pairing; no path of this machine is in it."""
    emulated = is_emulated(source, source_options)
    fake = is_fake(options.decoder, decoder_options)
    pair = pair_name(source, options.decoder, emulated=emulated, fake=fake)
    if options.decoder == PACED:
        return f"{PACED if source == PACED else pair} {options.geometry}"
    if options.decoder in WITH_A_MODEL or source in TAKE_A_MODEL:
        return f"{pair} {model_name(options.model)}"
    return pair


def _settings_of(setting: Setting) -> dict[str, Any]:
    """What rows depend on beside their key."""
    return {
        "group_layers": setting.group_layers,
        "prefill_mb_s": setting.prefill_mb_s,
        "most_tokens": setting.most_tokens,
        "decoder_options": _without_places(setting.decoder_options),
        "source_options": _without_places(setting.source_options),
    }


def _without_places(value: Any) -> Any:
    """Options as rows keep them: what has a place on this machine goes by its name."""
    if isinstance(value, dict):
        return {name: _without_places(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_without_places(each) for each in value]
    if isinstance(value, str) and os.path.isabs(value):
        return Path(value).name
    return value


def _check_within(flag: str, value: float, most: float) -> None:
    if not 0 < value <= most:
        raise Refused(f"{flag} is {value:g}; it must be above 0 and at most {most:g}", field=flag)


def _print_rows(rows: list[dict[str, Any]]) -> None:
    table = Table(
        *("A ends at", "mode", "ms", "of off", "parked ms", "parked MB"),
        title="from the end of A to the first token of B",
    )
    for line in lines(rows):
        ratio = "" if line.ratio is None else _short(line.ratio)
        table.add_row(
            f"{line.share:g} ({line.ended_at.median:.2f})",
            line.mode,
            _short(line.gap_ms),
            ratio,
            _short(line.parked_ms),
            _short(line.parked_mb),
        )
    _console.print(table)
    print_goals(_console, figures(rows))


def _short(spread: Spread) -> str:
    return f"{spread.median:.3g} [{spread.p10:.3g}, {spread.p90:.3g}]"
