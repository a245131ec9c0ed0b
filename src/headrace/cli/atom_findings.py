"""What `headrace doctor` says of the ATOM decoder: its environment, and a card.

Both are notes where something is missing: whoever has no such card, or wants none, misses nothing.
"""

from __future__ import annotations

from typing import Final

from headrace.cli.findings import Finding, unavailable
from headrace.engine.atom import environment, preflight, smi
from headrace.errors import BackendUnavailable

PREFLIGHT_TIMEOUT_S: Final = 30.0
ENVIRONMENT: Final = f"decoder {environment.NAME}"
CARD: Final = f"{environment.NAME} card"
DEVICE: Final = 0


def find_environment() -> Finding:
    """Find the environment of the ATOM decoder, and see whether a model could be loaded in it."""
    try:
        interpreter = environment.find()
    except BackendUnavailable as exc:
        return unavailable(ENVIRONMENT, exc)
    facts = {"interpreter": interpreter}
    try:
        told = preflight.check(interpreter, card=False, timeout_s=PREFLIGHT_TIMEOUT_S)
    except BackendUnavailable as exc:
        return unavailable(ENVIRONMENT, exc, facts)
    packages = next(each.detail for each in told if each.probe == "packages")
    return Finding(ENVIRONMENT, "ok", f"available in {interpreter}: {packages}", facts=facts)


def find_card() -> Finding:
    """See whether there is a card that the ATOM decoder can use."""
    try:
        interpreter = environment.find()
    except BackendUnavailable:
        return _listed()
    try:
        told = preflight.check(interpreter, sdk=False, timeout_s=PREFLIGHT_TIMEOUT_S)
    except BackendUnavailable as exc:
        return unavailable(CARD, exc)
    found = "; ".join(f"{each.probe}: {each.detail}" for each in told)
    return Finding(CARD, "ok", found, facts={"device": DEVICE})


def _listed() -> Finding:
    """What the driver's tool says where there is nothing to open a card with."""
    try:
        said = smi.ask()
        card = said.card(DEVICE)
    except BackendUnavailable as exc:
        return unavailable(CARD, exc)
    found = f"{card}, {said.driver_line}; not opened: there is no environment for {ENVIRONMENT}"
    return Finding(CARD, "note", found, facts={"device": DEVICE})
