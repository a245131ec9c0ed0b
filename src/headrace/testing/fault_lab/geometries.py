"""The caches that schedules are run with, their cells, and where a plan puts them.

What a hand-off must carry is stated here a second time, from the layers alone: `Geometry.needed`
does not ask the plan. A cell is known by one number, its key: layer, part, byte of the position,
and position.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Final, Literal

from headrace.geometry import Full, Kind, Layer, Layout, Manifest, Part, Shared, Sliding
from headrace.ids import Span
from headrace.plan import Plan, Region, compile_plan
from headrace.testing.facts import Terms
from headrace.testing.fault_lab.safety import require

CONTEXT: Final = 12  # positions of a lane and of a slot
STRIDE: Final = 16  # bits of one layer in the ledger's cells

Place = tuple[int, int]  # byte of the slot, key of the cell that lies there
Places = tuple[Place, ...]


def key_of(layer: int, part: int, byte: int, position: int) -> int:
    """The number of one byte of one cell."""
    return layer << 16 | part << 12 | byte << 8 | position


def describe_key(key: int) -> str:
    """A cell's byte in words."""
    byte, position = key >> 8 & 15, key & 255
    return f"layer {key >> 16} part {key >> 12 & 15} position {position} byte {byte}"


class Geometry:
    """One decoder's cache, and the plans for it."""

    def __init__(
        self,
        kinds: tuple[Kind, ...],
        parts: tuple[Part, ...],
        layout: Layout,
        first: Literal["logits", "token"] = "logits",
    ) -> None:
        self.layers = tuple(
            Layer(at, f"layer{at}", kind, () if isinstance(kind, Shared) else parts)
            for at, kind in enumerate(kinds)
        )
        self.layout: Layout = layout
        self.first: Literal["logits", "token"] = first
        self.manifest = Manifest(
            "decoder", "tiny", self.layers, (layout,), 1 << 16, "uint8", CONTEXT
        )
        self._plans: dict[int, Plan] = {}
        self._written: dict[tuple[int, Span], Places] = {}
        self._copied: dict[tuple[int, Span], Places] = {}
        self._terms: dict[tuple[int, Terms], PromptTerms] = {}

    @cached_property
    def universe(self) -> int:
        """The ledger's cells of a prompt that fills every bit."""
        return (1 << len(self.layers) * STRIDE) - 1

    def forget_plans(self) -> None:
        """Compile again from here on: the code that makes plans was changed."""
        for kept in (self._plans, self._written, self._copied):
            kept.clear()

    def plan(self, num_tokens: int) -> Plan:
        plan = self._plans.get(num_tokens)
        if plan is None:
            plan = compile_plan(self.manifest, self.layout, num_tokens, CONTEXT)
            self._plans[num_tokens] = plan
        return plan

    def window(self, layer: Layer, num_tokens: int) -> range:
        """The positions of a layer that must be carried."""
        if isinstance(layer.kind, Shared):
            return range(0)
        if isinstance(layer.kind, Sliding):
            return range(max(0, num_tokens - layer.kind.tail), num_tokens)
        return range(num_tokens)

    def needed(self, num_tokens: int) -> list[int]:
        """The keys of all cells that a prompt's entry must hold."""
        return [
            key_of(layer.index, part, byte, position)
            for layer in self.layers
            for part, shape in enumerate(layer.parts)
            for position in self.window(layer, num_tokens)
            for byte in range(shape.row_nbytes)
        ]

    def legal(self, num_tokens: int, spans: Iterable[Span]) -> bool:
        """Whether all spans lie in the model and in the prompt."""
        return all(
            0 <= span.layer_start < span.layer_stop <= len(self.layers)
            and 0 <= span.start < span.stop <= num_tokens
            for span in spans
        )

    def written(self, num_tokens: int, span: Span) -> Places:
        """Where an engine writes the cells of a span, as a sink hands them out."""
        places = self._written.get((num_tokens, span))
        if places is None:
            places = tuple(self._write(self.plan(num_tokens), span))
            self._written[num_tokens, span] = places
        return places

    def copied(self, num_tokens: int, piece: Span) -> Places:
        """What an import of `piece` reads, and as which cells it lands."""
        places = self._copied.get((num_tokens, piece))
        if places is None:
            plan = self.plan(num_tokens)
            places = tuple(
                place
                for copy in plan.copies(piece)
                for place in self._bytes(plan, copy.layer, copy.part, copy.start, copy.source)
            )
            self._copied[num_tokens, piece] = places
        return places

    def terms(self, base: Terms, num_tokens: int) -> PromptTerms:
        """The ledger's constants for a prompt of this length."""
        terms = self._terms.get((num_tokens, base))
        if terms is None:
            facts = {**vars(base), "num_tokens": num_tokens}
            terms = self._terms[num_tokens, base] = PromptTerms(self, facts)
        return terms

    def _write(self, plan: Plan, span: Span) -> Iterator[Place]:
        for layer in range(span.layer_start, span.layer_stop):
            lo, hi = plan.windows[layer]
            start, stop = max(lo, span.start), min(hi, span.stop)
            if start < stop:
                for part in range(len(plan.layers[layer].parts)):
                    region = plan.region(layer, part, start, stop)
                    yield from self._bytes(plan, layer, part, start, region)

    def _bytes(
        self, plan: Plan, layer: int, part: int, start: int, region: Region
    ) -> Iterator[Place]:
        """Each byte of a region, in its order, with the cell that it is by the layout's words."""
        shape = self.layers[layer].parts[part]
        row_nbytes = shape.row_nbytes if self.layout == "token_major" else shape.head_nbytes
        for row in range(region.rows):
            begin = region.offset + row * region.stride
            inside = plan.slot.kv_offset <= begin <= plan.slot.nbytes - region.row_nbytes
            require(2, inside, f"{region} of layer {layer} lies outside the slot's KV area")
            for at in range(region.row_nbytes):
                byte = row * row_nbytes + at % row_nbytes
                yield begin + at, key_of(layer, part, byte, start + at // row_nbytes)


class PromptTerms(Terms):
    """The ledger's constants for one prompt length.

    Bits of cells are as wide for every length, and what a prompt does not have counts as had from
    the start (`padding`), so that complete is the same number for all.
    """

    def __init__(self, geometry: Geometry, facts: dict[str, object]) -> None:
        for name, fact in facts.items():
            object.__setattr__(self, name, fact)
        needed = 0
        for layer in geometry.layers:
            for position in geometry.window(layer, self.num_tokens):
                needed |= 1 << (layer.index * STRIDE + position)
        names = {"_geometry": geometry, "_needed": needed, "_cells": {}}
        for name, fact in names.items():
            object.__setattr__(self, name, fact)

    _geometry: Geometry
    _needed: int
    _cells: dict[Span, int]

    @property
    def padding(self) -> int:
        return self._geometry.universe & ~self._needed

    def transfer_set(self, start: int) -> int:
        return self._geometry.universe  # nothing is kept in the lab: `start` is 0

    def cells(self, span: Span, start: int) -> int:
        bits = self._cells.get(span)
        if bits is None:
            bits = 0
            start, stop = max(0, span.start), min(span.stop, self.num_tokens)
            row = (1 << stop) - (1 << start) if start < stop else 0
            for layer in range(max(0, span.layer_start), min(span.layer_stop, len(self.layers))):
                bits |= row << (layer * STRIDE)
            bits &= self._needed
            self._cells[span] = bits
        return bits

    def nbytes(self, cells: int) -> int:
        row = (1 << STRIDE) - 1
        return sum(
            (cells >> (layer.index * STRIDE) & row).bit_count() * layer.row_nbytes
            for layer in self.layers
        )


_KV: Final = (Part("k", 1, 1, "uint8"), Part("v", 1, 1, "uint8"))
_UNEVEN: Final = (Part("k", 2, 8, "uint8"), Part("v", 1, 16, "uint8"))  # 4 rows fill their place

GEOMETRIES: Final = (
    Geometry((Full(),), _KV, "token_major"),
    Geometry((Full(), Full()), _KV, "head_major", "token"),
    Geometry((Full(), Sliding(2, 2)), _KV, "token_major"),
    Geometry((Sliding(5, 4), Full(), Sliding(5, 4), Shared("layer1")), _UNEVEN, "head_major"),
    Geometry((Sliding(5, 4), Sliding(5, 4), Full()), _UNEVEN, "token_major", "token"),
    Geometry((Sliding(1, 0),), _KV, "token_major"),
)
