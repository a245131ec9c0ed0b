"""A fake of FuriosaAI's packages for tests: the calls that the engine uses, and no others.

It is handed to the engine by name, as `headrace.testing.fake_furiosa:open`, and says that it is
fake wherever the vendor's packages say their names. The engine's code is the one that a card runs.
What it computes is near to the vendor's kernels; what it takes says nothing about a card.
"""

from __future__ import annotations

from typing import Final

from headrace.engine.rngd.sdk import Sdk
from headrace.testing.fake_furiosa.card import FakeCard, Fault
from headrace.testing.fake_furiosa.kernels import library
from headrace.testing.fake_furiosa.smi import FakeSmi
from headrace.testing.fake_furiosa.vendor import FakeTorch

__all__ = ["FakeCard", "FakeFuriosa", "Fault", "open"]

VERSIONS: Final = {"fake-furiosa": "1"}


class FakeFuriosa:
    """The packages of one process, and the card behind them.

    seed: of the order in which streams get on. polls_per_step: how late everything is.
    """

    def __init__(self, seed: int = 0, polls_per_step: int = 1) -> None:
        self.card = FakeCard(seed, polls_per_step)
        self.torch = FakeTorch(self.card)

    def sdk(self) -> Sdk:
        """As the engine is handed it."""
        return Sdk("fake furiosa", self.torch, library, FakeSmi(), VERSIONS)


def open() -> Sdk:
    """A factory as the engine's option `sdk` names one."""
    return FakeFuriosa().sdk()
