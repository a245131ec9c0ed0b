"""The lanes of one decoder, who holds each, and what is kept beyond them: what all decoders share.

It says which lane a reservation or an entry stands for, refuses stale ones, and checks both ends of
a copy before a tensor of them exists. The only bytes that it moves are those of kept entries, and
these by a copier of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

import torch

from headrace.backends.base import Entry, Kept, Reservation, ReserveFailed, SlotView
from headrace.backends.storages import Storages
from headrace.engine.lanes import Lane, host_bytes
from headrace.engine.prefill import Seed, States, needed_rows
from headrace.engine.tensors import check_region
from headrace.errors import LocalProtocolError, WouldBlock
from headrace.geometry import Layer, Sliding
from headrace.plan import Copy, live_window

Move: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""A target and a source of one shape, [heads, positions, head_dim], both in the device's memory."""

Copier: TypeAlias = Callable[[Sequence[Move]], None]
"""Carries moves out, or queues them in order with imports and before what later decodes: then it
holds on to the tensors until they are done. Raises: DeviceError."""


def copy_now(moves: Sequence[Move]) -> None:
    """The copier of host memory: all is copied on return."""
    for target, source in moves:
        target.copy_(source)


class _LaneState(Enum):
    FREE = "free"
    RESERVED = "reserved"
    PUBLISHED = "published"


@dataclass
class _Record:
    """A lane and who holds it; `serial` rises with each reservation, so that stale ones differ.

    kept_positions: the first positions came from what is kept; no import may touch them.
    """

    lane: Lane
    state: _LaneState = _LaneState.FREE
    serial: int = 0
    kept_positions: int = 0


class LaneTable:
    """`lanes` lanes of up to `context` positions.

    allocate: makes a lane's memory of that many bytes, a flat uint8 tensor. extra: memories beside
    those of the lanes, for what is kept. copier: moves what is kept.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        context: int,
        lanes: int,
        allocate: Callable[[int], torch.Tensor] = host_bytes,
        *,
        extra: int = 0,
        copier: Copier = copy_now,
    ) -> None:
        self._layers = layers
        self._context = context
        self._storages = Storages(layers, context, lanes + extra, allocate)
        self._copier = copier
        self._records = [_Record(Lane(layers, context, None)) for _ in range(lanes)]

    def reserve(self, num_tokens: int) -> Reservation:
        """Set a lane aside for a prompt.

        Raises:
            WouldBlock: no lane is free.
            LocalProtocolError: the prompt can never fit, or too much is kept for the lane to have
                memory.
        """
        index = self._free_lane(num_tokens)
        self._records[index].lane.use(self._storages.take(index))
        return self._reserved(index, num_tokens)

    def reserve_from(self, kept: Kept, positions: int, num_tokens: int) -> Reservation:
        """Set a lane aside with the live cells of [0, `positions`) of `kept` in place.

        Raises:
            WouldBlock: no lane is free.
            LocalProtocolError: as `reserve`, or `kept` cannot be reused so.
            ReserveFailed: a copy failed; the lane and its memory stay taken until it is freed.
        """
        if not self.can_reuse(kept, positions) or positions > num_tokens:
            raise LocalProtocolError(
                f"positions [0, {positions}) of {kept} for a prompt of {num_tokens}"
            )
        index = self._free_lane(num_tokens)
        lane = self._records[index].lane
        storage = self._storages.take_over(kept, positions, index)
        in_place = storage is not None
        lane.use(storage if storage is not None else self._storages.take(index))
        reservation = self._reserved(index, num_tokens, positions)
        moves: list[Move] = []
        for layer in self._layers:
            start = live_window(layer, num_tokens)[0]
            if start >= positions or (in_place and not isinstance(layer.kind, Sliding)):
                continue
            sources = self._storages.rows(kept, layer, start, positions)
            for part, source in enumerate(sources):
                moves.append((lane.cells(layer.index, part, start, positions), source))
        try:
            self._copier(moves)
        except Exception as exc:
            raise ReserveFailed(f"{kept} was not copied: {exc}", reservation) from exc
        return reservation

    def storage_of(self, held: Reservation | Entry) -> int:
        """The number of the memory that a lane uses. Raises: LocalProtocolError: it is stale."""
        self._held(held, _state_of(held))
        return self._storages.number_of(held.lane)

    def keep(self, entry: Entry) -> Kept:
        """Keep a published entry's prompt, before its first decode step.

        Raises:
            LocalProtocolError: the entry is stale, or was decoded.
            Refused: there is no memory for its sliding layers' rows; then nothing is kept.
        """
        lane = self._held(entry, _LaneState.PUBLISHED).lane
        if lane.length != entry.num_tokens:
            raise LocalProtocolError(f"{entry} has {lane.length} positions: it was decoded")
        tails = self._storages.new_tails(entry.num_tokens)
        window = {layer: live_window(self._layers[layer], entry.num_tokens) for layer in tails}
        self._copier(
            [
                (target, lane.cells(layer, part, *window[layer]))
                for layer, parts in tails.items()
                for part, target in enumerate(parts)
            ]
        )
        return self._storages.keep(entry.lane, entry.num_tokens, tails)

    def can_reuse(self, kept: Kept, positions: int) -> bool:
        """Whether positions [0, `positions`) of it are enough to go on from.

        Raises:
            LocalProtocolError: it is not kept.
        """
        return self._storages.can_reuse(kept, positions)

    def seed(self, kept: Kept, positions: int) -> Seed:
        """What a prefill can go on from at `positions`: views, good for as long as it is kept.

        Raises:
            LocalProtocolError: it is not kept, or cannot be reused so.
        """
        if not self.can_reuse(kept, positions):
            raise LocalProtocolError(f"positions [0, {positions}) of {kept} are not enough")
        layers: list[States | None] = []
        for layer in self._layers:
            start = positions - needed_rows(layer, positions)
            rows = self._storages.rows(kept, layer, start, positions) if layer.parts else ()
            layers.append((rows[0], rows[1]) if rows else None)
        return Seed(positions, tuple(layers))

    def evict(self, kept: Kept) -> None:
        """Keep it no longer. Raises: LocalProtocolError if it is not kept."""
        self._storages.evict(kept)

    @property
    def kept_nbytes(self) -> int:
        """Bytes of memories that no lane uses and something is kept in, and of all tails."""
        return self._storages.kept_nbytes

    def targets(
        self, reservation: Reservation, slot: SlotView, copies: Sequence[Copy]
    ) -> list[torch.Tensor]:
        """The lane's cells of each copy, [heads, positions, head_dim], both ends checked.

        Raises:
            LocalProtocolError: the reservation is stale, or a copy lies outside it or the slot, or
                in what is kept.
        """
        record = self._held(reservation, _LaneState.RESERVED)
        return [self._target(record, slot, copy) for copy in copies]

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
        """Give the lane back; its memory stays for what is kept in it."""
        record = self._held(held, _state_of(held))
        record.lane.leave()
        record.state = _LaneState.FREE
        self._storages.leave(held.lane)

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
        """Lanes by state, memories by use, their bytes, and what is kept."""
        states = [record.state for record in self._records]
        return {
            "lanes_free": states.count(_LaneState.FREE),
            "lanes_reserved": states.count(_LaneState.RESERVED),
            "lanes_published": states.count(_LaneState.PUBLISHED),
            "nbytes": self._storages.nbytes,
            **self._storages.statistics(),
        }

    def check_integrity(self) -> None:
        """Raise LocalProtocolError unless each lane in use has one memory, and all adds up."""
        states = enumerate(record.state for record in self._records)
        self._storages.check_integrity([at for at, s in states if s is not _LaneState.FREE])

    def close(self) -> None:
        """Let go of all lanes and memories. Idempotent."""
        self._records = []
        self._storages.close()

    def _free_lane(self, num_tokens: int) -> int:
        if not 1 <= num_tokens <= self._context:
            raise LocalProtocolError(f"{num_tokens} tokens, a lane holds 1 to {self._context}")
        for index, record in enumerate(self._records):
            if record.state is _LaneState.FREE:
                return index
        raise WouldBlock(f"all {len(self._records)} lanes are taken")

    def _reserved(self, index: int, num_tokens: int, kept_positions: int = 0) -> Reservation:
        record = self._records[index]
        record.lane.begin(num_tokens)
        record.state = _LaneState.RESERVED
        record.serial += 1
        record.kept_positions = kept_positions
        return Reservation(index, num_tokens, record.serial)

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

    def _target(self, record: _Record, slot: SlotView, copy: Copy) -> torch.Tensor:
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
        if copy.start < record.kept_positions:
            raise LocalProtocolError(
                f"{copy}, the first {record.kept_positions} positions are there and kept"
            )
        return record.lane.cells(copy.layer, copy.part, copy.start, copy.stop)


_TYPES: Final = {_LaneState.RESERVED: Reservation, _LaneState.PUBLISHED: Entry}


def _state_of(held: Reservation | Entry) -> _LaneState:
    return _LaneState.RESERVED if isinstance(held, Reservation) else _LaneState.PUBLISHED
