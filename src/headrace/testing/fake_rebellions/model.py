"""What `from_pretrained` gives, over a fake card: a prefill, decoders, and the runtime's calls.

The weights are the checkpoint's, and the arithmetic is that of the engine on a CPU. The past is
what lies in the card's memory, read anew for each call. Arguments are those of the vendor's calls
that are used, by their names, and of the vendor's errors those are raised that a caller can meet.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch

from headrace.engine.loading import LoadedModel, load_model
from headrace.testing.fake_rebellions.card import Card
from headrace.testing.fake_rebellions.compiled import read_compiled
from headrace.testing.fake_rebellions.graph import Graph, check

_Tables: TypeAlias = tuple[torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True)
class Output:
    """logits: [batch, 1, vocabulary]."""

    logits: torch.Tensor


class FakeModel:
    """A compiled decoder on a card: `decoders` by the batch size that they were compiled for.

    Raises:
        FileNotFoundError: the directory holds no compiled model.
        ValueError: what it holds is not the fake's.
    """

    def __init__(self, directory: Path, card: Card) -> None:
        self.rbln_config, checkpoint = read_compiled(directory)
        dtype = str(self.rbln_config.dtype).removeprefix("torch.")
        model = _weights(checkpoint, dtype, _written(checkpoint))
        self.config = model.module.config
        card.install(self.rbln_config.cache_metas)
        graph = Graph(model, self.rbln_config, card)
        self.prefill_decoder = Prefill(graph)
        sizes = self.rbln_config.decoder_batch_sizes
        self.decoders = {size: Decoder(graph, size) for size in sizes}


@lru_cache(maxsize=4)
def _weights(checkpoint: Path, dtype: str, written: tuple[int, ...]) -> LoadedModel:
    """Loaded once for all fakes of a process, until the files are `written` again."""
    return load_model(checkpoint, dtype=dtype, threads=torch.get_num_threads())


def _written(checkpoint: Path) -> tuple[int, ...]:
    return tuple(path.stat().st_mtime_ns for path in sorted(checkpoint.iterdir()))


def runtime_of(card: Card) -> Any:
    """An object with those private calls that the card's software has."""
    calls = {
        "_update_kv_cache": card.update,
        "_fetch_kv_cache": card.fetch,
        "_copy_kv_cache": card.copy,
        "_get_kv_cache_size": card.size,
    }
    return SimpleNamespace(**{name: calls[name] for name in card.knobs.calls})


class Prefill:
    """`model.prefill_decoder`."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.runtime = runtime_of(graph.card)

    def __call__(
        self,
        input_ids: torch.Tensor,
        cache_position: torch.Tensor | None = None,
        batch_idx: int | None = None,
        block_tables: torch.Tensor | None = None,
        local_block_tables: torch.Tensor | None = None,
    ) -> Output:
        """Compute a prompt, [1, n] ids, and keep its states on the card.

        Raises:
            ValueError: it is too long, or one of two tables is missing.
            NotImplementedError: it goes on from where no chunk begins, or attends both ways and is
                longer than a chunk.
            RuntimeError: an input is not as the graph takes it, or no block is free.
            Fault: the positions or the blocks cannot be.
        """
        graph, item = self._graph, batch_idx or 0
        with graph.card.call("prefill"):
            start, stop = self._positions(input_ids, cache_position)
            external = graph.is_external(block_tables, local_block_tables)
            if not external:
                block_tables, local_block_tables = self._own_tables(item, start, stop)
            (blocks,) = graph.read_tables(block_tables, local_block_tables)
            graph.places(blocks, start, stop, external=external)
            graph.card.begin_prefill(start, stop)
            position_ids = None
            if graph.config.use_position_ids:
                position_ids = torch.arange(start, stop)[None]
            both_ways = graph.card.knobs.bidirectional_prefill
            if both_ways and (start or stop > graph.config.prefill_chunk_size):
                raise NotImplementedError("a prefill that attends both ways beyond one chunk")
            logits = graph.run(
                input_ids, blocks, start, position_ids=position_ids, both_ways=both_ways
            )
            graph.pad(blocks, stop)
            if not external:
                graph.mask[item] = 0
                graph.mask[item, :stop] = 1
            return Output(logits[:, None])

    def _positions(
        self, input_ids: torch.Tensor, cache_position: torch.Tensor | None
    ) -> tuple[int, int]:
        config, count = self._graph.config, input_ids.shape[-1]
        check("input_ids", input_ids, (1, count), torch.int64)
        if count > config.max_seq_len:
            raise ValueError(f"{count} tokens, the model was compiled for {config.max_seq_len}")
        if cache_position is None:
            return 0, count
        check("cache_position", cache_position, (1, count), torch.int32)
        start = int(cache_position[0, 0])
        if start % config.prefill_chunk_size:
            raise NotImplementedError("a prefix that is no multiple of prefill_chunk_size")
        if cache_position[0].tolist() != list(range(start, start + count)):
            raise self._graph.card.fault("positions of a prefill that do not ascend by one")
        return start, start + count

    def _own_tables(self, item: int, start: int, stop: int) -> _Tables:
        config, full, local = self._graph.config, None, None
        if config.use_global_attention:
            full = self._graph.pages.for_prefill(item, start, stop)
        if config.use_local_attention:
            local = torch.tensor([item], dtype=torch.int16)
        return full, local


class Decoder:
    """`model.decoders[batch_size]`."""

    def __init__(self, graph: Graph, batch_size: int) -> None:
        self._graph = graph
        self._size = batch_size
        self.runtime = runtime_of(graph.card)

    def __call__(
        self,
        input_ids: torch.Tensor,
        cache_position: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        local_block_tables: torch.Tensor | None = None,
    ) -> Output:
        """Compute one token of each item, [batch, 1] ids, on top of what lies on the card.

        Raises:
            ValueError: one of two tables is missing, or a position is outside of the mask.
            RuntimeError: a wrong input, no free block, or a failure on command.
            Fault: the blocks cannot be, or the sequence was disturbed.
        """
        graph = self._graph
        with graph.card.call("decode"):
            started = time.monotonic()
            external = graph.is_external(block_tables, local_block_tables)
            if not external:
                block_tables, local_block_tables = self._own_tables(cache_position)
            position_ids = self._checked(input_ids, cache_position, position_ids)
            mask = self._mask(cache_position, attention_mask, external=external)
            tables = graph.read_tables(block_tables, local_block_tables, self._size)
            rows = []
            for item, blocks in enumerate(tables):
                own, position = slice(item, item + 1), int(cache_position[item])
                places = graph.places(blocks, position, position + 1, external=external)
                graph.card.begin_decode(item, position, places)
                logits = graph.run(
                    input_ids[own],
                    blocks,
                    position,
                    position_ids=None if position_ids is None else position_ids[own],
                    visible=None if mask is None else mask[item].nonzero()[:, 0].tolist(),
                    leaks=graph.card.knobs.leaks,
                )
                rows.append(logits)
            graph.card.end_decode(started)
            return Output(torch.stack(rows))

    def _checked(
        self,
        input_ids: torch.Tensor,
        cache_position: torch.Tensor,
        position_ids: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """The position ids, if the graph takes them; the vendor drops what it does not take."""
        for name, given in (("ids", input_ids), ("cache positions", cache_position)):
            if given.shape[0] != self._size:
                raise RuntimeError(f"{name} of {given.shape[0]} items, compiled for {self._size}")
        check("input_ids", input_ids, (self._size, 1), torch.int64)
        check("cache_position", cache_position, (self._size, 1), torch.int32)
        if not self._graph.config.use_position_ids:
            return None
        return check("position_ids", position_ids, (self._size, 1), torch.int32)

    def _mask(
        self, cache_position: torch.Tensor, given: torch.Tensor | None, *, external: bool
    ) -> torch.Tensor | None:
        """What is attended to: what was given; or all up to here, where tables came from outside
        and no position ids; or what the model's own prefill left and this.
        """
        graph, config = self._graph, self._graph.config
        if not config.use_attention_mask:
            return None
        if given is not None:
            shape = (self._size, config.max_seq_len)
            return check("attention_mask", given, shape, config.dtype)
        for item, position in enumerate(cache_position[:, 0].tolist()):
            if not 0 <= position < config.max_seq_len:
                raise ValueError(f"step {position} is outside of the attention mask")
            if external and not config.use_position_ids:
                graph.mask[item] = 0
                graph.mask[item, :position] = 1
            graph.mask[item, position] = 1
        return graph.mask[: self._size]

    def _own_tables(self, cache_position: torch.Tensor) -> _Tables:
        config, full, local = self._graph.config, None, None
        if config.use_global_attention:
            full = self._graph.pages.for_decode(cache_position[:, 0].tolist())
        if config.use_local_attention:
            local = torch.arange(self._size, dtype=torch.int16)[:, None]
        return full, local
