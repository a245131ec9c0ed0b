"""What an owner holds at one moment, for its router and for operators."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from headrace.ids import AttemptId
from headrace.messages.base import MAX_HELD_TEXT, Count, Text, WireMessage, WireStruct

HeldText: TypeAlias = Annotated[str, Meta(max_length=MAX_HELD_TEXT)]
SourceState: TypeAlias = Literal[
    "in service", "starting", "waiting to restart", "set aside", "gone"
]


class Quarantined(WireMessage, frozen=True, tag="apart"):
    """What an attempt left out of service, why, and for how long by now."""

    attempt: AttemptId
    reason: Text
    for_ns: Count


class LaneHeld(WireStruct, frozen=True):
    """A lane in use or out of service.

    state: reserved, published, draining or quarantined. reason, for_ns: of a quarantine.
    """

    attempt: AttemptId
    state: Text
    reason: HeldText
    for_ns: Count


class SlotHeld(WireStruct, frozen=True):
    """One slot of one source.

    state: as in the slot's table, in lower case. tokens: what is out, a write token and read
    tokens. for_ns: how long it has been draining, or out of service.
    """

    source: Count
    slot: Count
    generation: Count
    state: Text
    holder: AttemptId | None
    tokens: tuple[Text, ...]
    for_ns: Count


class SourceHeld(WireStruct, frozen=True):
    """One source and all that took its place.

    source: the id of the one that serves, or served last, which its slots carry. reason: why it is
    not in service, or empty. pid: of its process, 0 if there is none. restarts: how often another
    took its place.
    """

    source: Count
    name: HeldText
    state: SourceState
    reason: HeldText
    pid: Count
    restarts: Count


class RequestHeld(WireStruct, frozen=True):
    """One request that holds something or waits for it.

    label: its router's, or None for a request of somebody else. phase: the state of its hand-off,
    in lower case. nbytes_imported, nbytes_total: of the KV that the attempt's source is to give;
    the total is 0 before it has a slot. submitted_ns: on the host's CLOCK_MONOTONIC.
    """

    label: Count | None
    attempt: AttemptId
    phase: Text
    num_tokens: Count
    num_generated: Count
    nbytes_imported: Count
    nbytes_total: Count
    submitted_ns: Count


class Inspected(WireMessage, frozen=True, tag="inspected"):
    """What an owner holds: counts, what is out of service, lanes, slots, sources and requests.

    statistics: (section, name, count). context: positions of a lane. Lanes that are free are only
    counted. truncated: whether something was left out so that the rest fits into one message:
    requests first, then slots, lanes, what is quarantined, counts, and sources last.
    """

    statistics: tuple[tuple[Text, Text, int], ...]
    quarantined: tuple[Quarantined, ...]
    context: Count
    lanes_free: Count
    lanes: tuple[LaneHeld, ...]
    slots: tuple[SlotHeld, ...]
    sources: tuple[SourceHeld, ...]
    requests: tuple[RequestHeld, ...]
    truncated: bool = False
