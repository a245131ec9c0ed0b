"""A paged cache of plain tensors, [blocks, block_size, heads, head_dim] for each layer and part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from headrace.engine.tensors import dtype_of
from headrace.geometry import Manifest

CANARY = 77.0


class PlainCache:
    """Implements `PagedCache`.

    groups: by cache group, its block size; group_of: by layer, its cache group. fails: what the
    next write raises, by layer.
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        num_blocks: int = 16,
        groups: Sequence[int] = (4,),
        group_of: Mapping[int, int] | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self._manifest = manifest
        self._groups = groups
        self._group_of = dict(group_of or {})
        self.fails: dict[int, Exception] = {}
        self.cells: dict[tuple[int, int], torch.Tensor] = {}
        for layer in manifest.layers:
            size = groups[self.cache_group(layer.index)]
            for number, part in enumerate(layer.parts):
                shape = num_blocks, size, part.heads, part.head_dim
                cells = torch.full(shape, CANARY, dtype=dtype_of(part))
                self.cells[layer.index, number] = cells

    def manifest(self) -> Manifest:
        return self._manifest

    def cache_group(self, layer: int) -> int:
        return self._group_of.get(layer, 0)

    def block_size(self, cache_group: int) -> int:
        return self._groups[cache_group]

    def write(self, layer: int, states: Sequence[torch.Tensor], cells: torch.Tensor) -> None:
        if layer in self.fails:
            raise self.fails.pop(layer)
        for part, rows in enumerate(states):
            self._flat(layer, part)[cells] = rows

    def read(self, layer: int, part: int, cells: torch.Tensor) -> torch.Tensor:
        return self._flat(layer, part)[cells]

    def written(self, layer: int, part: int) -> set[tuple[int, int]]:
        """The (block, place) of all cells that are no canary."""
        changed = (self.cells[layer, part] != CANARY).flatten(2).any(2)
        return {(int(block), int(place)) for block, place in changed.nonzero()}

    def _flat(self, layer: int, part: int) -> torch.Tensor:
        return self.cells[layer, part].flatten(0, 1)
