"""`headrace check`: does this source and this decoder keep the rules, here, on these devices."""

from __future__ import annotations

import importlib
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.backends.load import check_name
from headrace.cli.arguments import check_count, json_object
from headrace.engine.text import max_positions_of
from headrace.errors import PeerDied, Refused
from headrace.runtime import elsewhere
from headrace.runtime.log import configure
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

INTERRUPTED = 130
RUN_THERE = "headrace.testing.pair.runner:run_asked"
QUICK_CONTEXT, CONTEXT = 128, 1088
NO_MODEL = ("replay", "null")
REPLAYED = {"layers": 6, "heads": 2, "head_dim": 8, "window": 16, "full_every": 3}
"""What replay imitates where no decoder says: small, with full and sliding layers."""

Told = Callable[[str, dict[str, Any]], None]
Finish = Callable[[dict[str, Any]], None]

_STYLES = {"ok": "green", "failed": "bold red", "skipped": "dim", "not run": "yellow"}


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """The options of `headrace check`."""

    source: str
    "torch, cuda, rngd, vllm, replay or module:factory."
    decoder: str
    "cpu, cuda, atom, null or module:factory."
    model: str | None = None
    "A built-in model, a directory, a GGUF file or a hub id."
    quick: bool = False
    "Fewer lengths, cuts and moments."
    report: Path | None = None
    "Write report.json and report.md into this directory."
    only: tuple[str, ...] = ()
    "Run this case; may be given more than once."
    repeat: int = 1
    "Run the cases this often, with another seed each time."
    seed: int = 0
    "Of the prompts and of random bytes."
    share_device: bool = False
    "Go on although another process uses the device."
    context: int | None = None
    "Positions that a lane and a slot hold; by default 1088, or 128 with --quick."
    dtype: str | None = None
    "The weights' and the cache's dtype; by default float32, and bfloat16 with --source rngd."
    threads: int = 1
    "torch threads of each process."
    source_python: str | None = None
    "The interpreter of the source's own environment; rngd's is found if `rngd setup` made it."
    emulate: bool = False
    "Run the source's kernels on the CPU, with its vendor's own executor (rngd)."
    source_options: str = "{}"
    "More options of the source, as a JSON object."
    decoder_options: str = "{}"
    "More options of the decoder, as a JSON object."
    decoder_python: str | None = None
    "The interpreter of the decoder's own environment; by default HEADRACE_ATOM_PYTHON for atom."
    compiled: Path | None = None
    "The directory of the compiled model, which atom needs beside --model."


def check(options: Annotated[CheckOptions, Parameter(name="*")]) -> int:
    """Check a source and a decoder together: real processes, real devices, and faults on command.

    Exits 0 if every case holds, 1 if one failed, 2 for a mistake.
    """
    _check(options)
    # Nothing that is shipped for use may import the tests' package; only this command runs it.
    writer = importlib.import_module("headrace.testing.pair.report")
    console = Console(highlight=False)
    attributes = _attributes(options)
    asked = _asked(options, attributes["context"])

    def finish(report: dict[str, Any]) -> None:
        if options.report is not None:
            writer.write(report | {"asked": asked}, options.report)
        _print(console, report, options, pair=asked["pair"])

    with console.status("opening the pair") as status:

        def told(what: str, case: dict[str, Any]) -> None:
            status.update(f"{case['case']}: {case['proves']}" if what == "begin" else "")

        report = _run(options, attributes, told, finish)
    finish(report)
    if report.get("interrupted"):
        return INTERRUPTED
    return 0 if report["passed"] else 1


def _run(
    options: CheckOptions, attributes: dict[str, Any], told: Told, finish: Finish
) -> dict[str, Any]:
    """Run the suite, in the decoder's environment if it has one of its own: it opens the decoder
    in its own process.
    """
    interpreter = interpreter_for_decoder(
        options.decoder, options.decoder_python, attributes["decoder_options"]
    )
    if interpreter is not None:
        return _run_there(interpreter, options, attributes, told)
    runner = importlib.import_module("headrace.testing.pair.runner")
    configure("error")  # what is warned of here was ordered
    report: dict[str, Any] = runner.run(
        attributes, only=options.only, repeat=options.repeat, told=told, hung=finish
    )
    return report


def _run_there(
    interpreter: str, options: CheckOptions, attributes: dict[str, Any], told: Told
) -> dict[str, Any]:
    """Run the suite in another environment; a source that names none has this process's."""
    hung: list[dict[str, Any]] = []

    def hear(said: tuple[str, dict[str, Any]]) -> None:
        what, value = said
        if what == "hung":
            hung.append(value)
        else:
            told(what, value)

    asked = {
        "attributes": attributes | {"source_python": attributes["source_python"] or sys.executable},
        "only": options.only,
        "repeat": options.repeat,
    }
    try:
        report: dict[str, Any] = elsewhere.call(interpreter, RUN_THERE, asked, told=hear)
    except PeerDied:
        if hung:  # the end of that process was the only way out of the call
            return hung[0]
        raise
    return report


def _check(options: CheckOptions) -> None:
    check_name("source", options.source)
    check_name("decoder", options.decoder)
    check_source(options.source, dtype=options.dtype, emulate=options.emulate)
    check_count("--repeat", options.repeat)
    check_count("--threads", options.threads)
    check_count("--seed", options.seed, least=0)
    if options.context is not None:
        check_count("--context", options.context, least=2)
    given = json_object("--decoder-options", options.decoder_options)
    batch = given.get("decode_batch", 1)
    if batch != 1:
        raise Refused(
            f"--decoder-options: decode_batch is {batch} and a check compares bit by bit in the "
            "exact mode; leave it out"
        )
    check_decoder(options.decoder, compiled=options.compiled, given=given)
    takes = [options.source] if options.source in TAKE_A_MODEL else []
    takes += [options.decoder] if options.decoder in WITH_A_MODEL else []
    if options.model is None and takes:
        raise Refused(f"{takes[0]} needs --model; `headrace models list` shows what is built in")
    if options.model is not None and {options.source, options.decoder} <= set(NO_MODEL):
        raise Refused("replay and null take no model; leave --model out")
    _check_directory(options.report)


def _check_directory(path: Path | None) -> None:
    """Refuse a directory that could not be written, before the minutes whose result it holds."""
    if path is None:
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / ".headrace").touch()
        (path / ".headrace").unlink()
    except OSError as exc:
        raise Refused(f"--report: {path} cannot be written: {exc.strerror}") from exc


def _attributes(options: CheckOptions) -> dict[str, Any]:
    """The attributes of the suite."""
    model: dict[str, Any] = {}
    context = options.context or (QUICK_CONTEXT if options.quick else CONTEXT)
    if options.model is not None:
        from headrace.engine.models import resolve

        directory = resolve(options.model)
        if options.context is None:
            context = min(context, _longest(directory))
        dtype = dtype_for(options.source, options.dtype)
        model = {"model": str(directory), "dtype": dtype, "threads": options.threads}
    source = options_for(
        options.source, model, emulate=options.emulate, share_device=options.share_device
    )
    if options.source == "replay" and options.decoder == "null":
        source = dict(REPLAYED)
    decoder = options_of(
        options.decoder, model, compiled=options.compiled, share_device=options.share_device
    )
    return {
        "source": options.source,
        "source_options": source | json_object("--source-options", options.source_options),
        "source_python": interpreter_for(options.source, options.source_python),
        "decoder": options.decoder,
        "decoder_options": decoder | json_object("--decoder-options", options.decoder_options),
        "context": context,
        "quick": options.quick,
        "seed": options.seed,
        "share_device": options.share_device,
    }


def _longest(directory: Path) -> int:
    """The most positions that a model holds."""
    try:
        return max_positions_of(directory)
    except (OSError, AttributeError, TypeError, ValueError) as exc:
        path = directory / "config.json"
        raise Refused(f"{path} cannot be used ({exc}); save the model there again") from exc


def _asked(options: CheckOptions, context: int) -> dict[str, Any]:
    """What was asked for, in the user's words, as the report tells it."""
    kept = ("source", "decoder", "model", "quick", "seed", "threads", "repeat")
    source_options = json_object("--source-options", options.source_options)
    decoder_options = json_object("--decoder-options", options.decoder_options)
    emulated = is_emulated(options.source, {"emulate": options.emulate} | source_options)
    fake = is_fake(options.decoder, decoder_options)
    return {
        **{name: getattr(options, name) for name in kept},
        "pair": pair_name(options.source, options.decoder, emulated=emulated, fake=fake),
        "emulate": emulated,
        "fake": fake,
        "dtype": dtype_for(options.source, options.dtype),
        "source_options": source_options,
        "decoder_options": decoder_options,
        "only": list(options.only),
        "context": context,
        "command": _command(options),
    }


def _command(options: CheckOptions) -> str:
    """The command line that does the same again."""
    words = ["headrace", "check"]
    default = CheckOptions(source="", decoder="")
    for name in CheckOptions.__dataclass_fields__:
        value = getattr(options, name)
        if value == getattr(default, name) or name == "report":
            continue
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        else:
            for each in value if isinstance(value, tuple) else (value,):
                words += [flag, str(each)]
    return shlex.join(words)


def _print(console: Console, report: dict[str, Any], options: CheckOptions, *, pair: str) -> None:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("case", no_wrap=True)
    table.add_column("result", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("note")
    for case in report["cases"]:
        note = case["note"] or case["proves"]
        name = case["case"] + (f" ({case['round'] + 1})" if options.repeat > 1 else "")
        result = Text(case["result"], style=_STYLES.get(case["result"], ""))
        table.add_row(name, result, f"{case['seconds']:.1f}", Text(note))
    console.print(table)
    style = "bold green" if report["passed"] else "bold red"
    verdict = f"{pair}: {report['verdict']}"
    console.print(Text(f"{verdict} in {report['seconds']:.1f} s", style=style), soft_wrap=True)
    if options.report is not None:
        console.print(f"report.json and report.md are in {options.report}", soft_wrap=True)
