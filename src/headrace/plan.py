"""The plan of one hand-off: its transfer set, and where the cells lie in a slot.

A plan is compiled from an agreed pair of manifests, the prompt length n and the context, and is the
only thing that yields byte ranges. Offsets never travel: both sides compile the same plan.

A slot holds, in this order and each area aligned: the prompt (u32 ids), one row of logits, and the
KV area, in which layer by layer and part by part the live window of positions lies in the source's
layout:

    head_major    [heads, positions, head_dim]   one row of bytes per head
    token_major   [positions, heads, head_dim]   one row of bytes in all
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from headrace.errors import Refused
from headrace.geometry import (
    ITEMSIZE,
    Emission,
    Full,
    Kind,
    Layer,
    Layout,
    Manifest,
    Part,
    Shared,
    Sliding,
    kind_name,
)
from headrace.ids import Span

PART_ALIGNMENT: Final = 64
AREA_ALIGNMENT: Final = 4096
TOKEN_NBYTES: Final = 4


class Region(NamedTuple):
    """A strided range of a slot: `rows` rows of `row_nbytes` bytes, `stride` bytes from one to the
    next.
    """

    offset: int
    rows: int
    row_nbytes: int
    stride: int


class Copy(NamedTuple):
    """What an import moves: positions [start, stop) of one part of one layer, from `source` in the
    slot.
    """

    layer: int
    part: int
    start: int
    stop: int
    source: Region

    @property
    def nbytes(self) -> int:
        return self.source.rows * self.source.row_nbytes


class SlotLayout(NamedTuple):
    """Where a slot keeps what, in bytes from its start, and its whole size."""

    prompt_offset: int
    logits_offset: int
    logits_nbytes: int
    kv_offset: int
    nbytes: int


def compile_plan(
    decoder: Manifest, layout: Layout, num_tokens: int, context: int, start: int = 0
) -> Plan:
    """The plan for a prompt of `num_tokens` in slots and lanes made for `context` positions.

    `layout` is what `agree` returned for the pair. `start`: the first position to carry, since the
    decoder has those before it; there is at least one to carry.

    Raises:
        Refused: the prompt is empty, or longer than the context, or `start` lies outside it.
    """
    if num_tokens < 1:
        raise Refused("the prompt is empty; give at least one token", field="prompt")
    if num_tokens > context:
        raise Refused(
            f"the prompt has {num_tokens} tokens and the context holds {context}; "
            "raise --context or shorten it",
            field="prompt",
        )
    if not 0 <= start < num_tokens:
        raise Refused(f"start {start} of a prompt of {num_tokens} tokens", field="start")
    return Plan(decoder, layout, num_tokens, context, start)


def slot_layout(decoder: Manifest, context: int) -> SlotLayout:
    """The layout of a slot that can hold any prompt of up to `context` tokens for this decoder."""
    logits_offset = _align(TOKEN_NBYTES * context, AREA_ALIGNMENT)
    logits_nbytes = decoder.vocab_size * ITEMSIZE[decoder.logits_dtype]
    kv_offset = _align(logits_offset + logits_nbytes, AREA_ALIGNMENT)
    nbytes = kv_offset
    for layer in decoder.layers:
        lo, hi = live_window(layer, context)
        for part in layer.parts:
            nbytes += _align((hi - lo) * part.row_nbytes, PART_ALIGNMENT)
    return SlotLayout(0, logits_offset, logits_nbytes, kv_offset, _align(nbytes, AREA_ALIGNMENT))


def live_window(layer: Layer, num_tokens: int) -> tuple[int, int]:
    """Positions [lo, hi) of `layer` that a hand-off of `num_tokens` must carry; the one place that
    anchors a window.

    Raises:
        Refused: the layer's kind is declared but not supported.
    """
    match layer.kind:
        case Full():
            return 0, num_tokens
        case Sliding(tail=tail):
            return max(0, num_tokens - tail), num_tokens
        case Shared():
            return num_tokens, num_tokens
        case _:
            raise Refused(
                f"layer {layer.name}: {kind_name(layer.kind)} layers are not supported",
                field="kind",
            )


class Plan:
    """The transfer set of one hand-off, and where its cells lie in a slot.

    Both ends compile it from the decoder's manifest, the agreed layout, n and the context, so that
    a span's byte ranges need not travel.
    """

    def __init__(
        self, decoder: Manifest, layout: Layout, num_tokens: int, context: int, start: int = 0
    ) -> None:
        self.num_tokens = num_tokens
        self.start = start
        self.layout = layout
        self.slot = slot_layout(decoder, context)
        self.layers = tuple(sorted(decoder.layers, key=lambda layer: layer.index))
        self.windows = tuple(
            (max(lo, start), hi)
            for lo, hi in (live_window(layer, num_tokens) for layer in self.layers)
        )
        self._row_nbytes = tuple(layer.row_nbytes for layer in self.layers)
        self._bases: list[tuple[int, ...]] = []
        offset = self.slot.kv_offset
        for layer, (lo, hi) in zip(self.layers, self.windows, strict=True):
            bases = []
            for part in layer.parts:
                bases.append(offset)
                offset += _align((hi - lo) * part.row_nbytes, PART_ALIGNMENT)
            self._bases.append(tuple(bases))
        self.nbytes = sum(
            (hi - lo) * row for (lo, hi), row in zip(self.windows, self._row_nbytes, strict=True)
        )

    def by_layer(self, span: Span) -> list[Span]:
        """The parts of a span that have cells, one layer each."""
        layers = range(span.layer_start, span.layer_stop)
        parts = (Span(layer, layer + 1, span.start, span.stop) for layer in layers)
        return [part for part in parts if self.span_nbytes(part)]

    def whole(self) -> Span:
        """The span of all layers and all positions."""
        return Span(0, len(self.layers), 0, self.num_tokens)

    def span_nbytes(self, span: Span) -> int:
        """Bytes of the span's cells."""
        return sum(
            (stop - start) * self._row_nbytes[layer] for layer, start, stop in self._cells(span)
        )

    def copies(self, span: Span) -> list[Copy]:
        """The copies that carry the span's cells, layer by layer and part by part; empty if it
        holds none.
        """
        return [
            Copy(layer, part, start, stop, self.region(layer, part, start, stop))
            for layer, start, stop in self._cells(span)
            for part in range(len(self.layers[layer].parts))
        ]

    def region(self, layer: int, part: int, start: int, stop: int) -> Region:
        """Where positions [start, stop) of a part lie in the slot; they must be inside the layer's
        window.
        """
        lo, hi = self.windows[layer]
        shape = self.layers[layer].parts[part]
        base = self._bases[layer][part]
        if self.layout == "token_major":
            row = shape.row_nbytes
            return Region(base + (start - lo) * row, 1, (stop - start) * row, 0)
        row = shape.head_nbytes
        return Region(base + (start - lo) * row, shape.heads, (stop - start) * row, (hi - lo) * row)

    def cut(self, span: Span, budget_nbytes: int) -> list[Span]:
        """Cut a span into pieces of at most `budget_nbytes` where one position of one layer allows
        it.

        The pieces' cells are the span's cells, each once. Whole layers stay together as long as
        they fit.
        """
        pieces: list[Span] = []
        first, used = span.layer_start, 0
        for layer in range(span.layer_start, span.layer_stop):
            start, stop = self._clip(layer, span)
            nbytes = (stop - start) * self._row_nbytes[layer]
            if used + nbytes <= budget_nbytes:
                used += nbytes
                continue
            if first < layer:
                pieces.append(Span(first, layer, span.start, span.stop))
            first, used = layer, nbytes
            if nbytes > budget_nbytes:
                step = max(1, budget_nbytes // self._row_nbytes[layer])
                pieces += [
                    Span(layer, layer + 1, at, min(at + step, stop))
                    for at in range(start, stop, step)
                ]
                first, used = layer + 1, 0
        if first < span.layer_stop:
            pieces.append(Span(first, span.layer_stop, span.start, span.stop))
        return pieces

    def layer_groups(self, size: int, emission: Emission) -> list[tuple[range, ...]]:
        """The layer groups that a source emits together, in the order in which they are final.

        `layers`: runs of `size` consecutive layers. `cache_groups`: `size` layers of one cache
        geometry, which need not be neighbours. Each group is given as runs of layers; groups
        without cells are left out.

        Raises:
            Refused: `size` is below one.
        """
        if size < 1:
            raise Refused(f"a layer group of {size} layers; use at least 1", field="group_layers")
        if emission == "layers":
            count = len(self.layers)
            members = [list(range(at, min(at + size, count))) for at in range(0, count, size)]
        else:
            by_geometry: dict[tuple[Kind, tuple[Part, ...]], list[int]] = {}
            for layer in self.layers:
                by_geometry.setdefault((layer.kind, layer.parts), []).append(layer.index)
            members = [
                numbers[at : at + size]
                for numbers in by_geometry.values()
                for at in range(0, len(numbers), size)
            ]
            members.sort(key=lambda numbers: numbers[-1])
        return [tuple(_runs(numbers)) for numbers in members if any(map(self._has_cells, numbers))]

    def _has_cells(self, layer: int) -> bool:
        lo, hi = self.windows[layer]
        return lo < hi

    def _clip(self, layer: int, span: Span) -> tuple[int, int]:
        lo, hi = self.windows[layer]
        start, stop = max(lo, span.start), min(hi, span.stop)
        return start, max(start, stop)

    def _cells(self, span: Span) -> Iterator[tuple[int, int, int]]:
        for layer in range(span.layer_start, span.layer_stop):
            start, stop = self._clip(layer, span)
            if start < stop:
                yield layer, start, stop


def _runs(numbers: list[int]) -> Iterator[range]:
    start = previous = numbers[0]
    for number in numbers[1:]:
        if number != previous + 1:
            yield range(start, previous + 1)
            start = number
        previous = number
    yield range(start, previous + 1)


def _align(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment
