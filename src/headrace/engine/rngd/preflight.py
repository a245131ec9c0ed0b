"""Whether an RNGD source can run here: its probes, made in a child process."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Final

from headrace.engine.preflight import Preflight, Told
from headrace.engine.rngd.probes import FAMILIES, PES_PER_CARD, SETUP, Asked, probes
from headrace.engine.rngd.sdk import VENDOR

MODULE: Final = "headrace.engine.rngd.preflight"
TIMEOUT_S: Final = 60.0

_NO_HEADRACE = (
    "Give an environment that has headrace and msgspec (headrace rngd setup makes one), and leave "
    "it a minute where its disk is slow"
)


def check(
    interpreter: str,
    *,
    emulate: bool,
    device: int = 0,
    compile: bool = True,
    share: bool = False,
    fusion: int = PES_PER_CARD,
    families: Sequence[str] = FAMILIES,
    timeout_s: float = TIMEOUT_S,
) -> list[Told]:
    """Make every probe in a child that `interpreter` runs, and return how they went.

    emulate: ask for what a CPU needs, not for a card. compile: whether kernels must be compiled.
    share: go on although a card's cores are occupied. families: whose kernels must be there.

    Raises:
        BackendUnavailable: of the first probe that failed, or that the child died or hung at.
    """
    asked = Asked(emulate, device, compile, share, fusion, tuple(families))
    return _PREFLIGHT.check(interpreter, asked, timeout_s)


def main(arguments: Sequence[str] | None = None) -> int:
    """What the child runs; see `Preflight.main`."""
    return _PREFLIGHT.main(arguments)


def _flags(asked: Asked) -> list[str]:
    return [
        f"--device={asked.device}",
        f"--fusion={asked.fusion}",
        f"--families={','.join(asked.families)}",
        *(["--emulate"] if asked.emulate else []),
        *(["--compile"] if asked.compiles else []),
        *(["--share"] if asked.share else []),
    ]


def _add_flags(parser: ArgumentParser) -> None:
    for flag in ("--emulate", "--compile", "--share"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--fusion", type=int, default=PES_PER_CARD)
    parser.add_argument("--families", default=",".join(FAMILIES))


def _read_flags(parsed: Namespace) -> Asked:
    families = tuple(filter(None, parsed.families.split(",")))
    return Asked(
        parsed.emulate, parsed.device, parsed.compile, parsed.share, parsed.fusion, families
    )


_PREFLIGHT: Final = Preflight(
    vendor=VENDOR,
    module=MODULE,
    side="source",
    setup=SETUP,
    no_headrace=_NO_HEADRACE,
    probes=probes,
    flags=_flags,
    add_flags=_add_flags,
    read_flags=_read_flags,
)


if __name__ == "__main__":
    sys.exit(main())
