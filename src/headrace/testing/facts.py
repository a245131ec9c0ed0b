"""What is known of one attempt, one slot, one import: the facts that the ledger keeps.

Cells are bits of an integer: bit `layer * num_tokens + position`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple, TypeAlias

from headrace.errors import HeadraceError
from headrace.geometry import Layer, Sliding
from headrace.ids import AttemptId, ImportId, SourceId, Span
from headrace.protocol.commands import Cause, Outcome

Place: TypeAlias = tuple[SourceId, int]


class Violation(HeadraceError):
    """A machine broke a rule; the text names the rule and the facts."""


class Verdict(Enum):
    """What must become of a message."""

    DROP = auto()  # stale, late, unknown or of a dead source: nothing changes
    FAULT = auto()  # it breaks the protocol: its attempt fails, and nothing else
    FAIL = auto()  # its attempt fails as the protocol has it
    TAKE = auto()


def rule(holds: bool, *facts: object) -> None:
    """Raise `Violation` with the facts unless the rule holds."""
    if not holds:
        raise Violation(" ".join(map(str, facts)))


@dataclass(frozen=True)
class Terms:
    """The constants of one instance that the rules need."""

    layers: tuple[Layer, ...]
    num_tokens: int
    num_lanes: int
    prefetch_depth: int
    digest: bool
    chunk_nbytes: int
    progress_timeout_ns: int
    drain_timeout_ns: int
    max_progress: int
    num_attempts: int = 1
    local: bool = False

    def cells(self, span: Span, start: int) -> int:
        """The span's cells that the transfer set of positions from `start` has, as bits."""
        bits = 0
        for layer in self.layers[span.layer_start : span.layer_stop]:
            tail = layer.kind.tail if isinstance(layer.kind, Sliding) else self.num_tokens
            for position in range(span.start, span.stop):
                if position >= max(start, self.num_tokens - tail):
                    bits |= 1 << (layer.index * self.num_tokens + position)
        return bits

    def transfer_set(self, start: int) -> int:
        """All cells that must come from a source where positions from `start` must."""
        return self.cells(Span(0, len(self.layers), 0, self.num_tokens), start)

    def nbytes(self, cells: int) -> int:
        row = (1 << self.num_tokens) - 1
        return sum(
            (cells >> (layer.index * self.num_tokens) & row).bit_count() * layer.row_nbytes
            for layer in self.layers
        )

    def inside(self, span: Span) -> bool:
        """Whether the span lies in the model and in the prompt."""
        layers = 0 <= span.layer_start < span.layer_stop <= len(self.layers)
        return layers and 0 <= span.start < span.stop <= self.num_tokens


@dataclass(slots=True)
class Account:
    """The facts of one attempt.

    local: for the owner's own engine. avoid: where the attempt before failed. given_up: why nothing
    more of it begins, although it has no terminal. followed: the next attempt has its place.
    start: positions that its storage holds as soon as it has one. all_kept: these are all.
    """

    deadline_ns: int | None
    local: bool = False
    avoid: SourceId | None = None
    given_up: Cause | None = None
    followed: bool = False
    since_ns: int = 0  # of the grant, then of the last cells or word of work, then of the final
    place: Place | None = None
    generation: int = 0
    storage: bool = False
    told: int = 0
    num_progress: int = 0
    asked: int = 0
    fenced: int = 0
    landed: int = 0
    digests: tuple[tuple[int, int], ...] = ()  # (cells, digest) of each span not yet checked
    final: bool = False
    token: int | None = None
    flights: int = 0
    asked_to_publish: bool = False
    outcome: Outcome | None = None
    retired: bool = False
    start: int = 0
    all_kept: bool = False
    unsafe: bool = False  # the device failed: its storage may still be written
    lost_reads: tuple[tuple[Place, ImportId], ...] = ()

    @property
    def live(self) -> bool:
        """Neither decided nor given up."""
        return self.outcome is None and self.given_up is None

    @property
    def over(self) -> bool:
        """Decided or given up, and nothing of its storage is in use."""
        visible = self.outcome is Outcome.PUBLISHED and not self.retired
        return not self.live and not self.flights and not visible

    @property
    def word(self) -> str:
        """What the owner must call the hand-off."""
        if self.over:
            return "ENDED"
        if not self.live:
            return "DRAINING" if self.flights else "PUBLISHED"
        if self.storage and (self.place is not None or self.all_kept):
            return "SEALED" if self.final else "STREAMING"
        return "RESERVED" if self.storage else "WAITING" if self.place is None else "PARKED"


@dataclass(slots=True)
class SlotAccount:
    """The facts of one slot: whose it is, and which tokens are out."""

    holder: AttemptId | None = None
    generation: int = -1
    writer: bool = False
    readers: set[ImportId] = field(default_factory=set)
    ended_ns: int | None = None
    apart: bool = False

    @property
    def word(self) -> str:
        """What the owner must call the slot."""
        if self.holder is None:
            return "FREE"
        if self.ended_ns is not None:
            return "QUARANTINED" if self.apart else "DRAINING"
        return "LEASED" if self.writer else "READING" if self.readers else "READY"


class Apart(NamedTuple):
    """What an attempt left behind that is not proven quiet; `lane`: a lane of its own."""

    lane: bool
    lost_reads: tuple[tuple[Place, ImportId], ...]


class Ticket(NamedTuple):
    """An import in flight, or the check of a landed span's digest."""

    attempt: AttemptId
    cells: int
    check: bool
    since_ns: int
