"""The compiled graphs of a fake model: weights, a card, and one forward on top of what lies there.

Prefill and decoders share one. Inputs are checked as compiled graphs would check them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers.cache_utils import Cache

from headrace.engine.loading import LoadedModel
from headrace.testing.fake_rebellions.cache import FullRows, Names, SlidingRows
from headrace.testing.fake_rebellions.card import Card, Place
from headrace.testing.fake_rebellions.compiled import CompiledConfig
from headrace.testing.fake_rebellions.pages import Pages


class Blocks(NamedTuple):
    """Where a sequence is. full: its blocks of full attention. local: that of its windows."""

    full: list[int]
    local: int


class Graph:
    """One forward of a model whose past is in a card's memory.

    pages: tables for those who bring none. mask: [items, positions], what a decoder attends to who
    is given no mask.
    """

    def __init__(self, model: LoadedModel, config: CompiledConfig, card: Card) -> None:
        self.config = config
        self.card = card
        self.pages = Pages(config)
        self.mask = torch.zeros(config.batch_size, config.max_seq_len, dtype=config.dtype)
        self._model = model

    def is_external(self, full: torch.Tensor | None, local: torch.Tensor | None) -> bool:
        """Whether the caller brought the tables. Raises: ValueError if only one of two."""
        match self.config.cache_impl:
            case "static":
                return full is not None
            case "sliding_window":
                return local is not None
            case "hybrid":
                if (full is None) != (local is None):
                    raise ValueError("block_tables and local_block_tables: both, or neither")
                return full is not None

    def read_tables(
        self, full: torch.Tensor | None, local: torch.Tensor | None, *lead: int
    ) -> list[Blocks]:
        """What the tables say, item by item; `lead` is the batch size, nothing for a prefill.

        Raises:
            RuntimeError: a table is not as the graph takes it.
        """
        config = self.config
        full_ids: list[list[int]] = [[]] * (lead[0] if lead else 1)
        local_ids = [0] * len(full_ids)
        if config.use_global_attention:
            given = check("block_tables", full, (*lead, config.max_blocks), torch.int16)
            full_ids = given.reshape(-1, config.max_blocks).tolist()
        elif full is not None:
            raise RuntimeError("fake runtime: block_tables is no input of this graph")
        if config.use_local_attention:
            given = check("local_block_tables", local, (*lead, 1), torch.int16)
            local_ids = given.reshape(-1).tolist()
        elif local is not None:
            raise RuntimeError("fake runtime: local_block_tables is no input of this graph")
        return list(map(Blocks, full_ids, local_ids))

    def places(self, blocks: Blocks, past: int, stop: int, *, external: bool) -> frozenset[Place]:
        """What holds positions [0, past) of a sequence that is to have [0, stop).

        Raises:
            Fault: a block is none of the card's, or a caller names one twice. The page table does
                so by itself, where it is asked for a position whose past it does not have.
        """
        config, rows = self.config, self.config.kvcache_block_size
        if not 0 <= past < stop <= config.max_seq_len:
            raise self.card.fault(f"position {stop - 1}, compiled for {config.max_seq_len}")
        if any(not 0 <= block < config.kvcache_num_blocks for block in blocks.full):
            raise self.card.fault(f"blocks {blocks.full}, there are {config.kvcache_num_blocks}")
        if not 0 <= blocks.local < config.batch_size:
            raise self.card.fault(f"window {blocks.local}, there are {config.batch_size}")
        used = blocks.full[: up_to(stop, rows) // rows]
        if external and len(set(used)) < len(used):
            raise self.card.fault(f"a block is named twice in {used}")
        held = used[: up_to(past, rows) // rows]
        return frozenset(
            (meta.name, block)
            for meta in config.cache_metas
            for block in (held if meta.is_full else [blocks.local])
        )

    def run(
        self,
        ids: torch.Tensor,
        blocks: Blocks,
        start: int,
        *,
        position_ids: torch.Tensor | None = None,
        visible: Sequence[int] | None = None,
        leaks: bool = False,
        both_ways: bool = False,
    ) -> torch.Tensor:
        """Compute `ids` [1, t] as positions from `start` on; returns the last one's logits [1, V].

        position_ids: where a model that takes them believes to be, which also places its windows.
        visible: the positions that full attention sees; None for all. both_ways: each position sees
        all of `ids`.
        """
        local = start if position_ids is None else int(position_ids[0, 0])
        memory, metas = self.card.memory, self.config.cache_metas
        layers: list[FullRows | SlidingRows] = []
        for keys, values in zip(metas[::2], metas[1::2], strict=True):
            names = Names(keys.name, values.name)
            if keys.is_full:
                layers.append(FullRows(blocks.full, keys.shape[2], visible))
                layers[-1].open(memory, names, start, leaks=leaks)
            else:
                ring = self.card.knobs.sliding == "ring"
                layers.append(SlidingRows(blocks.local, keys.shape[2], ring=ring))
                layers[-1].open(memory, names, local, leaks=leaks)
        given = {} if position_ids is None else {"position_ids": position_ids.to(torch.int64)}
        if both_ways:
            count = ids.shape[1]
            given["attention_mask"] = torch.zeros(1, 1, count, count, dtype=self.config.dtype)
        with torch.inference_mode():
            output = self._model.module(
                input_ids=ids,
                use_cache=True,
                logits_to_keep=1,
                **{self._model.cache_argument: Cache(layers=layers)},
                **given,
            )
        logits: torch.Tensor = output.logits[:, -1]
        return logits.clone()

    def pad(self, blocks: Blocks, stop: int) -> None:
        """Write something to the rows after a prefill's last one: chunks are computed whole."""
        rows, last = self.config.kvcache_block_size, stop - 1
        end = min(up_to(stop, self.config.prefill_chunk_size), up_to(stop, rows))
        beyond = [position % rows for position in range(stop, end)]
        for meta in self.config.cache_metas:
            if meta.is_full and beyond:
                block = blocks.full[last // rows]
                states = self.card.memory.gather(meta.name, [block], [last % rows])
                states = states.expand(-1, len(beyond), -1)
                self.card.memory.scatter(meta.name, [block] * len(beyond), beyond, states)


def up_to(count: int, step: int) -> int:
    """The least multiple of `step` that is not below `count`."""
    return -(-count // step) * step


def check(
    name: str, given: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """An input, as a compiled graph takes it. Raises: RuntimeError."""
    if given is None:
        raise RuntimeError(f"fake runtime: {name} is an input of this graph and is missing")
    if tuple(given.shape) != shape or given.dtype != dtype:
        raise RuntimeError(
            f"fake runtime: {name} is {tuple(given.shape)} {given.dtype}, the graph takes {shape} "
            f"{dtype}"
        )
    return given
