"""What an owner holds, counted for metrics from a report that may have left out lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple, TypeAlias

from headrace.messages import Inspected
from headrace.runtime.roster import OWN_ENGINE
from headrace.server import label_words as words
from headrace.server.label_words import OTHER, one_of

_Counted: TypeAlias = Mapping[tuple[str, str], int]


class Holdings(NamedTuple):
    """Counts by state, slots by source and state; a state that is not there is not known.

    The owner's own engine is none of its sources. apart_lanes, apart_slots: those in quarantine.
    """

    lanes: Mapping[str, int]
    slots: Mapping[tuple[str, str], int]
    sources: Mapping[str, int]
    apart_lanes: int
    apart_slots: int


def nothing(sources: Collection[str]) -> Holdings:
    """What an owner holds that is not ready; `sources`: whose slots are told."""
    slots = {(source, state): 0 for source in sources for state in words.SLOT_STATES}
    return Holdings(
        dict.fromkeys(words.LANE_STATES, 0), slots, dict.fromkeys(words.SOURCE_STATES, 0), 0, 0
    )


def holdings_of(report: Inspected, sources: Collection[str]) -> Holdings:
    """What a report tells; closed sets are told whole, zeros included."""
    counted: _Counted = {(section, name): count for section, name, count in report.statistics}
    states = [each.state for each in report.sources if each.name != OWN_ENGINE]
    # Said twice by an owner: its counts are there even if the lines did not fit its message.
    apart = [
        counted.get((section, "quarantined"), sum(each.state == "quarantined" for each in lines))
        for section, lines in (("lanes", report.lanes), ("slots", report.slots))
    ]
    return Holdings(
        _lanes(report, counted),
        _slots(report, counted, sources),
        _whole(words.SOURCE_STATES, Counter(one_of(each, words.SOURCE_STATES) for each in states)),
        *apart,
    )


def _lanes(report: Inspected, counted: _Counted) -> Mapping[str, int]:
    """Lanes are left out once all slots are; then two of their states are counted, no other."""
    if report.truncated and not report.slots:
        apart = counted.get(("lanes", "quarantined"))
        known = {"free": report.lanes_free}
        return known if apart is None else known | {"quarantined": apart}
    lanes = Counter(one_of(lane.state, words.LANE_STATES) for lane in report.lanes)
    lanes["free"] = report.lanes_free
    return _whole(words.LANE_STATES, lanes)


def _slots(
    report: Inspected, counted: _Counted, sources: Collection[str]
) -> Mapping[tuple[str, str], int]:
    """Where lines were left out all slots are of `other`: whose they are was not told."""
    names = {each.source: one_of(each.name, sources) for each in report.sources}
    slots = Counter(
        (names.get(slot.source, OTHER), one_of(slot.state, words.SLOT_STATES))
        for slot in report.slots
    )
    totals = {s: counted["slots", s] for s in words.SLOT_STATES if ("slots", s) in counted}
    if report.truncated and (not totals or sum(totals.values()) != slots.total()):
        return {(OTHER, state): count for state, count in totals.items()}
    return {key: slots[key] for source in sources for key in _keys(source)} | slots


def _keys(source: str) -> list[tuple[str, str]]:
    return [(source, state) for state in words.SLOT_STATES]


def _whole(states: Collection[str], counts: Counter[str]) -> Mapping[str, int]:
    return {state: counts[state] for state in states}
