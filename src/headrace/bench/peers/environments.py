"""The environments that `benchmarks/peers/setup.py` makes: where they are and what they need."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

from headrace.engine.models import cache_root
from headrace.errors import HeadraceError

MARKER = "headrace-peer.json"
SETUP = "benchmarks/peers/setup.py"


class Unavailable(HeadraceError):
    """A transport cannot be measured here; the text says why, and becomes its rows' `skipped`."""


class Environment(NamedTuple):
    """The interpreter of a peer, and the variables that it needs."""

    interpreter: str
    env: dict[str, str]


def default_directory() -> Path:
    """Where the setup script puts the environments if not told otherwise."""
    return cache_root() / "peers"


def environment_of(family: str, directory: Path) -> Environment:
    """The environment of a family of peers; an empty name is this interpreter.

    Raises:
        Unavailable: there is none, or it is not whole.
    """
    if not family:
        return Environment(sys.executable, {})
    home = directory / family
    advice = f"run: python {SETUP} --root {directory} {family}"
    try:
        marker = json.loads((home / MARKER).read_text())
    except OSError as exc:
        raise Unavailable(f"no environment for {family} in {directory}; {advice}") from exc
    except ValueError as exc:
        raise Unavailable(f"{home / MARKER} is no marker of {SETUP}; {advice}") from exc
    if not marker.get("complete"):
        raise Unavailable(f"the environment {home} was not finished; {advice}")
    return Environment(str(home / "bin" / "python"), marker["env"])
