"""Whether a source and its owner read one clock, told from the messages between them.

As in NTP: a message cannot arrive before it was sent. The grant bounds the offset (source minus
owner) from above, by when the source began; the announcements bound it from below, by when the
owner had validated them. The tightest bound of each side is kept. Both sides of one host read
CLOCK_MONOTONIC, and the offset then lies within the bounds of zero. What a device tells was brought
to the clock of its own side, and bounds the offset by no more than its error allows.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

from msgspec.structs import replace

from headrace.messages import Interval, IntervalKind
from headrace.telemetry.recording import LOCAL_GRANT, Run
from headrace.telemetry.times import Stretch

Verdict: TypeAlias = Literal["one", "shifted", "contradictory", "unchecked"]


@dataclass(frozen=True, slots=True)
class ClockCheck:
    """What the messages tell of two clocks.

    offset_ns: source minus owner, uncertain by error_ns; 0 and 0 where nothing could be told.
    """

    verdict: Verdict
    offset_ns: int
    error_ns: int

    @property
    def shift_ns(self) -> int:
        """What to take off the source's readings, so that they are the owner's."""
        return self.offset_ns if self.verdict == "shifted" else 0

    @property
    def comparable(self) -> bool:
        """Whether times of one side may be set against times of the other."""
        return self.verdict != "contradictory"


@dataclass(frozen=True)
class Aligned:
    """A run on its owner's clock, in ns; a moment that was not reached is None.

    What is asked once per interval is found once per run: looking at all of them each time would
    make a drawing's cost grow with the square of its intervals.
    """

    run: Run
    clock: ClockCheck
    source: tuple[Interval, ...]
    owner: tuple[Interval, ...]

    def of(self, *kinds: IntervalKind) -> list[Interval]:
        """The intervals of these kinds, the source's first."""
        return [each for each in (*self.source, *self.owner) if each.kind in kinds]

    @cached_property
    def is_local(self) -> bool:
        """Whether the owner computed it by itself: one thread, in which nothing runs beside it."""
        return any(each.name == LOCAL_GRANT for each in self.of("granted"))

    @property
    def begun_ns(self) -> int | None:
        """When the source began to compute."""
        return min((each.begun_ns for each in self.of("compute")), default=None)

    @cached_property
    def final_ns(self) -> int | None:
        """The source-final time: the prefill ended."""
        return self.moment_ns("final")

    @property
    def last_group_ns(self) -> int | None:
        """When the last layer group lay in the slot."""
        return self.moment_ns("announced")

    @cached_property
    def published_ns(self) -> int | None:
        """When the entry became visible."""
        return self.moment_ns("published")

    @property
    def parked(self) -> Interval | None:
        """While it held a slot and waited for storage."""
        return max(self.of("parked"), key=lambda each: each.ended_ns, default=None)

    @cached_property
    def tail(self) -> Stretch | None:
        """From the later of the source-final time and the end of parking to publishing.

        None if the readings do not have them in that order. What was measured of a request says the
        same: `messages.Measured.tail_ns`.
        """
        final_ns, ended_ns = self.final_ns, self.published_ns
        if final_ns is None or ended_ns is None or not self.clock.comparable:
            return None
        begun_ns = max(final_ns, 0 if self.parked is None else self.parked.ended_ns)
        return (begun_ns, ended_ns) if begun_ns <= ended_ns else None

    def moment_ns(self, kind: IntervalKind) -> int | None:
        """When something of this kind happened last."""
        return max((each.begun_ns for each in self.of(kind)), default=None)


def align(run: Run) -> Aligned:
    """The run with its source's readings brought to the owner's clock, if they are of another."""
    clock = check_clocks(run.source, run.owner)
    return Aligned(run, clock, tuple(_shifted(run.source, clock.shift_ns)), run.owner)


def check_clocks(source: Sequence[Interval], owner: Sequence[Interval]) -> ClockCheck:
    """Compare two clocks by the messages of one attempt."""
    at_most = _latest_offset(source, owner)
    behind = [heard.begun_ns - sent.begun_ns for sent, heard in pairs(source, owner)]
    if at_most is None or not behind:
        return ClockCheck("unchecked", 0, 0)
    at_least = -min(behind)
    if at_least > at_most:
        return ClockCheck("contradictory", 0, 0)
    offset_ns = (at_least + at_most) // 2
    error_ns = at_most - offset_ns  # the larger half, so that the bounds are both within it
    return ClockCheck("one" if abs(offset_ns) <= error_ns else "shifted", offset_ns, error_ns)


def pairs(
    source: Iterable[Interval], owner: Iterable[Interval]
) -> Iterator[tuple[Interval, Interval]]:
    """Each message of the source, `announced` or `final`, with the owner's `validated`, in order.

    Those of which one side has no reading are left out.
    """
    waiting: dict[tuple[str, int], deque[Interval]] = defaultdict(deque)
    for each in source:
        if each.kind in ("announced", "final"):
            waiting[each.name, each.nbytes].append(each)
    for each in owner:
        sent = waiting[each.name, each.nbytes] if each.kind == "validated" else None
        if sent:
            yield sent.popleft(), each


def _latest_offset(source: Iterable[Interval], owner: Iterable[Interval]) -> int | None:
    """No larger than this is source minus owner: the source began after the last grant."""
    granted = [each.begun_ns for each in owner if each.kind == "granted"]
    begun = [each.begun_ns + each.error_ns for each in source if each.kind == "compute"]
    return min(begun) - max(granted) if granted and begun else None


def _shifted(intervals: Sequence[Interval], shift_ns: int) -> Iterator[Interval]:
    for each in intervals:
        begun_ns, ended_ns = each.begun_ns - shift_ns, each.ended_ns - shift_ns
        yield replace(each, begun_ns=begun_ns, ended_ns=ended_ns) if shift_ns else each
