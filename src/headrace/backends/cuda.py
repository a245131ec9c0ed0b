"""The CUDA decoder: lanes in device memory, imports on a stream of their own.

All of it is written against `headrace.engine.device`. The host queues and polls. For what is queued
it waits where it needs bytes of it (logits, `read`), where a slab is not pinned (a copy of pageable
memory holds the host up while it is staged), and when it opens and closes. Shorter waits are for
small work of its own: each step's tokens are uploaded from pageable memory, and every few seconds
an event on an empty stream tells the device's clock.

By default sequences are decoded one after another, one per forward: the exact mode. With
`decode_batch` several are decoded in one forward, as `headrace.engine.batching` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct

from headrace.backends.base import (
    Caps,
    CopyTuning,
    Entry,
    Fence,
    HostRange,
    Reservation,
    SlotView,
)
from headrace.backends.copy_probe import probe
from headrace.backends.keeping import KeepsInLanes, extra_storages
from headrace.backends.lane_copies import LaneCopies, rows_of
from headrace.backends.lane_table import LaneTable
from headrace.backends.options import read_options
from headrace.backends.pinning import Pins
from headrace.backends.stepping import decode_lanes
from headrace.engine.batching import Batching
from headrace.engine.cuda import open_device
from headrace.engine.device import Device, Rows
from headrace.engine.gpu_users import users
from headrace.engine.layers import manifest
from headrace.engine.loading import LoadedModel, load_model
from headrace.errors import Closed, Refused
from headrace.geometry import Layer, Layout, Manifest
from headrace.plan import Copy

DEFAULT_CONTEXT = 2048
MAX_DECODE_BATCH = 256


class Options(Struct, frozen=True, forbid_unknown_fields=True):
    """What `open` takes: what the cpu decoder takes, and the number of the GPU.

    model: a directory with config.json and safetensors. attn: the attention implementation, by
    default the model's best. lanes: most requests that hold storage at once. context: positions of
    one lane, by default the model's or 2048, whichever is fewer. decode_batch: sequences decoded in
    one forward; 1 is the exact mode. keep_nbytes: device memory for entries kept beyond their
    lanes, 0 to keep none.
    """

    model: str
    dtype: str = "float32"
    threads: Annotated[int, Meta(ge=1)] = 1
    attn: str | None = None
    lanes: Annotated[int, Meta(ge=1)] = 1
    context: Annotated[int, Meta(ge=1)] | None = None
    decode_batch: Annotated[int, Meta(ge=1, le=MAX_DECODE_BATCH)] = 1
    keep_nbytes: Annotated[int, Meta(ge=0)] = 0
    device: Annotated[int, Meta(ge=0)] = 0


def open(config: Mapping[str, Any]) -> CudaDecoder:
    """Load the decoder from the fields of `Options` onto a GPU, and measure its link.

    Raises:
        Refused: an option is unknown or wrong, the model's cache is not supported, or memory is
            short.
        BackendUnavailable: there is no such GPU here.
    """
    options = read_options(config, Options, "cuda")
    device = open_device(options.device)
    try:
        model = load_model(
            Path(options.model),
            dtype=options.dtype,
            threads=options.threads,
            attention=options.attn,
            device=device.torch_device,
        )
        probed = probe(device)
        return CudaDecoder(
            model,
            options.lanes,
            options.context or min(DEFAULT_CONTEXT, model.max_positions),
            device,
            options.decode_batch,
            copies=probed.tuning,
            measured=probed.statistics(),
            keep_nbytes=options.keep_nbytes,
        )
    except BaseException:
        device.close()
        raise


def occupants(config: Mapping[str, Any]) -> list[str]:
    """One sentence for each other user of the GPU that these options name.

    Raises:
        Refused: an option is unknown or wrong.
        BackendUnavailable: there is no such GPU here.
    """
    return users(read_options(config, Options, "cuda").device)


class CudaDecoder(KeepsInLanes):
    """Decodes up to `lanes` sequences of up to `context` positions on one device.

    Implements `Decoder`, `PinsSlabs` and `KeepsEntries`. Its imports are fenced by device events.
    """

    def __init__(
        self,
        model: LoadedModel,
        lanes: int,
        context: int,
        device: Device,
        decode_batch: int = 1,
        *,
        copies: CopyTuning,
        measured: Mapping[str, int] | None = None,
        keep_nbytes: int = 0,
    ) -> None:
        """The model lies on the device; it and the device are this decoder's from now on.

        `copies`: how to feed the device. `measured`: what the start-up probe found, for statistics.

        Raises:
            Refused: device memory is short, or the context is longer than the model's.
        """
        if context > model.max_positions:
            raise Refused(
                f"context is {context}, the model was made for {model.max_positions}",
                field="context",
            )
        self.caps = Caps(
            max_lanes=lanes, device_events=True, decode_batch=decode_batch, copies=copies
        )
        self.facts = {**model.pairing_facts("DynamicCache"), "decode_batch": decode_batch}
        self._model: LoadedModel | None = model
        self._device = device
        self._manifest = manifest(model.config, model.directory, "decoder", model.dtype, context)
        layers = self._manifest.layers
        self.keeps_nbytes = keep_nbytes
        extra = extra_storages(layers, context, keep_nbytes)
        self._copies = LaneCopies(device, layers, copies.shared_chunk_nbytes)
        self._lanes = LaneTable(
            layers, context, lanes, device.empty, extra=extra, copier=self._copies.move
        )
        self._reads = device.stream("read")
        self._pins = Pins(device, read_only=True)
        self._measured = dict(measured or {})
        self._batching = _batching_on(device, model, layers, decode_batch)
        device.synchronize()  # the memory above may have been another's until now

    def manifest(self) -> Manifest:
        return self._manifest

    def reserve(self, num_tokens: int) -> Reservation:
        """Set a lane aside for a prompt.

        Raises:
            WouldBlock: no lane is free.
            LocalProtocolError: the prompt can never fit.
        """
        return self._lanes.reserve(num_tokens)

    def begin_import(
        self, reservation: Reservation, slot: SlotView, copies: Sequence[Copy]
    ) -> Fence:
        """Queue copies of cells from the slot into the reservation; their fence is a device event.

        Raises:
            LocalProtocolError: the reservation is stale, or a copy lies outside it or the slot;
                then nothing was queued.
            DeviceError: the device failed.
        """
        targets = self._lanes.targets(reservation, slot, copies)
        return self._copies.begin(reservation.lane, targets, slot, copies)

    def read(self, held: Reservation | Entry, layout: Layout, copy: Copy) -> memoryview:
        """The prompt's bytes of a copy's cells as landed, in `layout` order; the host waits.

        Raises:
            LocalProtocolError: `held` is stale, or the lane does not hold these positions any
                more.
            DeviceError: the device failed.
        """
        cells = self._lanes.cells(held, copy)
        heads, positions, head_dim = cells.shape
        row_nbytes = positions * head_dim * cells.element_size()
        landed = np.empty((heads, row_nbytes), np.uint8)
        target = Rows(int(landed.ctypes.data), row_nbytes)
        self._copies.before_read(held.lane, self._reads)
        self._device.copy(self._reads, target, rows_of(cells), row_nbytes, heads)
        self._device.record(self._reads).wait()
        if layout == "token_major":
            by_head = landed.reshape(heads, positions, -1)
            landed = np.ascontiguousarray(by_head.transpose(1, 0, 2))
        return landed.data.cast("B")

    def publish(self, reservation: Reservation) -> Entry:
        """Make the reservation visible to decode, which waits on the device for its copies."""
        entry = self._lanes.publish(reservation)
        self._copies.before_decode(entry.lane)
        return entry

    def free(self, held: Reservation | Entry) -> None:
        """Give the lane back.

        Raises:
            LocalProtocolError: `held` is stale, or copies into the lane are in flight.
            DeviceError: the device failed.
        """
        self._copies.check_quiet(held.lane)
        self._lanes.free(held)
        self._copies.give_back(held.lane)
        if self._batching is not None:
            self._batching.forget(held)

    def decode_step(self, active: Sequence[tuple[Entry, int]]) -> list[memoryview]:
        """Feed each entry its next token; returns each one's float32 row of logits.

        All entries advance by one position, or none does. The host waits for the logits.

        Raises:
            LocalProtocolError: an entry is stale or not published, given twice or full, or a token
                is unknown.
            DeviceError: the device failed.
        """
        if self._model is None:
            raise Closed("the cuda decoder was closed")
        with self._device.on_compute():
            return decode_lanes(self._model, self._lanes, self._batching, active)

    def register(self, slab: HostRange) -> None:
        """Pin a slab, once it is mapped; where that fails it is pageable."""
        self._pins.register(slab)

    def unregister(self, slab: HostRange) -> None:
        """The slab is about to be unmapped; no copy of it is in flight."""
        self._pins.unregister(slab)

    def statistics(self) -> Mapping[str, int]:
        """Of the lanes and what is kept, the pinned slabs, the device, and the start-up probe."""
        return {
            **self._lanes.statistics(),
            **self._pins.statistics(),
            **self._device.statistics(),
            **self._measured,
        }

    def close(self) -> None:
        """Wait for the device, then unpin all slabs and give everything back. Idempotent."""
        if self._model is None:
            return
        self._model = self._batching = None
        try:
            self._device.synchronize()
            self._pins.close()
        finally:
            self._copies.close()
            self._lanes.close()
            self._device.close()


def _batching_on(
    device: Device, model: LoadedModel, layers: Sequence[Layer], decode_batch: int
) -> Batching | None:
    if decode_batch == 1:
        return None
    with device.on_compute():
        return Batching(model, layers, decode_batch, device.empty)
