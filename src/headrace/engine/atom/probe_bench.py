"""What the steps of a probe work with: a loaded model, mirrors, and blocks to and from the card."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from headrace.engine.atom import number_format, prompts
from headrace.engine.atom.blocks import lane_blocks, needed
from headrace.engine.atom.caches import Cache
from headrace.engine.atom.casts import Cast, NumberFormat
from headrace.engine.atom.compiled import CALLS, CompiledDecoder
from headrace.engine.atom.mirrors import Mirror, make_mirror
from headrace.engine.atom.prompts import Reference
from headrace.engine.atom.sdk import Sdk
from headrace.engine.tensors import DTYPES
from headrace.errors import BackendUnavailable, DeviceError, Refused

IMAGES: Final = "image_prefill"
"""The phase of a compiled model that alone attends both ways, where there is one."""

MOST_STEPS: Final = 600
"""Decode steps that a prompt may take: some tens of milliseconds each."""

_PATTERNS: Final = 1 << 16
_SCATTER: Final = 40503
"""Odd, so that multiplying by it turns the 16-bit patterns into an order without one."""


class Place(NamedTuple):
    """A block of the lane."""

    cache: Cache
    block: int

    def __str__(self) -> str:
        return f"block {self.block} of {self.cache.name}"


@dataclass
class Bench:
    """A card, a compiled model, and what was found of them so far.

    compiled: once it is loaded. stored: by cache, the torch dtype of a mirror's elements, int16
    where the card has two bytes of what is declared to have four. number_format, sub_blocks: as
    found. logits: by the tokens of a prompt, the row that the card computed last. refused: why the
    model is not compiled as it has to be.
    """

    sdk: Sdk
    directory: Path
    device: int
    reference: Reference | None
    compiled: CompiledDecoder | None = None
    stored: dict[str, torch.dtype] = field(default_factory=dict)
    number_format: NumberFormat | None = None
    sub_blocks: bool = False
    logits: dict[int, torch.Tensor] = field(default_factory=dict)
    refused: Refused | None = None
    _mirrors: dict[tuple[object, ...], Mirror] = field(default_factory=dict)

    def load(self) -> Any:
        """Load the model and open it, if its runtime has the calls; returns the runtime.

        Raises:
            BackendUnavailable: it cannot be loaded.
            Refused: it is not compiled as it has to be, or a cache is of a dtype that is not
                supported.
        """
        loaded: list[Any] = []

        def remembered(directory: str, device: int) -> Any:
            model = self.sdk.load(directory, device)
            loaded.append(model.prefill_decoder.runtime)
            return model

        sdk = replace(self.sdk, load=remembered)
        try:
            compiled = CompiledDecoder(sdk, str(self.directory), self.device)
        except BackendUnavailable:
            if loaded and any(not hasattr(loaded[0], name) for name in CALLS):
                return loaded[0]
            raise
        except Refused as exc:
            self.refused = exc
            raise
        for cache in compiled.caches:
            Cast("float32", cache.dtype, "declared")
        self.compiled = compiled
        return loaded[0]

    @property
    def opened(self) -> CompiledDecoder:
        """The loaded model.

        Raises:
            DeviceError: it is not open.
        """
        if self.compiled is None:
            raise DeviceError("the compiled model was not opened, as the step 'calls' says")
        return self.compiled

    @property
    def format(self) -> NumberFormat:
        """As found.

        Raises:
            DeviceError: it was not.
        """
        if self.number_format is None:
            raise DeviceError("the number format was not found, as its step says")
        return self.number_format

    @property
    def by_steps(self) -> bool:
        """Whether the card computes prompts by decode steps, since its own prefill is not causal.

        So it is compiled where a mask and position ids come without a phase for images: each
        position of a chunk attends to all of it, and from layer 1 on keys and values differ.
        """
        config = self.opened.config
        masked = bool(config.use_attention_mask and config.use_position_ids)
        return masked and IMAGES not in (getattr(config, "phases", None) or ())

    @property
    def own_prefill(self) -> str:
        """How the card computes a prompt, in words."""
        return "by decode steps" if self.by_steps else "causal"

    def reached(self, lengths: Iterable[int]) -> tuple[list[int], list[int]]:
        """Tokens of the prompts that the card is had to compute, and of those that are too long to
        wait for, by decode steps above all.
        """
        most = MOST_STEPS if self.by_steps else prompts.LONGEST_PROMPT
        every = sorted(lengths)
        return [each for each in every if each <= most], [each for each in every if each > most]

    @property
    def tokens(self) -> tuple[int, ...]:
        """Of the longest prompt."""
        return prompts.tokens_of(max(prompts.lengths(self.opened.caches, self.opened.positions)))

    def first(self, count: int) -> tuple[int, ...]:
        """The first tokens, also if no prompt with a reference is that long."""
        return self.tokens[:count] if count <= len(self.tokens) else prompts.tokens_of(count)

    @property
    def short(self) -> int:
        """Tokens of the short prompt."""
        return prompts.short_prompt(self.opened.caches, self.opened.positions)

    def places(self) -> Iterator[Place]:
        """Every block of the lane in every cache."""
        for cache in self.opened.caches:
            for block in lane_blocks(cache, self.opened.positions):
                yield Place(cache, block)

    def mirror(self, cache: Cache, use: str = "sent") -> Mirror:
        """A mirror of a cache's shape, one for each shape and use."""
        stored = self.stored.get(cache.name, DTYPES[cache.dtype])
        key = use, cache.shape, stored
        if key not in self._mirrors:
            self._mirrors[key] = make_mirror(self.sdk, cache, stored)
        return self._mirrors[key]

    def send(self, place: Place, bits: torch.Tensor, rows: int | None = None) -> None:
        """Put `bits` (int16, as `bits_of` has them) into a block, or into its first rows."""
        mirror = self.mirror(place.cache)
        bits_of(mirror, place.block).copy_(bits)
        self.opened.update(place.cache, mirror, place.block, rows or place.cache.rows)

    def fetch(
        self, place: Place, before: torch.Tensor | None = None, rows: int | None = None
    ) -> torch.Tensor:
        """The bits of a block, of which its first rows were fetched; good until the next call.

        `before`: what the mirror holds until then.
        """
        mirror = self.mirror(place.cache, "fetched")
        bits = bits_of(mirror, place.block)
        if before is not None:
            bits.copy_(before)
        self.opened.fetch(place.cache, mirror, place.block, rows or place.cache.rows)
        return bits

    def count(self, cache: Cache) -> int:
        """16-bit halves of a block."""
        return bits_of(self.mirror(cache), 0).numel()

    def plain(self, cache: Cache, shift: int) -> torch.Tensor:
        """The bits of a block of small numbers, which every format has; no two shifts below 129
        have one in common.
        """
        elements = cache.elements // cache.blocks
        values = ((torch.arange(elements) + shift) % 129 - 64) / 8
        stored = self.mirror(cache).rows.dtype
        return values.to(torch.float16 if stored == torch.int16 else stored).view(torch.int16)

    def clear(self) -> None:
        """Put zeros into every block of the lane: no pattern of a step is left for a kernel."""
        for place in self.places():
            self.send(place, torch.zeros(self.count(place.cache), dtype=torch.int16))

    def compute(self, num_tokens: int, there: int = 0) -> torch.Tensor:
        """Have the card compute a prompt in a cleared lane; returns the last row of logits.

        By decode steps it goes on from the first tokens that are `there`, and leaves zeros behind.
        """
        tokens = self.first(num_tokens)
        if not self.by_steps:
            self.clear()
            return self.opened.prefill(tokens)
        if not 0 < there < num_tokens:
            self.clear()
            logits = self.opened.prefill(tokens[:1])
            self.clear_behind(1)
            there = 1
        for position in range(there, num_tokens):
            logits = self.opened.decode(tokens[position], position)
        return logits

    def clear_behind(self, num_tokens: int) -> None:
        """Put zeros into every row of the lane that a prompt has no position in."""
        for place in self.places():
            cache = place.cache
            wanted = {rows.block: rows.num for rows in needed(cache, num_tokens)}
            first = wanted.get(place.block, 0)
            if first == 0:
                self.send(place, torch.zeros(self.count(cache), dtype=torch.int16))
            elif first < cache.rows:
                bits = self.fetch(place).clone().view(cache.heads, cache.rows, -1)
                bits[:, first:] = 0
                self.send(place, bits.view(-1))

    def prompt(self, cache: Cache, num_tokens: int) -> torch.Tensor:
        """What a cache holds of a prompt, [heads, rows, head_dim] of the stored dtype."""
        mirror = self.mirror(cache, "fetched")
        found = []
        for rows in needed(cache, num_tokens):
            self.opened.fetch(cache, mirror, rows.block, cache.rows)
            found.append(mirror.rows[rows.block, :, : rows.num].clone())
        return torch.cat(found, dim=1)


def bits_of(mirror: Mirror, block: int) -> torch.Tensor:
    """A block of a mirror as int16, flat: one or two for each element."""
    return mirror.rows[block].view(torch.int16).view(-1)


def pattern(start: int, count: int) -> torch.Tensor:
    """`count` 16-bit patterns, int16: any 65,536 that follow each other are all there are."""
    at = (torch.arange(count, dtype=torch.int64) + start) * _SCATTER % _PATTERNS
    return at.to(torch.int32).to(torch.int16)


def starts(counts: Iterable[int]) -> Iterator[int]:
    """Where the pattern of each block starts, of so many halves each.

    Small blocks go on where the last one ended, so that together they have all patterns; no two
    blocks are alike, also where each of them has all.
    """
    total = 0
    for serial, count in enumerate(counts):
        yield total + (total // _PATTERNS if count % _PATTERNS else serial)
        total += count


def readings(cache: Cache, cells: torch.Tensor) -> dict[NumberFormat, torch.Tensor]:
    """What stored cells say in each format that their width allows, as float32."""
    found: dict[NumberFormat, torch.Tensor] = {}
    declared = DTYPES[cache.dtype]
    if declared.itemsize == cells.element_size():
        found["declared"] = cells.view(declared).to(torch.float32)
    if cells.element_size() == torch.int16.itemsize:
        patterns = cells.view(torch.int16)
        found["custom_float16"] = number_format.decode(patterns, torch.float32)
    return found


def label(cache: Cache) -> str:
    """A cache's geometry in words."""
    _, heads, rows, head_dim = cache.shape
    return f"{cache.kind}, {cache.blocks} blocks of {heads} x {rows} x {head_dim}, {cache.dtype}"


def by_geometry(caches: Sequence[Cache]) -> dict[str, Cache]:
    """The first cache of each geometry."""
    found: dict[str, Cache] = {}
    for each in caches:
        found.setdefault(label(each), each)
    return found


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """The rms difference as a share of the rms that is wanted; no number counts as endless."""
    share = float((got - want).square().mean().sqrt() / want.square().mean().sqrt())
    return share if share == share else float("inf")
