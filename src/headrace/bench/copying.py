"""A source whose KV lies in private memory and is copied into the slot: the second of two copies.

What a device without access to the slot does. Loaded as `headrace.bench.copying:open`.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.backends.base import Cells, PrefillSink
from headrace.backends.options import read_options
from headrace.backends.replay import ReplayEngine, ReplayOptions
from headrace.engine.host import HostMemory
from headrace.geometry import Manifest
from headrace.ids import Span


class CopyingOptions(ReplayOptions, frozen=True, forbid_unknown_fields=True):
    """Replay's geometry, and the prompt length that private memory is kept for."""

    num_tokens: int = 0


def open(options: Mapping[str, Any]) -> CopyingEngine:
    """The factory; options as in `CopyingOptions`."""
    return CopyingEngine(read_options(options, CopyingOptions, "copying"))


class CopyingEngine:
    """Copies its private KV into the slot, one layer group and transfer chunk after the other."""

    def __init__(self, options: CopyingOptions) -> None:
        self._manifest = ReplayEngine(options).manifest()
        nbytes = sum(layer.row_nbytes for layer in self._manifest.layers) * options.num_tokens
        self._private = HostMemory(nbytes)
        noise = random.Random(1).randbytes(1 << 20)
        for at in range(0, nbytes, len(noise)):
            part = noise[: nbytes - at]
            self._private.view[at : at + len(part)] = part

    def manifest(self) -> Manifest:
        return self._manifest

    def prefill_stream(self, tokens: Sequence[int], sink: PrefillSink, start: int = 0) -> None:
        options = sink.options
        at = 0
        step = options.chunk or len(tokens)
        for group in sink.plan.layer_groups(options.group_layers, options.emission):
            for begun in range(0, len(tokens), step):
                ended = min(begun + step, len(tokens))
                spans = [Span(run.start, run.stop, begun, ended) for run in group]
                with sink.write(*spans) as writer:
                    for layer in (layer for run in group for layer in run):
                        for cells in writer.cells(layer):
                            at = self._copy(cells, at)
        sink.final(bytes(sink.plan.slot.logits_nbytes))

    def close(self) -> None:
        """Nothing is held beyond memory."""

    def _copy(self, cells: Cells, at: int) -> int:
        for row in cells.rows():
            target = ctypes.addressof(ctypes.c_char.from_buffer(row))
            ctypes.memmove(target, self._private.address + at, len(row))
            at += len(row)
        return at
