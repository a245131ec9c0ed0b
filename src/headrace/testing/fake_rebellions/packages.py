"""The vendor's packages as one process has them, over a fake card."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch

from headrace.engine.atom.sdk import Sdk
from headrace.testing.fake_rebellions.card import ALIGNMENT, Card, Knobs
from headrace.testing.fake_rebellions.model import FakeModel

VERSIONS: Final = {"fake-rebellions": "1"}


@dataclass(kw_only=True, eq=False)
class FakeRebellions(Knobs):
    """The packages of one process, and the card behind them. The fields are the card's knobs."""

    card: Card = field(init=False, repr=False)
    rebel: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.card = Card(self)
        self.rebel = SimpleNamespace(
            npu_is_available=self._is_there,
            get_npu_name=lambda device: self.npu_name if self._is_there(device) else None,
            device_count=lambda: self.num_devices,
        )

    def sdk(self) -> Sdk:
        """As the engine is handed it."""
        return Sdk("fake rebellions", self.rebel, self.load, self.aligned, VERSIONS, "fake")

    def load(self, directory: str, device: int) -> FakeModel:
        """The compiled decoder of a directory that `compile_fake` made, on a card.

        Raises:
            RuntimeError: there is no such card.
            FileNotFoundError: the directory holds no compiled model.
            ValueError: what it holds is not the fake's.
        """
        if not self._is_there(device):
            raise RuntimeError(f"fake driver: there is no device {device}")
        with self.card.call("load"):
            return FakeModel(Path(directory), self.card)

    def aligned(self, numel: int) -> torch.Tensor:
        """A flat float16 tensor in host memory, at a multiple of 4,096 bytes. It is full of NaNs,
        since nobody wrote to it.
        """
        nbytes = numel * 2
        memory = np.full(nbytes + ALIGNMENT, 0xFF, np.uint8)
        first = -memory.ctypes.data % ALIGNMENT
        return torch.from_numpy(memory[first : first + nbytes].view(np.float16))

    def _is_there(self, device: int) -> bool:
        return 0 <= device < self.num_devices
