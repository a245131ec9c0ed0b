"""Which blocks a caller gets who brings no tables: they change with each prefill.

It does as the vendor's page table does, but for the order: its first blocks are not 0, 1, 2, ...,
so that a caller who imported into these and brings no tables decodes from others.
"""

from __future__ import annotations

from collections import deque

import torch

from headrace.testing.fake_rebellions.compiled import CompiledConfig

_EMPTY = -1


class Pages:
    """The blocks of each item of the batch, and those that are free."""

    def __init__(self, config: CompiledConfig) -> None:
        self._config = config
        self._tables = torch.full((config.batch_size, config.max_blocks), _EMPTY, dtype=torch.int16)
        self._free = deque(reversed(range(config.kvcache_num_blocks)))

    def for_prefill(self, item: int, start: int, stop: int) -> torch.Tensor:
        """A new table for positions [start, stop): what the item had is given back first.

        Raises:
            RuntimeError: no block is free.
        """
        table = self._tables[item]
        self._free.extend(int(block) for block in table if block != _EMPTY)
        table.fill_(_EMPTY)
        for position in range(start, stop, self._config.kvcache_block_size):
            self._allocate(item, position)
        return self._filled(table)

    def for_decode(self, positions: list[int]) -> torch.Tensor:
        """The tables of items 0, 1, ..., each with a block for its position.

        Raises:
            RuntimeError: no block is free.
        """
        for item, position in enumerate(positions):
            self._allocate(item, position)
        return self._filled(self._tables[: len(positions)])

    def _allocate(self, item: int, position: int) -> None:
        at = position // self._config.kvcache_block_size
        if self._tables[item, at] == _EMPTY:
            self._require_free()
            self._tables[item, at] = self._free.popleft()

    def _filled(self, tables: torch.Tensor) -> torch.Tensor:
        """With a free block, the same one, where a table has none."""
        if not bool((tables == _EMPTY).any()):
            return tables.clone()
        self._require_free()
        return tables.masked_fill(tables == _EMPTY, self._free[0])

    def _require_free(self) -> None:
        if not self._free:
            raise RuntimeError("fake: no memory blocks are available")
