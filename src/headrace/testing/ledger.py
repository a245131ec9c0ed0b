"""The facts of an owner, kept a second time and without its tables.

The ledger has no state machine. It notes from the events alone what was told, what landed, who
holds which token, and which storage was set aside. What a hand-off or a slot must be called, and
what must become of a message, follows from these facts.

Cells are bits of an integer: bit `layer * num_tokens + position`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple, TypeAlias, assert_never

from headrace.errors import HeadraceError
from headrace.geometry import Layer, Sliding
from headrace.ids import AttemptId, ImportId, SourceId, Span
from headrace.messages import Computing, Failed, Progress, Released, SourceFinal
from headrace.protocol.commands import Outcome

AttemptMessage: TypeAlias = Computing | Progress | SourceFinal | Failed | Released
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

    def cells(self, span: Span) -> int:
        """The span's cells that the transfer set has, as bits."""
        bits = 0
        for layer in self.layers[span.layer_start : span.layer_stop]:
            tail = layer.kind.tail if isinstance(layer.kind, Sliding) else self.num_tokens
            for position in range(span.start, span.stop):
                if position >= self.num_tokens - tail:
                    bits |= 1 << (layer.index * self.num_tokens + position)
        return bits

    @property
    def transfer_set(self) -> int:
        return self.cells(Span(0, len(self.layers), 0, self.num_tokens))

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
    """The facts of one attempt."""

    deadline_ns: int | None
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
    unsafe: bool = False  # the device failed: its storage may still be written

    @property
    def over(self) -> bool:
        """Decided, and nothing of its storage is in use."""
        visible = self.outcome is Outcome.PUBLISHED and not self.retired
        return self.outcome is not None and not self.flights and not visible

    @property
    def word(self) -> str:
        """What the owner must call the hand-off."""
        if self.over:
            return "ENDED"
        if self.outcome is not None:
            return "DRAINING" if self.flights else "PUBLISHED"
        if self.storage and self.place is not None:
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


class Ticket(NamedTuple):
    """An import in flight, or the check of a landed span's digest."""

    attempt: AttemptId
    cells: int
    check: bool
    since_ns: int


class Ledger:
    """The facts of one owner, its sources and its requests."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.accounts: dict[AttemptId, Account] = {}  # oldest first
        self.slots: dict[Place, SlotAccount] = {}
        self.dead: set[SourceId] = set()
        self.forgotten: set[SourceId] = set()  # and dead
        self.doomed: set[SourceId] = set()  # to be killed
        self.tickets: dict[ImportId, Ticket] = {}
        self.lanes_apart = 0
        self.due: dict[AttemptId, Outcome] = {}  # what this event decides
        self.cancels: dict[AttemptId, bool] = {}  # whom it may cancel at the source; True: must
        self.kills: set[Place] = set()  # the slots for which this event kills a source
        self.budget_nbytes = 0

    def attached(self, source: SourceId, num_slots: int) -> None:
        for index in range(num_slots):
            self.slots[source, index] = SlotAccount()

    def submitted(self, attempt: AttemptId, deadline_ns: int | None) -> None:
        rule(attempt not in self.accounts, attempt, "exists already")
        self.accounts[attempt] = Account(deadline_ns)

    def verdict(self, source: SourceId, message: AttemptMessage) -> Verdict:
        """What must become of a message; changes nothing."""
        account = self.accounts.get(message.attempt)
        if account is None or account.place is None or source in self.dead:
            return Verdict.DROP
        live = account.outcome is None and account.place[0] == source
        slot = self._granted(source, message)
        if slot is None:
            return Verdict.FAULT if live else Verdict.DROP
        if isinstance(message, Released) and slot.writer:
            return Verdict.TAKE if account.final or not live else Verdict.FAIL
        if not live:
            return Verdict.DROP
        match message:
            case Progress(spans=spans, digests=digests):
                stamped = len(digests) == (len(spans) if digests or self.terms.digest else 0)
                bounded = account.num_progress < self.terms.max_progress
                legal = not account.final and stamped and bounded
                legal = legal and self._fresh(account, spans)
            case Computing():
                legal = not account.final
            case SourceFinal():
                legal = not account.final and account.told == self.terms.transfer_set
            case Failed():
                return Verdict.FAULT if account.final else Verdict.FAIL
            case Released():
                legal = False
            case _:
                assert_never(message)
        return Verdict.TAKE if legal else Verdict.FAULT

    def told(self, source: SourceId, message: AttemptMessage, now_ns: int) -> None:
        """Note a message that is not to be dropped."""
        account = self.accounts[message.attempt]
        slot = self._granted(source, message)
        released = isinstance(message, Released) and slot is not None
        if self.verdict(source, message) in (Verdict.FAULT, Verdict.FAIL):
            # A source that has returned needs no cancel; one more does no harm.
            self.decide(message.attempt, Outcome.FAILED, now_ns, must_cancel=not released)
        elif isinstance(message, Progress):
            account.num_progress += 1
            for at, span in enumerate(message.spans):
                cells = self.terms.cells(span)
                account.told |= cells
                account.since_ns = now_ns if cells else account.since_ns
                if cells and message.digests:
                    account.digests += ((cells, message.digests[at]),)
        elif isinstance(message, Computing):
            account.since_ns = now_ns
        elif isinstance(message, SourceFinal):
            account.since_ns = now_ns
            account.final = True
            account.token = message.token if message.first == "token" else None
        if released and slot is not None:
            slot.writer = False
            self._quiet((source, message.slot))

    def import_ended(self, import_id: ImportId, *, failed: bool, now_ns: int) -> None:
        """An import was fenced; or failed without a fence, and its read token never comes back."""
        ticket = self.tickets.pop(import_id)
        account = self.accounts[ticket.attempt]
        account.flights -= 1
        if failed:
            account.unsafe = True
            if account.outcome is None:
                self.decide(ticket.attempt, Outcome.FAILED, now_ns)
            return
        account.fenced |= ticket.cells
        if not any(ticket.cells & cells for cells, _ in account.digests):
            account.landed |= ticket.cells
        place = next(key for key, slot in self.slots.items() if import_id in slot.readers)
        self.slots[place].readers.remove(import_id)
        self._quiet(place)

    def digest_checked(self, import_id: ImportId, *, right: bool, now_ns: int) -> None:
        ticket = self.tickets.pop(import_id)
        account = self.accounts[ticket.attempt]
        account.flights -= 1
        if right:
            account.landed |= ticket.cells
        elif account.outcome is None:
            self.decide(ticket.attempt, Outcome.FAILED, now_ns)

    def published(self, attempt: AttemptId, now_ns: int) -> None:
        """The decoder carried `Publish` out."""
        account = self.accounts[attempt]
        rule(account.outcome is None, attempt, "is published after its terminal")
        account.outcome = self.due[attempt] = Outcome.PUBLISHED
        self._end_slot(account, now_ns)

    def device_failed(self, attempt: AttemptId, now_ns: int) -> None:
        """A `Reserve` or a `Publish` failed."""
        self.accounts[attempt].unsafe = True
        self.decide(attempt, Outcome.FAILED, now_ns)

    def reserve_refused(self, attempt: AttemptId, now_ns: int) -> None:
        """Nothing was set aside for a `Reserve`, so there is nothing to give back."""
        self.accounts[attempt].storage = False
        self.decide(attempt, Outcome.FAILED, now_ns)

    def lane_lost(self) -> None:
        """A lane is out of service; if it is another's by now, then only one is when that fails."""
        self.lanes_apart = min(self.lanes_apart + 1, self.terms.num_lanes)

    def retired(self, attempt: AttemptId, *, unsafe: bool) -> None:
        self.accounts[attempt].retired = True
        self.accounts[attempt].unsafe = unsafe

    def died(self, source: SourceId, now_ns: int) -> None:
        """The source is proven dead: its write tokens are back."""
        self.dead.add(source)
        for place, slot in list(self.slots.items()):
            if place[0] == source and slot.writer and slot.holder is not None:
                account = self.accounts[slot.holder]
                slot.writer = False
                if account.outcome is None and not account.final:
                    self.decide(slot.holder, Outcome.FAILED, now_ns)
                self._quiet(place)

    def may_forget(self, source: SourceId) -> bool:
        """Whether nothing is left of a source: it is dead, and none of its slots is held."""
        held = [slot for (at, _), slot in self.slots.items() if at == source and slot.holder]
        return source in self.dead and not held

    def forgot(self, source: SourceId) -> None:
        self.forgotten.add(source)
        self.slots = {place: slot for place, slot in self.slots.items() if place[0] != source}

    def clock(self, now_ns: int) -> None:
        """Time passed: note whose deadlines did.

        An import that was not fenced in time is waited for no longer; what it may still touch is
        set apart: its storage, and by the read token that stays out, its slot.
        """
        for place, slot in self.slots.items():
            if slot.ended_ns is None or slot.apart:
                continue
            if slot.ended_ns + self.terms.drain_timeout_ns <= now_ns:
                slot.apart = True
                if slot.writer:
                    self.kills.add(place)
        for attempt, account in list(self.undecided()):
            late = account.deadline_ns is not None and account.deadline_ns <= now_ns
            if account.place is not None and not account.final:
                late |= account.since_ns + self.terms.progress_timeout_ns <= now_ns
            if late:
                self.decide(attempt, Outcome.FAILED, now_ns)
        for import_id, ticket in list(self.tickets.items()):
            if ticket.since_ns + self.terms.drain_timeout_ns <= now_ns:
                self.import_ended(import_id, failed=True, now_ns=now_ns)

    def strand(self, now_ns: int) -> None:
        """Who waits for what is out of service for good fails."""
        for attempt, account in list(self.undecided()):
            lacks_lane = not account.storage and not self.lane_in_service
            lacks_slot = account.place is None and not self.slot_in_service
            if lacks_lane or lacks_slot:
                self.decide(attempt, Outcome.FAILED, now_ns)

    def decide(
        self, attempt: AttemptId, outcome: Outcome, now_ns: int, *, must_cancel: bool = True
    ) -> None:
        """The terminal of a hand-off that is not published."""
        account = self.accounts[attempt]
        account.outcome = self.due[attempt] = outcome
        if any(slot.writer and slot.holder == attempt for slot in self.slots.values()):
            self.cancels[attempt] = must_cancel
        self._end_slot(account, now_ns)

    def undecided(self) -> Iterator[tuple[AttemptId, Account]]:
        """The hand-offs without a terminal, oldest first."""
        return ((a, account) for a, account in self.accounts.items() if account.outcome is None)

    @property
    def lane_in_service(self) -> bool:
        return self.lanes_apart < self.terms.num_lanes

    @property
    def slot_in_service(self) -> bool:
        """Whether some slot may be granted, now or later."""
        gone = self.dead | self.doomed
        return any(at not in gone and not slot.apart for (at, _), slot in self.slots.items())

    @property
    def lanes_free(self) -> int:
        """Below zero when one that another holds was lost."""
        held = sum(account.storage for account in self.accounts.values())
        return self.terms.num_lanes - held - self.lanes_apart

    def idle(self, source: SourceId) -> bool:
        """Whether a source has no write token."""
        return not any(slot.writer for place, slot in self.slots.items() if place[0] == source)

    def _granted(self, source: SourceId, message: AttemptMessage) -> SlotAccount | None:
        slot = self.slots.get((source, message.slot))
        if slot is None or slot.holder != message.attempt:
            return None
        return slot if slot.generation == message.generation else None

    def _fresh(self, account: Account, spans: tuple[Span, ...]) -> bool:
        seen = account.told
        for span in spans:
            cells = self.terms.cells(span)
            if not self.terms.inside(span) or cells & seen:
                return False
            seen |= cells
        return True

    def _end_slot(self, account: Account, now_ns: int) -> None:
        if account.place is not None:
            self.slots[account.place].ended_ns = now_ns
            self._quiet(account.place)

    def _quiet(self, place: Place) -> None:
        slot = self.slots[place]
        if slot.ended_ns is not None and not slot.writer and not slot.readers:
            self.slots[place] = SlotAccount(generation=slot.generation)
