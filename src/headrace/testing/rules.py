"""The owner's rules, stated a second time and without its tables: a ledger of plain facts.

The ledger keeps no state machine. It notes what was told, what landed, who holds which token and
what storage was set aside, from the events alone, and derives from these facts what each command
needs before it may be given, and what must have been given when an event is over. A rule is thus
checked in both directions: nothing too early (`command`), nothing forgotten (`settle`).

Cells are bits of an integer: bit `layer * num_tokens + position`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeAlias, assert_never

from headrace.errors import HeadraceError
from headrace.geometry import Layer, Sliding
from headrace.ids import AttemptId, ImportId, SourceId, Span
from headrace.messages import Failed, Progress, Released, SourceFinal
from headrace.protocol.commands import (
    CheckDigest,
    Command,
    Free,
    Outcome,
    Publish,
    Quarantine,
    Report,
    Reserve,
    SendCancel,
    StartImport,
    StartPrefill,
)

AttemptMessage: TypeAlias = Progress | SourceFinal | Failed | Released
Place: TypeAlias = tuple[SourceId, int]


class Violation(HeadraceError):
    """A machine broke a rule; the text names the rule and both values."""


class Verdict(Enum):
    """What must become of a message."""

    DROP = auto()  # stale, late or unknown: nothing changes
    FAULT = auto()  # its attempt fails, and nothing else
    TAKE = auto()


@dataclass(frozen=True)
class Terms:
    """The constants of one instance that the rules need."""

    layers: tuple[Layer, ...]
    num_tokens: int
    num_lanes: int
    prefetch_depth: int
    chunk_nbytes: int
    progress_timeout_ns: int
    drain_timeout_ns: int

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
        layers = 0 <= span.layer_start < span.layer_stop <= len(self.layers)
        return layers and 0 <= span.start < span.stop <= self.num_tokens


@dataclass(slots=True)
class Account:
    """The facts of one attempt."""

    deadline_ns: int | None
    since_ns: int = 0  # of the grant, of the last word of its source
    place: Place | None = None
    generation: int = 0
    storage: bool = False
    told: int = 0
    asked: int = 0
    fenced: int = 0
    landed: int = 0
    digests: tuple[tuple[int, int], ...] = ()  # cells, digest: of spans not yet checked
    final: bool = False
    token: int | None = None
    flights: int = 0
    asked_to_publish: bool = False
    outcome: Outcome | None = None
    retired: bool = False
    unsafe: bool = False  # the device failed: its storage may still be written

    @property
    def over(self) -> bool:
        """Nothing of its storage is in use."""
        visible = self.outcome is Outcome.PUBLISHED and not self.retired
        return self.outcome is not None and not self.flights and not visible


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
        """What its owner must call it."""
        if self.holder is None:
            return "FREE"
        if self.ended_ns is not None:
            return "QUARANTINED" if self.apart else "DRAINING"
        return "LEASED" if self.writer else "READING" if self.readers else "READY"


@dataclass(frozen=True, slots=True)
class Ticket:
    """An import in flight, or a digest check, whose cells are `cells`."""

    attempt: AttemptId
    cells: int
    check: bool


class Ledger:
    """The facts of one owner, its sources and its requests."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.accounts: dict[AttemptId, Account] = {}  # oldest first
        self.slots: dict[Place, SlotAccount] = {}
        self.dead: set[SourceId] = set()
        self.tickets: dict[ImportId, Ticket] = {}
        self.lanes_apart = 0
        self._last_import = -1
        self._due: dict[AttemptId, Outcome] = {}  # what this event decides
        self._cancels: dict[AttemptId, bool] = {}  # may be cancelled at its source; True: must be
        self._budget_nbytes = 0

    # What happened.

    def attached(self, source: SourceId, num_slots: int) -> None:
        for index in range(num_slots):
            self.slots[source, index] = SlotAccount()

    def submitted(self, attempt: AttemptId, deadline_ns: int | None) -> None:
        _rule(attempt not in self.accounts, f"attempt {attempt} exists already")
        self.accounts[attempt] = Account(deadline_ns)

    def verdict(self, source: SourceId, message: AttemptMessage) -> Verdict:
        """What must become of a message; changes nothing."""
        account = self.accounts.get(message.attempt)
        slot = self.slots.get((source, message.slot))
        live = account is not None and account.outcome is None
        live = live and account is not None and account.place is not None
        live = live and account is not None and account.place[0] == source
        granted = slot is not None and slot.holder == message.attempt
        granted = granted and slot is not None and slot.generation == message.generation
        if not granted or account is None or slot is None:
            return Verdict.FAULT if live else Verdict.DROP
        if isinstance(message, Released) and slot.writer:
            return Verdict.TAKE if account.final or not live else Verdict.FAULT
        if not live:
            return Verdict.DROP
        match message:
            case Progress(spans=spans, digests=digests):
                legal = not account.final and len(digests) in (0, len(spans))
                return Verdict.TAKE if legal and self._fresh(account, spans) else Verdict.FAULT
            case SourceFinal():
                legal = not account.final and account.told == self.terms.transfer_set
                return Verdict.TAKE if legal else Verdict.FAULT
            case Failed() | Released():
                return Verdict.FAULT
            case _:
                assert_never(message)

    def told(self, source: SourceId, message: AttemptMessage, now_ns: int) -> None:
        """Note a message that is not to be dropped."""
        verdict = self.verdict(source, message)
        account = self.accounts[message.attempt]
        if verdict is Verdict.FAULT:
            returned = isinstance(message, Released) and self._writing(message.attempt)
            self._decide(message.attempt, Outcome.FAILED, now_ns, must_cancel=not returned)
        match message:
            case Released():
                place = (source, message.slot)
                granted = self.slots.get(place)
                if granted is not None and granted.holder == message.attempt:
                    if granted.generation == message.generation:
                        granted.writer = False
                    self._quiet(place)
            case Progress() if verdict is Verdict.TAKE:
                account.since_ns = now_ns
                for at, span in enumerate(message.spans):
                    cells = self.terms.cells(span)
                    account.told |= cells
                    if cells and message.digests:
                        account.digests += ((cells, message.digests[at]),)
            case SourceFinal() if verdict is Verdict.TAKE:
                account.since_ns = now_ns
                account.final = True
                account.token = message.token if message.first == "token" else None
            case _:
                pass

    def importing(self, budget_nbytes: int) -> None:
        self._budget_nbytes = budget_nbytes

    def import_ended(self, import_id: ImportId, *, failed: bool, now_ns: int) -> None:
        """An import was fenced; or failed without one, and then its read token never comes back."""
        ticket = self.tickets.pop(import_id)
        account = self.accounts[ticket.attempt]
        account.flights -= 1
        if failed:
            account.unsafe = True
            if account.outcome is None:
                self._decide(ticket.attempt, Outcome.FAILED, now_ns)
            return
        self._land(account, ticket.cells)
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
            self._decide(ticket.attempt, Outcome.FAILED, now_ns)

    def published(self, attempt: AttemptId, now_ns: int) -> None:
        """The decoder carried `Publish` out."""
        account = self.accounts[attempt]
        _rule(account.outcome is None, f"{attempt}: a Publish stands after its terminal")
        account.outcome = self._due[attempt] = Outcome.PUBLISHED
        self._end_slot(account, now_ns)

    def device_failed(self, attempt: AttemptId, now_ns: int) -> None:
        """A `Reserve` or a `Publish` failed."""
        self.accounts[attempt].unsafe = True
        self._decide(attempt, Outcome.FAILED, now_ns)

    def retired(self, attempt: AttemptId) -> None:
        self.accounts[attempt].retired = True

    def cancelled(self, attempt: AttemptId, now_ns: int) -> None:
        self._decide(attempt, Outcome.CANCELLED, now_ns)

    def died(self, source: SourceId, now_ns: int) -> None:
        self.dead.add(source)
        for place, slot in self.slots.items():
            if place[0] == source and slot.writer and slot.holder is not None:
                account = self.accounts[slot.holder]
                if account.outcome is None and not account.final:
                    self._decide(slot.holder, Outcome.FAILED, now_ns, cancel=False)
                slot.writer = False
                self._quiet(place)
        if all(place[0] in self.dead for place in self.slots):
            for attempt in [a for a, c in self.undecided() if c.place is None]:
                self._decide(attempt, Outcome.FAILED, now_ns)

    def clock(self, now_ns: int) -> None:
        for slot in self.slots.values():
            ended_ns = slot.ended_ns
            if ended_ns is not None and ended_ns + self.terms.drain_timeout_ns <= now_ns:
                slot.apart = True
        for attempt, account in list(self.undecided()):
            late = account.deadline_ns is not None and account.deadline_ns <= now_ns
            if account.place is not None and not account.final:
                late |= account.since_ns + self.terms.progress_timeout_ns <= now_ns
            if late:
                self._decide(attempt, Outcome.FAILED, now_ns)

    # What was commanded.

    def command(self, command: Command, now_ns: int) -> None:
        """Check one command against the facts, then note it.

        Raises:
            Violation: it was not allowed.
        """
        match command:
            case Reserve():
                self._reserve(command)
            case StartPrefill():
                self._start_prefill(command, now_ns)
            case SendCancel(attempt=attempt, source=source):
                place = self.accounts[attempt].place
                allowed = self._cancels.pop(attempt, None) is not None
                _rule(allowed and place is not None and place[0] == source, f"stray {command}")
            case StartImport():
                self._start_import(command)
            case CheckDigest():
                self._check_digest(command)
            case Publish():
                self._publish(command)
            case Free(attempt=attempt) | Quarantine(attempt=attempt):
                self._give_back(attempt, apart=isinstance(command, Quarantine))
            case Report():
                attempt = AttemptId(*command.request, 1)
                due = self._due.pop(attempt, None)
                _rule(due is command.outcome, f"{command}, due was {due}")
            case _:
                assert_never(command)

    def settle(self) -> None:
        """Check that the event left nothing undone.

        Raises:
            Violation: with what is missing.
        """
        _rule(not self._due, f"no Report of {self._due}")
        owed = [str(attempt) for attempt, must in self._cancels.items() if must]
        _rule(not owed, f"no SendCancel of {owed}")
        self._cancels.clear()
        for attempt, account in self.accounts.items():
            _rule(not (account.over and account.storage), f"{attempt}: its storage was kept")
        for attempt, account in self.undecided():
            ready = self._publishable(account)
            _rule(ready == account.asked_to_publish, f"{attempt}: complete, and no Publish")
            for cells, _ in account.digests:
                _rule(bool(cells & ~account.fenced), f"{attempt}: a digest was not checked")
        if self._budget_nbytes > 0:
            _rule(not any(self._importable(c) for _, c in self.undecided()), "a budget was left")
        self._budget_nbytes = 0
        self._settle_admission()

    def word_of(self, attempt: AttemptId) -> str:
        """What its owner must call the hand-off."""
        account = self.accounts[attempt]
        if account.over:
            return "ENDED"
        if account.outcome is not None:
            return "DRAINING" if account.flights else "PUBLISHED"
        if account.storage and account.place is not None:
            return "SEALED" if account.final else "STREAMING"
        return "RESERVED" if account.storage else "PARKED" if account.place else "WAITING"

    def undecided(self) -> Iterator[tuple[AttemptId, Account]]:
        """The hand-offs without a terminal, oldest first."""
        return ((a, account) for a, account in self.accounts.items() if account.outcome is None)

    @property
    def lanes_free(self) -> int:
        held = sum(account.storage for account in self.accounts.values())
        return self.terms.num_lanes - held - self.lanes_apart

    # The rules.

    def _reserve(self, command: Reserve) -> None:
        account = self.accounts[command.attempt]
        _rule(self.lanes_free > 0, f"{command} without a free lane")
        _rule(account.outcome is None and not account.storage, f"{command} of {account}")
        parked = [a for a, c in self.undecided() if c.place and not c.storage]
        waiting = [a for a, c in self.undecided() if not c.place and not c.storage]
        _rule(command.attempt == (parked + waiting)[0], f"{command} out of turn")
        account.storage = True

    def _start_prefill(self, command: StartPrefill, now_ns: int) -> None:
        place = (command.source, command.slot)
        slot, account = self.slots[place], self.accounts[command.attempt]
        _rule(account.outcome is None and account.place is None, f"{command} of {account}")
        _rule(command.source not in self.dead, f"{command} to a dead source")
        _rule(self._idle(command.source), f"{command} to a busy source")
        _rule(slot.holder is None, f"{command} into a slot of {slot.holder}, {slot.word}")
        _rule(command.generation > slot.generation, f"{command} after {slot.generation}")
        lacking = [a for a, c in self.undecided() if c.place is None and c.storage]
        if lacking:
            _rule(command.attempt == lacking[0], f"{command}, {lacking[0]} has storage, no slot")
        else:
            _rule(self._may_park(command.source), f"{command} parks beyond the bound")
            waiting = [a for a, c in self.undecided() if c.place is None]
            _rule(command.attempt == waiting[0], f"{command} parks out of turn")
        account.place, account.generation, account.since_ns = place, command.generation, now_ns
        slot.holder, slot.generation, slot.writer = command.attempt, command.generation, True

    def _start_import(self, command: StartImport) -> None:
        account = self.accounts[command.attempt]
        place = (command.source, command.slot)
        slot = self.slots[place]
        _rule(command.import_id > self._last_import, f"{command} uses an id again")
        _rule(account.outcome is None, f"{command} after its terminal")
        _rule(account.storage, f"{command} without storage")
        _rule(account.place == place and slot.holder == command.attempt, f"{command}: not its slot")
        _rule(account.generation == slot.generation, f"{command}: generation {slot.generation}")
        cells = self.terms.cells(command.piece)
        nbytes = self.terms.nbytes(cells)
        _rule(cells != 0 and not cells & ~account.told, f"{command} of cells that were not told")
        _rule(not cells & account.asked, f"{command} of cells that were imported before")
        single = cells.bit_count() == 1
        _rule(single or nbytes <= self.terms.chunk_nbytes, f"{command} of {nbytes} bytes")
        _rule(self._budget_nbytes > 0, f"{command} beyond the budget")
        nearest = min(self._distance(c) for _, c in self.undecided() if self._importable(c))
        _rule(self._distance(account) == nearest, f"{command}, another is nearer to publishing")
        self._budget_nbytes -= nbytes
        account.asked |= cells
        account.flights += 1
        slot.readers.add(command.import_id)
        self._ticket(command.import_id, Ticket(command.attempt, cells, check=False))

    def _check_digest(self, command: CheckDigest) -> None:
        account = self.accounts[command.attempt]
        entry = (self.terms.cells(command.span), command.expected)
        _rule(account.outcome is None, f"{command} after its terminal")
        _rule(entry in account.digests, f"{command} of a span without that digest")
        _rule(not entry[0] & ~account.fenced, f"{command} before every piece is fenced")
        account.digests = tuple(other for other in account.digests if other != entry)
        account.flights += 1
        self._ticket(command.import_id, Ticket(command.attempt, entry[0], check=True))

    def _publish(self, command: Publish) -> None:
        account = self.accounts[command.attempt]
        missing = self.terms.transfer_set & ~account.landed
        facts = f"final {account.final}, {account.flights} in flight, cells {missing:#x} missing"
        _rule(not account.asked_to_publish, f"{command} twice")
        _rule(self._publishable(account), f"{command} with {facts}")
        _rule(account.place == (command.source, command.slot), f"{command} of another slot")
        _rule(account.token == command.token, f"{command}, the token was {account.token}")
        account.asked_to_publish = True

    def _give_back(self, attempt: AttemptId, *, apart: bool) -> None:
        account = self.accounts[attempt]
        _rule(account.storage, f"{attempt} gave its storage back before")
        _rule(account.over, f"{attempt} is {self.word_of(attempt)}: its storage is in use")
        _rule(account.unsafe == apart, f"{attempt}: device failed {account.unsafe}, apart {apart}")
        account.storage = False
        self.lanes_apart += apart

    def _settle_admission(self) -> None:
        idle = self.lanes_free and any(not account.storage for _, account in self.undecided())
        _rule(not idle, "a lane is free and a hand-off waits for one")
        waiting = [account for _, account in self.undecided() if account.place is None]
        for (source, index), slot in self.slots.items():
            if slot.holder is None and source not in self.dead and self._idle(source):
                due = waiting and (waiting[0].storage or self._may_park(source))
                due = due or any(account.storage for account in waiting)
                _rule(not due, f"slot {index} of source {source} is free and a hand-off waits")

    def _publishable(self, account: Account) -> bool:
        complete = account.landed == self.terms.transfer_set and account.place is not None
        quiet = not account.flights and account.outcome is None
        return complete and account.final and account.storage and quiet

    def _importable(self, account: Account) -> bool:
        queued = account.told & ~account.asked
        return bool(queued) and account.storage and account.place is not None

    def _distance(self, account: Account) -> tuple[bool, int]:
        return not account.final, self.terms.nbytes(account.told & ~account.asked)

    def _may_park(self, source: SourceId) -> bool:
        parked = sum(bool(c.place) and not c.storage for _, c in self.undecided())
        num_slots = sum(place[0] == source for place in self.slots)
        return parked < min(self.terms.prefetch_depth, num_slots - 1)

    def _idle(self, source: SourceId) -> bool:
        return not any(slot.writer for place, slot in self.slots.items() if place[0] == source)

    def _writing(self, attempt: AttemptId) -> bool:
        return any(slot.writer and slot.holder == attempt for slot in self.slots.values())

    def _fresh(self, account: Account, spans: tuple[Span, ...]) -> bool:
        seen = account.told
        for span in spans:
            if not self.terms.inside(span) or self.terms.cells(span) & seen:
                return False
            seen |= self.terms.cells(span)
        return True

    def _land(self, account: Account, cells: int) -> None:
        """Fenced cells land with the last piece of their span, and after its digest if it has one.

        Spans without a digest are not kept apart here, so that a span landing too early shows only
        in what is published: which is where rule 1 looks.
        """
        account.fenced |= cells
        if not any(cells & span for span, _ in account.digests):
            account.landed |= cells

    def _decide(
        self,
        attempt: AttemptId,
        outcome: Outcome,
        now_ns: int,
        *,
        cancel: bool = True,
        must_cancel: bool = True,
    ) -> None:
        account = self.accounts[attempt]
        account.outcome = self._due[attempt] = outcome
        if cancel and self._writing(attempt):
            self._cancels[attempt] = must_cancel
        self._end_slot(account, now_ns)

    def _end_slot(self, account: Account, now_ns: int) -> None:
        if account.place is not None:
            self.slots[account.place].ended_ns = now_ns
            self._quiet(account.place)

    def _quiet(self, place: Place) -> None:
        slot = self.slots[place]
        if slot.ended_ns is not None and not slot.writer and not slot.readers:
            self.slots[place] = SlotAccount(generation=slot.generation)

    def _ticket(self, import_id: ImportId, ticket: Ticket) -> None:
        self._last_import = import_id
        self.tickets[import_id] = ticket


def _rule(holds: bool, text: str) -> None:
    if not holds:
        raise Violation(text)
