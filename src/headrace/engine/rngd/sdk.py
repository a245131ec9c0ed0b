"""The vendor's modules as the engine is handed them: the installed ones, or a fake by that name.

Nothing here imports them; `furiosa.py` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

VENDOR: Final = "furiosa"

TORCH_VERSION: Final = "2.10.0"
SDK_VERSION: Final = "2026.4.0"
"""What the engine was written for and emulated with; others are refused by preflight."""


@dataclass(frozen=True)
class Sdk:
    """What one process uses of the vendor.

    name: "furiosa" for the installed packages, "fake furiosa" for a fake. torch: the module
    `furiosa.torch`. kernels: from a family's name, the module `furiosa.kernels.<family>`. smi: the
    module `furiosa_smi`. versions: by package.
    """

    name: str
    torch: Any
    kernels: Callable[[str], Any]
    smi: Any
    versions: Mapping[str, str]

    def device(self, index: int) -> str:
        """A device as the vendor's calls take it."""
        return f"furiosa:{index}"
