"""What the connectors of this process saw, and how rows are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from headrace.backends.paged import PagedCache
from headrace.plan import live_window
from headrace.vllm.scheduling import Load

Rows: TypeAlias = Mapping[tuple[int, int], torch.Tensor]
"""By layer and part, [positions, heads, head_dim]."""


class Seen:
    """What the connectors of this process saw; `clear` between two of them.

    loads: in the order in which they were told to the worker. published: the rows of each load that
    was published, by request id. blocks: of every request, by id and cache group, as they were when
    vLLM allocated them.
    """

    def __init__(self) -> None:
        self.cache: PagedCache | None = None
        self.loads: list[Load] = []
        self.published: dict[str, Rows] = {}
        self.blocks: dict[str, Sequence[Sequence[int]]] = {}
        self.keep_rows = True

    def clear(self) -> None:
        """Forget all of it."""
        self.__init__()  # type: ignore[misc]

    def rows(self, block_ids: Sequence[Sequence[int]], stop: int) -> Rows:
        """What lies in these blocks for positions before `stop`, of each layer's live window."""
        cache = self.cache
        assert cache is not None
        rows = {}
        for layer in cache.manifest().layers:
            start, end = live_window(layer, stop)
            if start >= end:
                continue
            group = cache.cache_group(layer.index)
            size = cache.block_size(group)
            positions = torch.arange(start, end)
            ids = torch.tensor(list(block_ids[group]), dtype=torch.int64)
            cells = ids[positions // size] * size + positions % size
            for part in range(len(layer.parts)):
                rows[layer.index, part] = cache.read(layer.index, part, cells)
        return rows

    def loaded_rows(self, load: Load) -> Rows:
        """What lies in a load's blocks now."""
        return self.rows(load.block_ids, len(load.tokens))


SEEN = Seen()


def same(left: Rows, right: Rows) -> bool:
    """Whether these are the same to the last bit, NaN included."""
    return left.keys() == right.keys() and all(
        torch.equal(left[key].view(torch.uint8), right[key].view(torch.uint8)) for key in left
    )


def distance(left: Rows, right: Rows) -> float:
    """The largest difference of two cells, as a share of the largest cell of its layer and part."""
    assert left.keys() == right.keys()
    return max(float((left[key] - right[key]).abs().max() / right[key].abs().max()) for key in left)
