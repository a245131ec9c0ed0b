"""The replay engine in a decoder's own geometry, so that it can feed any decoder.

Its bytes are no KV of any model, but each is a finite element of its part's dtype: what a decoder
computes from them is no text, and the same each time. Needs msgspec only.
"""

from __future__ import annotations

import random
import struct
from array import array
from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from headrace.backends.base import Cells
from headrace.backends.options import read_options
from headrace.backends.replay import ReplayEngine, ReplayOptions
from headrace.errors import Refused
from headrace.geometry import ITEMSIZE, Layout, Manifest

FACTORY: Final = "headrace.testing.pair.imitation:open"
_NUM_ELEMENTS = 262_139  # a prime, so that rows of any size fall on different places


class Options(Struct, frozen=True, forbid_unknown_fields=True):
    """decoder: the manifest to imitate. layer_ms: as in `ReplayOptions`. layout: how cells are
    written, by default the decoder's first.
    """

    decoder: Manifest
    layer_ms: float = 0.0
    layout: Layout | None = None


def open(options: Mapping[str, Any]) -> ImitatingEngine:
    """A replay engine of the geometry that a decoder's manifest has."""
    read = read_options(options, Options, "imitation")
    return ImitatingEngine(read.decoder, read.layer_ms, read.layout)


class ImitatingEngine(ReplayEngine):
    """Emits the same finite elements for the same prompt, on every route."""

    def __init__(self, decoder: Manifest, layer_ms: float, layout: Layout | None) -> None:
        vocab_size = decoder.vocab_size
        super().__init__(
            ReplayOptions(layers=len(decoder.layers), vocab_size=vocab_size, layer_ms=layer_ms)
        )
        layouts = decoder.layouts if layout is None else (layout,)
        self._manifest = replace(decoder, role="source", first="logits", layouts=layouts)
        if decoder.logits_dtype != "float32":
            raise Refused(f"replay has float32 logits, this decoder wants {decoder.logits_dtype}")
        self._parts = {layer.index: layer.parts for layer in decoder.layers}
        dtypes = {part.dtype for layer in decoder.layers for part in layer.parts}
        self._elements = {dtype: _noise(dtype) for dtype in dtypes}

    def manifest(self) -> Manifest:
        """The decoder's own, as a source."""
        return self._manifest

    def _fill(self, cells: Cells, seed: int) -> None:
        """Each row is a stretch of one long noise, begun at an element of this row and prompt."""
        dtype = self._parts[cells.layer][cells.part].dtype
        noise, itemsize = self._elements[dtype], ITEMSIZE[dtype]
        per_position = cells.region.row_nbytes // (cells.stop - cells.start)
        for number, row in enumerate(cells.rows()):
            key = seed + cells.layer * 7919 + cells.part * 104_729 + number * 1_299_709
            at = 0
            noise_at = (key * itemsize + cells.start * per_position) % len(noise)
            while at < len(row):
                take = min(len(row) - at, len(noise) - noise_at)
                row[at : at + take] = noise[noise_at : noise_at + take]
                at, noise_at = at + take, 0


def _noise(dtype: str) -> memoryview:
    """Elements between -1 and 1; small whole numbers where a dtype has fewer than 16 bits."""
    rng = random.Random(0)
    numbers = [rng.uniform(-1, 1) for _ in range(_NUM_ELEMENTS)]
    return memoryview(_ELEMENTS.get(dtype, _small_bytes)(numbers))


def _small_bytes(numbers: list[float]) -> bytes:
    return bytes(int(32 + 31 * number) for number in numbers)


def _bfloat16(numbers: list[float]) -> bytes:
    wide = array("f", numbers).tobytes()  # its upper half is a bfloat16
    halves = bytearray(2 * len(numbers))
    halves[0::2], halves[1::2] = wide[2::4], wide[3::4]
    return bytes(halves)


_ELEMENTS: Final[Mapping[str, Callable[[list[float]], bytes]]] = {
    "float64": lambda numbers: array("d", numbers).tobytes(),
    "float32": lambda numbers: array("f", numbers).tobytes(),
    "float16": lambda numbers: struct.pack(f"<{len(numbers)}e", *numbers),
    "bfloat16": _bfloat16,
}
