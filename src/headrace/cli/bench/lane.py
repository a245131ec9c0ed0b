"""`headrace bench lane`: the next request at a decoder that has one lane."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

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
from headrace.cli.bench.tables import open_rows, print_goals
from headrace.cli.decoders import (
    ATOM,
    check_decoder,
    interpreter_for_decoder,
    is_fake,
    options_of,
)
from headrace.errors import Refused
from headrace.runtime import elsewhere

MAX_RATE = 1e6
MAX_SHARE = 100.0
WITH_A_MODEL: Final = ("cpu", ATOM)

_console = Console(highlight=False)


def lane_command(
    *,
    decoder: str = "paced",
    source: str | None = None,
    model: str = "smollm2-135m",
    geometry: str = "llama-3.1-8b",
    decoder_options: str = "{}",
    decoder_python: str | None = None,
    compiled: Path | None = None,
    source_options: str = "{}",
    prompt: int = 512,
    group_layers: int = 1,
    shares: tuple[float, ...] = (0.25, 0.6, 1.5),
    prefill_mb_s: float = 200.0,
    import_mb_s: float = 1000.0,
    step_ms: float = 10.0,
    slack_ms: float = 5.0,
    most_tokens: int = 512,
    repeats: int = 10,
    resume: bool = False,
    out: Path | None = None,
) -> int:
    """Two requests back to back at a decoder of one lane: from the end of A to B's first token.

    Without prefetch, with prefetch by the whole route, and with prefetch streamed, where what came
    before the lane was free is imported from its slot and the rest live.

    Parameters
    ----------
    decoder
        `paced` (memory, a set rate and a set step), a listed one such as `cpu`, or
        `module:factory`; it must have one lane.
    source
        `paced`, a listed one or `module:factory`; by default `paced` for a paced decoder, else
        `torch`.
    model
        Of a decoder and a source that compute: a built-in name or a directory.
    geometry
        Of a paced decoder.
    decoder_options, source_options
        More options, as a JSON object.
    decoder_python
        The interpreter of the decoder's own environment; by default HEADRACE_ATOM_PYTHON for atom.
    compiled
        The directory of the compiled model, which atom needs beside --model.
    prompt
        Tokens of each prompt.
    shares
        When A ends, as shares of B's prefill.
    prefill_mb_s
        KV of a paced prefill, MB/s (1e6 bytes).
    import_mb_s, step_ms
        Of a paced decoder: the rate of its imports, and the time of a decode step.
    slack_ms
        For the host, in the goal.
    most_tokens
        That A may need; its lane holds the prompt and these.
    repeats
        Each takes every mode twice.
    resume
        Go on with the rows that --out holds.
    """
    for flag, count in (
        ("--prompt", prompt),
        ("--group-layers", group_layers),
        ("--most-tokens", most_tokens),
        ("--repeats", repeats),
    ):
        check_count(flag, count)
    for flag, rate in (("--prefill-mb-s", prefill_mb_s), ("--import-mb-s", import_mb_s)):
        _check_within(flag, rate, MAX_RATE)
    _check_within("--step-ms", step_ms, MAX_RATE)
    if slack_ms < 0:
        raise Refused(f"--slack-ms is {slack_ms:g}; it cannot be negative", field="--slack-ms")
    if not shares:
        raise Refused("--shares is empty; give at least one", field="--shares")
    for share in shares:
        _check_within("--shares", share, MAX_SHARE)
    own = json_object("--decoder-options", decoder_options)
    if decoder != "paced":
        check_name("decoder", decoder)
        check_decoder(decoder, compiled=compiled, given=own)
    pace = {"mb_per_s": import_mb_s, "step_ms": step_ms}
    pairing = _pairing(decoder, source, model, geometry, prompt + most_tokens, pace, compiled)
    own = pairing["decoder_options"] | own
    pairing |= {
        "name": _named(pairing["name"], decoder, own),
        "decoder_options": own,
        "source_options": pairing["source_options"]
        | json_object("--source-options", source_options),
    }
    setting = Setting(
        **pairing,
        num_tokens=prompt,
        prefill_mb_s=prefill_mb_s,
        group_layers=group_layers,
        shares=shares,
        repeats=repeats,
        most_tokens=most_tokens,
        slack_ms=slack_ms,
    )
    interpreter = interpreter_for_decoder(decoder, decoder_python, own)
    if interpreter is None:
        file = open_rows(out, lane.CLAIM, lane.KEY, _settings_of(setting), resume=resume)
        for row in lane.run(setting, file):
            _print_row(row)
        _print_rows(file.rows)
    else:
        _print_rows(_rows_from(interpreter, setting, out, resume=resume))
    return 0


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


def _named(name: str, decoder: str, options: dict[str, Any]) -> str:
    """What rows call the pairing; a decoder on a fake says so."""
    return f"{name} (fake)" if is_fake(decoder, options) else name


def _pairing(
    decoder: str,
    source: str | None,
    model: str,
    geometry: str,
    context: int,
    pace: dict[str, Any],
    compiled: Path | None = None,
) -> dict[str, Any]:
    """The names of decoder and source, their options by themselves, and what rows call them."""
    if source not in (None, "paced"):
        check_name("source", source)
    if decoder == "paced":
        if geometry not in GEOMETRIES:
            known = ", ".join(GEOMETRIES)
            raise Refused(f"unknown geometry {geometry!r}; known are {known}", field="--geometry")
        fed = source or "paced"
        own = {"geometry": geometry, "context": context, **pace}
        return {
            "name": f"paced {geometry}" if fed == "paced" else f"{fed} to paced {geometry}",
            "decoder": PACED_LANE,
            "decoder_options": own,
            "source": fed,
            "source_options": {},
        }
    source = source or "torch"
    computes: dict[str, Any] = {}
    if decoder in WITH_A_MODEL or source == "torch":
        from headrace.engine.models import resolve

        computes = {"model": str(resolve(model)), "dtype": "float32", "threads": 1}
    return {
        "name": f"{source} to {decoder} {model}" if computes else f"{source} to {decoder}",
        "decoder": decoder,
        "decoder_options": options_of(decoder, computes, compiled=compiled)
        if decoder in WITH_A_MODEL
        else {},
        "source": source,
        "source_options": computes if source == "torch" else {},
    }


def _settings_of(setting: Setting) -> dict[str, Any]:
    """What rows depend on beside their key."""
    return {
        "group_layers": setting.group_layers,
        "prefill_mb_s": setting.prefill_mb_s,
        "slack_ms": setting.slack_ms,
        "most_tokens": setting.most_tokens,
        "decoder_options": _without_places(setting.decoder_options),
        "source_options": _without_places(setting.source_options),
    }


def _without_places(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as rows keep them: a directory goes by its name."""
    places = ("model", "compiled")
    return {name: Path(at).name if name in places else at for name, at in options.items()}


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
