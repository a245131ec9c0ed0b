"""What a chunk of a prompt is to the kernels: ids, positions, slots and masks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from headrace.engine.rngd.buckets import Chunk
from headrace.engine.rngd.executor import Executor
from headrace.engine.rngd.signature import Tensor


class ChunkInputs:
    """Host tensors of one chunk by argument name, each placed when a kernel first takes it."""

    def __init__(self, executor: Executor, hosts: Mapping[str, torch.Tensor]) -> None:
        self._executor = executor
        self._hosts = hosts
        self._placed: dict[tuple[str, tuple[int, ...]], Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._hosts

    def place(self, tensor: Tensor) -> Any:
        """The tensor of this name as a kernel takes it."""
        key = tensor.name, tensor.stored
        if key not in self._placed:
            self._placed[key] = self._executor.place(tensor, self._hosts[tensor.name])
        return self._placed[key]


def token_inputs(tokens: torch.Tensor, chunk: Chunk) -> dict[str, torch.Tensor]:
    """What the token-wise kernels take, int32; tokens: all ids of the prompt.

    Rows past the chunk's end are padding: token 0 at position 0, scattered to slot 0.
    """
    ids = torch.zeros(chunk.tokens, dtype=torch.int32)
    positions, slots = ids.clone(), ids.clone()
    ids[: chunk.length] = tokens[chunk.start : chunk.stop]
    positions[: chunk.length] = torch.arange(chunk.start, chunk.stop, dtype=torch.int32)
    slots[: chunk.length] = positions[: chunk.length] + 1
    return {"input_ids": ids, "position_ids": positions, "kv_scatter_index": slots[None]}


def attention_inputs(chunk: Chunk, size: int, window: int | None) -> dict[str, torch.Tensor]:
    """Which slots attention gathers (int32 [1, size]) and who sees whom (bool [1, tokens, size]).

    Position j is seen from position i if j <= i and, with a window, j > i - window. Every row sees
    something, padding too: a row of nothing would be no number.

    Positions past the prompt gather the first row again, which nobody sees there. The vendor's mark
    for padding, slot 0, would have the kernel gather rows of other prompts in its place, with a
    weight of zero: and that makes no zero of what is not finite.
    """
    first = 0 if window is None else max(0, chunk.stop - size)
    places = torch.arange(first, first + size)
    real = places < chunk.stop
    slots = torch.where(real, places, first).to(torch.int32) + 1
    seers = torch.arange(chunk.start, chunk.start + chunk.tokens)[:, None]
    mask = (places[None] <= seers) & real[None]
    if window is not None:
        mask &= places[None] > seers - window
    return {"kv_gather_index": slots[None], "attention_mask": mask[None]}
