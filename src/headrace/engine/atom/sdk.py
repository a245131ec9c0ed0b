"""The vendor's packages as the engine is handed them: the real ones, or a fake named as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

VENDOR: Final = "rebellions"
CARD_PREFIX: Final = "RBLN-CA"
"""What the names of ATOM cards begin with; others keep sliding windows otherwise."""


@dataclass(frozen=True)
class Sdk:
    """What is used of the packages, and nothing else is.

    name: "rebellions", or "fake rebellions". rebel: the module `rebel`, which lists cards. load:
    `load(directory, device)` makes the compiled decoder of optimum-rbln. aligned: `aligned(numel)`
    makes a flat float16 tensor in host memory that a card can copy from and to. versions: by
    package, of those that decide what is computed and how it is kept. driver: the kernel driver's
    version, empty where nothing tells it.
    """

    name: str
    rebel: Any
    load: Callable[[str, int], Any]
    aligned: Callable[[int], Any]
    versions: Mapping[str, str]
    driver: str
