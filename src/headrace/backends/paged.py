"""A decoder over blocks that somebody else allocates: it imports, and decodes nothing.

An engine with a paged cache sets blocks aside for a request and binds them here to that request's
label: they are its reservation. From then until `holds` says no, only this decoder writes them, and
their allocator must give them to nobody else.

What a block is to the device, a `PagedCache` knows. Its writes are over when they return, or raise,
so that every fence is passed at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, Protocol

import torch

from headrace.backends.base import Caps, Done, Entry, Reservation, SlotView
from headrace.engine.tensors import as_bytes, check_region, dtype_of, over_address
from headrace.errors import Closed, LocalProtocolError, WouldBlock
from headrace.geometry import Layout, Manifest
from headrace.plan import Copy, live_window

MOST_BOUND: Final = 1 << 16
"""Reservations at once; its caller's blocks run out before."""
CLEAR_NBYTES: Final = 4 << 20
"""Zeros that are written at once."""


class PagedCache(Protocol):
    """The blocks of one model's cache, by cache group."""

    num_blocks: int

    def manifest(self) -> Manifest: ...

    def cache_group(self, layer: int) -> int:
        """Whose blocks a layer's cells lie in: the place of its cache group's ids in a binding."""

    def block_size(self, cache_group: int) -> int:
        """Positions of one block."""

    def write(self, layer: int, states: Sequence[torch.Tensor], cells: torch.Tensor) -> None:
        """Write positions of all parts of a layer, by part [positions, heads, head_dim].

        cells: int64, the place of each position: block x block size + place in the block.
        """

    def read(self, layer: int, part: int, cells: torch.Tensor) -> torch.Tensor:
        """What `write` put there, [positions, heads, head_dim]."""


@dataclass(frozen=True, slots=True)
class Binding:
    """The blocks of one request.

    block_ids: by cache group, the block of each block-sized run of positions from 0 on. `start`:
    positions that they hold already, and that are never written.
    """

    label: int
    num_tokens: int
    block_ids: tuple[tuple[int, ...], ...]
    start: int = 0


class PagedDecoder:
    """Imports into what was bound; see the module. Implements `Decoder` and `ReservesByLabel`."""

    def __init__(self, cache: PagedCache) -> None:
        self.caps = Caps(max_lanes=MOST_BOUND, decodes=False)
        self._cache: PagedCache | None = cache
        self._manifest = cache.manifest()
        self._bound: dict[int, Binding] = {}
        self._held: dict[int, tuple[Binding, Reservation | Entry]] = {}  # by serial
        # By serial, what was imported, as far as it was begun: layer, first position, last + 1.
        self._imported: dict[int, set[tuple[int, int, int]]] = {}
        self._last_serial = 0

    def manifest(self) -> Manifest:
        return self._manifest

    def bind(self, binding: Binding) -> None:
        """Have a request's blocks be what `reserve_for` its label reserves.

        Raises:
            LocalProtocolError: the label is bound already, a layer's live positions have no block,
                a block is none of the cache's or is held by another request, or is given twice.
        """
        if binding.label in self._bound or self.holds(binding.label):
            raise LocalProtocolError(f"label {binding.label} has blocks already")
        written = self._written(binding)
        if len(set(written)) != len(written):
            raise LocalProtocolError(f"label {binding.label} was given a block twice")
        others = [*self._bound.values(), *(held for held, _ in self._held.values())]
        for other in others:
            both = set(written) & set(self._written(other))
            if both:
                raise LocalProtocolError(
                    f"blocks {sorted(both)} of label {binding.label} are held by {other.label}"
                )
        self._bound[binding.label] = binding

    def unbind(self, label: int) -> None:
        """The request ended, or was refused; what it holds it holds until it is freed."""
        self._bound.pop(label, None)

    def holds(self, label: int) -> bool:
        """Whether the blocks of this label may still be written."""
        return any(binding.label == label for binding, _ in self._held.values())

    def reserve(self, num_tokens: int) -> Reservation:
        raise WouldBlock("storage here is bound to a label, and the request has none")

    def reserve_for(self, label: int | None, num_tokens: int) -> Reservation:
        """The reservation of what was bound.

        Raises:
            WouldBlock: nothing is bound to the label, or it is held, or is of another length.
        """
        binding = None if label is None else self._bound.get(label)
        if binding is None or self.holds(binding.label) or binding.num_tokens != num_tokens:
            raise WouldBlock(f"no blocks for {num_tokens} tokens are bound to label {label}")
        self._last_serial += 1
        reservation = Reservation(binding.label, num_tokens, self._last_serial)
        self._held[reservation.serial] = binding, reservation
        return reservation

    def begin_import(
        self, reservation: Reservation, slot: SlotView, copies: Sequence[Copy]
    ) -> Done:
        """Copy cells from the slot into the blocks; it is finished on return.

        Raises:
            LocalProtocolError: the reservation is stale, a copy lies outside it or the slot, or a
                layer's parts do not come together; then nothing was written.
        """
        binding, cache = self._binding(reservation), self._open_cache()
        writes = [self._checked(binding, slot, list(same)) for same in _by_rectangle(copies)]
        imported = self._imported.setdefault(reservation.serial, set())
        imported.update((copy.layer, copy.start, copy.stop) for copy in copies)
        for first, states in writes:
            cells = self._cells(binding, first.layer, first.start, first.stop)
            cache.write(first.layer, states, cells)
        return Done()

    def read(self, held: Reservation | Entry, layout: Layout, copy: Copy) -> memoryview:
        """The bytes of a copy's cells as landed, in `layout` order.

        Raises:
            LocalProtocolError: `held` is stale, or the copy lies outside of it.
        """
        binding = self._binding(held)
        self._check_inside(binding, copy)
        cells = self._cells(binding, copy.layer, copy.start, copy.stop)
        rows = self._open_cache().read(copy.layer, copy.part, cells)
        return as_bytes(rows.permute(1, 0, 2) if layout == "head_major" else rows)

    def publish(self, reservation: Reservation) -> Entry:
        """All of it is there; no byte moves."""
        binding = self._binding(reservation)
        entry = Entry(reservation.lane, reservation.num_tokens, reservation.serial)
        self._held[reservation.serial] = binding, entry
        return entry

    def free(self, held: Reservation | Entry) -> None:
        """Nothing is written there any more.

        What was not published is overwritten with zeros: it may be anything, such as a digest's
        pattern, which is no number, and an attention that masks a cell still multiplies with it.
        """
        binding = self._binding(held)
        if isinstance(held, Reservation):
            for layer, start, stop in sorted(self._imported.get(held.serial, ())):
                self._clear(binding, layer, start, stop)
        self._imported.pop(held.serial, None)
        del self._held[held.serial]

    def decode_step(self, active: Sequence[tuple[Entry, int]]) -> list[memoryview]:
        raise LocalProtocolError("a paged decoder decodes nothing; its engine does")

    def statistics(self) -> Mapping[str, int]:
        """Bindings by what became of them."""
        held = [each for _, each in self._held.values()]
        return {
            "lanes_reserved": sum(isinstance(each, Reservation) for each in held),
            "lanes_published": sum(isinstance(each, Entry) for each in held),
            "bound": len(self._bound),
        }

    def close(self) -> None:
        """Let go of the cache. Idempotent."""
        self._cache = None
        self._bound.clear()
        self._held.clear()

    def _open_cache(self) -> PagedCache:
        if self._cache is None:
            raise Closed("the paged decoder was closed")
        return self._cache

    def _binding(self, held: Reservation | Entry) -> Binding:
        binding, now = self._held.get(held.serial, (None, None))
        if binding is None or now != held:
            raise LocalProtocolError(f"{held} is stale: {now or 'nothing'} is held there")
        return binding

    def _written(self, binding: Binding) -> list[int]:
        """The blocks that its imports may write."""
        written: dict[int, range] = {}  # by cache group, the places of its blocks
        cache = self._open_cache()
        for layer in self._manifest.layers:
            start, stop = live_window(layer, binding.num_tokens)
            start = max(start, binding.start)
            if start >= stop:
                continue
            number = cache.cache_group(layer.index)
            size = cache.block_size(number)
            places = range(start // size, -(-stop // size))
            before = written.get(number, places)
            written[number] = range(min(before.start, places.start), max(before.stop, places.stop))
        blocks = []
        for number, places in written.items():
            ids = binding.block_ids[number] if number < len(binding.block_ids) else ()
            if places.stop > len(ids):
                raise LocalProtocolError(
                    f"label {binding.label} has {len(ids)} blocks of cache group {number} and "
                    f"{binding.num_tokens} tokens need {places.stop}"
                )
            blocks += [ids[place] for place in places]
        wrong = [block for block in blocks if not 0 < block < cache.num_blocks]
        if wrong:
            raise LocalProtocolError(
                f"blocks {wrong} of label {binding.label} are none that can be written"
            )
        return blocks

    def _clear(self, binding: Binding, layer: int, start: int, stop: int) -> None:
        parts = self._manifest.layers[layer].parts
        step = max(1, CLEAR_NBYTES // self._manifest.layers[layer].row_nbytes)
        for at in range(start, stop, step):
            count = min(step, stop - at)
            zeros = [
                torch.zeros(count, part.heads, part.head_dim, dtype=dtype_of(part))
                for part in parts
            ]
            cells = self._cells(binding, layer, at, at + count)
            self._open_cache().write(layer, zeros, cells)

    def _checked(
        self, binding: Binding, slot: SlotView, same: Sequence[Copy]
    ) -> tuple[Copy, list[torch.Tensor]]:
        """The rows in the slot of one layer's copies, by part, [positions, heads, head_dim]."""
        first, states = same[0], []
        self._check_inside(binding, first)
        parts = self._manifest.layers[first.layer].parts
        if [copy.part for copy in same] != list(range(len(parts))):
            raise LocalProtocolError(
                f"parts {[copy.part for copy in same]} of layer {first.layer}; all of them are "
                "written together"
            )
        for copy in same:
            part, positions = parts[copy.part], copy.stop - copy.start
            check_region(copy.source, part, positions, slot.layout, slot.buffer.nbytes)
            rows = over_address(slot.address, copy.source, part, positions, slot.layout)
            states.append(rows.permute(1, 0, 2))
        return first, states

    def _check_inside(self, binding: Binding, copy: Copy) -> None:
        if not 0 <= copy.layer < len(self._manifest.layers):
            raise LocalProtocolError(f"layer {copy.layer} of {len(self._manifest.layers)}")
        layer = self._manifest.layers[copy.layer]
        if not 0 <= copy.part < len(layer.parts):
            raise LocalProtocolError(f"part {copy.part} of {layer.name}")
        start, stop = live_window(layer, binding.num_tokens)
        if not max(start, binding.start) <= copy.start < copy.stop <= stop:
            raise LocalProtocolError(
                f"positions [{copy.start}, {copy.stop}) of {layer.name}; the blocks of label "
                f"{binding.label} are for [{max(start, binding.start)}, {stop})"
            )

    def _cells(self, binding: Binding, layer: int, start: int, stop: int) -> torch.Tensor:
        cache = self._open_cache()
        number = cache.cache_group(layer)
        size = cache.block_size(number)
        ids = torch.tensor(binding.block_ids[number], dtype=torch.int64)
        positions = torch.arange(start, stop)
        return ids[positions // size] * size + positions % size


def _by_rectangle(copies: Sequence[Copy]) -> Iterator[Iterator[Copy]]:
    """The copies of one layer's same positions, which a plan gives part by part."""
    for _, same in groupby(copies, key=lambda copy: (copy.layer, copy.start, copy.stop)):
        yield same
