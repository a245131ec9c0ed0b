"""What an owner holds at one moment, line by line, for operators and tests: plain facts."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.ids import AttemptId, Generation, SlotIndex, SourceId


@dataclass(frozen=True, slots=True)
class LaneLine:
    """Storage in use or out of service; lanes that are free have no line.

    state: reserved, published, draining or quarantined. reason, since_ns: of a quarantine.
    """

    attempt: AttemptId
    state: str
    reason: str = ""
    since_ns: int = 0


@dataclass(frozen=True, slots=True)
class SlotLine:
    """One slot of one source.

    state: as in the slot's table, in lower case. tokens: what is out, a write token and read
    tokens. since_ns: when it began to drain.
    """

    source: SourceId
    slot: SlotIndex
    generation: Generation
    state: str
    holder: AttemptId | None
    tokens: tuple[str, ...]
    since_ns: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that an owner holds.

    waiting: hand-offs that lack storage, a slot or both, oldest first. sources: how many are in
    service, gone (dead or being ended), and expected.
    """

    lanes_free: int
    lanes: tuple[LaneLine, ...]
    slots: tuple[SlotLine, ...]
    waiting: tuple[AttemptId, ...]
    sources: tuple[tuple[str, int], ...]
