"""How cells come into lanes on a device: copies on a stream of their own, in order, without a wait.

The host only queues. Four orders are kept on the device:

- copies into a lane come after what compute still does with the memory that was given back last;
- a piece that must be laid out otherwise (a slot keeps position by position what a lane keeps head
  by head) lands in a place of a small ring first and is laid out from there by a kernel on a second
  stream, so that the link goes on meanwhile; the place is filled again only after that kernel;
- decode of a lane comes after the last of its own copies, and waits for those of no other lane;
- what is moved between memories of the device comes after all that compute was given before.

A fence keeps what its copies read from: the slot's bytes stay mapped until it is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from headrace.backends.base import SlotView
from headrace.backends.lane_table import Move
from headrace.engine.device import Device, Event, Rows, Stream
from headrace.engine.tensors import dtype_of
from headrace.errors import LocalProtocolError
from headrace.geometry import Layer, Part
from headrace.messages import DeviceTimes
from headrace.plan import Copy

RING_PLACES: Final = 4


class CopyFence:
    """The proof that the copies of one import have landed; implements `TimedFence`."""

    def __init__(
        self, device: Device, begun: Event, ended: Event, kept: object, flying: set[CopyFence]
    ) -> None:
        """`kept`: what must live until then. `flying`: those that it is one of until then."""
        self._device = device
        self._begun = begun
        self._ended = ended
        self._kept: object = kept
        self._flying = flying
        self._done = False
        flying.add(self)

    def done(self) -> bool:
        """Whether they have; raises DeviceError if the device failed before that was known."""
        if self._done:
            return True
        if not self._ended.done():
            return False
        self._done = True
        self._kept = None
        self._flying.discard(self)
        return True

    def times(self) -> DeviceTimes:
        """When they ran, by device events; once it is done."""
        return self._device.times(self._begun, self._ended)


@dataclass
class _Place:
    """Device memory of the ring, and the event after which it can be filled again."""

    memory: torch.Tensor
    read: Event | None = None


class LaneCopies:
    """The copies into all lanes of one decoder."""

    def __init__(self, device: Device, layers: Sequence[Layer], ring_nbytes: int) -> None:
        """`ring_nbytes`: of each of the ring's places.

        Raises:
            Refused: there is no device memory for the ring.
        """
        self._device = device
        self._layers = layers
        self._link = device.stream("import")
        self._layout = device.stream("layout")
        widest = max((part.row_nbytes for layer in layers for part in layer.parts), default=1)
        self._place_nbytes = max(ring_nbytes, widest)
        self._ring = [_Place(device.empty(self._place_nbytes)) for _ in range(RING_PLACES)]
        self._next_place = 0
        self._given_back: Event | None = None
        self._flights: dict[int, set[CopyFence]] = {}  # by lane, not known to be done
        self._last: dict[int, dict[str, Event]] = {}  # by lane and stream
        self._moving: set[CopyFence] = set()

    def begin(
        self, lane: int, targets: Sequence[torch.Tensor], slot: SlotView, copies: Sequence[Copy]
    ) -> CopyFence:
        """Queue copies from a slot into a lane's cells; both ends were checked.

        Raises:
            DeviceError: the device failed.
        """
        self._after_what_was_given_back()
        begun = self._device.record(self._link)
        if slot.layout == "head_major":
            for copy, target in zip(copies, targets, strict=True):
                offset, heads, row_nbytes, stride = copy.source
                source = Rows(slot.address + offset, stride)
                self._device.copy(self._link, rows_of(target), source, row_nbytes, heads)
            stream = self._link
        else:
            for copy, target in zip(copies, targets, strict=True):
                self._lay_out(target, slot.address + copy.source.offset, copy)
            stream = self._layout
        ended = self._device.record(stream)
        self._last.setdefault(lane, {})[stream.name] = ended
        flying = self._flights.setdefault(lane, set())
        return CopyFence(self._device, begun, ended, slot.buffer, flying)

    def move(self, moves: Sequence[Move]) -> None:
        """Queue copies between memories of the device; the copier of a `LaneTable`.

        They come after all that compute was given so far, and before all that it is given later.
        The tensors are held until they are done. Raises: DeviceError.
        """
        for fence in tuple(self._moving):
            fence.done()
        if not moves:
            return
        device = self._device
        device.wait(self._link, device.record(device.compute))
        begun = device.record(self._link)
        for target, source in moves:
            heads, positions, head_dim = target.shape
            row_nbytes = positions * head_dim * target.element_size()
            device.copy(self._link, rows_of(target), rows_of(source), row_nbytes, heads)
        ended = device.record(self._link)
        device.wait(device.compute, ended)
        CopyFence(device, begun, ended, tuple(moves), self._moving)

    def before_decode(self, lane: int) -> None:
        """Have compute wait, on the device, for the copies into a lane."""
        for event in self._last.pop(lane, {}).values():
            self._device.wait(self._device.compute, event)

    def before_read(self, lane: int, stream: Stream) -> None:
        """Have another stream wait for what may still write a lane's cells."""
        self._device.wait(stream, self._device.record(self._device.compute))
        for event in self._last.get(lane, {}).values():
            self._device.wait(stream, event)

    def check_quiet(self, lane: int) -> None:
        """Raise LocalProtocolError if anything is in flight into a lane, DeviceError if it failed.

        The host does not wait.
        """
        left = [fence for fence in tuple(self._flights.get(lane, ())) if not fence.done()]
        if left:
            raise LocalProtocolError(f"lane {lane} was to be freed, {len(left)} imports in flight")

    def give_back(self, lane: int) -> None:
        """A lane was freed: whoever gets its memory comes after what compute does with it."""
        self._flights.pop(lane, None)
        self._last.pop(lane, None)
        self._given_back = self._device.record(self._device.compute)

    def close(self) -> None:
        """Let go of the ring; the device is idle. Idempotent."""
        self._ring = []
        self._moving.clear()
        self._flights.clear()
        self._last.clear()

    def _after_what_was_given_back(self) -> None:
        if self._given_back is not None:
            self._device.wait(self._link, self._given_back)
            self._given_back = None

    def _lay_out(self, target: torch.Tensor, address: int, copy: Copy) -> None:
        """Bring positions, each all heads in one row, into cells [heads, positions, head_dim]."""
        part = self._layers[copy.layer].parts[copy.part]
        count = copy.stop - copy.start
        step = self._place_nbytes // part.row_nbytes
        for at in range(0, count, step):
            positions = min(step, count - at)
            source = address + at * part.row_nbytes
            self._through_ring(target[:, at : at + positions], source, part, positions)

    def _through_ring(self, target: torch.Tensor, address: int, part: Part, positions: int) -> None:
        device = self._device
        place = self._ring[self._next_place]
        self._next_place = (self._next_place + 1) % len(self._ring)
        nbytes = positions * part.row_nbytes
        if place.read is not None:
            device.wait(self._link, place.read)
        staged = Rows(place.memory.data_ptr(), nbytes)
        device.copy(self._link, staged, Rows(address, nbytes), nbytes, 1)
        device.wait(self._layout, device.record(self._link))
        by_position = place.memory[:nbytes].view(dtype_of(part))
        cells = by_position.view(positions, part.heads, part.head_dim).permute(1, 0, 2)
        device.launch(self._layout, lambda: _copy(target, cells))
        place.read = device.record(self._layout)


def rows_of(cells: torch.Tensor) -> Rows:
    """Cells [heads, positions, head_dim] whose positions lie side by side, as rows of one head."""
    return Rows(cells.data_ptr(), cells.stride(0) * cells.element_size())


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)
