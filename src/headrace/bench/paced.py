"""A replay source that feeds a decoder with a model: the decoder's geometry, and finite numbers.

It computes nothing. Its rows are a ramp between -1 and 1, so that a decoder computes with them as
with any others; what comes out is no text. Loaded as `headrace.bench.paced:open`.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct, to_builtins
from msgspec.structs import replace

from headrace.backends.base import Cells
from headrace.backends.options import read_options
from headrace.backends.replay import ReplayEngine, ReplayOptions
from headrace.errors import Refused
from headrace.geometry import Manifest, Sliding

FACTORY: Final = "headrace.bench.paced:open"
_DTYPES: Final = ("float32", "float16", "bfloat16")


class Options(Struct, frozen=True, forbid_unknown_fields=True):
    """decoder: the manifest to feed. layer_ms: as in `ReplayOptions`."""

    decoder: Manifest
    layer_ms: float = 0.0


def options_for(decoder: Manifest, num_tokens: int, nbytes_per_s: float) -> dict[str, Any]:
    """The source's options, so that a prompt of `num_tokens` has KV at this rate."""
    nbytes = kv_nbytes(decoder, num_tokens)
    layer_ms = 1e3 * nbytes / nbytes_per_s / len(decoder.layers)
    return {"decoder": to_builtins(decoder), "layer_ms": layer_ms}


def kv_nbytes(decoder: Manifest, num_tokens: int) -> int:
    """Bytes of a prompt's transfer set."""
    total = 0
    for layer in decoder.layers:
        rows = min(num_tokens, layer.kind.tail) if isinstance(layer.kind, Sliding) else num_tokens
        total += rows * layer.row_nbytes
    return total


def open(options: Mapping[str, Any]) -> PacedEngine:
    """The factory; options as in `Options`."""
    read = read_options(options, Options, "paced")
    return PacedEngine(read.decoder, read.layer_ms)


class PacedEngine(ReplayEngine):
    """Emits the same numbers for every prompt, at its pace."""

    def __init__(self, decoder: Manifest, layer_ms: float) -> None:
        num_layers, vocab_size = len(decoder.layers), decoder.vocab_size
        super().__init__(ReplayOptions(layers=num_layers, vocab_size=vocab_size, layer_ms=layer_ms))
        self._manifest = replace(decoder, role="source", first="logits")
        dtypes = {part.dtype for layer in decoder.layers for part in layer.parts}
        if len(dtypes) != 1 or not dtypes <= set(_DTYPES):
            raise Refused(f"a paced source of {', '.join(sorted(dtypes))}: use {list(_DTYPES)}")
        self._numbers = memoryview(ramp(dtypes.pop()))

    def manifest(self) -> Manifest:
        """The decoder's own, as a source."""
        return self._manifest

    def _fill(self, cells: Cells, seed: int) -> None:
        for row in cells.rows():
            for at in range(0, len(row), len(self._numbers)):
                taken = min(len(row) - at, len(self._numbers))
                row[at : at + taken] = self._numbers[:taken]


def ramp_values() -> list[float]:
    """Of the ramp."""
    return [(index % 1021) / 510 - 1 for index in range(1021 * 64)]


def ramp(dtype: str) -> bytes:
    """The ramp's elements; made only where a source is, since every command imports this."""
    values = ramp_values()
    match dtype:
        case "float32":
            return array("f", values).tobytes()
        case "float16":
            return struct.pack(f"<{len(values)}e", *values)
    return b"".join(struct.pack("<f", each)[2:] for each in values)
