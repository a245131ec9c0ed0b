"""The vendor's management library on a fake machine: what it lists, and what a card says."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any


class CoreStatus(Enum):
    Available = "Available"
    Occupied = "Occupied"


class _Told:
    """An object whose methods give fixed values, as the library's objects do."""

    def __init__(self, **values: Any) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Callable[[], Any]:
        if name.startswith("_") or name not in self._values:
            raise AttributeError(name)
        return lambda: self._values[name]


class FakeSmi:
    """Stands in for `furiosa_smi`, for a machine with `num_cards` cards; `busy`: all are in use."""

    CoreStatus = CoreStatus

    def __init__(self, num_cards: int = 1, *, busy: bool = False) -> None:
        self._cards = [_card(index, busy) for index in range(num_cards)]

    def list_devices(self) -> list[Any]:
        return list(self._cards)

    def list_pci_devices(self) -> list[Any]:
        return [_Told(bdf=card.bdf()) for card in self._cards]

    def driver_info(self) -> Any:
        return _Told(major=0, minor=0, patch=0)


def _card(index: int, busy: bool) -> Any:
    status = CoreStatus.Occupied if busy else CoreStatus.Available
    return _Told(
        device_name=f"npu{index}",
        product_name="fake card",
        serial=f"FAKE{index:04}",
        bdf=_Told(domain=0xFFFF, bus=index, device=0, function=0),
        firmware_version=_Told(major=0, minor=0, patch=0),
        numa_node=0,
        liveness=True,
        core_status=dict.fromkeys(range(8), status),
    )
