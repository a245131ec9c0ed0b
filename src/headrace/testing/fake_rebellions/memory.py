"""The memory of a fake card: the caches of one compiled model, in the card's number format.

The 16-bit float is worked out here once more, from what a pattern stands for, and not by the
engine's codec: all patterns are listed with their values, and a value goes to the nearest of them.
Memory that nobody wrote is full of NaNs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Final, Literal, TypeAlias

import numpy as np
import torch

from headrace.engine.tensors import DTYPES
from headrace.testing.fake_rebellions.compiled import CacheMeta

NumberFormat: TypeAlias = Literal["declared", "custom_float16", "converted"]
"""declared: mirror and card have the dtype that is declared. custom_float16: both have patterns of
the private float. converted: mirrors have the declared dtype, the card has the private float.
"""

_PATTERNS: Final[dict[int, torch.dtype]] = {2: torch.int16, 4: torch.int32}
_UNWRITTEN: Final = -1


@cache
def _values() -> np.ndarray:
    """By pattern, what it stands for: sign, 6 bits of exponent with bias 31, 9 of mantissa."""
    values = np.empty(1 << 16)
    for pattern in range(1 << 15):
        exponent, mantissa = pattern >> 9, pattern & 0x1FF
        if exponent == 63:
            value = float("nan") if mantissa else float("inf")
        elif exponent:
            value = (1 + mantissa / 512) * 2.0 ** (exponent - 31)
        else:
            value = mantissa / 512 * 2.0**-30
        values[pattern], values[pattern | 1 << 15] = value, -value
    return values


def from_patterns(patterns: torch.Tensor) -> torch.Tensor:
    """The float32 values of int16 patterns."""
    index = patterns.numpy().view(np.uint16)
    return torch.from_numpy(_values()[index].astype(np.float32))


def to_patterns(values: torch.Tensor) -> torch.Tensor:
    """The int16 patterns that are nearest to `values`; of two that are as near, the even one."""
    given = values.to(torch.float64).numpy()
    ascending = _values()[: 63 << 9]
    ascending = np.append(ascending, 2.0**32)  # what infinity would be, were it a number
    size = np.minimum(np.abs(given), 2.0**32)
    above = np.clip(np.searchsorted(ascending, size), 1, len(ascending) - 1)
    below = above - 1
    to_below, to_above = size - ascending[below], ascending[above] - size
    nearer_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    found = np.where(nearer_above, above, below)
    found = np.where(np.isnan(given), 63 << 9 | 1 << 8, found)
    found = np.where(np.signbit(given), found | 1 << 15, found)
    return torch.from_numpy(found.astype(np.uint16).view(np.int16))


class Memory:
    """The caches by name, [blocks, heads, rows, head_dim]. A row is one position of a block."""

    def __init__(self, metas: Sequence[CacheMeta], number_format: NumberFormat) -> None:
        self._metas = {meta.name: meta for meta in metas}
        self._format = number_format
        private = number_format != "declared"
        self._kept: dict[str, torch.Tensor] = {}
        for name, meta in self._metas.items():
            width = 2 if private else DTYPES[meta.dtype].itemsize
            self._kept[name] = torch.full(tuple(meta.shape), _UNWRITTEN, dtype=_PATTERNS[width])

    def __contains__(self, name: str) -> bool:
        return name in self._metas

    @property
    def names(self) -> Sequence[str]:
        return list(self._metas)

    def meta(self, name: str) -> CacheMeta:
        return self._metas[name]

    def host_itemsize(self, name: str) -> int:
        """Bytes of one element of a mirror."""
        if self._format == "custom_float16":
            return 2
        return DTYPES[self._metas[name].dtype].itemsize

    def host_nbytes(self, name: str) -> int:
        """Bytes of a whole mirror."""
        return self._kept[name].numel() * self.host_itemsize(name)

    def update(self, name: str, mirror: torch.Tensor, block: int, rows: slice) -> int:
        """Rows of a block of a mirror to the card; returns how many bytes these are."""
        cells = self._as_host(name, mirror)[block, :, rows]
        kept = to_patterns(cells) if self._format == "converted" else cells
        self._kept[name][block, :, rows] = kept
        return cells.numel() * cells.element_size()

    def fetch(self, name: str, mirror: torch.Tensor, block: int, rows: slice) -> int:
        """Rows of a block from the card to a mirror; returns how many bytes these are."""
        cells = self._as_host(name, mirror)[block, :, rows]
        kept = self._kept[name][block, :, rows]
        cells.copy_(from_patterns(kept) if self._format == "converted" else kept)
        return cells.numel() * cells.element_size()

    def lose(self, name: str, block: int) -> None:
        """Have a block be as if nobody had written it."""
        self._kept[name][block] = _UNWRITTEN

    def copy_block(self, name: str, source: int, target: int, count: int) -> None:
        """The first `count` rows of a block to another one."""
        kept = self._kept[name]
        kept[target, :, :count] = kept[source, :, :count].clone()

    def gather(self, name: str, blocks: Sequence[int], rows: Sequence[int]) -> torch.Tensor:
        """What is at these rows of these blocks, [heads, rows, head_dim] in the declared dtype."""
        found = self._kept[name][list(blocks), :, list(rows)]  # [rows, heads, head_dim]
        return self._decoded(name, found.permute(1, 0, 2).contiguous())

    def scatter(
        self, name: str, blocks: Sequence[int], rows: Sequence[int], states: torch.Tensor
    ) -> None:
        """Write states [heads, rows, head_dim] to these rows of these blocks."""
        kept = self._encoded(name, states)
        self._kept[name][list(blocks), :, list(rows)] = kept.permute(1, 0, 2)

    def through(self, name: str, states: torch.Tensor) -> torch.Tensor:
        """What is left of states that are written and read back."""
        return self._decoded(name, self._encoded(name, states))

    def _encoded(self, name: str, states: torch.Tensor) -> torch.Tensor:
        if self._format == "declared":
            return states.contiguous().view(self._kept[name].dtype)
        return to_patterns(states.contiguous())

    def _decoded(self, name: str, kept: torch.Tensor) -> torch.Tensor:
        dtype = DTYPES[self._metas[name].dtype]
        if self._format == "declared":
            return kept.view(dtype)
        return from_patterns(kept).to(dtype)

    def _as_host(self, name: str, mirror: torch.Tensor) -> torch.Tensor:
        if self._format == "converted":
            return mirror.view(DTYPES[self._metas[name].dtype])
        return mirror.view(self._kept[name].dtype)
