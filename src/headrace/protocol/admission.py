"""Admission: who may have storage, a slot, or both, now.

Storage first, then slot. A freed lane goes to the oldest parked hand-off before any waiting one. A
free slot goes to the oldest hand-off that holds storage without one; only when there is none may
the oldest waiting hand-off be parked, that is, hold a slot without storage. So nobody waits for a
slot that a parked hand-off holds while that one waits for his storage: opposite holdings, and with
them deadlock, cannot arise. At most min(prefetch depth, slots - 1) are parked; depth 0 is no
prefetch.

A retry keeps its storage, and so outranks new parking. It goes to another source than the one that
failed it, if one is in service. A local attempt goes to the owner's own engine and nowhere else.

Fairness: first come, first served, by submission. Nobody is parked while an older request waits,
even where no slot can be had for that one (it is local, it needs none since all of it is kept, or
it avoids the source): else each younger one that is parked would have the lane before it, for as
long as more of them come. So a request is overtaken only by those that were parked before it began
to wait, which is where its source failed it while it was parked itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from headrace.protocol.handoff import Handoff, HandoffState


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """What follows on a failure of a source.

    num_attempts: on sources, the first included. local: one more by the owner's own engine after
    these, or at once where no source is in service.
    """

    num_attempts: int = 1
    local: bool = False


class Admission:
    """The queues of hand-offs that lack storage or a slot, oldest first."""

    def __init__(self, num_lanes: int, prefetch_depth: int) -> None:
        self.lanes_free = num_lanes
        self.prefetch_depth = prefetch_depth
        self._queue: list[Handoff] = []

    def __len__(self) -> int:
        return len(self._queue)

    def join(self, handoff: Handoff) -> None:
        """A hand-off waits from now on, behind those of older requests."""
        self._queue.append(handoff)
        self._queue.sort(key=lambda waiting: waiting.attempt)

    def leave(self, handoff: Handoff) -> None:
        """The hand-off ended, or holds both; it waits no longer."""
        if handoff in self._queue:
            self._queue.remove(handoff)

    def next_for_storage(self) -> Handoff | None:
        """Who gets a free lane: the oldest parked, else the oldest waiting; None without a lane."""
        if self.lanes_free <= 0:  # below: one that is promised was lost
            return None
        return self._oldest(HandoffState.PARKED) or self._oldest(HandoffState.WAITING)

    def next_for_slot(
        self, fits: Callable[[Handoff], bool], *, num_slots: int, num_parked: int
    ) -> Handoff | None:
        """Who gets a free slot of a slab with `num_slots`: the oldest that holds storage and fits;
        where none does hold any, the oldest waiting one if it fits.

        `num_parked`: hand-offs that are parked, wherever.
        """
        if self._oldest(HandoffState.RESERVED):
            return self._oldest(HandoffState.RESERVED, fits)
        first = self._oldest(HandoffState.WAITING)
        if first is None or num_parked >= min(self.prefetch_depth, num_slots - 1):
            return None
        return first if fits(first) else None

    def waiting(self) -> Iterable[Handoff]:
        """All that wait, oldest first."""
        return tuple(self._queue)

    def _oldest(
        self, state: HandoffState, fits: Callable[[Handoff], bool] = lambda handoff: True
    ) -> Handoff | None:
        return next((h for h in self._queue if h.state is state and fits(h)), None)
