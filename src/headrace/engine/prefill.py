"""A prefill whose keys and values can be taken layer by layer, while it runs.

A layer's states are final when its cache is updated, before the layer's own attention runs, so that
is where they are taken: one layer's compute earlier than a hook at the layer's end. The forward
calls are the same whatever is done with the states, which is why the route changes no bit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from transformers import DynamicCache

from headrace.engine.layers import check_states
from headrace.engine.loading import LoadedModel
from headrace.geometry import Layer, Sliding


class Taker(Protocol):
    """What becomes of a prefill's states, positions [start, stop) being computed at once.

    States are [heads, positions, head_dim] tensors that the cache may own: copy, do not keep.
    """

    keep_full: bool
    """Whether `end` needs the full-attention layers' states; else they are dropped when taken."""

    def begin(self, start: int, stop: int) -> None:
        """Positions [start, stop) are about to be computed."""

    def take(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """The states of the positions being computed are final in this layer."""

    def end(self, start: int, stop: int, cache: TakenCache) -> None:
        """Positions [start, stop) are computed in all layers."""


class TakenCache(DynamicCache):  # type: ignore[misc]
    """transformers' own cache, which shows each layer's new states to a taker."""

    def __init__(self, model: LoadedModel, layers: Sequence[Layer], taker: Taker) -> None:
        super().__init__(config=model.module.config)
        self._geometry = layers
        self._taker = taker
        self.last = False

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer, count = self._geometry[layer_idx], key_states.shape[2]
        check_states(layer, key_states, value_states, count)
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        # The cache has just laid the rows out head by head; the raw states often lie token by
        # token, and copying those costs a transposition more.
        first = keys.shape[2] - count
        self._taker.take(layer_idx, keys[0, :, first:], values[0, :, first:])
        self._drop(layer_idx)
        return keys, values

    def states(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A kept full-attention layer's keys and values, [heads, positions so far, head_dim]."""
        kept = self.layers[layer]
        return kept.keys[0], kept.values[0]

    def _drop(self, layer_idx: int) -> None:
        """Let go of what no later forward and no taker reads."""
        kept = self.layers[layer_idx]
        sliding = isinstance(self._geometry[layer_idx].kind, Sliding)
        if self.last and (sliding or not self._taker.keep_full):
            kept.keys = kept.values = None
        elif sliding:
            # The cache keeps a view of the last rows that pins the storage of all of them.
            kept.keys, kept.values = kept.keys.clone(), kept.values.clone()


def run_prefill(
    model: LoadedModel,
    layers: Sequence[Layer],
    tokens: Sequence[int],
    prefill_chunk: int,
    taker: Taker,
) -> tuple[torch.Tensor, int]:
    """Compute `tokens`, `prefill_chunk` positions at once (0 = all).

    Returns the last position's float32 logits, and when they were there (host CLOCK_MONOTONIC, ns),
    which is before the last chunk's states are taken away.

    Raises:
        LocalProtocolError: a token is unknown, or a layer's states differ from its geometry.
    """
    model.check_tokens(tokens)
    ids = torch.tensor([list(tokens)], dtype=torch.long, device=model.device)
    cache = TakenCache(model, layers, taker)
    num_tokens = ids.shape[1]
    step = prefill_chunk or num_tokens
    for start in range(0, num_tokens, step):
        stop = min(start + step, num_tokens)
        cache.last = stop == num_tokens
        taker.begin(start, stop)
        logits = model.forward(ids[:, start:stop], cache)
        ready_ns = time.monotonic_ns()
        taker.end(start, stop, cache)
    return logits, ready_ns
