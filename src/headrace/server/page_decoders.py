"""Decoders as their owners tell: what they hold now, and what they counted since the start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Final, TypeAlias

from headrace.ids import AttemptId
from headrace.messages import Inspected, RequestHeld, SlotHeld, SourceHeld
from headrace.server.events import DecoderChanged, Looked
from headrace.server.page_state import (
    ApartState,
    DecoderState,
    LaneState,
    SlotState,
    SourceState,
)

MAX_REASONS: Final = 64
"""Of one kind of fault; those that come later count as `other`."""

OTHER: Final = "other"

Notes: TypeAlias = Mapping[tuple[str, str], str]
"""By decoder and source, what is to be known of it; the source "" is the decoder itself."""

FindRequest: TypeAlias = Callable[[str, int], int | None]
"""Whose request a decoder has under a label."""

_COUNTED: Final = {"dropped": "dropped", "restarts": "restarts", "retries": "retries"}
_RESTARTS: Final = {
    "restarted": "a source was started again",
    "start_failed": "a source failed to start",
    "set_aside": "a source was set aside",
}


def bounded_add(counts: Counter[str], reason: str, count: int = 1) -> None:
    """Count by reason, of which there are never more than `MAX_REASONS` and `OTHER`."""
    known = reason in counts or len(counts) < MAX_REASONS
    counts[reason if known else OTHER] += count


class Decoder:
    """One decoder: its state, the last report of its owner, and counts since the start."""

    def __init__(self, name: str, request_of: FindRequest) -> None:
        self.name = name
        self._request_of = request_of
        self.incarnation = 0
        self._state = "starting"
        self._reason = ""
        self._pid = 0
        self._looked_ns: int | None = None
        self._report: Inspected | None = None
        self._held: dict[int, RequestHeld] = {}
        self._whose: dict[AttemptId, int] = {}
        self._now: Counter[tuple[str, str]] = Counter()
        self._before: dict[str, Counter[str]] = {}

    def changed(self, event: DecoderChanged) -> None:
        """It is in another state; what an owner held that is gone is held no more."""
        self._enter(event.incarnation)
        self._state, self._reason, self._pid = event.state, event.reason, event.pid
        if event.state != "ready":
            self._report, self._held, self._whose = None, {}, {}

    def looked(self, event: Looked) -> None:
        """Its owner told; a report of an incarnation before this one is dropped."""
        if event.incarnation < self.incarnation:
            return
        self._enter(event.incarnation)
        self._looked_ns, self._report = event.at_ns, event.report
        self._held = {each.label: each for each in event.report.requests if each.label is not None}
        self._whose = dict(self._find(event.report))
        self._now = Counter(
            {
                (section, reason): count
                for section, reason, count in event.report.statistics
                if _is_fault(section, reason) and count > 0
            }
        )

    def held(self, label: int) -> RequestHeld | None:
        """What the last report says of a request."""
        return self._held.get(label)

    def faults(self) -> dict[str, Counter[str]]:
        """Counts by kind and reason; `quarantined` is of now."""
        found = {kind: Counter(counts) for kind, counts in self._before.items()}
        self._fold(found)
        if self.incarnation:
            bounded_add(_of(found, "restarts"), "an owner was started again", self.incarnation)
        for each in () if self._report is None else self._report.quarantined:
            bounded_add(_of(found, "quarantined"), each.reason)
        return found

    def state(self, now_ns: int, notes: Notes) -> DecoderState:
        """What is shown of it."""
        report = self._report
        return DecoderState(
            name=self.name,
            note=notes.get((self.name, ""), ""),
            state=self._state,
            reason=self._reason,
            incarnation=self.incarnation,
            pid=self._pid,
            looked_s=None if self._looked_ns is None else _seconds(now_ns - self._looked_ns),
            context=0 if report is None else report.context,
            lanes_free=0 if report is None else report.lanes_free,
            lanes=() if report is None else tuple(self._lanes(report)),
            sources=() if report is None else tuple(self._sources(report, notes)),
            quarantined=() if report is None else tuple(_apart(report)),
            truncated=report is not None and report.truncated,
        )

    def _enter(self, incarnation: int) -> None:
        if incarnation > self.incarnation:
            self._fold(self._before)
            self._now = Counter()
            self.incarnation = incarnation

    def _fold(self, into: dict[str, Counter[str]]) -> None:
        for (section, reason), count in self._now.items():
            told = "an attempt that another followed" if section == "retries" else reason
            bounded_add(_of(into, _COUNTED[section]), _RESTARTS.get(told, told), count)

    def _find(self, report: Inspected) -> Iterator[tuple[AttemptId, int]]:
        """Whose the attempts are; those that hold something after their end are remembered."""
        held = [lane.attempt for lane in report.lanes]
        held += [slot.holder for slot in report.slots if slot.holder is not None]
        for attempt in held:
            if attempt in self._whose:
                yield attempt, self._whose[attempt]
        for each in report.requests:
            request = None if each.label is None else self._request_of(self.name, each.label)
            if request is not None:
                yield each.attempt, request

    def _lanes(self, report: Inspected) -> Iterator[LaneState]:
        for each in report.lanes:
            yield LaneState(
                state=each.state,
                attempt=str(each.attempt),
                request=self._whose.get(each.attempt),
                reason=each.reason,
                for_s=_seconds(each.for_ns),
            )

    def _sources(self, report: Inspected, notes: Notes) -> Iterator[SourceState]:
        slots: dict[int, list[SlotHeld]] = {}
        for slot in report.slots:
            slots.setdefault(slot.source, []).append(slot)
        unnamed = set(slots) - {each.source for each in report.sources}
        left = [SourceHeld(source, "", "gone", "", 0, 0) for source in sorted(unnamed)]
        for each in (*report.sources, *left):
            yield SourceState(
                source=each.source,
                name=each.name,
                note=notes.get((self.name, each.name), ""),
                state=each.state,
                reason=each.reason,
                pid=each.pid,
                restarts=each.restarts,
                slots=tuple(map(self._slot, slots.get(each.source, []))),
            )

    def _slot(self, slot: SlotHeld) -> SlotState:
        holder = slot.holder
        return SlotState(
            slot=slot.slot,
            generation=slot.generation,
            state=slot.state,
            holder="" if holder is None else str(holder),
            request=None if holder is None else self._whose.get(holder),
            tokens=slot.tokens,
            for_s=_seconds(slot.for_ns),
        )


def _is_fault(section: str, reason: str) -> bool:
    return section in _COUNTED and (section != "restarts" or reason in _RESTARTS)


def _of(found: dict[str, Counter[str]], kind: str) -> Counter[str]:
    return found.setdefault(kind, Counter())


def _apart(report: Inspected) -> Iterator[ApartState]:
    for each in report.quarantined:
        yield ApartState(attempt=str(each.attempt), reason=each.reason, for_s=_seconds(each.for_ns))


def _seconds(nanoseconds: int) -> float:
    return max(0, nanoseconds) / 1e9
