"""What a device's link is best fed with: measured at the start, from pinned memory.

Small copies leave a link idle between them, and large ones are in the way of whoever is next. So
the smallest chunk is taken that comes near the best rate, and the fewest of them in flight. Copies
alone do not show what a piece costs its owner: about a tenth of a millisecond of the host. So a
chunk is never less than what the link moves in a few times that, or in a little more than that
while entries decode. Then the owner looks after imports only between two steps, and what is in
flight is what competes with a step: it is bounded by what the link moves in a short time.

Others may use the link meanwhile (a source that loads its weights), which can only slow a copy
down. So each figure is the best of a few samples, taken in turn and not one after another.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Final, NamedTuple

from headrace.backends.base import CopyTuning
from headrace.engine.device import Device, Event, PinFailed, Rows, Stream
from headrace.engine.host import HostMemory

MIB: Final = 1 << 20
CHUNKS: Final = tuple(n * MIB for n in (1, 2, 4, 8, 16, 32))
DEPTHS: Final = (1, 2, 4)
SAMPLES: Final = 3
NEAR_BEST: Final = 0.9
CHUNK_S: Final = (
    0.0005  # of the link's time, at least; an owner's cost of a piece is 0.1 ms or less
)
SHARED_CHUNK_S: Final = 0.00015  # the same while entries decode
IN_FLIGHT_S: Final = 0.004  # of the link's time, so that it stays busy through an owner's turn
_TOTAL_NBYTES: Final = 32 * MIB  # moved for one sample, or four chunks if that is more


class Probed(NamedTuple):
    """What was measured: bytes per second by (chunk, chunks in flight), and what follows."""

    rates: Mapping[tuple[int, int], float]
    tuning: CopyTuning
    pinned: bool

    def statistics(self) -> dict[str, int]:
        """The best rate, and the tuning."""
        return {
            "probe_mb_per_s": round(max(self.rates.values()) / 1e6),
            "probe_pinned": int(self.pinned),
            "chunk_nbytes": self.tuning.chunk_nbytes,
            "shared_chunk_nbytes": self.tuning.shared_chunk_nbytes,
            "in_flight_nbytes": self.tuning.in_flight_nbytes,
            "shared_in_flight_nbytes": self.tuning.shared_in_flight_nbytes,
        }


def probe(
    device: Device,
    chunks: Sequence[int] = CHUNKS,
    depths: Sequence[int] = DEPTHS,
    total_nbytes: int = _TOTAL_NBYTES,
    *,
    samples: int = SAMPLES,
    pin: bool = True,
) -> Probed:
    """Measure host-to-device copies; takes some tenths of a second, and gives all memory back.

    `total_nbytes`: moved for one sample. `samples`: of which a figure is the best. `pin`: False to
    measure pageable memory.

    Raises:
        Refused: there is no memory for it. DeviceError: the device failed.
    """
    largest = max(chunks)
    host = HostMemory(largest, "the copy probe")
    scratch = device.empty(largest)
    pinned = False
    if pin:
        with suppress(PinFailed):
            device.register(host.address, largest, read_only=False)
            pinned = True
    device.synchronize()
    link = _Link(device, device.stream("probe"), scratch.data_ptr(), host.address)
    try:
        link.rate(largest, 1, largest)  # the first is slow
        rates: dict[tuple[int, int], float] = {}
        for _ in range(samples):
            for cell in product(chunks, depths):
                rate = link.rate(*cell, max(total_nbytes, 4 * cell[0]))
                rates[cell] = max(rates.get(cell, 0.0), rate)
    finally:
        device.synchronize()
        if pinned:
            device.unregister(host.address)
    return Probed(rates, choose(rates), pinned)


def choose(rates: Mapping[tuple[int, int], float]) -> CopyTuning:
    """The smallest chunks, and the fewest in flight, that come near the best of `rates`.

    No chunk is less than what the link moves in `CHUNK_S`, or `SHARED_CHUNK_S`, in powers of two.
    """
    best = max(rates.values())
    near, depth = min(key for key, rate in rates.items() if rate >= NEAR_BEST * best)
    chunk = max(near, _power_of_two(best * CHUNK_S))
    shared = max(near, _power_of_two(best * SHARED_CHUNK_S))
    in_flight = max(2 * chunk, depth * near, -(-int(best * IN_FLIGHT_S) // chunk) * chunk)
    return CopyTuning(chunk, shared, in_flight, max(shared, in_flight // 2))


def _power_of_two(least: float) -> int:
    """The next one that is not less."""
    return 1 << max(0, math.ceil(least) - 1).bit_length()


class _Link(NamedTuple):
    """What is measured: one stream, and the addresses at both ends."""

    device: Device
    stream: Stream
    target: int
    source: int

    def rate(self, chunk: int, depth: int, total_nbytes: int) -> float:
        """Bytes per second with at most `depth` copies begun and not known to be done."""
        flights: deque[Event] = deque()
        begun = ended = self.device.record(self.stream)
        count = -(-total_nbytes // chunk)
        target, source = Rows(self.target, chunk), Rows(self.source, chunk)
        for _ in range(count):
            if len(flights) == depth:
                _spin(flights.popleft())
            self.device.copy(self.stream, target, source, chunk, 1)
            ended = self.device.record(self.stream)
            flights.append(ended)
        _spin(ended)
        times = self.device.times(begun, ended)
        return count * chunk * 1e9 / max(1, times.ended_ns - times.begun_ns)


def _spin(event: Event) -> None:
    while not event.done():
        pass  # as the owner polls; a wait could put the host to sleep
