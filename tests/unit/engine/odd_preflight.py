"""The preflight of no vendor: its one probe does what the test says, in the child."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from typing import Any, Final

from headrace.engine.preflight import Preflight
from headrace.engine.probing import Probe, headrace_probe

MODULE: Final = "tests.unit.engine.odd_preflight"
SETUP: Final = "Set it up"
ODD: Final = "import odd"


@dataclass(frozen=True)
class Asked:
    """code: what the probe runs; what it leaves in `found` is what was found."""

    code: str = "found = 'all is well'"


def look(asked: Asked) -> str:
    left: dict[str, Any] = {}
    exec(asked.code, left)
    return str(left["found"])


def probes(asked: Asked) -> list[Probe[Asked]]:
    last = Probe[Asked]("last", "no_device", SETUP, lambda asked: "reached")
    return [headrace_probe(SETUP), Probe(ODD, "driver_missing", "Load it", look), last]


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--code", default=Asked().code)


def read_flags(parsed: Namespace) -> Asked:
    return Asked(parsed.code)


ODD_PREFLIGHT: Final = Preflight(
    vendor="odd",
    module=MODULE,
    side="decoder",
    setup=SETUP,
    no_headrace="Install headrace there",
    probes=probes,
    flags=lambda asked: [f"--code={asked.code}"],
    add_flags=add_flags,
    read_flags=read_flags,
)

if __name__ == "__main__":
    sys.exit(ODD_PREFLIGHT.main())
