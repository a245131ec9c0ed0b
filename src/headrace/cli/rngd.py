"""`headrace rngd`: make the environment of the RNGD source, compile for a card, probe one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.console import Console
from rich.text import Text

from headrace.cli.arguments import check_count, check_given, check_output
from headrace.cli.children import NOTHING_DONE, ended, run_tied, show_record
from headrace.engine import environments
from headrace.engine.environment_making import give_up, make
from headrace.engine.environments import RNGD
from headrace.engine.models import resolve
from headrace.engine.rngd import preflight
from headrace.engine.rngd.probes import COMPILER, FAMILIES, PES_PER_CARD, find_toolchain
from headrace.errors import BackendUnavailable, HeadraceError, Refused

PROBE_MODULE = "headrace.engine.rngd.probe"
COMPILE_MODULE = "headrace.engine.rngd.compile_ahead"
CARDS = 1024
CHIPS = (1, 2, 4)
TOLD_COLUMNS = 72
PROVE_TIMEOUT_S = 300.0

rngd_app = App(
    name="rngd",
    help="Make the environment of the RNGD source; compile for a card; probe one.",
    version_flags=[],
)


@rngd_app.command
def setup(
    *,
    directory: str | None = None,
    python: str | None = None,
    dry_run: Annotated[bool, Parameter(name="--dry-run", negative="")] = False,
) -> int:
    """Make a virtual environment with FuriosaAI's packages, for the RNGD source alone.

    It needs no card: the same packages run the kernels on a CPU. Nothing outside of the directory
    is changed.

    Parameters
    ----------
    directory
        Where it is made, by default in headrace's cache.
    python
        The interpreter that it is made with, by default this one.
    dry_run
        Say what would be done, and do nothing.
    """
    check_given("--directory", directory)
    check_given("--python", python)
    default = environments.default_directory(RNGD)
    place = default if directory is None else Path(directory).expanduser().absolute()
    console = Console(stderr=True, highlight=False)
    environments.check_directory(RNGD, place)
    if environments.is_complete(RNGD, place):
        if (broken := _broken(place)) is None:
            _say(console, f"{place} is complete")
            return 0
        _say(console, f"{place} cannot be used and is made anew: {broken}")
        if not dry_run:
            give_up(RNGD, place)
    python = python or sys.executable
    environments.check_writable(place)
    _announce(console, place, python)
    if dry_run:
        return 0
    with console.status("making the environment") as status:
        interpreter = make(
            RNGD,
            place,
            python,
            told=lambda line: status.update(Text(_short(line))),
            prove=_prove,
        )
    _say(console, f"done: {interpreter}")
    if place != default:
        _say(console, f"to have it found, set: {RNGD.variable}={interpreter}")
    return 0


def _announce(console: Console, directory: Path, python: str) -> None:
    """Say what is going to be done, unless it has to be refused."""
    if environments.lacks_only_a_link(RNGD, directory):
        _say(console, f"{directory} has all packages; only this headrace is linked into it.")
        return
    facts = environments.look_at(python)
    environments.check_python(RNGD, facts)
    _say(console, *_announced(directory, facts))
    environments.check_room(RNGD, directory)


def _say(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)


def _broken(directory: Path) -> BackendUnavailable | None:
    """Why an environment that was finished cannot be used; None if it can."""
    try:
        preflight.check(
            str(environments.interpreter_in(directory)), emulate=True, timeout_s=PROVE_TIMEOUT_S
        )
    except BackendUnavailable as exc:
        return exc
    return None


def _announced(directory: Path, facts: environments.PythonFacts) -> list[str]:
    """What is going to be done, and how big it is."""
    python = ".".join(map(str, facts.version))
    return [
        f"{', '.join(RNGD.requirements)} and what they require go into {directory}, made with "
        f"{facts.path} ({python}).",
        f"About {RNGD.download_nbytes / 1e9:.1f} GB are downloaded and "
        f"{RNGD.disk_nbytes / 1e9:.1f} GB stay on disk, as measured on {RNGD.measured_on}:",
        *(f"  {part}" for part in RNGD.parts),
        f"{RNGD.room_nbytes / 1e9:.1f} GB must be free meanwhile.",
        f"To compile for a card needs {COMPILER} too, which is not installed by this (Debian and "
        "Ubuntu: apt install gcc-aarch64-linux-gnu). A card's driver and firmware are the "
        "vendor's system packages: https://developer.furiosa.ai/latest/en/get_started/"
        "prerequisites.html",
    ]


def _short(line: str) -> str:
    return line if len(line) <= TOLD_COLUMNS else f"{line[: TOLD_COLUMNS - 3]}..."


def _prove(interpreter: str) -> None:
    """Have the fresh environment show that it can emulate."""
    try:
        preflight.check(interpreter, emulate=True, timeout_s=PROVE_TIMEOUT_S)
    except BackendUnavailable as exc:
        raise HeadraceError(f"all is installed, and it cannot be used: {exc}") from exc


@rngd_app.command
def probe(
    *,
    device: int = 0,
    chips: int = 1,
    emulate: Annotated[bool, Parameter(negative="")] = False,
    share_device: Annotated[bool, Parameter(negative="")] = False,
    out: Path | None = None,
    python: str | None = None,
) -> int:
    """Find out on a card what cannot be known without one, and write it down as a JSON record.

    The RNGD source reads the record: it refuses layouts that were not verified on a card.

    Parameters
    ----------
    device
        N of the device furiosa:N.
    chips
        How many chips that device is made of.
    emulate
        Run what can be run on the CPU, to see that the probe works; it verifies no card.
    share_device
        Go on although another process uses the card.
    out
        The file of the record, by default the one in headrace's cache that the source reads.
    python
        The interpreter of the source's environment, by default the one that setup made.
    """
    check_count("--device", device, least=0, limit=CARDS)
    if chips not in CHIPS:
        raise Refused(f"--chips is {chips}; choose 1, 2 or 4", field="chips")
    check_given("--python", python)
    name = "emulated" if emulate else f"furiosa:{device}"
    if out is not None:
        out = out.expanduser().absolute()
        check_output("--out", out)
    interpreter = python or environments.find(RNGD)
    fusion = chips * PES_PER_CARD
    preflight.check(interpreter, emulate=emulate, device=device, share=share_device, fusion=fusion)
    arguments = [
        *(f"--device={device}", f"--chips={chips}"),
        *(["--emulate"] if emulate else []),
        *([] if out is None else [f"--out={out}"]),
    ]
    status, told = run_tied(interpreter, PROBE_MODULE, arguments)
    return show_record(name, status, told, out)


@rngd_app.command(name="compile")
def compile_kernels(
    *,
    model: str,
    max_positions: int | None = None,
    token_buckets: tuple[int, ...] = (),
    cache: Path | None = None,
    python: str | None = None,
) -> int:
    """Compile a model's kernels for a card, so that a source that starts later finds them.

    It needs no card, and minutes for each kernel. It can be ended and gone on with: each kernel is
    kept when it is done.

    Parameters
    ----------
    model
        A built-in model, a directory, a GGUF file or a hub id.
    max_positions
        The longest prompt, as the source's option; by default the model's longest or 8192.
    token_buckets
        Most tokens computed at once, one for each set of kernels, as the source's option.
    cache
        Where compiled kernels are kept, as the source's option compile_cache; by default in
        headrace's cache.
    python
        The interpreter of the source's environment, by default the one that setup made.
    """
    if max_positions is not None:
        check_count("--max-positions", max_positions)
    for size in token_buckets:
        check_count("--token-buckets", size)
    check_given("--python", python)
    interpreter = python or environments.find(RNGD)
    find_toolchain()
    directory = resolve(model)
    # What a card needs beside this is its compiler.
    preflight.check(interpreter, emulate=True, families=_families(directory))
    arguments = [
        f"--model={directory}",
        *([] if max_positions is None else [f"--max-positions={max_positions}"]),
        *(["--token-buckets", *map(str, token_buckets)] if token_buckets else []),
        *([] if cache is None else [f"--cache={cache.expanduser().absolute()}"]),
    ]
    status, _ = run_tied(interpreter, COMPILE_MODULE, arguments)
    if status not in (0, NOTHING_DONE):
        raise HeadraceError(f"compiling {ended(status)}; what was done is kept")
    return status


def _families(directory: Path) -> tuple[str, ...]:
    """Whose kernels a model needs: none's if it is refused, which the compiling child says."""
    try:
        config = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError):
        return ()
    model_type = config.get("model_type") if isinstance(config, dict) else None
    return (model_type,) if model_type in FAMILIES else ()
