"""A paced decoder of one lane: memory only, with a set rate of import and a set decode step.

It computes nothing: each step waits for its time and gives the same logits. Like a decoder whose
calls are synchronous, it holds its owner for as long as an import or a step takes. Figures made
with it are called "paced", never "measured on" a device. Its factory is
`headrace.bench.paced_lane:open`.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

from msgspec import Meta, Struct

from headrace.backends.base import Caps, Entry, Fence, Reservation, SlotView
from headrace.backends.null import NullDecoder
from headrace.backends.options import read_options
from headrace.bench.geometries import GEOMETRIES
from headrace.errors import Refused
from headrace.plan import Copy

FACTORY: Final = "headrace.bench.paced_lane:open"
_SPINS_NS: Final = 200_000  # before the end of a wait, since a sleep may last longer than asked


class Options(Struct, frozen=True, forbid_unknown_fields=True):
    """geometry: a name of `headrace.bench.geometries`. mb_per_s: of imports, 1e6 bytes."""

    geometry: str
    context: int
    mb_per_s: Annotated[float, Meta(gt=0)]
    step_ms: Annotated[float, Meta(ge=0)]


def open(options: Mapping[str, Any]) -> PacedLane:
    """The factory; options as in `Options`. Raises: Refused."""
    read = read_options(options, Options, "paced lane")
    if read.geometry not in GEOMETRIES:
        raise Refused(
            f"unknown geometry {read.geometry!r}; known are {', '.join(GEOMETRIES)}",
            field="geometry",
        )
    return PacedLane(read)


class PacedLane(NullDecoder):
    """A null decoder of one lane, at its pace."""

    def __init__(self, options: Options) -> None:
        manifest = GEOMETRIES[options.geometry].decoder()
        super().__init__(manifest, context=options.context, lanes=1)
        self.caps = Caps(max_lanes=1)
        self.facts = {"pace": {"mb_per_s": options.mb_per_s, "step_ms": options.step_ms}}
        self._ns_per_byte = 1e3 / options.mb_per_s
        self._step_ns = options.step_ms * 1e6
        self._row = array("f", bytes(4 * manifest.vocab_size))

    def begin_import(
        self, reservation: Reservation, slot: SlotView, copies: Sequence[Copy]
    ) -> Fence:
        """Copy, and return when the link has had the time for these bytes."""
        begun_ns = time.monotonic_ns()
        fence = super().begin_import(reservation, slot, copies)
        _wait_until(begun_ns + sum(copy.nbytes for copy in copies) * self._ns_per_byte)
        return fence

    def decode_step(self, active: Sequence[tuple[Entry, int]]) -> list[memoryview]:
        """Wait for the time of a step; the logits are the same for whatever entry."""
        for entry, _ in active:
            self._check(entry)
        _wait_until(time.monotonic_ns() + self._step_ns)
        return [memoryview(self._row) for _ in active]


def _wait_until(at_ns: float) -> None:
    time.sleep(max(0.0, at_ns - _SPINS_NS - time.monotonic_ns()) / 1e9)
    while time.monotonic_ns() < at_ns:
        pass
