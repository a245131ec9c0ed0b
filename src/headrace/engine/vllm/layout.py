"""Where a paged cache keeps a cell inside its block, learned from the backend's own writes.

Writing goes through the backend's own cache-write op always. Reading needs to know where the op put
what, and that is learned: numbered cells are written into a cache of two blocks, and looked for. A
cache that is anything but a fixed order of the same elements in each block and head is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from headrace.errors import Refused

Write: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(keys, values [tokens, heads, head_dim], cache, cells int64): the backend's op."""

_BASE = 128  # digits of the numbering: such integers are exact in every dtype of a cache


class BlockOrder:
    """Where the elements of a block's positions lie, of each part.

    places: by part, int64 [block_size, head_dim], counted within one block and head.
    """

    def __init__(self, places: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._places = places

    def read(self, cache: torch.Tensor, part: int, cells: torch.Tensor) -> torch.Tensor:
        """The rows of `cells` (block x block size + place), a copy [tokens, heads, head_dim].

        cache: [blocks, heads, block_size, 2 * head_dim].
        """
        size, head_dim = self._places[part].shape
        flat = cache.view(cache.shape[0], cache.shape[1], -1)
        blocks, inverse = torch.unique(cells // size, return_inverse=True)
        taken = flat[blocks][:, :, self._places[part].reshape(-1)]
        rows = taken.view(len(blocks), cache.shape[1], size, head_dim).permute(0, 2, 1, 3)
        return rows[inverse, cells % size]


def learn(
    write: Write, heads: int, block_size: int, head_dim: int, dtype: torch.dtype
) -> BlockOrder:
    """Learn where `write` puts what.

    Raises:
        Refused: it is no fixed order of the same elements.
    """
    shape = (3, heads, block_size, 2 * head_dim)
    tokens = torch.arange(block_size, 2 * block_size)  # all of block 1
    count = 2 * block_size * head_dim
    numbers = torch.arange(1, count + 1).view(2, block_size, 1, head_dim)
    found = torch.zeros(count, dtype=torch.int64)
    scale = 1
    while scale <= count:
        cache = torch.zeros(shape, dtype=dtype)
        digits = (numbers // scale % _BASE).to(dtype).expand(2, block_size, heads, head_dim)
        write(digits[0].contiguous(), digits[1].contiguous(), cache, tokens)
        found += cache[1, 0].reshape(-1).to(torch.int64) * scale
        scale *= _BASE
    order = torch.argsort(found)
    if not torch.equal(found[order], torch.arange(1, count + 1)):
        raise Refused(
            "this attention backend's cache keeps no plain order of its keys and values, so "
            "headrace cannot tell what lies where; use another backend",
            field="attention backend",
        )
    half = count // 2
    shape_of_part = block_size, head_dim
    learned = BlockOrder((order[:half].view(shape_of_part), order[half:].view(shape_of_part)))
    _check(learned, write, shape, dtype)
    return learned


def _check(
    order: BlockOrder, write: Write, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    """What is read is what was written, in any block, any place, any head, and nothing else is."""
    blocks, heads, size, width = shape
    generator = torch.Generator().manual_seed(7)
    cells = torch.randperm(blocks * size, generator=generator)[: size + 3]
    states = [
        torch.randn(len(cells), heads, width // 2, generator=generator).to(dtype) for _ in "kv"
    ]
    cache = torch.zeros(shape, dtype=dtype)
    write(states[0], states[1], cache, cells)
    right = all(torch.equal(order.read(cache, part, cells), states[part]) for part in (0, 1))
    if not right or torch.count_nonzero(cache) != sum(map(torch.count_nonzero, states)):
        raise Refused(
            "this attention backend's cache changes what is written to it, or orders blocks "
            "differently, so headrace cannot tell what lies where; use another backend",
            field="attention backend",
        )
