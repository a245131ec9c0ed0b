"""The CPU decoder: lanes of reserved memory, and one sequence per forward.

Sequences are decoded one after another and never batched, because a batch of two rounds otherwise
than two batches of one: what a request gets does not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
from msgspec import Meta, Struct

from headrace.backends.base import Caps, Done, Entry, Reservation, SlotView
from headrace.backends.options import read_options
from headrace.backends.torch import TorchEngine
from headrace.engine.capacity import require_memory
from headrace.engine.host import copy_rows
from headrace.engine.lanes import Lane, lane_nbytes
from headrace.engine.layers import manifest
from headrace.engine.loading import LoadedModel, load_model
from headrace.engine.tensors import as_bytes, check_region, over_address
from headrace.errors import Closed, LocalProtocolError, Refused, WouldBlock
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


class _LaneState(Enum):
    FREE = "free"
    RESERVED = "reserved"
    PUBLISHED = "published"


@dataclass
class _Record:
    """A lane and who holds it; `serial` rises with each reservation, so that stale ones differ."""

    lane: Lane
    state: _LaneState = _LaneState.FREE
    serial: int = 0


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
        self._records = [_Record(Lane(self._layers, context)) for _ in range(lanes)]

    def manifest(self) -> Manifest:
        return self._manifest

    def reserve(self, num_tokens: int) -> Reservation:
        """Set a lane aside for a prompt.

        Raises:
            WouldBlock: no lane is free.
            LocalProtocolError: the prompt can never fit.
        """
        if not 1 <= num_tokens <= self._manifest.max_positions:
            raise LocalProtocolError(
                f"{num_tokens} tokens, a lane holds 1 to {self._manifest.max_positions}"
            )
        for index, record in enumerate(self._records):
            if record.state is _LaneState.FREE:
                record.lane.begin(num_tokens)
                record.state = _LaneState.RESERVED
                record.serial += 1
                return Reservation(index, num_tokens, record.serial)
        raise WouldBlock(f"all {len(self._records)} lanes are taken")

    def begin_import(
        self, reservation: Reservation, slot: SlotView, copies: Sequence[Copy]
    ) -> Done:
        """Copy cells from the slot into the reservation; it is finished on return.

        Raises:
            LocalProtocolError: the reservation is stale, or a copy lies outside it or the slot;
            then nothing was written.
        """
        lane = self._held(reservation, _LaneState.RESERVED).lane
        targets = [self._target(lane, slot, copy) for copy in copies]
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
        lane = self._held(held, _state_of(held)).lane
        cells = lane.cells(copy.layer, copy.part, copy.start, copy.stop)
        return as_bytes(cells if layout == "head_major" else cells.permute(1, 0, 2))

    def publish(self, reservation: Reservation) -> Entry:
        """Make the reservation visible to decode; no byte moves."""
        record = self._held(reservation, _LaneState.RESERVED)
        record.lane.publish()
        record.state = _LaneState.PUBLISHED
        return Entry(reservation.lane, reservation.num_tokens, reservation.serial)

    def free(self, held: Reservation | Entry) -> None:
        """Give the lane back."""
        record = self._held(held, _state_of(held))
        record.lane.begin(0)
        record.state = _LaneState.FREE

    def decode_step(self, active: Sequence[tuple[Entry, int]]) -> list[memoryview]:
        """Feed each entry its next token; returns each one's float32 row of logits.

        All entries advance by one position, or none does.

        Raises:
            LocalProtocolError: an entry is stale or not published, given twice or full, or a token
            is unknown.
        """
        if self._model is None:
            raise Closed("the cpu decoder was closed")
        lanes = [self._held(entry, _LaneState.PUBLISHED).lane for entry, _ in active]
        if len({entry.lane for entry, _ in active}) != len(active):
            raise LocalProtocolError("an entry is given twice in one decode step")
        for (entry, token), lane in zip(active, lanes, strict=True):
            self._model.check_tokens((token,))
            if lane.length >= self._manifest.max_positions:
                raise LocalProtocolError(
                    f"lane {entry.lane} is full: {lane.length} of "
                    f"{self._manifest.max_positions} positions"
                )
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
        states = [record.state for record in self._records]
        return {
            "lanes_free": states.count(_LaneState.FREE),
            "lanes_reserved": states.count(_LaneState.RESERVED),
            "lanes_published": states.count(_LaneState.PUBLISHED),
            "nbytes": sum(record.lane.storage.nbytes for record in self._records),
        }

    def close(self) -> None:
        self._model = None
        self._records = []

    def _held(self, held: Reservation | Entry, state: _LaneState) -> _Record:
        if not 0 <= held.lane < len(self._records):
            raise LocalProtocolError(f"lane {held.lane}, the decoder has {len(self._records)}")
        record = self._records[held.lane]
        if not isinstance(held, _TYPES[state]) or record.serial != held.serial:
            raise LocalProtocolError(
                f"{held} where a lane that is {state.value} is needed; lane {held.lane} has "
                f"serial {record.serial}"
            )
        if record.state is not state:
            raise LocalProtocolError(f"{held}: the lane is {record.state.value}, not {state.value}")
        return record

    def _target(self, lane: Lane, slot: SlotView, copy: Copy) -> torch.Tensor:
        """The lane's cells of a copy, once both ends of it are checked."""
        if not 0 <= copy.layer < len(self._layers):
            raise LocalProtocolError(f"layer {copy.layer}, the model has {len(self._layers)}")
        parts = self._layers[copy.layer].parts
        if not 0 <= copy.part < len(parts):
            raise LocalProtocolError(
                f"part {copy.part} of {self._layers[copy.layer].name}, which has {len(parts)}"
            )
        check_region(
            copy.source, parts[copy.part], copy.stop - copy.start, slot.layout, slot.buffer.nbytes
        )
        return lane.cells(copy.layer, copy.part, copy.start, copy.stop)

    def _decode_one(self, model: LoadedModel, lane: Lane, token: int) -> memoryview:
        logits = model.forward(torch.tensor([[token]], dtype=torch.long), lane.cache)
        return logits.numpy().data


_TYPES = {_LaneState.RESERVED: Reservation, _LaneState.PUBLISHED: Entry}


def _state_of(held: Reservation | Entry) -> _LaneState:
    return _LaneState.RESERVED if isinstance(held, Reservation) else _LaneState.PUBLISHED
