"""When a trace may speak of kernel overlap: the rule, in one place.

An import and a computing of the source overlapped on their devices if

- both were read from devices, as was all else that the source computed and the owner imported: one
  host reading makes all of it a host overlap, and one of a fake device an overlap of fakes;
- and both lasted together for longer than the sum of the errors of the two readings, to which that
  of the shift comes where the source's clock was another.

Such stretches are the kernel overlap. What is shorter may not have been there at all. It is an
upper bound of what kernels did at once: a computing runs from one event to the next, and the gaps
between its kernels are in it, as are the slices of a GPU's time that another process had.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from headrace.messages import Interval
from headrace.telemetry.clocks import Aligned
from headrace.telemetry.times import Stretch, length_ns, overlap, union, union_of

Evidence: TypeAlias = Literal["host", "fake", "device"]


_WEAKEST_FIRST: Final[tuple[Evidence, ...]] = ("host", "fake", "device")


@dataclass(frozen=True, slots=True)
class Overlap:
    """How long imports ran while the source was at work, ns, and what that rests on.

    source, owner: the clock of all that the source computed, and of all that was imported. length:
    while the source computed or wrote, and by two devices while it computed, the gaps between its
    kernels included. error: by how much a stretch of it may be off. kernels: as much of it as may
    be called kernel overlap; None if nothing may.
    """

    source: Evidence
    owner: Evidence
    length_ns: int
    error_ns: int
    kernels_ns: int | None

    @property
    def evidence(self) -> Evidence:
        """The weaker of both sides."""
        sides = self.source, self.owner
        return next(each for each in _WEAKEST_FIRST if each in sides)


def overlap_of(run: Aligned) -> Overlap:
    """What a run's intervals show; no instant counts twice."""
    computed, imported = run.of("compute"), run.of("import")
    sides = _clock_of(computed), _clock_of(imported)
    if "host" in sides:
        at_work = union_of(run.of("compute", "write"))
        length = length_ns(overlap(at_work, union_of(imported)))
        return Overlap(*sides, length, 0, None)
    shift_ns = run.clock.error_ns if run.clock.shift_ns else 0
    found = list(_together(computed, imported, shift_ns))
    kernels = union(stretch for stretch, error_ns in found if length_ns([stretch]) > error_ns)
    return Overlap(
        *sides,
        length_ns(overlap(union_of(computed), union_of(imported))),
        max((error_ns for _, error_ns in found), default=0),
        None if "fake" in sides else length_ns(kernels) or None,
    )


def _clock_of(intervals: Iterable[Interval]) -> Evidence:
    """The weakest of them; no reading at all is `host`."""
    clocks = {each.clock for each in intervals}
    return next((each for each in _WEAKEST_FIRST if each in clocks), "host")


def _together(
    computed: Iterable[Interval], imported: Iterable[Interval], shift_ns: int
) -> Iterator[tuple[Stretch, int]]:
    """Each pair that overlaps, in order of time: when both ran, and by how much that may be off."""
    begun = [(each.begun_ns, side, each) for side in (0, 1) for each in (computed, imported)[side]]
    running: tuple[list[Interval], list[Interval]] = [], []  # as of the latest beginning
    for begun_ns, side, one in sorted(begun, key=lambda each: each[:2]):
        others = running[1 - side]
        others[:] = [other for other in others if other.ended_ns > begun_ns]
        for other in others:
            ended_ns = min(one.ended_ns, other.ended_ns)
            if begun_ns < ended_ns:
                yield (begun_ns, ended_ns), one.error_ns + other.error_ns + shift_ns
        running[side].append(one)
