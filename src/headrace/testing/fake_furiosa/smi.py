"""The vendor's management library on a fake card: what is listed, and what a card says of itself."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any


class CoreStatus(Enum):
    Available = "Available"
    Occupied = "Occupied"


class FakeCardInfo:
    """One card, all of whose cores are free unless `busy`."""

    def __init__(self, index: int, *, busy: bool = False) -> None:
        self._index, self._busy = index, busy

    def device_name(self) -> str:
        return f"npu{self._index}"

    def product_name(self) -> str:
        return "fake card"

    def serial(self) -> str:
        return f"FAKE{self._index:04}"

    def bdf(self) -> str:
        return f"ffff:{self._index:02x}:00.0"

    def numa_node(self) -> int:
        return 0

    def liveness(self) -> bool:
        return True

    def core_status(self) -> dict[int, CoreStatus]:
        status = CoreStatus.Occupied if self._busy else CoreStatus.Available
        return dict.fromkeys(range(8), status)


class FakeSmi:
    """Stands in for `furiosa_smi`, for a machine with `num_cards` cards."""

    CoreStatus = CoreStatus

    def __init__(self, num_cards: int = 1, *, busy: bool = False) -> None:
        self._cards = [FakeCardInfo(index, busy=busy) for index in range(num_cards)]

    def list_devices(self) -> list[FakeCardInfo]:
        return list(self._cards)

    def list_pci_devices(self) -> list[Any]:
        return [SimpleNamespace(bdf=card.bdf()) for card in self._cards]

    def driver_info(self) -> str:
        return "fake driver"
