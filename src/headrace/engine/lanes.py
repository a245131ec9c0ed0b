"""Lanes: reserved decoder storage in which a cache lands, and from which it is decoded in place.

A lane's storage is allocated and touched once. Per layer and part it is [heads, rows, head_dim];
a position's row is the position minus the layer's `origin`, and rows always ascend with positions,
since attention over rows in another order rounds differently. Publishing therefore moves no byte,
and a decode step writes one row and reads a view.

A full layer has a row for every position of the context. A sliding layer needs window - 1 rows of
the past: its buffer has twice as many, and when its end is reached the live rows are moved back to
the front, which costs one row's copy per step on average and keeps the view in one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from transformers.cache_utils import Cache, DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

from headrace.engine.host import HostMemory
from headrace.engine.tensors import dtype_of
from headrace.errors import LocalProtocolError
from headrace.geometry import Layer, Part, Sliding
from headrace.plan import live_window

_ALIGNMENT: Final = 4096
_NOTHING: Final = torch.empty((0, 0, 0))


def lane_nbytes(layers: Sequence[Layer], context: int) -> int:
    """Bytes of the memory of one lane."""
    return max(_ALIGNMENT, sum(map(sum, _sizes(layers, context))))


def _sizes(layers: Sequence[Layer], context: int) -> list[list[int]]:
    return [
        [align(part.row_nbytes * capacity(layer, context)) for part in layer.parts]
        for layer in layers
    ]


def host_bytes(nbytes: int) -> torch.Tensor:
    """Host memory of a lane, touched: a flat uint8 tensor. Raises: Refused, DeviceError."""
    memory = HostMemory(nbytes, "a lane")
    return torch.from_numpy(np.frombuffer(memory.view, dtype=np.uint8))


class LaneStorage:
    """The memory of one lane: private, touched, and never moved.

    Raises:
        Refused: there is no memory for it, or torch has no cache of a part's dtype.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        context: int,
        allocate: Callable[[int], torch.Tensor] = host_bytes,
    ) -> None:
        sizes = _sizes(layers, context)
        self.nbytes = lane_nbytes(layers, context)
        flat = allocate(self.nbytes)
        self.address = flat.data_ptr()
        self.parts: list[tuple[torch.Tensor, ...]] = []
        offset = 0
        for layer, nbytes in zip(layers, sizes, strict=True):
            rows = capacity(layer, context)
            tensors = []
            for part, size in zip(layer.parts, nbytes, strict=True):
                tensors.append(
                    part_rows(flat[offset : offset + part.row_nbytes * rows], part, rows)
                )
                offset += size
            self.parts.append(tuple(tensors))


class _Rows:
    """What both kinds of our cache layers do: one new row in place, a view of the live ones."""

    is_sliding: bool
    device: torch.device
    keys: torch.Tensor
    values: torch.Tensor

    def hold(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Use [heads, rows, head_dim] tensors as this layer's storage."""
        self.device = keys.device
        self.keys, self.values = keys[None], values[None]
        self.is_initialized = True
        self.length = 0
        self.origin = 0

    def begin(self, origin: int) -> None:
        """Start over with row 0 standing for position `origin`."""
        self.origin, self.length = origin, 0

    def view(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The last `count` rows."""
        stop = self.length - self.origin
        return self.keys[:, :, stop - count : stop], self.values[:, :, stop - count : stop]

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the next position's row, states [1, heads, 1, head_dim]."""
        if keys.shape[2] != 1:
            raise LocalProtocolError(f"a decode step of {keys.shape[2]} positions, expected 1")
        row = self.length - self.origin
        self.keys[:, :, row : row + 1].copy_(keys)
        self.values[:, :, row : row + 1].copy_(values)
        self.length += 1

    def get_seq_length(self) -> int:
        return self.length


class FullRows(_Rows, DynamicLayer):  # type: ignore[misc]
    """A full-attention layer over reserved rows; returns what transformers' dynamic layer would."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.append(key_states, value_states)
        return self.view(self.length)


class SlidingRows(_Rows, DynamicSlidingWindowLayer):  # type: ignore[misc]
    """A sliding layer over reserved rows; returns the last `window` rows, the new one included."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.length - self.origin == self.keys.shape[2]:
            self._move_back()
        self.append(key_states, value_states)
        return self.view(min(self.length, self.sliding_window))

    @property
    def cumulative_length(self) -> int:
        """What transformers' own sliding layer counts, read when masks are made."""
        return self.length

    @cumulative_length.setter
    def cumulative_length(self, value: int) -> None:
        self.length = value

    def _move_back(self) -> None:
        """Move the last window - 1 rows to the front; the two places never overlap."""
        keep = self.sliding_window - 1
        rows = self.keys.shape[2]
        for held in (self.keys, self.values):
            held[:, :, :keep].copy_(held[:, :, rows - keep :])
        self.origin = self.length - keep


class Lane:
    """One lane: storage for one sequence, and the cache through which a model decodes it.

    allocate: makes the lane's own storage; None for a lane that is given one with `use`.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        context: int,
        allocate: Callable[[int], torch.Tensor] | None = host_bytes,
    ) -> None:
        self._layers = layers
        self._storage: LaneStorage | None = None
        self._rows = [_rows_of(layer) for layer in layers]
        self.cache = Cache(layers=[rows or DummyLayer() for rows in self._rows])
        self.num_tokens = 0
        if allocate is not None:
            self.use(LaneStorage(layers, context, allocate))

    @property
    def storage(self) -> LaneStorage:
        """What it uses. Raises: LocalProtocolError if that is none."""
        if self._storage is None:
            raise LocalProtocolError("a lane without storage")
        return self._storage

    def use(self, storage: LaneStorage) -> None:
        """Have its rows in `storage` from now on, whatever lies there."""
        self._storage = storage
        for rows, parts in zip(self._rows, storage.parts, strict=True):
            if rows is not None:
                rows.hold(*parts)

    def leave(self) -> None:
        """Let go of its storage; nothing of it can be reached through this lane any more."""
        self._storage = None
        self.num_tokens = 0
        for rows in self._rows:
            if rows is not None:
                rows.hold(_NOTHING, _NOTHING)

    @property
    def length(self) -> int:
        """Positions in the cache: the prompt's, and one for each token fed since."""
        return next((rows.length for rows in self._rows if rows is not None), 0)

    def begin(self, num_tokens: int) -> None:
        """Make room for a prompt; nothing of it is visible to `cache` yet."""
        self.num_tokens = num_tokens
        for layer, rows in zip(self._layers, self._rows, strict=True):
            if rows is not None:
                rows.begin(live_window(layer, num_tokens)[0])

    def publish(self) -> None:
        """The prompt's cells have landed: let `cache` see them."""
        self.rewind(self.num_tokens)

    def rewind(self, length: int) -> None:
        """Set how many positions `cache` sees; undoes steps that a failure cut short."""
        for rows in self._rows:
            if rows is not None:
                rows.length = length

    def cells(self, layer: int, part: int, start: int, stop: int) -> torch.Tensor:
        """Positions [start, stop) of a part, a view [heads, stop - start, head_dim].

        Raises:
            LocalProtocolError: the lane holds no such prompt positions.
        """
        lo, hi = live_window(self._layers[layer], self.num_tokens)
        rows = self._rows[layer]
        if rows is None or not max(lo, rows.origin) <= start < stop <= hi:
            raise LocalProtocolError(
                f"{self._layers[layer].name} positions [{start}, {stop}), the lane's prompt has "
                f"[{lo}, {hi}) there"
            )
        held = (rows.keys, rows.values)[part]
        return held[0, :, start - rows.origin : stop - rows.origin]


def capacity(layer: Layer, context: int) -> int:
    """Rows of a layer's buffers in a lane made for `context` positions."""
    if isinstance(layer.kind, Sliding):
        return min(context, 2 * (layer.kind.window - 1) + 1)
    return context


def _rows_of(layer: Layer) -> FullRows | SlidingRows | None:
    if not layer.parts:
        return None
    window = layer.kind.window if isinstance(layer.kind, Sliding) else 0
    rows = SlidingRows(sliding_window=window) if window else FullRows()
    rows.hold(_NOTHING, _NOTHING)
    return rows


def part_rows(flat: torch.Tensor, part: Part, rows: int) -> torch.Tensor:
    """A part's rows [heads, rows, head_dim] over as many bytes."""
    return flat.view(dtype_of(part)).view(part.heads, rows, part.head_dim)


def align(nbytes: int) -> int:
    """Bytes up to where the next part may begin."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
