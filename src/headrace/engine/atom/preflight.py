"""Whether an ATOM decoder can run here: its probes, made in a child process."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Final

from headrace.engine.atom.environment import SETUP
from headrace.engine.atom.probes import Asked, probes
from headrace.engine.atom.sdk import VENDOR
from headrace.engine.preflight import Preflight, Told

MODULE: Final = "headrace.engine.atom.preflight"
TIMEOUT_S: Final = 90.0


def check(
    interpreter: str,
    *,
    device: int = 0,
    share: bool = False,
    card: bool = True,
    sdk: bool = True,
    timeout_s: float = TIMEOUT_S,
) -> list[Told]:
    """Make every probe in a child that `interpreter` runs, and return how they went.

    device: as the vendor's runtime counts cards. share: go on although others use the card. card:
    whether to look at a card. sdk: whether to look at what a model is loaded and computed with.

    Raises:
        BackendUnavailable: of the first probe that failed, or that the child died or hung at.
    """
    return _PREFLIGHT.check(interpreter, Asked(device, share, card, sdk), timeout_s)


def main(arguments: Sequence[str] | None = None) -> int:
    """What the child runs; see `Preflight.main`."""
    return _PREFLIGHT.main(arguments)


def _flags(asked: Asked) -> list[str]:
    return [
        f"--device={asked.device}",
        *(["--share"] if asked.share else []),
        *([] if asked.card else ["--no-card"]),
        *([] if asked.sdk else ["--no-sdk"]),
    ]


def _add_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--device", type=int, default=0)
    for flag in ("--share", "--no-card", "--no-sdk"):
        parser.add_argument(flag, action="store_true")


def _read_flags(parsed: Namespace) -> Asked:
    return Asked(parsed.device, parsed.share, not parsed.no_card, not parsed.no_sdk)


_PREFLIGHT: Final = Preflight(
    vendor=VENDOR,
    module=MODULE,
    side="decoder",
    setup=SETUP,
    no_headrace=SETUP,
    probes=probes,
    flags=_flags,
    add_flags=_add_flags,
    read_flags=_read_flags,
)


if __name__ == "__main__":
    sys.exit(main())
