"""A decoder that is memory only: it takes a hand-off exactly as a real one and computes nothing.

A lane is an image of a slot's KV area. Used for tests, for benchmarks of the path itself, and by
the worker handle to keep a whole result for a caller that has no decoder. Needs msgspec only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from headrace.backends.base import Caps, Done, Entry, Fence, Reservation, SlotView
from headrace.backends.options import read_options
from headrace.engine.capacity import require_memory
from headrace.engine.host import HostMemory, copy_rows
from headrace.errors import LocalProtocolError, WouldBlock
from headrace.geometry import Layer, Layout, Manifest, Sliding
from headrace.plan import Copy, Plan, Region, compile_plan, slot_layout


class NullOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """`manifest` is the decoder's; lanes and context size its memory."""

    manifest: Manifest
    context: int
    lanes: int = 4


def open(options: Mapping[str, Any]) -> NullDecoder:
    """The factory that `--decoder null` names; options as in `NullOptions`."""
    read = read_options(options, NullOptions, "null")
    return NullDecoder(read.manifest, context=read.context, lanes=read.lanes)


def decoder_like(source: Manifest) -> Manifest:
    """The manifest of a memory-only decoder that takes all that `source` emits."""
    return replace(
        source,
        role="decoder",
        layers=tuple(_with_window_tail(layer) for layer in source.layers),
        layouts=("head_major", "token_major"),
        emits=("layers", "cache_groups"),
        first="logits",
        prefix="none",
    )


class NullDecoder:
    """Lanes of host memory; `decode_step` is refused."""

    def __init__(self, manifest: Manifest, *, context: int, lanes: int) -> None:
        self.caps = Caps(max_lanes=lanes, decodes=False)
        self._manifest = manifest
        self._context = context
        layout = slot_layout(manifest, context)
        self._kv_offset = layout.kv_offset
        require_memory(lanes * (layout.nbytes - layout.kv_offset), f"{lanes} lanes")
        self._lanes = [HostMemory(layout.nbytes - layout.kv_offset) for _ in range(lanes)]
        self._held: dict[int, Reservation | Entry] = {}
        self._layouts: dict[int, Layout] = {}  # what a lane's bytes were imported as
        self._next_serial = 0

    def manifest(self) -> Manifest:
        return self._manifest

    def reserve(self, num_tokens: int) -> Reservation:
        for lane in range(len(self._lanes)):
            if lane not in self._held:
                reservation = Reservation(lane, num_tokens, self._next_serial)
                self._next_serial += 1
                self._held[lane] = reservation
                return reservation
        raise WouldBlock(f"no lane free of {len(self._lanes)}")

    def begin_import(
        self, reservation: Reservation, slot: SlotView, copies: Sequence[Copy]
    ) -> Fence:
        self._check(reservation)
        address = self._lanes[reservation.lane].address
        self._layouts[reservation.lane] = slot.layout
        for copy in copies:
            region = copy.source
            target = address + self._lane_offset(reservation, region)
            copy_rows(target, region.stride, slot.address, region)
        return Done()

    def read(self, held: Reservation | Entry, layout: Layout, copy: Copy) -> bytes | memoryview:
        self._check(held)
        kept = self._layouts.get(held.lane, layout)
        if layout != kept:
            raise LocalProtocolError(f"lane {held.lane} holds {kept}, and {layout} was asked for")
        plan = self._plan(held.num_tokens, layout)
        offset, rows, nbytes, stride = plan.region(copy.layer, copy.part, copy.start, copy.stop)
        view = self._lanes[held.lane].view[offset - self._kv_offset :]
        if rows == 1:
            return view[:nbytes]
        return b"".join(view[row * stride :][:nbytes] for row in range(rows))

    def publish(self, reservation: Reservation) -> Entry:
        self._check(reservation)
        entry = Entry(reservation.lane, reservation.num_tokens, reservation.serial)
        self._held[reservation.lane] = entry
        return entry

    def free(self, held: Reservation | Entry) -> None:
        self._check(held)
        del self._held[held.lane]
        self._layouts.pop(held.lane, None)

    def decode_step(self, active: Sequence[tuple[Entry, int]]) -> list[memoryview]:
        raise LocalProtocolError("a null decoder decodes nothing; ask for no more than one token")

    def statistics(self) -> Mapping[str, int]:
        published = sum(isinstance(held, Entry) for held in self._held.values())
        return {
            "lanes": len(self._lanes),
            "free": len(self._lanes) - len(self._held),
            "reserved": len(self._held) - published,
            "published": published,
            "lane_nbytes": self._lanes[0].nbytes if self._lanes else 0,
        }

    def close(self) -> None:
        self._held.clear()
        self._lanes.clear()

    def _check(self, held: Reservation | Entry) -> None:
        if self._held.get(held.lane) != held:
            raise LocalProtocolError(f"{held} is not what lane {held.lane} holds")

    def _lane_offset(self, reservation: Reservation, region: Region) -> int:
        offset = region.offset - self._kv_offset
        reach = offset + (region.rows - 1) * region.stride + region.row_nbytes
        if offset < 0 or reach > self._lanes[reservation.lane].nbytes:
            raise LocalProtocolError(f"{region} reaches outside lane {reservation.lane}")
        return offset

    def _plan(self, num_tokens: int, layout: Layout) -> Plan:
        return compile_plan(self._manifest, layout, num_tokens, self._context)


def _with_window_tail(layer: Layer) -> Layer:
    if isinstance(layer.kind, Sliding):
        tail = min(layer.kind.tail, layer.kind.window)
        return replace(layer, kind=Sliding(layer.kind.window, tail))
    return layer
