"""A prefill that vLLM computes in this process, taken layer by layer by a taker.

vLLM makes its connector by itself, so that the engine and the connector meet here: the engine
begins a prefill at the one `Producing` of this process, and the connector's worker half tells it
what is scheduled and what is written. Both run in one thread.

What the taker raises, such as a cancel, must not come out of vLLM's forward, which would end its
engine. It is kept, nothing more is taken, and the engine of the source raises it after the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from headrace.errors import LocalProtocolError
from headrace.geometry import Manifest


class Cache(Protocol):
    """What of `VllmCache` is needed here."""

    def manifest(self) -> Manifest: ...
    def layer_of(self, name: str) -> int | None: ...
    def kernel_block_size(self, layer: int) -> int: ...
    def read(self, layer: int, part: int, cells: torch.Tensor) -> torch.Tensor: ...


class Taker(Protocol):
    """What of `engine.prefill.Taker` is called here."""

    def begin(self, start: int, stop: int) -> None: ...
    def take(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None: ...
    def end(self, start: int, stop: int, cache: Any) -> None: ...


class Producing:
    """The prefill of one prompt by the vLLM engine in this process."""

    def __init__(self) -> None:
        self.cache: Cache | None = None
        self.failure: BaseException | None = None
        self._taker: Taker | None = None
        self._piece: tuple[int, int] | None = None  # the positions being computed
        self._taken = 0  # positions that were computed in all layers
        self._blocks: dict[int, torch.Tensor] = {}  # by layer, of the piece

    def begin(self, taker: Taker) -> None:
        """A prefill is about to run; all that is computed from here on is the taker's."""
        self._taker, self.failure = taker, None
        self._piece, self._taken = None, 0

    def end(self) -> int:
        """The prefill is over: how many positions were taken in all layers."""
        self._taker, self._piece = None, None
        self._blocks.clear()
        return self._taken

    @property
    def at_work(self) -> bool:
        """Whether anything is to be taken."""
        return self._taker is not None and self.failure is None

    # What the connector tells.

    def scheduled(self, start: int, stop: int) -> None:
        """Positions [start, stop) are computed in this step."""
        if self._piece is None:
            self._piece = start, stop
            if start != self._taken:
                why = f"vLLM computes from position {start}, and [0, {self._taken}) was taken"
                self.failure = LocalProtocolError(why)
            self._attempt(lambda taker: taker.begin(start, stop))

    def saved(self, name: str, block_table: torch.Tensor) -> None:
        """A layer's keys and values of this step are written to the blocks of the one request."""
        if self._piece is None or self.cache is None or not self.at_work:
            return
        layer = self.cache.layer_of(name)
        if layer is None:
            return
        self._blocks[layer] = block_table
        start, stop = self._piece
        keys, values = self._rows(layer, start, stop)
        self._attempt(lambda taker: taker.take(layer, keys, values))

    def stepped(self) -> None:
        """The step is over."""
        if self._piece is None:
            return
        start, stop = self._piece
        self._attempt(lambda taker: taker.end(start, stop, self))
        self._piece, self._taken = None, stop
        self._blocks.clear()

    # What a taker asks for.

    def states(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A full-attention layer's keys and values so far, [heads, positions, head_dim]."""
        if self._piece is None:
            raise LocalProtocolError("states asked for between two steps")
        return self._rows(layer, 0, self._piece[1])

    def _rows(self, layer: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.cache is None:
            raise LocalProtocolError("vLLM has not registered its cache")
        size = self.cache.kernel_block_size(layer)  # of what the kernel's block table counts
        positions = torch.arange(start, stop)
        blocks = self._blocks[layer].to(torch.int64)
        cells = blocks[positions // size] * size + positions % size
        keys, values = (
            self.cache.read(layer, part, cells).permute(1, 0, 2).contiguous() for part in (0, 1)
        )
        return keys, values

    def _attempt(self, call: Callable[[Taker], None]) -> None:
        if self._taker is None or self.failure is not None:
            return
        try:
            call(self._taker)
        except BaseException as exc:
            self.failure = exc


HERE = Producing()
"""Of this process, which runs one vLLM engine at most."""
