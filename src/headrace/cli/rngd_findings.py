"""What `headrace doctor` says of the RNGD source: its environment, and a card.

Both are notes where something is missing: whoever has no such card, or wants none, misses nothing.
"""

from __future__ import annotations

from typing import Final

from headrace.cli.findings import Finding, unavailable
from headrace.engine import environments
from headrace.engine.environments import RNGD
from headrace.engine.rngd import preflight
from headrace.errors import BackendUnavailable

PREFLIGHT_TIMEOUT_S: Final = 30.0


def find_environment() -> Finding:
    """Find the environment of the RNGD source, and see whether it can emulate."""
    try:
        interpreter = environments.find(RNGD)
    except BackendUnavailable as exc:
        return unavailable("source rngd", exc)
    facts = {"interpreter": interpreter}
    try:
        preflight.check(interpreter, emulate=True, timeout_s=PREFLIGHT_TIMEOUT_S)
    except BackendUnavailable as exc:
        return unavailable("source rngd", exc, facts)
    found = f"available in {interpreter}: the vendor's kernels can be emulated on this CPU"
    return Finding("source rngd", "ok", found, facts=facts)


def find_card() -> Finding:
    """See whether there is a card that the RNGD source can use."""
    try:
        interpreter = environments.find(RNGD)
    except BackendUnavailable:
        found = "not looked for: its tools are in the environment of source rngd"
        return Finding("rngd card", "note", found)
    try:
        told = preflight.check(interpreter, emulate=False, timeout_s=PREFLIGHT_TIMEOUT_S)
    except BackendUnavailable as exc:
        return unavailable("rngd card", exc)
    return Finding("rngd card", "ok", "; ".join(f"{each.probe}: {each.detail}" for each in told))
