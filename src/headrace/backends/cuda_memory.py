"""A decoder that is device memory only: it takes a hand-off as the CUDA one, and decodes nothing.

Lanes, copies, fences and pinned slabs are those of `headrace.backends.cuda`; there is no model. It
is what the path itself is measured with, for caches of any size and of any model's geometry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from headrace.backends.base import (
    Caps,
    CopyTuning,
    Entry,
    Fence,
    HostRange,
    Reservation,
    SlotView,
)
from headrace.backends.lane_copies import LaneCopies, rows_of
from headrace.backends.lane_table import LaneTable
from headrace.backends.pinning import Pins
from headrace.engine.device import Device, Rows
from headrace.errors import LocalProtocolError
from headrace.geometry import Layout, Manifest
from headrace.plan import Copy


class CudaMemory:
    """Lanes of device memory; `decode_step` is refused. Implements `Decoder` and `PinsSlabs`."""

    def __init__(
        self,
        manifest: Manifest,
        device: Device,
        *,
        context: int,
        copies: CopyTuning,
        lanes: int = 1,
        pins: bool = True,
    ) -> None:
        """The device is this decoder's from now on. `pins`: False leaves all slabs pageable.

        Raises:
            Refused: device memory is short.
        """
        self.caps = Caps(max_lanes=lanes, device_events=True, decodes=False, copies=copies)
        self._manifest = manifest
        self._device = device
        self._copies = LaneCopies(device, manifest.layers, copies.shared_chunk_nbytes)
        self._lanes = LaneTable(
            manifest.layers, context, lanes, device.empty, copier=self._copies.move
        )
        self._reads = device.stream("read")
        self._pins = Pins(device, read_only=True)
        self._may_pin = pins
        self._closed = False
        device.synchronize()  # the memory above may have been another's until now

    def manifest(self) -> Manifest:
        return self._manifest

    def reserve(self, num_tokens: int) -> Reservation:
        """As `CudaDecoder.reserve`."""
        return self._lanes.reserve(num_tokens)

    def begin_import(
        self, reservation: Reservation, slot: SlotView, copies: Sequence[Copy]
    ) -> Fence:
        """As `CudaDecoder.begin_import`."""
        targets = self._lanes.targets(reservation, slot, copies)
        return self._copies.begin(reservation.lane, targets, slot, copies)

    def read(self, held: Reservation | Entry, layout: Layout, copy: Copy) -> memoryview:
        """The prompt's bytes of a copy's cells as landed, in `layout` order; the host waits."""
        cells = self._lanes.cells(held, copy)
        heads, positions, head_dim = cells.shape
        row_nbytes = positions * head_dim * cells.element_size()
        landed = np.empty((heads, row_nbytes), np.uint8)
        self._copies.before_read(held.lane, self._reads)
        target = Rows(int(landed.ctypes.data), row_nbytes)
        self._device.copy(self._reads, target, rows_of(cells), row_nbytes, heads)
        self._device.record(self._reads).wait()
        if layout == "token_major":
            by_head = landed.reshape(heads, positions, -1)
            landed = np.ascontiguousarray(by_head.transpose(1, 0, 2))
        return landed.data.cast("B")

    def publish(self, reservation: Reservation) -> Entry:
        entry = self._lanes.publish(reservation)
        self._copies.before_decode(entry.lane)
        return entry

    def free(self, held: Reservation | Entry) -> None:
        """As `CudaDecoder.free`."""
        self._copies.check_quiet(held.lane)
        self._lanes.free(held)
        self._copies.give_back(held.lane)

    def decode_step(self, active: Sequence[tuple[Entry, int]]) -> list[memoryview]:
        raise LocalProtocolError("device memory decodes nothing; ask for no more than one token")

    def register(self, slab: HostRange) -> None:
        """Pin a slab, unless all are to be pageable."""
        if self._may_pin:
            self._pins.register(slab)

    def unregister(self, slab: HostRange) -> None:
        self._pins.unregister(slab)

    def statistics(self) -> Mapping[str, int]:
        return {
            **self._lanes.statistics(),
            **self._pins.statistics(),
            **self._device.statistics(),
        }

    def close(self) -> None:
        """Wait for the device, unpin all slabs and give everything back. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._device.synchronize()
            self._pins.close()
        finally:
            self._copies.close()
            self._lanes.close()
            self._device.close()
