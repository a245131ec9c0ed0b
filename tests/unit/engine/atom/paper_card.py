"""A card on paper: its caches are tensors, and each transfer and each write is noted in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from headrace.engine.atom.blocks import lane_blocks, rows_of, window_start
from headrace.engine.atom.caches import Cache
from headrace.engine.atom.compiled import CompiledDecoder
from headrace.engine.atom.lane import AtomLane
from headrace.engine.atom.mirrors import Mirror
from headrace.engine.atom.record import Verified
from headrace.engine.tensors import DTYPES
from headrace.testing.fake_rebellions import FakeRebellions

HEADS, WIDTH = 2, 4
Cells = dict[tuple[int, int], torch.Tensor]


def caches_of(rows: int, blocks: int, window: int, declared: str = "float32") -> tuple[Cache, ...]:
    """A layer of full attention, one with a window, and one more that is full and wider."""

    def cache(layer: int, part: int, kind: Literal["full", "sliding"], width: int) -> Cache:
        cut = (blocks, HEADS, rows) if kind == "full" else (1, HEADS, window)
        return Cache(
            f"past_key_values_{2 * layer + part}", layer, part, kind, *cut, width, declared
        )

    kinds: list[tuple[Literal["full", "sliding"], int]] = [
        ("full", WIDTH),
        ("sliding", WIDTH),
        ("full", 2 * WIDTH),
    ]
    return tuple(
        cache(layer, part, kind, width)
        for layer, (kind, width) in enumerate(kinds)
        for part in (0, 1)
    )


@dataclass
class PaperCard(CompiledDecoder):
    """What a lane calls of a compiled decoder. updates: block by block as (name, block, rows)."""

    caches: tuple[Cache, ...]
    positions: int
    updates: list[tuple[str, int, int]] = field(default_factory=list)
    fetches: list[tuple[str, int, int]] = field(default_factory=list)
    prefills: list[Sequence[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory = {
            each.name: torch.full(each.shape, float("nan"), dtype=DTYPES[each.dtype])
            for each in self.caches
        }

    def update(self, cache: Cache, mirror: Mirror, block: int, rows: int) -> None:
        self.updates.append((cache.name, block, rows))
        self.memory[cache.name][block, :, :rows] = mirror.host[block, :, :rows]

    def fetch(self, cache: Cache, mirror: Mirror, block: int, rows: int) -> None:
        self.fetches.append((cache.name, block, rows))
        mirror.host[block, :, :rows] = self.memory[cache.name][block, :, :rows]

    def prefill(self, tokens: Sequence[int]) -> torch.Tensor:
        self.prefills.append(tokens)
        return torch.zeros(1)

    def holds(self, cells: Cells, num_tokens: int) -> bool:
        """Whether the cells of a prompt are all where they belong, as values."""
        for cache in self.caches:
            sent = cells[cache.layer, cache.part]
            first = window_start(cache, num_tokens)
            for rows in rows_of(cache, first, num_tokens, num_tokens):
                kept = self.memory[cache.name][rows.block, :, rows.first : rows.first + rows.num]
                at = rows.start - first
                if not torch.equal(kept, sent[:, at : at + rows.num].to(kept.dtype)):
                    return False
        return True

    def rest(self, num_tokens: int) -> torch.Tensor:
        """What the blocks of a prompt hold behind it."""
        found = []
        for cache in self.caches:
            stop = min(num_tokens, cache.rows) if cache.kind == "sliding" else num_tokens
            for block in lane_blocks(cache, num_tokens):
                behind = max(0, stop - block * cache.rows)
                found.append(self.memory[cache.name][block, :, behind:].flatten().float())
        return torch.cat(found)


def lane_on(
    card: PaperCard, sent: str = "float32", *, reads_back: bool = False, **found: Any
) -> AtomLane:
    """A new lane; what was transferred to make it is forgotten."""
    facts = {"sub_blocks": False, "clears": False, "warms_up": False, **found}
    verified = Verified("declared", **facts)
    lane = AtomLane(FakeRebellions().sdk(), card, verified, sent, reads_back=reads_back)
    card.updates.clear()
    card.fetches.clear()
    return lane


def cells_of(caches: Sequence[Cache], num_tokens: int, seed: int, sent: str = "float32") -> Cells:
    """Cells of a prompt, no two alike."""
    draw = torch.Generator().manual_seed(seed)
    return {
        (cache.layer, cache.part): torch.randn(
            *(cache.heads, num_tokens - window_start(cache, num_tokens), cache.head_dim),
            generator=draw,
        ).to(DTYPES[sent])
        for cache in caches
    }
