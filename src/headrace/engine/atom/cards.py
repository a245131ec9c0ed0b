"""What tells one card from another."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from headrace.engine.atom import smi
from headrace.engine.atom.sdk import VENDOR, Sdk
from headrace.engine.faults import raised_as
from headrace.errors import BackendUnavailable


def describe(sdk: Sdk, device: int) -> dict[str, Any]:
    """What is told of a card: its number for the vendor's runtime, its name, and where it is
    plugged in.

    `bus_id` is left out where nothing tells it; a fake has none.

    Raises:
        BackendUnavailable: no_device: there is no such card.
    """
    probe, hint = f"rebel.get_npu_name({device})", "Choose a device that is there"
    with raised_as(lambda why: BackendUnavailable(VENDOR, "no_device", probe, why, hint)):
        name = sdk.rebel.get_npu_name(device)
    if name is None:
        raise BackendUnavailable(VENDOR, "no_device", probe, "it is None", hint)
    card: dict[str, Any] = {"index": device, "name": str(name)}
    if sdk.name == VENDOR:
        with suppress(BackendUnavailable):  # without it a card goes by its number
            card["bus_id"] = smi.ask().card(device).pci.bus_id
    return card


def which(card: Mapping[str, Any]) -> tuple[Any, ...]:
    """What makes two descriptions those of one card.

    Numbers move between reboots, so one counts only where no place is told.
    """
    return card.get("name"), card.get("bus_id") or card.get("index")
