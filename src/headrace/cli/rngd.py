"""`headrace rngd`: make the environment of the RNGD source, compile for a card, probe one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from headrace.cli.arguments import check_count, check_given, check_output
from headrace.cli.children import NOTHING_DONE, ended, run_tied, show_record
from headrace.cli.environment_setup import set_up
from headrace.engine import environments
from headrace.engine.environments import RNGD
from headrace.engine.models import resolve
from headrace.engine.rngd import preflight
from headrace.engine.rngd.probes import COMPILER, FAMILIES, PES_PER_CARD, find_toolchain
from headrace.errors import HeadraceError, Refused

PROBE_MODULE = "headrace.engine.rngd.probe"
COMPILE_MODULE = "headrace.engine.rngd.compile_ahead"
CARDS = 1024
CHIPS = (1, 2, 4)
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
    return set_up(
        RNGD,
        _look,
        directory=directory,
        python=python,
        dry_run=dry_run,
        remarks=[
            f"To compile for a card needs {COMPILER} too, which is not installed by this (Debian "
            "and Ubuntu: apt install gcc-aarch64-linux-gnu). A card's driver and firmware are the "
            "vendor's system packages: https://developer.furiosa.ai/latest/en/get_started/"
            "prerequisites.html",
        ],
    )


def _look(interpreter: str) -> tuple[str, ...]:
    """Have the environment show that it can emulate."""
    preflight.check(interpreter, emulate=True, timeout_s=PROVE_TIMEOUT_S)
    return ()


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
