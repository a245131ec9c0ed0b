"""What the owner's machine asks its shell to do, in the order given.

A command is a plain fact. The shell carries it out and reports completions back by the ids in it;
it decides nothing by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

from headrace.ids import AttemptId, Generation, ImportId, RequestId, SlotIndex, SourceId, Span


class Outcome(Enum):
    """How a hand-off ends, once."""

    PUBLISHED = "published"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Cause(Enum):
    """What ended a hand-off that was not published."""

    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    STALLED = "stalled"
    SOURCE_FAILED = "source-failed"
    SOURCE_DIED = "source-died"
    MALFORMED = "malformed"
    CORRUPT = "corrupt"
    DEVICE = "device"
    NO_STORAGE = "no-storage"
    NO_SOURCE = "no-source"


OF_THE_SOURCE: Final = frozenset(
    {Cause.STALLED, Cause.SOURCE_FAILED, Cause.SOURCE_DIED, Cause.MALFORMED, Cause.CORRUPT}
)
"""What another attempt can mend."""


@dataclass(frozen=True, slots=True)
class Reserve:
    """Set decoder storage aside for `num_tokens` positions; a lane is known to be free."""

    attempt: AttemptId
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StartPrefill:
    """Write the prompt into the slot, then send the source its grant."""

    attempt: AttemptId
    source: SourceId
    slot: SlotIndex
    generation: Generation


@dataclass(frozen=True, slots=True)
class SendCancel:
    """Tell the source that the attempt is no longer wanted."""

    attempt: AttemptId
    source: SourceId


@dataclass(frozen=True, slots=True)
class KillSource:
    """The source did not give a write token back in time: end it, so that its death proves it."""

    source: SourceId
    reason: str


@dataclass(frozen=True, slots=True)
class StartImport:
    """Copy the cells of `piece` into the reservation; report by `import_id` when fenced."""

    import_id: ImportId
    attempt: AttemptId
    source: SourceId
    slot: SlotIndex
    piece: Span


@dataclass(frozen=True, slots=True)
class CheckDigest:
    """Compute the digest of the span's bytes as landed, in plan order; report by `import_id`."""

    import_id: ImportId
    attempt: AttemptId
    span: Span
    expected: int


@dataclass(frozen=True, slots=True)
class Publish:
    """Coverage is complete, the source-final input is there, nothing is in flight: make it visible.

    `slot` still holds the logits row when `token` is None. `source` and `slot` are None where no
    source was needed: what was kept with the entry is the source-final input.
    """

    attempt: AttemptId
    source: SourceId | None
    slot: SlotIndex | None
    token: int | None


@dataclass(frozen=True, slots=True)
class Free:
    """No import runs and nobody decodes: give the reservation or entry back."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class Quarantine:
    """The device did not prove that it is quiet: set the storage apart, out of service."""

    attempt: AttemptId
    reason: str


@dataclass(frozen=True, slots=True)
class Retry:
    """The attempt failed and is quiet: the next one goes on, with its storage if it had any."""

    attempt: AttemptId
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """The hand-off's one terminal, for its caller; `cause` is None if it was published."""

    request: RequestId
    outcome: Outcome
    cause: Cause | None
    reason: str


Command: TypeAlias = (
    Reserve
    | StartPrefill
    | SendCancel
    | KillSource
    | StartImport
    | CheckDigest
    | Publish
    | Free
    | Quarantine
    | Retry
    | Report
)
