"""An emulated link: imports that land no sooner than a link of a given speed would carry them.

Host memory is often faster than the link between two devices. A `LinkDecoder` puts such a link in
front of any decoder, so that a benchmark can show what a transfer costs there. The bytes are copied
at once, as ever; only the fence waits. Figures made with it are of an "emulated link", never of a
real one. An owner polls its fences, so its CPU time is of no use behind such a link.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from headrace.backends.base import Decoder, Entry, Fence, Reservation, SlotView
from headrace.errors import Refused
from headrace.geometry import Layout, Manifest
from headrace.plan import Copy


class LinkDecoder:
    """A decoder behind one emulated serial link: transfers queue behind each other.

    `nbytes_per_s`: the link's speed. `clock_ns`: what tells the time, in ns. Each transfer begins
    when it is asked for or when the one before it has been carried, whichever is later.
    """

    def __init__(
        self,
        inner: Decoder,
        nbytes_per_s: float,
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Raises Refused unless the speed is above zero."""
        if not nbytes_per_s > 0:
            raise Refused(f"an emulated link of {nbytes_per_s} bytes per second; it needs a speed")
        self.caps = inner.caps
        self.nbytes_per_s = nbytes_per_s
        self._inner = inner
        self._clock_ns = clock_ns
        self._free_ns = 0  # when the link has carried all that it was given

    def manifest(self) -> Manifest:
        return self._inner.manifest()

    def reserve(self, num_tokens: int) -> Reservation:
        return self._inner.reserve(num_tokens)

    def begin_import(
        self, reservation: Reservation, slot: SlotView, copies: Sequence[Copy]
    ) -> Fence:
        begun_ns = max(self._clock_ns(), self._free_ns)
        fence = self._inner.begin_import(reservation, slot, copies)
        nbytes = sum(copy.nbytes for copy in copies)
        self._free_ns = begun_ns + round(nbytes * 1e9 / self.nbytes_per_s)
        return _Carried(fence, self._free_ns, self._clock_ns)

    def read(self, held: Reservation | Entry, layout: Layout, copy: Copy) -> bytes | memoryview:
        return self._inner.read(held, layout, copy)

    def publish(self, reservation: Reservation) -> Entry:
        return self._inner.publish(reservation)

    def free(self, held: Reservation | Entry) -> None:
        self._inner.free(held)

    def decode_step(self, active: Sequence[tuple[Entry, int]]) -> list[memoryview]:
        return self._inner.decode_step(active)

    def statistics(self) -> Mapping[str, int]:
        return self._inner.statistics()

    def close(self) -> None:
        self._inner.close()


class _Carried:
    """Done once the copy is fenced and the emulated link has carried its bytes."""

    def __init__(self, copied: Fence, carried_ns: int, clock_ns: Callable[[], int]) -> None:
        self._copied = copied
        self._carried_ns = carried_ns
        self._clock_ns = clock_ns

    def done(self) -> bool:
        return self._copied.done() and self._clock_ns() >= self._carried_ns
