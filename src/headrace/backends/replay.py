"""A source without a model: deterministic bytes of any geometry, at a set pace.

Tests and benchmarks use it to drive the real hand-off. The bytes of a cell depend on the prompt,
the layer, the part, the head and the position, however they are cut, so that a cell in the wrong
place or of another prompt is seen. Needs the standard library and msgspec only.

The pace is a compute time per layer, spent before the layer's cells are written: figures made with
it are called "paced", never "measured on" a device. A device with a copy engine of its own computes
on while the cells of earlier layers are written; `writes_beside` imitates it.
"""

from __future__ import annotations

import random
import time
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from headrace.backends.base import Cells, PrefillSink
from headrace.backends.options import read_options
from headrace.errors import LocalProtocolError, Refused
from headrace.geometry import (
    ITEMSIZE,
    MAX_EXTENT,
    MAX_LAYERS,
    Full,
    Kind,
    Layer,
    Layout,
    Manifest,
    Part,
    PrefixUse,
    Sliding,
)
from headrace.ids import Span

_NOISE_NBYTES = 1_048_573  # a prime, so that rows of any size fall on different places


class ReplayOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """The geometry to imitate, and how fast.

    window: 0 for full attention in every layer, else sliding layers of this window except every
    `full_every`-th. layer_ms: host time spent per layer, shared out over the prefill chunks.
    writes_beside: the time of a layer runs while earlier ones are written, instead of after that.
    prefix: what it does for a prompt whose first positions the decoder has: spends the time of all
    (`recompute`) or of the others only (`own_cache`), or is not to be asked (`none`).
    fail_at_layer: raise before this layer, for tests of failing engines; -1 never.
    """

    layers: int = 8
    heads: int = 8
    head_dim: int = 128
    dtype: str = "float16"
    window: int = 0
    full_every: int = 6
    layout: Layout = "head_major"
    vocab_size: int = 32
    max_positions: int = 1 << 20
    layer_ms: float = 0.0
    writes_beside: bool = False
    fail_at_layer: int = -1
    model: str = "replay"
    prefix: PrefixUse = "recompute"


def open(options: Mapping[str, Any]) -> ReplayEngine:
    """The factory that `--source replay` names; options as in `ReplayOptions`."""
    return ReplayEngine(read_options(options, ReplayOptions, "replay"))


class ReplayEngine:
    """Emits the same bytes for the same prompt and geometry, on every route."""

    def __init__(self, options: ReplayOptions) -> None:
        if options.dtype not in ITEMSIZE:
            raise Refused(f"replay: unknown dtype {options.dtype!r}", field="dtype")
        if options.full_every < 1 or options.layer_ms < 0:
            raise Refused("replay: full_every must be at least 1 and layer_ms not negative")
        if options.writes_beside and not options.layer_ms:
            raise Refused("replay: writes_beside needs a layer_ms, or nothing is computed beside")
        if not (1 <= options.layers <= MAX_LAYERS and 1 <= options.vocab_size <= MAX_EXTENT):
            raise Refused(f"replay: layers go from 1 to {MAX_LAYERS}, vocab_size to {MAX_EXTENT}")
        self._options = options
        self._noise = memoryview(random.Random(0).randbytes(_NOISE_NBYTES))

    def manifest(self) -> Manifest:
        """The geometry that the options describe; it can emit every position of every layer."""
        options = self._options
        parts = tuple(Part(n, options.heads, options.head_dim, options.dtype) for n in ("k", "v"))
        return Manifest(
            role="source",
            model=options.model,
            layers=tuple(
                Layer(index, f"layers.{index}", self._kind(index), parts)
                for index in range(options.layers)
            ),
            layouts=(options.layout,),
            vocab_size=options.vocab_size,
            logits_dtype="float32",
            max_positions=options.max_positions,
            prefix=options.prefix,
        )

    def prefill_stream(self, tokens: Sequence[int], sink: PrefillSink, start: int = 0) -> None:
        """Spend the time of each layer, then write and announce, as the route asks.

        Raises:
            Cancelled: the attempt was withdrawn.
            LocalProtocolError: the plan does not begin at `start`.
        """
        if sink.plan.start != start:
            raise LocalProtocolError(f"from position {start}, the plan begins at {sink.plan.start}")
        seed = zlib.crc32(array("I", tokens).tobytes())
        options, stop, pace = sink.options, len(tokens), _Pace(self._options)
        everything = [range(len(sink.plan.layers))]
        for begun, ended in self._pieces(start, stop, options.prefill_chunk or stop):
            share = (ended - begun) / stop
            if begun < start:
                self._compute(sink, everything, share, pace)
            elif options.route == "streamed":
                for group in sink.plan.layer_groups(options.group_layers, options.emission):
                    self._compute(sink, group, share, pace)
                    self._emit(sink, group, begun, ended, options.chunk, seed)
            else:
                self._compute(sink, everything, share, pace)
            ready_ns = pace.reached_ns()
            if options.route == "chunked" and begun >= start:
                self._emit(sink, everything, begun, ended, options.chunk, seed)
        if options.route == "whole":
            self._emit(sink, everything, start, stop, 0, seed)
        sink.final(self._logits(seed), ready_ns=ready_ns)

    def close(self) -> None:
        """Nothing is held beyond memory."""

    def _kind(self, index: int) -> Kind:
        options = self._options
        if not options.window or (index + 1) % options.full_every == 0:
            return Full()
        return Sliding(options.window, options.max_positions)

    def _pieces(self, start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
        """What is computed at once, cut at `start`; only what comes after it is emitted."""
        first = start if self._options.prefix == "own_cache" else 0
        for lo, hi in ((first, start), (start, stop)):
            for at in range(lo, hi, step):
                yield at, min(at + step, hi)

    def _compute(
        self, sink: PrefillSink, group: Sequence[range], share: float, pace: _Pace
    ) -> None:
        for layer in (layer for run in group for layer in run):
            if layer == self._options.fail_at_layer:
                raise RuntimeError(f"replay was told to fail at layer {layer}")
            pace.spend(share)
            sink.check()

    def _emit(
        self,
        sink: PrefillSink,
        group: Sequence[range],
        start: int,
        stop: int,
        chunk: int,
        seed: int,
    ) -> None:
        step = chunk or stop - start
        for at in range(start, stop, step):
            spans = [Span(run.start, run.stop, at, min(at + step, stop)) for run in group]
            with sink.write(*spans) as writer:
                for layer in (layer for run in group for layer in run):
                    for cells in writer.cells(layer):
                        self._fill(cells, seed)

    def _fill(self, cells: Cells, seed: int) -> None:
        """Each row is a stretch of one long noise, begun where only this row and prompt begin."""
        rows = cells.rows()
        nbytes_per_position = cells.region.row_nbytes // (cells.stop - cells.start)
        for number, row in enumerate(rows):
            key = seed + cells.layer * 7919 + cells.part * 104_729 + number * 1_299_709
            at, noise_at = 0, (key + cells.start * nbytes_per_position) % _NOISE_NBYTES
            while at < len(row):
                take = min(len(row) - at, _NOISE_NBYTES - noise_at)
                row[at : at + take] = self._noise[noise_at : noise_at + take]
                at, noise_at = at + take, 0

    def _logits(self, seed: int) -> bytes:
        rng = random.Random(seed)
        return array("f", [rng.random() for _ in range(self._options.vocab_size)]).tobytes()


class _Pace:
    """The time that layers take. It begins when it is made.

    With `writes_beside` each layer ends a set time after the one before it ended, whatever was
    written meanwhile: a wait that comes late is the shorter for it.
    """

    def __init__(self, options: ReplayOptions) -> None:
        self._layer_ns = options.layer_ms * 1e6
        self._beside = options.writes_beside
        self._ended_ns = float(time.monotonic_ns())

    def spend(self, share: float) -> None:
        """Wait until a layer of this share of the prompt is computed."""
        self._ended_ns += self._layer_ns * share
        wait_ns = self._layer_ns * share
        if self._beside:
            wait_ns = self._ended_ns - time.monotonic_ns()
        if wait_ns > 0:
            time.sleep(wait_ns / 1e9)

    def reached_ns(self) -> int:
        """When the last layer was computed; without `writes_beside` that is now."""
        return round(self._ended_ns) if self._beside else time.monotonic_ns()
