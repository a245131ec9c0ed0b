"""A decoder that can accept imports and copy nothing: the control arm of `bench load`.

It is for benchmarks only. What it took without copying must never become a cache entry, so it
refuses to publish that, and whoever uses it cancels such a request before it is complete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.backends.base import (
    Decoder,
    Done,
    Entry,
    Fence,
    HostRange,
    PinsSlabs,
    Reservation,
    SlotView,
)
from headrace.errors import LocalProtocolError
from headrace.geometry import Layout, Manifest
from headrace.plan import Copy


class DiscardingDecoder:
    """Another decoder, whose imports are discarded while `discarding` is set."""

    def __init__(self, inner: Decoder) -> None:
        self.caps = inner.caps
        self.discarding = False
        self.discarded_nbytes = 0
        self._inner = inner
        self._hollow: set[tuple[int, int]] = set()  # lane and serial of what was not copied

    @property
    def num_hollow(self) -> int:
        """Reservations that lack what was discarded and are not freed yet."""
        return len(self._hollow)

    def manifest(self) -> Manifest:
        return self._inner.manifest()

    def reserve(self, num_tokens: int) -> Reservation:
        return self._inner.reserve(num_tokens)

    def begin_import(
        self, reservation: Reservation, slot: SlotView, copies: Sequence[Copy]
    ) -> Fence:
        """Copy as ever, or count the bytes and be done."""
        if not self.discarding:
            return self._inner.begin_import(reservation, slot, copies)
        self._hollow.add((reservation.lane, reservation.serial))
        self.discarded_nbytes += sum(copy.nbytes for copy in copies)
        return Done()

    def read(self, held: Reservation | Entry, layout: Layout, copy: Copy) -> bytes | memoryview:
        return self._inner.read(held, layout, copy)

    def publish(self, reservation: Reservation) -> Entry:
        """Publish what was copied.

        Raises:
            LocalProtocolError: something of it was discarded.
        """
        if (reservation.lane, reservation.serial) in self._hollow:
            raise LocalProtocolError(f"{reservation} was discarded and was to be published")
        return self._inner.publish(reservation)

    def free(self, held: Reservation | Entry) -> None:
        self._inner.free(held)
        self._hollow.discard((held.lane, held.serial))

    def decode_step(self, active: Sequence[tuple[Entry, int]]) -> list[memoryview]:
        return self._inner.decode_step(active)

    def register(self, slab: HostRange) -> None:
        """Pin a slab, if the other one pins slabs."""
        if isinstance(self._inner, PinsSlabs):
            self._inner.register(slab)

    def unregister(self, slab: HostRange) -> None:
        if isinstance(self._inner, PinsSlabs):
            self._inner.unregister(slab)

    def statistics(self) -> Mapping[str, int]:
        return self._inner.statistics()

    def close(self) -> None:
        self._inner.close()
