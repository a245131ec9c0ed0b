"""A cache for transformers that is a fake card's memory: what it returns was read from there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from headrace.testing.fake_rebellions.memory import Memory

_NOTHING = torch.empty(0)


@dataclass(frozen=True)
class Names:
    """The two caches of a layer, by name."""

    keys: str
    values: str


class _OnCard:
    """What both kinds of layers do. length: positions before those that are computed now."""

    keys: torch.Tensor
    values: torch.Tensor
    length: int

    def open(self, memory: Memory, names: Names, length: int, *, leaks: bool) -> None:
        self._memory, self._names, self._leaks = memory, names, leaks
        self.device = torch.device("cpu")
        self.keys = self.values = _NOTHING
        self.is_initialized = True
        self.length = length

    def get_seq_length(self) -> int:
        return self.length

    def add_stale(self, values: torch.Tensor, block: int, row: int) -> None:
        """The leak: what lies in the next row comes on top of the last one's values."""
        values[:, -1:] += self._memory.gather(self._names.values, [block], [row])


class FullRows(_OnCard, DynamicLayer):  # type: ignore[misc]
    """A full-attention layer: position p is in row p % rows of block table[p // rows].

    visible: the positions that are attended to, of one step; None for all up to the last.
    """

    def __init__(self, table: Sequence[int], rows: int, visible: Sequence[int] | None) -> None:
        super().__init__()
        self._table = table
        self._rows = rows
        self._visible = visible

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start, self.length = self.length, self.length + key_states.shape[2]
        at = self._at(range(start, self.length))
        self._memory.scatter(self._names.keys, *at, key_states[0])
        self._memory.scatter(self._names.values, *at, value_states[0])
        seen = self._at(range(self.length) if self._visible is None else self._visible)
        keys = self._memory.gather(self._names.keys, *seen)
        values = self._memory.gather(self._names.values, *seen)
        if self._leaks and self.length < len(self._table) * self._rows:
            (block,), (row,) = self._at([self.length])
            self.add_stale(values, block, row)
        return keys[None], values[None]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As many as are returned, and none of them after the last position."""
        stop = self.length + query_length
        if self._visible is None:
            return stop, 0
        return len(self._visible), stop - len(self._visible)

    def _at(self, positions: Sequence[int]) -> tuple[list[int], list[int]]:
        blocks = [self._table[position // self._rows] for position in positions]
        return blocks, [position % self._rows for position in positions]


class SlidingRows(_OnCard, DynamicSlidingWindowLayer):  # type: ignore[misc]
    """A sliding layer: the last `window` positions are in one block.

    By position, row i holds position max(0, n - window) + i of n; in a ring, position p is in row
    p % window.
    """

    def __init__(self, block: int, window: int, *, ring: bool) -> None:
        super().__init__(sliding_window=window)
        self._window = window
        self._block = block
        self._ring = ring

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys = self._slide(self._names.keys, key_states[0])
        values = self._slide(self._names.values, value_states[0])
        self.length += key_states.shape[2]
        if self._leaks and self.length < self._window:
            self.add_stale(values, self._block, self.length)
        return keys[None], values[None]

    @property
    def cumulative_length(self) -> int:
        """What transformers' own sliding layer counts, read when masks are made."""
        return self.length

    @cumulative_length.setter
    def cumulative_length(self, value: int) -> None:
        self.length = value

    def _slide(self, name: str, states: torch.Tensor) -> torch.Tensor:
        """Write the states of positions from `length` on; returns them after what they see."""
        start, stop = self.length, self.length + states.shape[1]
        first = max(0, stop - self._window)
        past = self._read(name, max(0, start - self._window + 1), start)
        if not self._ring and first < start:
            self._write(name, stop, first, self._read(name, first, start))
        fresh = max(first, start)
        self._write(name, stop, fresh, states[:, fresh - start :])
        return torch.cat([past, self._memory.through(name, states)], dim=1)

    def _read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Positions [start, stop), of which the window ends with the last."""
        rows = [self._row(position, self.length) for position in range(start, stop)]
        return self._memory.gather(name, [self._block] * len(rows), rows)

    def _write(self, name: str, num_tokens: int, start: int, states: torch.Tensor) -> None:
        rows = [self._row(start + at, num_tokens) for at in range(states.shape[1])]
        self._memory.scatter(name, [self._block] * len(rows), rows, states)

    def _row(self, position: int, num_tokens: int) -> int:
        if self._ring:
            return position % self._window
        return position - max(0, num_tokens - self._window)
