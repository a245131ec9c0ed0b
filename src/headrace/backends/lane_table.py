"""The lanes of one decoder, and who holds each: what all decoders of this project share.

It moves no byte of a cache. It says which lane a reservation or an entry stands for, refuses stale
ones, and checks both ends of a copy before a tensor of them exists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

import torch

from headrace.backends.base import Entry, Reservation, SlotView
from headrace.engine.lanes import Lane, host_bytes
from headrace.engine.tensors import check_region
from headrace.errors import LocalProtocolError, WouldBlock
from headrace.geometry import Layer
from headrace.plan import Copy


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


class LaneTable:
    """`lanes` lanes of up to `context` positions.

    allocate: makes a lane's memory of that many bytes, a flat uint8 tensor.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        context: int,
        lanes: int,
        allocate: Callable[[int], torch.Tensor] = host_bytes,
    ) -> None:
        self._layers = layers
        self._context = context
        self._records = [_Record(Lane(layers, context, allocate)) for _ in range(lanes)]

    def reserve(self, num_tokens: int) -> Reservation:
        """Set a lane aside for a prompt.

        Raises:
            WouldBlock: no lane is free.
            LocalProtocolError: the prompt can never fit.
        """
        if not 1 <= num_tokens <= self._context:
            raise LocalProtocolError(f"{num_tokens} tokens, a lane holds 1 to {self._context}")
        for index, record in enumerate(self._records):
            if record.state is _LaneState.FREE:
                record.lane.begin(num_tokens)
                record.state = _LaneState.RESERVED
                record.serial += 1
                return Reservation(index, num_tokens, record.serial)
        raise WouldBlock(f"all {len(self._records)} lanes are taken")

    def targets(
        self, reservation: Reservation, slot: SlotView, copies: Sequence[Copy]
    ) -> list[torch.Tensor]:
        """The lane's cells of each copy, [heads, positions, head_dim], both ends checked.

        Raises:
            LocalProtocolError: the reservation is stale, or a copy lies outside it or the slot.
        """
        lane = self._held(reservation, _LaneState.RESERVED).lane
        return [self._target(lane, slot, copy) for copy in copies]

    def cells(self, held: Reservation | Entry, copy: Copy) -> torch.Tensor:
        """The prompt's cells of a copy, a view [heads, positions, head_dim].

        Raises:
            LocalProtocolError: `held` is stale, or the lane does not hold these positions any
            more.
        """
        lane = self._held(held, _state_of(held)).lane
        return lane.cells(copy.layer, copy.part, copy.start, copy.stop)

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

    def decoding(self, entries: Sequence[Entry]) -> list[Lane]:
        """The lanes of entries that are about to take one decode step together.

        Raises:
            LocalProtocolError: an entry is stale or not published, given twice or full.
        """
        lanes = [self._held(entry, _LaneState.PUBLISHED).lane for entry in entries]
        if len({entry.lane for entry in entries}) != len(entries):
            raise LocalProtocolError("an entry is given twice in one decode step")
        for entry, lane in zip(entries, lanes, strict=True):
            if lane.length >= self._context:
                raise LocalProtocolError(
                    f"lane {entry.lane} is full: {lane.length} of {self._context} positions"
                )
        return lanes

    def statistics(self) -> dict[str, int]:
        """Lanes by state, and bytes of lane storage."""
        states = [record.state for record in self._records]
        return {
            "lanes_free": states.count(_LaneState.FREE),
            "lanes_reserved": states.count(_LaneState.RESERVED),
            "lanes_published": states.count(_LaneState.PUBLISHED),
            "nbytes": sum(record.lane.storage.nbytes for record in self._records),
        }

    def close(self) -> None:
        """Let go of all lanes. Idempotent."""
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


_TYPES: Final = {_LaneState.RESERVED: Reservation, _LaneState.PUBLISHED: Entry}


def _state_of(held: Reservation | Entry) -> _LaneState:
    return _LaneState.RESERVED if isinstance(held, Reservation) else _LaneState.PUBLISHED
