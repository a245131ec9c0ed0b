"""States that lie on a device, carried into a slot by the device itself.

A copy of a layer's states is queued on a stream beside the computation. It comes after an event of
the compute stream that is recorded when all that makes those states is queued, so that the model
goes on meanwhile. A writer is announced when the event after its last copy is done, and not before;
events of one stream are done in order, so writers are announced as they were committed.

The host only queues. It looks at the events at each layer, and once all is queued until all is
announced. It never runs further ahead of the device than a few layers, or a cancel would find the
device busy with a whole prefill that nothing can take back.
"""

from __future__ import annotations

import mmap
import time
from collections import deque
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch

from headrace.backends.base import Cells, HostRange, PrefillSink, SpanWriter, TimedWriter
from headrace.engine.device import Device, Event, Rows, Stream
from headrace.engine.prefill import States
from headrace.engine.tensors import check_region, dtype_of
from headrace.errors import LocalProtocolError
from headrace.geometry import Part

LAYERS_AHEAD: Final = 4
"""Layers that the host queues beyond the one that the device is known to have computed."""

CHECK_EVERY_NS: Final = 1_000_000
"""Between two words with the sink while the host only waits: a cancel is heard within this."""

MOST_HELD_NBYTES: Final = 1 << 30
"""Of states whose copies are queued: device memory that the cache itself has let go of."""


class _Piece(NamedTuple):
    """States of positions from `first` that have their place among the cells of `place`."""

    place: Cells
    first: int
    states: torch.Tensor


@dataclass(slots=True)
class _Writing:
    """The copies that are queued for a writer: the events before the first and after the last."""

    writer: SpanWriter
    begun: Event
    computed: Event
    copied: Event


@dataclass(slots=True)
class _Queued:
    """What to do once `copied` is done: let go of pieces, or announce what was committed."""

    copied: Event
    pieces: list[_Piece]
    committed: _Writing | None = None

    @property
    def nbytes(self) -> int:
        return sum(piece.states.nbytes for piece in self.pieces)


class LogitsMemory:
    """Host memory of whole pages for one row of float32 logits; it serves all attempts."""

    def __init__(self, vocab_size: int) -> None:
        self._row = np.frombuffer(mmap.mmap(-1, 4 * vocab_size), np.uint8)
        self.view = self._row.data
        self.range = HostRange(int(self._row.ctypes.data), self._row.nbytes)


class DeviceCarrier:
    """The carrier of one attempt; all of it is called within `device.on_compute()`."""

    def __init__(
        self, device: Device, side: Stream, sink: PrefillSink, logits: LogitsMemory
    ) -> None:
        self._device = device
        self._side = side
        self._sink = sink
        self._memory = logits
        self._layers: deque[Event] = deque()
        self._writing: dict[int, _Writing] = {}  # by the writer's identity: it may be unhashable
        self._queue: deque[_Queued] = deque()
        self._held_nbytes = 0
        self._row: torch.Tensor | None = None
        self._row_computed: Event | None = None
        self._row_copied: Event | None = None
        self._made: Event | None = None  # what is carried next was made before this one
        self._ready_ns = self._checked_ns = 0
        self._told = device.record(device.compute)  # what was computed by then is announced

    def computed(self) -> None:
        self._check(time.monotonic_ns())
        self._made = None
        self._layers.append(self._device.record(self._device.compute))
        if len(self._layers) > LAYERS_AHEAD:
            self._wait_for(self._layers.popleft())
        self._poll()

    def carry(self, writer: SpanWriter, layer: int, states: States, start: int) -> None:
        pieces = [
            piece
            for place in writer.cells(layer)
            if (piece := self._piece_of(place, states[place.part], start)) is not None
        ]
        if not pieces:
            return
        device, side = self._device, self._side
        if self._made is None:
            self._made = device.record(device.compute)
            device.wait(side, self._made)
        writing = self._writing.get(id(writer))
        if writing is None:
            begun = device.record(side)
            writing = self._writing[id(writer)] = _Writing(writer, begun, self._made, begun)
        for piece in pieces:
            self._copy(piece)
        writing.computed, writing.copied = self._made, device.record(side)
        self._enqueue(_Queued(writing.copied, pieces))
        while self._held_nbytes > MOST_HELD_NBYTES:
            self._wait_for(self._queue[0].copied)
            self._poll()

    def commit(self, writer: SpanWriter) -> None:
        writing = self._writing.pop(id(writer), None)
        if writing is None:
            raise LocalProtocolError("a writer was committed and nothing was carried into it")
        self._enqueue(_Queued(writing.copied, [], writing))
        self._poll()

    def settle(self) -> None:
        while self._queue:
            self._wait_for(self._queue[0].copied)
            self._poll()

    def take_logits(self, row: torch.Tensor) -> None:
        """Queue the copy of the last position's logits, float32 and contiguous."""
        device, side = self._device, self._side
        self._row_computed = device.record(device.compute)
        device.wait(side, self._row_computed)
        rows = Rows(self._memory.range.address, row.nbytes), Rows(row.data_ptr(), row.nbytes)
        device.copy(side, *rows, row.nbytes, 1)
        self._row, self._row_copied = row, device.record(side)

    def logits(self) -> tuple[memoryview, int]:
        """The row of logits on the host, and when the device had computed it (CLOCK_MONOTONIC, ns).

        Their copy queues behind those of the last states, so its end is not the prefill's.
        """
        computed, copied = self._row_computed, self._row_copied
        if computed is None or copied is None:
            raise LocalProtocolError("the logits were never taken")
        self._wait_for(copied)
        self._wait_for(computed)  # done before, but only the event itself can tell its time
        self._poll()
        self._row = None
        return self._memory.view, self._ready_ns

    def drain(self) -> None:
        """Wait until no copy is in flight. Raises: DeviceError when that cannot be known."""
        self._device.record(self._side).wait()
        self._queue.clear()
        self._row = None

    def _enqueue(self, queued: _Queued) -> None:
        self._queue.append(queued)
        self._held_nbytes += queued.nbytes

    def _wait_for(self, event: Event) -> None:
        """Until it is done, hear a cancel now and then, and announce what comes to be done."""
        while not event.done():
            now_ns = time.monotonic_ns()
            if now_ns - self._checked_ns >= CHECK_EVERY_NS:
                self._check(now_ns)
            self._poll()

    def _check(self, now_ns: int) -> None:
        self._checked_ns = now_ns
        self._sink.check()

    def _poll(self) -> None:
        computed = self._row_computed
        if not self._ready_ns and computed is not None and computed.done():
            seen_ns = time.monotonic_ns()  # a device's time is off by a little, and may be ahead
            self._ready_ns = min(seen_ns, self._device.times(computed, computed).ended_ns)
        while self._queue and self._queue[0].copied.done():
            queued = self._queue.popleft()
            self._held_nbytes -= queued.nbytes
            if queued.committed is not None:
                self._announce(queued.committed)

    def _announce(self, writing: _Writing) -> None:
        writer = writing.writer
        if isinstance(writer, TimedWriter):
            computed = self._device.times(self._told, writing.computed)
            writer.ran(computed, self._device.times(writing.begun, writing.copied))
        self._told = writing.computed
        writer.commit()

    def _piece_of(self, place: Cells, states: torch.Tensor, start: int) -> _Piece | None:
        """The part of a layer's states that belongs into `place`, in rows that can be copied."""
        first = max(place.start, start)
        last = min(place.stop, start + states.shape[1])
        if first >= last:
            return None
        mine = states[:, first - start : last - start]
        if self._sink.plan.layout == "token_major":
            mine = mine.transpose(0, 1)
        dtype = dtype_of(self._part_of(place))
        if mine.dtype == dtype and _may_be_held(mine):
            return _Piece(place, first, mine)
        self._made = None  # for it is made here, on the compute stream
        made = torch.empty(mine.shape, dtype=dtype, device=mine.device)
        return _Piece(place, first, made.copy_(mine))

    def _copy(self, piece: _Piece) -> None:
        place, first, states = piece
        part, layout = self._part_of(place), self._sink.plan.layout
        check_region(place.region, part, place.stop - place.start, layout, place.buffer.nbytes)
        begin = np.frombuffer(place.buffer, np.uint8).ctypes.data + place.region.offset
        if layout == "token_major":
            target = Rows(begin + (first - place.start) * part.row_nbytes, part.row_nbytes)
        else:
            target = Rows(begin + (first - place.start) * part.head_nbytes, place.region.stride)
        source = Rows(states.data_ptr(), states.stride(0) * states.element_size())
        num_rows = states.shape[0]
        self._device.copy(self._side, target, source, states.nbytes // num_rows, num_rows)

    def _part_of(self, place: Cells) -> Part:
        return self._sink.plan.layers[place.layer].parts[place.part]


def _may_be_held(states: torch.Tensor) -> bool:
    """Whether each of the first dimension is a row of bytes, and at least half of what holding them
    pins is theirs.

    Rows of the last positions are a view of all positions, which the cache lets go of.
    """
    (rows, many, numbers), (per_row, per_one, per_number) = states.shape, states.stride()
    in_rows = (
        (rows == 1 or per_row >= many * numbers)
        and (many == 1 or per_one == numbers)
        and (numbers == 1 or per_number == 1)
    )
    return in_rows and 2 * states.nbytes >= states.untyped_storage().nbytes()
