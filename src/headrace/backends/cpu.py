"""The CPU decoder: lanes of reserved memory, decoded in place.

By default sequences are decoded one after another, one per forward: the exact mode, since a batch
of two rounds otherwise than two batches of one. With `decode_batch` several are decoded in one
forward, as `headrace.engine.batching` says. In both what a request gets does not depend on its
neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from headrace.backends.base import Caps, Done, Entry, Reservation, SlotView
from headrace.backends.keeping import ContinuingEngine, KeepsInLanes, extra_storages
from headrace.backends.lane_table import LaneTable
from headrace.backends.options import read_options
from headrace.backends.stepping import decode_lanes
from headrace.engine.batching import Batching
from headrace.engine.capacity import require_memory
from headrace.engine.host import copy_rows
from headrace.engine.lanes import lane_nbytes
from headrace.engine.layers import manifest
from headrace.engine.loading import LoadedModel, load_model
from headrace.engine.tensors import as_bytes, over_address
from headrace.errors import Closed, Refused
from headrace.geometry import Layout, Manifest
from headrace.plan import Copy

DEFAULT_CONTEXT = 2048
MAX_DECODE_BATCH = 256


class Options(Struct, frozen=True, forbid_unknown_fields=True):
    """What `open` takes.

    model: a directory with config.json and safetensors. attn: the attention implementation, by
    default the model's best. lanes: most requests that hold storage at once. context: positions of
    one lane, by default the model's or 2048, whichever is fewer. decode_batch: sequences decoded in
    one forward; 1 is the exact mode. keep_nbytes: bytes for entries kept beyond their lanes, 0 to
    keep none.
    """

    model: str
    dtype: str = "float32"
    threads: Annotated[int, Meta(ge=1)] = 1
    attn: str | None = None
    lanes: Annotated[int, Meta(ge=1)] = 1
    context: Annotated[int, Meta(ge=1)] | None = None
    decode_batch: Annotated[int, Meta(ge=1, le=MAX_DECODE_BATCH)] = 1
    keep_nbytes: Annotated[int, Meta(ge=0)] = 0


def open(config: Mapping[str, Any]) -> CpuDecoder:
    """Load the decoder from the fields of `Options`.

    Raises:
        Refused: an option is unknown or wrong, the model's cache is not supported or cannot be
        decoded in batches, or memory is short.
    """
    options = read_options(config, Options, "cpu")
    model = load_model(
        Path(options.model),
        dtype=options.dtype,
        threads=options.threads,
        attention=options.attn,
    )
    context = options.context or min(DEFAULT_CONTEXT, model.max_positions)
    return CpuDecoder(
        model, options.lanes, context, options.decode_batch, keep_nbytes=options.keep_nbytes
    )


class CpuDecoder(KeepsInLanes):
    """Decodes up to `lanes` sequences of up to `context` positions in this process.

    `decode_batch` of them in one forward. `keep_nbytes`: see `Options`.
    """

    def __init__(
        self,
        model: LoadedModel,
        lanes: int,
        context: int,
        decode_batch: int = 1,
        *,
        keep_nbytes: int = 0,
    ) -> None:
        if context > model.max_positions:
            raise Refused(
                f"context is {context}, the model was made for {model.max_positions}",
                field="context",
            )
        self.caps = Caps(max_lanes=lanes, decode_batch=decode_batch)
        self.facts = {**model.pairing_facts("DynamicCache"), "decode_batch": decode_batch}
        self._model: LoadedModel | None = model
        self._manifest = manifest(model.config, model.directory, "decoder", model.dtype, context)
        self._layers = self._manifest.layers
        self.keeps_nbytes = keep_nbytes
        extra = extra_storages(self._layers, context, keep_nbytes)
        what = f"{lanes} lanes" + (f" and {extra} for kept entries" if extra else "")
        require_memory((lanes + extra) * lane_nbytes(self._layers, context), what)
        self._lanes = LaneTable(self._layers, context, lanes, extra=extra)
        self._batching = Batching(model, self._layers, decode_batch) if decode_batch > 1 else None

    @property
    def rows_alike(self) -> bool:
        """Whether it is the same which row of a batch an entry has, as far as a probe can tell."""
        return self._batching is None or self._batching.rows_alike

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
    ) -> Done:
        """Copy cells from the slot into the reservation; it is finished on return.

        Raises:
            LocalProtocolError: the reservation is stale, or a copy lies outside it or the slot;
            then nothing was written.
        """
        targets = self._lanes.targets(reservation, slot, copies)
        for copy, target in zip(copies, targets, strict=True):
            if slot.layout == "head_major":
                stride = target.stride(0) * target.element_size()
                copy_rows(target.data_ptr(), stride, slot.address, copy.source)
            else:
                part = self._layers[copy.layer].parts[copy.part]
                source = over_address(
                    slot.address, copy.source, part, copy.stop - copy.start, slot.layout
                )
                target.copy_(source)
        return Done()

    def read(self, held: Reservation | Entry, layout: Layout, copy: Copy) -> memoryview:
        """The prompt's bytes of a copy's cells as landed, in `layout` order.

        Raises:
            LocalProtocolError: `held` is stale, or the lane does not hold these positions any
            more.
        """
        cells = self._lanes.cells(held, copy)
        return as_bytes(cells if layout == "head_major" else cells.permute(1, 0, 2))

    def publish(self, reservation: Reservation) -> Entry:
        """Make the reservation visible to decode; no byte moves."""
        return self._lanes.publish(reservation)

    def free(self, held: Reservation | Entry) -> None:
        """Give the lane back."""
        self._lanes.free(held)
        if self._batching is not None:
            self._batching.forget(held)

    def decode_step(self, active: Sequence[tuple[Entry, int]]) -> list[memoryview]:
        """Feed each entry its next token; returns each one's float32 row of logits.

        All entries advance by one position, or none does.

        Raises:
            LocalProtocolError: an entry is stale or not published, given twice or full, or a token
            is unknown.
        """
        if self._model is None:
            raise Closed("the cpu decoder was closed")
        return decode_lanes(self._model, self._lanes, self._batching, active)

    def prefill_engine(self) -> ContinuingEngine:
        """An engine that computes with this decoder's weights and threads, on what is kept here."""
        if self._model is None:
            raise Closed("the cpu decoder was closed")
        return ContinuingEngine(self._model, self._model.max_positions, self._lanes.seed)

    def statistics(self) -> Mapping[str, int]:
        """Lanes by state, memories by use, their bytes, and what is kept."""
        return self._lanes.statistics()

    def close(self) -> None:
        self._model = self._batching = None
        self._lanes.close()
