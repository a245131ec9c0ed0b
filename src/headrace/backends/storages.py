"""The memories of lanes, the lane that uses each, and the prompts that are kept in them.

There are more memories than lanes where entries are kept. A memory is free, or used by one lane, or
kept for the prompts in it, or both of the last. What is kept never changes:

- Its full-attention rows stay where they were decoded from, since decode only appends. Prompts that
  continue one another share them: a lane may take a memory over and go on after its rows, if no
  lane uses it and nothing that is kept there has rows beyond them. Else they are copied.
- Its sliding layers' live rows are copied out when it is kept, since decode overwrites them, and
  copied back when a lane goes on from it.

A memory that no lane uses and nothing is kept in is free again. A lane that is never given back
keeps its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from headrace.backends.base import Kept
from headrace.engine.lanes import LaneStorage, align, part_rows
from headrace.errors import LocalProtocolError
from headrace.geometry import Layer, Sliding
from headrace.plan import live_window

Rows: TypeAlias = tuple[torch.Tensor, ...]  # by part, [heads, positions, head_dim]


@dataclass
class _Memory:
    """One memory: its number, the lane that uses it, and what is kept in it by serial."""

    number: int
    storage: LaneStorage
    lane: int | None = None
    kept: dict[int, _Tails] = field(default_factory=dict)

    @property
    def is_free(self) -> bool:
        return self.lane is None and not self.kept


@dataclass(frozen=True)
class _Tails:
    """A kept prompt, and by sliding layer its live rows, the last of the prompt's last position."""

    kept: Kept
    rows: dict[int, Rows]


class Storages:
    """`count` memories for lanes of up to `context` positions.

    allocate: makes a flat uint8 tensor of that many bytes, of a lane or of a prompt's tails.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        context: int,
        count: int,
        allocate: Callable[[int], torch.Tensor],
    ) -> None:
        self._layers = layers
        self._allocate = allocate
        self._memories = [
            _Memory(number, LaneStorage(layers, context, allocate)) for number in range(count)
        ]
        self._last_serial = 0

    def take(self, lane: int) -> LaneStorage:
        """Have a lane use a free memory.

        Raises:
            LocalProtocolError: none is free, because what is kept was not evicted in time.
        """
        for memory in self._memories:
            if memory.is_free:
                memory.lane = lane
                return memory.storage
        raise LocalProtocolError(
            f"lane {lane} is free and no memory is: {self.statistics()['storages_kept']} of "
            f"{len(self._memories)} are kept for entries; evict some before reserving"
        )

    def take_over(self, kept: Kept, positions: int, lane: int) -> LaneStorage | None:
        """Have a lane use the memory of `kept` and go on after `positions`; None if it must not."""
        memory = self._memory(kept)
        others = (tails.kept.num_tokens for tails in memory.kept.values())
        if memory.lane is not None or any(num_tokens > positions for num_tokens in others):
            return None
        memory.lane = lane
        return memory.storage

    def number_of(self, lane: int) -> int:
        """The number of the memory that a lane uses. Raises: LocalProtocolError: it uses none."""
        return self._used_by(lane).number

    def leave(self, lane: int) -> None:
        """The lane uses its memory no longer."""
        self._used_by(lane).lane = None

    def new_tails(self, num_tokens: int) -> dict[int, Rows]:
        """Room for the live rows of a prompt, by sliding layer.

        Raises:
            Refused: there is no memory for them.
        """
        counts = {layer: _tail_rows(layer, num_tokens) for layer in self._layers}
        if not any(counts.values()):
            return {}
        flat, at = self._allocate(tails_nbytes(self._layers, num_tokens)), 0
        tails: dict[int, Rows] = {}
        for layer in filter(counts.get, counts):
            parts = []
            for part in layer.parts:
                nbytes = part.row_nbytes * counts[layer]
                parts.append(part_rows(flat[at : at + nbytes], part, counts[layer]))
                at += align(nbytes)
            tails[layer.index] = tuple(parts)
        return tails

    def keep(self, lane: int, num_tokens: int, tails: dict[int, Rows]) -> Kept:
        """Keep the prompt that a lane holds; `tails` were filled, or are about to be."""
        memory = self._used_by(lane)
        nbytes = sum(
            tensor.numel() * tensor.element_size() for rows in tails.values() for tensor in rows
        )
        self._last_serial += 1
        kept = Kept(self._last_serial, num_tokens, memory.number, memory.storage.nbytes, nbytes)
        memory.kept[kept.serial] = _Tails(kept, tails)
        return kept

    def evict(self, kept: Kept) -> None:
        """Keep it no longer. Raises: LocalProtocolError if it is not kept."""
        self._tails(kept)
        del self._memory(kept).kept[kept.serial]

    def can_reuse(self, kept: Kept, positions: int) -> bool:
        """Whether each layer has its live rows of [0, `positions`). Raises: LocalProtocolError."""
        self._tails(kept)
        if not 1 <= positions <= kept.num_tokens:
            return False
        return all(
            live_window(layer, kept.num_tokens)[0] <= live_window(layer, positions)[0]
            for layer in self._layers
            if isinstance(layer.kind, Sliding)
        )

    def rows(self, kept: Kept, layer: Layer, start: int, stop: int) -> Rows:
        """What is kept of positions [start, stop) of a layer, views that are not to be written."""
        tails = self._tails(kept)
        if layer.index in tails.rows:
            first = live_window(layer, kept.num_tokens)[0]
            return tuple(rows[:, start - first : stop - first] for rows in tails.rows[layer.index])
        parts = self._memory(kept).storage.parts[layer.index]
        return tuple(rows[:, start:stop] for rows in parts)

    @property
    def kept_nbytes(self) -> int:
        """Bytes of memories that no lane uses and something is kept in, and of all tails."""
        idle = sum(m.storage.nbytes for m in self._memories if m.lane is None and m.kept)
        return idle + sum(tails.kept.nbytes for tails in self._all_kept())

    @property
    def nbytes(self) -> int:
        """Bytes of all memories."""
        return sum(memory.storage.nbytes for memory in self._memories)

    def statistics(self) -> dict[str, int]:
        """Memories by use, and what is kept."""
        idle = [memory for memory in self._memories if memory.lane is None]
        return {
            "storages": len(self._memories),
            "storages_free": sum(memory.is_free for memory in idle),
            "storages_kept": sum(bool(memory.kept) for memory in idle),
            "kept": sum(1 for _ in self._all_kept()),
            "kept_nbytes": self.kept_nbytes,
        }

    def check_integrity(self, lanes: Sequence[int]) -> None:
        """Raise LocalProtocolError unless these lanes, each once, use memories and all adds up."""
        used = sorted(memory.lane for memory in self._memories if memory.lane is not None)
        counts = self.statistics()
        idle = counts["storages_free"] + counts["storages_kept"]
        if used != sorted(lanes) or len(used) + idle != len(self._memories):
            raise LocalProtocolError(
                f"lanes {list(lanes)} are in use, memories by {used}, {counts}"
            )

    def close(self) -> None:
        """Let go of all memories. Idempotent."""
        self._memories = []

    def _all_kept(self) -> Iterator[_Tails]:
        return (tails for memory in self._memories for tails in memory.kept.values())

    def _used_by(self, lane: int) -> _Memory:
        for memory in self._memories:
            if memory.lane == lane:
                return memory
        raise LocalProtocolError(f"lane {lane} uses no memory")

    def _memory(self, kept: Kept) -> _Memory:
        if not 0 <= kept.storage < len(self._memories):
            raise LocalProtocolError(f"{kept}: there are {len(self._memories)} memories")
        return self._memories[kept.storage]

    def _tails(self, kept: Kept) -> _Tails:
        tails = self._memory(kept).kept.get(kept.serial)
        if tails is None or tails.kept != kept:
            raise LocalProtocolError(f"{kept} is not kept, or no longer")
        return tails


def tails_nbytes(layers: Sequence[Layer], num_tokens: int) -> int:
    """Bytes of the sliding layers' live rows of a prompt, each part aligned."""
    return sum(
        align(part.row_nbytes * _tail_rows(layer, num_tokens))
        for layer in layers
        for part in layer.parts
    )


def _tail_rows(layer: Layer, num_tokens: int) -> int:
    if not isinstance(layer.kind, Sliding):
        return 0
    start, stop = live_window(layer, num_tokens)
    return stop - start
