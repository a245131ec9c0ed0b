"""`headrace config`: whether a headrace.toml can be served here, and all that it says."""

from __future__ import annotations

import sys
from pathlib import Path

from cyclopts import App
from rich.filesize import decimal

from headrace.errors import Refused
from headrace.server.config_checks import Checked, CheckedDecoder, check_config
from headrace.server.config_file import read_config
from headrace.server.config_text import config_text, default_text

config_app = App(
    name="config",
    help="Check a headrace.toml, or show it with all defaults (`headrace serve --config FILE`).",
    version_flags=[],
)


@config_app.command
def check(file: Path, /) -> int:
    """Say whether a config can be served on this host; nothing is started.

    Prints a line for each decoder, and what is odd on standard error.

    Parameters
    ----------
    file
        The headrace.toml.
    """
    config = read_config(file)
    try:
        checked = check_config(config)
    except Refused as exc:
        raise Refused(f"{file}: {exc}", field=exc.field) from exc
    for decoder in checked.decoders:
        print(line_of(decoder))
    print_warnings(checked)
    return 0


@config_app.command
def show(file: Path | None = None, /) -> int:
    """Print a config with every key, fit to be used as one; without FILE, one to begin with.

    Parameters
    ----------
    file
        The headrace.toml.
    """
    text = default_text() if file is None else config_text(read_config(file))
    print(text, end="")
    return 0


def line_of(decoder: CheckedDecoder) -> str:
    """A decoder, what it takes, and that it is ready to serve or what only its start can tell."""
    slots = sum(each.slots for each in decoder.table.sources)
    sizes = decoder.sizes
    lanes = f"{decoder.lanes} lane{'s' if decoder.lanes > 1 else ''}"
    counts = f"{lanes} and {slots} slot{'s' if slots > 1 else ''}"
    if sizes is None:
        taken = f"{counts}, of sizes that its options decide"
    else:
        each = f"{decimal(sizes.lane)} a lane, {decimal(sizes.slot)} a slot"
        taken = f"{counts} take {decimal(sizes.reserved)} here ({each})"
        taken += f", weights up to {decimal(sizes.weights)}" if sizes.weights else ""
    model = f"{decoder.table.model} by {decoder.start.pair}"
    ready = (
        f"not checked: {', '.join(decoder.unchecked)}" if decoder.unchecked else "ready to serve"
    )
    return f"{decoder.name}: {model}: {taken}; {ready}"


def print_warnings(checked: Checked) -> None:
    """Say what is odd, a line each, on standard error."""
    for warning in checked.warnings:
        print(f"headrace: warning: {warning}", file=sys.stderr)
