"""The CPU decoder: lanes of reserved memory, and one sequence per forward.

Sequences are decoded one after another and never batched, because a batch of two rounds otherwise
than two batches of one: what a request gets does not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from msgspec import Meta, Struct

from headrace.backends.base import Caps, Done, Entry, Reservation, SlotView
from headrace.backends.lane_table import LaneTable
from headrace.backends.options import read_options
from headrace.backends.torch import TorchEngine
from headrace.engine.capacity import require_memory
from headrace.engine.host import copy_rows
from headrace.engine.lanes import Lane, lane_nbytes
from headrace.engine.layers import manifest
from headrace.engine.loading import LoadedModel, load_model
from headrace.engine.tensors import as_bytes, over_address
from headrace.errors import Closed, Refused
from headrace.geometry import Layout, Manifest
from headrace.plan import Copy

DEFAULT_CONTEXT = 2048


class Options(Struct, frozen=True, forbid_unknown_fields=True):
    """What `open` takes.

    model: a directory with config.json and safetensors. attn: the attention implementation, by
    default the model's best. lanes: most requests that hold storage at once. context: positions of
    one lane, by default the model's or 2048, whichever is fewer.
    """

    model: str
    dtype: str = "float32"
    threads: Annotated[int, Meta(ge=1)] = 1
    attn: str | None = None
    lanes: Annotated[int, Meta(ge=1)] = 1
    context: Annotated[int, Meta(ge=1)] | None = None


def open(config: Mapping[str, Any]) -> CpuDecoder:
    """Load the decoder from the fields of `Options`.

    Raises:
        Refused: an option is unknown or wrong, the model's cache is not supported, or memory is
        short.
    """
    options = read_options(config, Options, "cpu")
    model = load_model(
        Path(options.model),
        dtype=options.dtype,
        threads=options.threads,
        attention=options.attn,
    )
    context = options.context or min(DEFAULT_CONTEXT, model.max_positions)
    return CpuDecoder(model, options.lanes, context)


class CpuDecoder:
    """Decodes up to `lanes` sequences of up to `context` positions in this process."""

    def __init__(self, model: LoadedModel, lanes: int, context: int) -> None:
        if context > model.max_positions:
            raise Refused(
                f"context is {context}, the model was made for {model.max_positions}",
                field="context",
            )
        self.caps = Caps(max_lanes=lanes)
        self.facts = model.pairing_facts("DynamicCache")
        self._model: LoadedModel | None = model
        self._manifest = manifest(model.config, model.directory, "decoder", model.dtype, context)
        self._layers = self._manifest.layers
        require_memory(lanes * lane_nbytes(self._layers, context), f"{lanes} lanes")
        self._lanes = LaneTable(self._layers, context, lanes)

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

    def decode_step(self, active: Sequence[tuple[Entry, int]]) -> list[memoryview]:
        """Feed each entry its next token; returns each one's float32 row of logits.

        All entries advance by one position, or none does.

        Raises:
            LocalProtocolError: an entry is stale or not published, given twice or full, or a token
            is unknown.
        """
        if self._model is None:
            raise Closed("the cpu decoder was closed")
        lanes = self._lanes.decoding([entry for entry, _ in active])
        for _, token in active:
            self._model.check_tokens((token,))
        before = [lane.length for lane in lanes]
        try:
            return [
                self._decode_one(self._model, lane, token)
                for lane, (_, token) in zip(lanes, active, strict=True)
            ]
        except BaseException:
            for lane, length in zip(lanes, before, strict=True):
                lane.rewind(length)
            raise

    def prefill_engine(self) -> TorchEngine:
        """An engine that computes with this decoder's weights and threads."""
        if self._model is None:
            raise Closed("the cpu decoder was closed")
        return TorchEngine(self._model, self._model.max_positions)

    def statistics(self) -> Mapping[str, int]:
        """Lanes by state, and bytes of lane storage."""
        return self._lanes.statistics()

    def close(self) -> None:
        self._model = None
        self._lanes.close()

    def _decode_one(self, model: LoadedModel, lane: Lane, token: int) -> memoryview:
        logits = model.forward(torch.tensor([[token]], dtype=torch.long), lane.cache)
        return logits.numpy().data
