"""One hand-off at the owner: from waiting for storage to the last fence.

    WAITING     holds neither storage nor slot
    PARKED      holds a slot, not yet storage: spans are validated and counted and stay in the slot
    RESERVED    holds storage, not yet a slot
    STREAMING   holds both: spans are imported as they are told
    SEALED      the source-final input is there and every cell was told; imports may still run
    PUBLISHED   the entry is visible and decodes
    DRAINING    begins nothing; imports that run are waited for
    ENDED       nothing runs; its storage is given back, or passed on to the next attempt

Two coverages are kept. `claimed` is what the source has told, checked before anything changes, so
that a cell told twice or outside the plan is refused. `landed` is what is proven to be in the
reservation: a span counts there when every piece of it is fenced and, where asked for, its digest
was found right. Publishing looks at `landed`, at the source-final input and at what is in flight,
and at nothing else.

The first positions of a prompt may be in the storage as soon as it is reserved, since an entry of
the decoder that begins alike was kept: they are outside the transfer set, and no source may tell
them. Where that is the whole prompt, the source-final input was kept too, no source is needed, and
the hand-off is SEALED by its storage alone.

An attempt that failed by its source's fault may be given up instead of decided: it drains without a
terminal, and once it is quiet the next attempt takes its storage over. Until then a cancel, a
deadline or a device's fault may still decide it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar

from headrace.coverage import Coverage
from headrace.errors import LocalProtocolError, RemoteProtocolError
from headrace.ids import AttemptId, ImportId, SourceId, Span
from headrace.messages import MAX_PROGRESS
from headrace.plan import Plan
from headrace.protocol.commands import Outcome
from headrace.protocol.machine import Machine
from headrace.protocol.slots import Lease, Slot


class HandoffState(Enum):
    WAITING = auto()
    PARKED = auto()
    RESERVED = auto()
    STREAMING = auto()
    SEALED = auto()
    PUBLISHED = auto()
    DRAINING = auto()
    ENDED = auto()


class HandoffEvent(Enum):
    RESERVE = auto()
    LEASE = auto()
    PROGRESS = auto()
    FINAL = auto()
    SEAL = auto()
    IMPORT_BEGIN = auto()
    IMPORT_END = auto()
    PUBLISH = auto()
    END = auto()
    QUIET = auto()


_S, _E = HandoffState, HandoffEvent


@dataclass(slots=True)
class SpanImport:
    """A told span on its way: `open_pieces` of it are queued or in flight."""

    span: Span
    digest: int | None
    open_pieces: int


@dataclass(slots=True)
class Flight:
    """One import in flight: a piece of a span, or the check of the whole span's digest."""

    span_import: SpanImport
    nbytes: int
    digest_check: bool = False


class Handoff(Machine[HandoffState, HandoffEvent]):
    """One attempt of one request, as its owner keeps it."""

    TABLE: ClassVar = {
        _S.WAITING: {_E.RESERVE: _S.RESERVED, _E.LEASE: _S.PARKED, _E.END: _S.DRAINING},
        _S.PARKED: {
            _E.RESERVE: _S.STREAMING,
            _E.PROGRESS: _S.PARKED,
            _E.FINAL: _S.PARKED,
            _E.END: _S.DRAINING,
        },
        _S.RESERVED: {_E.LEASE: _S.STREAMING, _E.SEAL: _S.SEALED, _E.END: _S.DRAINING},
        _S.STREAMING: {
            _E.PROGRESS: _S.STREAMING,
            _E.FINAL: _S.STREAMING,
            _E.SEAL: _S.SEALED,
            _E.IMPORT_BEGIN: _S.STREAMING,
            _E.IMPORT_END: _S.STREAMING,
            _E.END: _S.DRAINING,
        },
        _S.SEALED: {
            _E.IMPORT_BEGIN: _S.SEALED,
            _E.IMPORT_END: _S.SEALED,
            _E.PUBLISH: _S.PUBLISHED,
            _E.END: _S.DRAINING,
        },
        _S.PUBLISHED: {_E.END: _S.DRAINING},
        _S.DRAINING: {_E.IMPORT_END: _S.DRAINING, _E.QUIET: _S.ENDED},
        _S.ENDED: {},
    }

    def __init__(
        self,
        attempt: AttemptId,
        num_tokens: int,
        *,
        digest: bool = False,
        local: bool = False,
        avoid: SourceId | None = None,
        start: int = 0,
    ) -> None:
        """`digest`: every span must come with one.

        `local`: for the owner's own engine. `avoid`: the source that failed the attempt before.
        `start`: positions that its storage holds as soon as it is reserved.
        """
        super().__init__(HandoffState.WAITING, f"hand-off {attempt}")
        self.attempt = attempt
        self.num_tokens = num_tokens
        self.digest = digest
        self.local = local
        self.avoid = avoid
        self.start = start
        self.outcome: Outcome | None = None
        self.reason = ""
        self.has_storage = False
        self.source: SourceId | None = None
        self.lease: Lease | None = None
        self.final = not self.needs_source
        self.token: int | None = None
        self.last_progress_ns = 0
        self.quarantine_reason = ""
        self.lost_reads: list[tuple[Slot, ImportId]] = []  # of imports that were never fenced
        self._plan: Plan | None = None
        self._claimed = Coverage((), 0)
        self._landed = Coverage((), 0)
        self._queue: deque[tuple[SpanImport, Span, int]] = deque()
        self._flights: dict[ImportId, Flight] = {}
        self._queued_nbytes = 0
        self._num_progress = 0

    @property
    def needs_source(self) -> bool:
        """Whether anything of it is to come from a source; else it waits for storage only."""
        return self.start < self.num_tokens

    @property
    def in_flight(self) -> int:
        """Imports begun and not yet fenced."""
        return len(self._flights)

    @property
    def live(self) -> bool:
        """Whether the source may tell of it: it is neither published nor over."""
        return self.allows(HandoffEvent.END) and self.state is not HandoffState.PUBLISHED

    @property
    def given_up(self) -> bool:
        """Whether it is over without a terminal: another attempt is to follow."""
        return self.outcome is None and self.state in (HandoffState.DRAINING, HandoffState.ENDED)

    @property
    def publishable(self) -> bool:
        """Every cell landed, the source-final input there, nothing in flight."""
        return (
            self.state is HandoffState.SEALED
            and self.final
            and self._landed.complete
            and not self._flights
        )

    @property
    def nearness(self) -> tuple[bool, int]:
        """Sorts the hand-off nearest to publishing first: sealed ones, then fewest bytes queued."""
        return self.state is not HandoffState.SEALED, self._queued_nbytes

    @property
    def has_pieces(self) -> bool:
        """Whether an import could begin now."""
        return bool(self._queue) and self.allows(HandoffEvent.IMPORT_BEGIN)

    def reserve(self) -> None:
        """Storage is set aside for this attempt; what was told before is imported together."""
        self._check(HandoffEvent.RESERVE)
        self.has_storage = True
        self._join_queue()
        self._step(HandoffEvent.RESERVE)
        self._settle()

    def take_lease(self, source: SourceId, lease: Lease, plan: Plan, now_ns: int) -> None:
        """A slot of `source` is granted, and with it the plan is fixed."""
        self._check(HandoffEvent.LEASE)
        self.source = source
        self.lease = lease
        self.last_progress_ns = now_ns
        self._plan = plan
        self._claimed = Coverage(plan.windows, plan.num_tokens)
        self._landed = Coverage(plan.windows, plan.num_tokens)
        self._step(HandoffEvent.LEASE)

    def progress(self, spans: Sequence[Span], digests: Sequence[int], now_ns: int) -> None:
        """The source told spans: all are checked, then all are queued for import.

        Raises:
            RemoteProtocolError: illegal now, a malformed span, or digests that do not match.
        """
        self._check(HandoffEvent.PROGRESS, RemoteProtocolError)
        if self.final:
            raise RemoteProtocolError(f"{self._name}: progress after the final")
        if (digests or self.digest) and len(digests) != len(spans):
            raise RemoteProtocolError(f"{self._name}: {len(spans)} spans, {len(digests)} digests")
        if self._num_progress == MAX_PROGRESS:
            raise RemoteProtocolError(f"{self._name}: more than {MAX_PROGRESS} progress messages")
        self._claimed.add(spans)
        self._num_progress += 1
        plan = self._expect_plan()
        for at, span in enumerate(spans):
            nbytes = plan.span_nbytes(span)
            if nbytes:  # a span without cells is legal and moves nothing
                entry = SpanImport(span, digests[at] if digests else None, 1)
                self._queue.append((entry, span, nbytes))
                self._queued_nbytes += nbytes
                self.last_progress_ns = now_ns
        self._step(HandoffEvent.PROGRESS)

    def computing(self, now_ns: int) -> None:
        """The source is at work and has nothing to tell yet.

        Raises:
            RemoteProtocolError: illegal now, or after the final.
        """
        self._check(HandoffEvent.PROGRESS, RemoteProtocolError)
        if self.final:
            raise RemoteProtocolError(f"{self._name}: computing after the final")
        self.last_progress_ns = now_ns
        self._step(HandoffEvent.PROGRESS)

    def source_final(self, token: int | None, now_ns: int) -> None:
        """The source-final input is there.

        Raises:
            RemoteProtocolError: illegal now, given before, or cells were not told.
        """
        self._check(HandoffEvent.FINAL, RemoteProtocolError)
        if self.final:
            raise RemoteProtocolError(f"{self._name}: a second final")
        missing = self._claimed.first_missing()
        if missing is not None:
            raise RemoteProtocolError(f"{self._name}: final, but {missing} was never told")
        self.final = True
        self.token = token
        self.last_progress_ns = now_ns
        self._step(HandoffEvent.FINAL)
        self._settle()

    def begin_import(self, import_id: ImportId, chunk_nbytes: int) -> tuple[Span, int]:
        """Take a piece of what is queued first, cut to `chunk_nbytes`; returns it and its bytes."""
        self._check(HandoffEvent.IMPORT_BEGIN)
        if not self._queue:
            raise LocalProtocolError(f"{self._name}: nothing is queued")
        entry, told, _ = self._queue.popleft()
        plan = self._expect_plan()
        pieces = [(piece, plan.span_nbytes(piece)) for piece in plan.cut(told, chunk_nbytes)]
        (piece, nbytes), *rest = [each for each in pieces if each[1]]
        entry.open_pieces += len(rest)
        self._queue.extendleft((entry, *each) for each in reversed(rest))
        self._queued_nbytes -= nbytes
        self._flights[import_id] = Flight(entry, nbytes)
        self._step(HandoffEvent.IMPORT_BEGIN)
        return piece, nbytes

    def begin_digest_check(self, import_id: ImportId, entry: SpanImport) -> None:
        """The whole span is fenced and its bytes are to be checked as landed."""
        self._check(HandoffEvent.IMPORT_BEGIN)
        self._flights[import_id] = Flight(entry, 0, digest_check=True)
        self._step(HandoffEvent.IMPORT_BEGIN)

    def end_import(self, import_id: ImportId, *, good: bool = True) -> SpanImport | None:
        """An import ended; returns the span whose digest must be checked next, if any.

        `good` is false when it failed or its digest was wrong: then its span never lands.
        """
        self._check(HandoffEvent.IMPORT_END)
        flight = self._flights.pop(import_id, None)
        if flight is None:
            raise LocalProtocolError(f"{self._name}: import {import_id} is not in flight")
        self._step(HandoffEvent.IMPORT_END)
        entry = flight.span_import
        wants_check = False
        if good:
            entry.open_pieces -= 0 if flight.digest_check else 1
            fenced = entry.open_pieces == 0
            wants_check = fenced and entry.digest is not None and not flight.digest_check
            if fenced and not wants_check:
                self._landed.add([entry.span])
        self._settle()
        return entry if wants_check and self.allows(HandoffEvent.IMPORT_BEGIN) else None

    def span_of(self, import_id: ImportId) -> Span:
        """The told span that an import in flight belongs to."""
        return self._flights[import_id].span_import.span

    def publish(self) -> None:
        """The entry is visible: the hand-off's terminal is `published`.

        Raises:
            LocalProtocolError: a condition of rule 1 does not hold.
        """
        self._check(HandoffEvent.PUBLISH)
        if not self.publishable:
            raise LocalProtocolError(
                f"{self._name}: publish with {self.in_flight} imports in flight, "
                f"final {self.final}, missing {self._landed.first_missing()}"
            )
        self.outcome = Outcome.PUBLISHED
        self._step(HandoffEvent.PUBLISH)

    def end(self, outcome: Outcome | None, reason: str = "") -> bool:
        """Begin nothing more; returns whether this decided the terminal. None gives it up."""
        self._check(HandoffEvent.END)
        decided = self.outcome is None and outcome is not None
        if self.outcome is None:
            self.outcome, self.reason = outcome, reason
        self._queue.clear()
        self._queued_nbytes = 0
        self._step(HandoffEvent.END)
        self._settle()
        return decided

    def decide(self, outcome: Outcome) -> None:
        """The terminal of an attempt that was given up: no other follows.

        Raises:
            LocalProtocolError: it was not given up.
        """
        if not self.given_up:
            raise LocalProtocolError(f"{self._name}: {self.state.name} {self.outcome} is decided")
        self.outcome = outcome

    def _join_queue(self) -> None:
        """Make one of queued spans that are one rectangle: fewer imports cost less."""
        queue: deque[tuple[SpanImport, Span, int]] = deque()
        for entry, span, nbytes in self._queue:
            if queue and entry.digest is None and queue[-1][0].digest is None:
                joined = _joined(queue[-1][1], span)
                if joined is not None:
                    nbytes += queue.pop()[2]
                    entry, span = SpanImport(joined, None, 1), joined
            queue.append((entry, span, nbytes))
        self._queue = queue

    def _settle(self) -> None:
        holds = self.state in (HandoffState.STREAMING, HandoffState.RESERVED)
        if holds and self.final and self._claimed.complete:
            self._step(HandoffEvent.SEAL)
        if self.state is HandoffState.DRAINING and not self._flights:
            self._step(HandoffEvent.QUIET)

    def _expect_plan(self) -> Plan:
        if self._plan is None:
            raise LocalProtocolError(f"{self._name}: no plan before a lease")
        return self._plan


def _joined(one: Span, other: Span) -> Span | None:
    """The rectangle that two spans are, the second after the first; None if they are none."""
    positions = one.start, one.stop
    if one.layer_stop == other.layer_start and positions == (other.start, other.stop):
        return Span(one.layer_start, other.layer_stop, *positions)
    layers = one.layer_start, one.layer_stop
    if one.stop == other.start and layers == (other.layer_start, other.layer_stop):
        return Span(*layers, one.start, other.stop)
    return None
