"""An emulated link before the blocks of somebody else's cache."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Final

from headrace.backends.base import Fence, Reservation, SlotView
from headrace.backends.paged import PagedDecoder
from headrace.bench.links import LinkDecoder
from headrace.plan import Copy

NO_LINK: Final = math.inf
LOOK_S: Final = 2e-4  # at most between two looks at the link: what a tail may be too long by


class PagedLink(LinkDecoder):
    """vLLM's blocks behind an emulated link, whose speed may be set between requests.

    Without one imports go straight to the blocks. Whoever looks at an import that the link is
    carrying rests for a moment, since the core belongs to a source that computes.
    """

    def __init__(self, paged: PagedDecoder) -> None:
        super().__init__(paged, NO_LINK)
        self._paged = paged

    def set_mb_s(self, mb_s: float) -> None:
        """The speed from here on, in 1e6 bytes per second; 0 for no link."""
        self.nbytes_per_s = mb_s * 1e6 if mb_s else NO_LINK

    def reserve_for(self, label: int | None, num_tokens: int) -> Reservation:
        return self._paged.reserve_for(label, num_tokens)

    def begin_import(
        self, reservation: Reservation, slot: SlotView, copies: Sequence[Copy]
    ) -> Fence:
        if self.nbytes_per_s == NO_LINK:
            return self._paged.begin_import(reservation, slot, copies)
        begun_ns = max(time.monotonic_ns(), self._free_ns)
        return _Resting(super().begin_import(reservation, slot, copies), begun_ns, self._free_ns)


class _Resting:
    """A fence of the link. begun_ns, carried_ns: when the link carries it."""

    def __init__(self, inner: Fence, begun_ns: int, carried_ns: int) -> None:
        self._inner = inner
        self._begun_ns = begun_ns
        self._carried_ns = carried_ns

    def done(self) -> bool:
        if self._inner.done():
            return True
        now_ns = time.monotonic_ns()
        if self._begun_ns <= now_ns < self._carried_ns:  # of all that wait, one
            time.sleep(min(LOOK_S, (self._carried_ns - now_ns) / 1e9))
        return self._inner.done()
