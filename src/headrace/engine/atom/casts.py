"""From the dtype that a source sends to what a cache keeps: declared exact, or declared lossy.

A cast is exact if it keeps every finite value of the dtype that is sent. Any other is lossy, also
where the values of a given prompt would survive it: what it changes is counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import torch

from headrace.engine.atom import number_format
from headrace.engine.tensors import DTYPES
from headrace.errors import Refused

NumberFormat: TypeAlias = Literal["declared", "custom_float16", "converted"]
"""What a mirror's elements are: of the dtype that the cache's metadata declares; patterns of the
runtime's own 16-bit float; or of the declared dtype, which the runtime converts to its own by
itself, so that only values of both are kept."""

_PIECE: Final = 1 << 16  # elements that are cast at once, so that a CPU keeps them near
_WIDENING: Final = {("bfloat16", "float32"), ("float16", "float32")}


@dataclass(frozen=True)
class Cast:
    """sent: dtype of the source. declared: dtype of the cache. number_format: of the mirror."""

    sent: str
    declared: str
    number_format: NumberFormat

    def __post_init__(self) -> None:
        for name, dtype in (("the source sends", self.sent), ("the cache is", self.declared)):
            if dtype not in DTYPES or dtype == "float64":
                raise Refused(
                    f"{name} {dtype}, which is not supported here yet; use float32, float16 or "
                    "bfloat16",
                    field="dtype",
                )

    @property
    def exact(self) -> bool:
        """Whether every finite value is kept."""
        if self.number_format != "declared":
            return False
        return self.sent == self.declared or (self.sent, self.declared) in _WIDENING

    @property
    def stored(self) -> str:
        """What a mirror's elements are, in words."""
        match self.number_format:
            case "declared":
                return self.declared
            case "custom_float16":
                return "custom_float16"
            case "converted":
                return f"{self.declared}, kept as custom_float16"

    @property
    def name(self) -> str:
        """The cast in words, as facts tell it."""
        kept = "exact" if self.exact else "lossy"
        return f"{self.sent} to {self.stored}: {kept}"

    @property
    def stored_dtype(self) -> torch.dtype:
        """The torch dtype of a mirror's elements; patterns are int16."""
        return torch.int16 if self.number_format == "custom_float16" else DTYPES[self.declared]

    @property
    def sent_dtype(self) -> torch.dtype:
        """The torch dtype of what is sent."""
        return DTYPES[self.sent]

    def store(self, target: torch.Tensor, cells: torch.Tensor) -> int:
        """Write `cells` (of the sent dtype) to `target`, a mirror's rows of one shape with them,
        [heads, positions, head_dim].

        Returns how many values were changed by the cast; 0 if it is exact.
        """
        if self.exact:
            target.copy_(cells)
            return 0
        heads, positions, head_dim = cells.shape
        num = max(1, _PIECE // (heads * head_dim))
        return sum(
            self._store_lossy(target[:, at : at + num], cells[:, at : at + num])
            for at in range(0, positions, num)
        )

    def _store_lossy(self, target: torch.Tensor, cells: torch.Tensor) -> int:
        """By way of float32, which holds every value of either dtype."""
        if self.number_format == "custom_float16":
            target.copy_(number_format.encode(cells))
            return number_format.count_changed(cells)
        wanted = kept = cells.to(torch.float32)
        if self.number_format == "converted":  # the card's own values, or it would round them
            kept = number_format.decode(number_format.encode(cells), torch.float32)
        target.copy_(kept)
        back = target.to(torch.float32)
        if torch.equal(back, wanted):
            return 0
        return int(torch.count_nonzero((back != wanted) & ~wanted.isnan()))

    def load(self, stored: torch.Tensor) -> torch.Tensor:
        """What `stored` (a mirror's rows) says, in the sent dtype."""
        if self.number_format == "custom_float16":
            return number_format.decode(stored, self.sent_dtype)
        found = stored.to(self.sent_dtype)
        if (self.sent, self.declared) != ("bfloat16", "float32"):
            return found
        # Which NaN it is would be lost, and poison is one: a bfloat16 is half of its float32.
        halves = (stored.contiguous().view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
        return torch.where(stored.isnan(), halves, found)
