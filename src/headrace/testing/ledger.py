"""The facts of an owner, kept a second time and without its tables.

The ledger has no state machine. It notes from the events alone what was told, what landed, who
holds which token, and which storage was set aside. What a hand-off or a slot must be called, and
what must become of a message, follows from these facts (`headrace.testing.facts`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias, assert_never

from headrace.ids import AttemptId, ImportId, RequestId, SourceId, Span
from headrace.messages import Computing, Failed, Progress, Released, SourceFinal
from headrace.protocol.commands import OF_THE_SOURCE, Cause, Outcome
from headrace.testing.facts import (
    Account,
    Apart,
    Place,
    SlotAccount,
    Terms,
    Ticket,
    Verdict,
    rule,
)

AttemptMessage: TypeAlias = Computing | Progress | SourceFinal | Failed | Released


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
        self.apart: dict[AttemptId, Apart] = {}
        self.local: SourceId | None = None
        self.num_expected = 0
        self.num_sources = 0
        self.num_first = 0  # of them, those that were there from the start
        self.due: dict[RequestId, tuple[Outcome, Cause | None]] = {}  # what this event decides
        self.cancels: dict[AttemptId, bool] = {}  # whom it may cancel at the source; True: must
        self.retries: set[AttemptId] = set()  # whom another attempt follows by this event
        self.kills: set[Place] = set()  # the slots for which this event kills a source
        self.budget_nbytes = 0

    def attached(self, source: SourceId, num_slots: int, *, local: bool = False) -> None:
        self.num_sources += 1
        self.local = source if local else self.local
        for index in range(num_slots):
            self.slots[source, index] = SlotAccount()

    def submitted(self, attempt: AttemptId, deadline_ns: int | None, start: int = 0) -> None:
        rule(attempt not in self.accounts, attempt, "exists already")
        account = Account(deadline_ns, local=not self.slot_in_service, start=start)
        account.all_kept = account.final = start == self.terms.num_tokens
        self.accounts[attempt] = account

    def verdict(self, source: SourceId, message: AttemptMessage, *, fault: bool = False) -> Verdict:
        """What must become of a message; changes nothing. `fault`: the shell found it wrong."""
        account = self.accounts.get(message.attempt)
        if account is None or account.place is None or source in self.dead:
            return Verdict.DROP
        live = account.live and account.place[0] == source and self.slots[account.place].writer
        slot = self._granted(source, message)
        if slot is None:
            return Verdict.FAULT if live else Verdict.DROP
        if isinstance(message, Released) and slot.writer:
            return Verdict.TAKE if account.final or not live else Verdict.FAIL
        if not live:
            return Verdict.DROP
        if fault:
            return Verdict.FAULT
        match message:
            case Progress(spans=spans, digests=digests):
                stamped = len(digests) == (len(spans) if digests or self.terms.digest else 0)
                bounded = account.num_progress < self.terms.max_progress
                legal = not account.final and stamped and bounded
                legal = legal and self._fresh(account, spans)
            case Computing():
                legal = not account.final
            case SourceFinal():
                legal = not account.final and account.told == self.terms.transfer_set(account.start)
            case Failed():
                return Verdict.FAULT if account.final else Verdict.FAIL
            case Released():
                legal = False
            case _:
                assert_never(message)
        return Verdict.TAKE if legal else Verdict.FAULT

    def running(self, source: SourceId) -> AttemptId | None:
        """The live attempt that a source computes, if it does."""
        slots = (slot for (at, _), slot in self.slots.items() if at == source and slot.writer)
        holder = next((slot.holder for slot in slots), None)
        return holder if holder is not None and self.accounts[holder].live else None

    def told(
        self, source: SourceId, message: AttemptMessage, now_ns: int, *, fault: bool = False
    ) -> None:
        """Note a message that is not to be dropped."""
        account = self.accounts[message.attempt]
        slot = self._granted(source, message)
        released = isinstance(message, Released) and slot is not None
        verdict = self.verdict(source, message, fault=fault)
        if verdict in (Verdict.FAULT, Verdict.FAIL):
            cause = Cause.MALFORMED if verdict is Verdict.FAULT else Cause.SOURCE_FAILED
            # A source that has returned needs no cancel; one more does no harm.
            self.fail(message.attempt, cause, now_ns, must_cancel=not released)
        elif isinstance(message, Progress):
            account.num_progress += 1
            for at, span in enumerate(message.spans):
                cells = self.terms.cells(span, account.start)
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
        read = [key for key, slot in self.slots.items() if import_id in slot.readers]
        if failed:
            account.unsafe = True
            account.lost_reads += tuple((place, import_id) for place in read)
            if account.outcome is None:
                self.fail(ticket.attempt, Cause.DEVICE, now_ns)
            return
        account.fenced |= ticket.cells
        if not any(ticket.cells & cells for cells, _ in account.digests):
            account.landed |= ticket.cells
        (place,) = read
        self.slots[place].readers.remove(import_id)
        self._quiet(place)
        self._follow_if_quiet(ticket.attempt)

    def digest_checked(self, import_id: ImportId, *, right: bool, now_ns: int) -> None:
        ticket = self.tickets.pop(import_id)
        account = self.accounts[ticket.attempt]
        account.flights -= 1
        if right:
            account.landed |= ticket.cells
        elif account.live:
            self.fail(ticket.attempt, Cause.CORRUPT, now_ns)
        if not account.followed:
            self._follow_if_quiet(ticket.attempt)

    def published(self, attempt: AttemptId, now_ns: int) -> None:
        """The decoder carried `Publish` out."""
        account = self.accounts[attempt]
        rule(account.outcome is None, attempt, "is published after its terminal")
        account.outcome = Outcome.PUBLISHED
        self.due[attempt.request] = (Outcome.PUBLISHED, None)
        self._end_slot(account, now_ns)

    def device_failed(self, attempt: AttemptId, now_ns: int) -> None:
        """A `Reserve` or a `Publish` failed."""
        self.accounts[attempt].unsafe = True
        self.fail(attempt, Cause.DEVICE, now_ns)

    def reserve_refused(self, attempt: AttemptId, now_ns: int) -> None:
        """Nothing was set aside for a `Reserve`, so there is nothing to give back."""
        self.accounts[attempt].storage = False
        self.fail(attempt, Cause.NO_STORAGE, now_ns)

    def lane_lost(self, attempt: AttemptId) -> None:
        """A lane is out of service; if it is another's by now, then only one is when that fails."""
        lane = self.lane_in_service
        self.lanes_apart += lane
        self.apart[attempt] = Apart(lane, self.accounts[attempt].lost_reads)

    def reinstated(self, attempt: AttemptId) -> None:
        """Somebody answers for it that nothing touches what this attempt left behind."""
        apart = self.apart.pop(attempt)
        heirs = [other for other, kept in self.apart.items() if not kept.lane]
        if apart.lane and heirs:
            self.apart[heirs[0]] = self.apart[heirs[0]]._replace(lane=True)
        else:
            self.lanes_apart -= apart.lane
        for place, reader in apart.lost_reads:
            self.slots[place].readers.remove(reader)
            self._quiet(place)

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
                if account.live and not account.final:
                    self.fail(slot.holder, Cause.SOURCE_DIED, now_ns)
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
            if self._keeps_on(place, slot, now_ns):
                self.kills.add(place)
            if slot.ended_ns is None or slot.apart:
                continue
            if slot.ended_ns + self.terms.drain_timeout_ns <= now_ns:
                slot.apart = True
                if slot.writer and place[0] != self.local:
                    self.kills.add(place)
        for attempt, account in list(self.accounts.items()):
            if account.outcome is not None or account.followed:
                continue
            telling = account.live and account.place is not None and not account.final
            if account.deadline_ns is not None and account.deadline_ns <= now_ns:
                self.fail(attempt, Cause.DEADLINE, now_ns)
            elif telling and account.since_ns + self.terms.progress_timeout_ns <= now_ns:
                self.fail(attempt, Cause.STALLED, now_ns)
        for import_id, ticket in list(self.tickets.items()):
            if ticket.since_ns + self.terms.drain_timeout_ns <= now_ns:
                self.import_ended(import_id, failed=True, now_ns=now_ns)

    def _keeps_on(self, place: Place, slot: SlotAccount, now_ns: int) -> bool:
        """Whether a source gave its final long ago and has not returned."""
        if not slot.writer or slot.holder is None or place[0] in {*self.doomed, self.local}:
            return False
        account = self.accounts[slot.holder]
        late = account.since_ns + self.terms.drain_timeout_ns <= now_ns
        return account.live and account.final and late

    def strand(self, now_ns: int) -> None:
        """Who waits for what is out of service for good fails."""
        for attempt, account in list(self.undecided()):
            if not account.storage and not self.lane_in_service:
                self.fail(attempt, Cause.NO_STORAGE, now_ns)
            elif account.place is None and not account.all_kept:
                served = self.local_in_service if account.local else self.slot_in_service
                if not served:
                    self.fail(attempt, Cause.NO_SOURCE, now_ns)
                elif self.is_jammed(account):
                    self.fail(attempt, Cause.NO_SOURCE, now_ns)
                    return  # its storage may help the others

    def fail(
        self, attempt: AttemptId, cause: Cause, now_ns: int, *, must_cancel: bool = True
    ) -> None:
        """An attempt failed: it is given up where another may follow, else decided."""
        account = self.accounts[attempt]
        local = self.terms.local and self.local_in_service
        more = attempt.attempt < self.terms.num_attempts or local
        mendable = (cause in OF_THE_SOURCE and more) or (cause is Cause.NO_SOURCE and local)
        if account.live and mendable and not account.local:
            account.given_up = cause
            self._stop(attempt, now_ns, must_cancel=must_cancel)
            self._follow_if_quiet(attempt)
        else:
            self.decide(attempt, Outcome.FAILED, cause, now_ns, must_cancel=must_cancel)

    def decide(
        self,
        attempt: AttemptId,
        outcome: Outcome,
        cause: Cause,
        now_ns: int,
        *,
        must_cancel: bool = True,
    ) -> None:
        """The terminal of a hand-off that is not published."""
        account = self.accounts[attempt]
        live = account.live
        account.outcome = outcome
        self.due[attempt.request] = (outcome, cause)
        if live:
            self._stop(attempt, now_ns, must_cancel=must_cancel)

    def current(self, request: RequestId) -> tuple[AttemptId, Account]:
        """The attempt that a request is at."""
        attempt = max(attempt for attempt in self.accounts if attempt.request == request)
        return attempt, self.accounts[attempt]

    def undecided(self) -> Iterator[tuple[AttemptId, Account]]:
        """The hand-offs that are neither decided nor given up, oldest first."""
        return ((a, account) for a, account in self.accounts.items() if account.live)

    def fits(self, source: SourceId, account: Account) -> bool:
        """Whether an attempt may go to this source."""
        if account.all_kept:
            return False
        if account.local or source == self.local:
            return account.local and source == self.local
        others = {at for at, _ in self.slots} - {source}
        return account.avoid != source or not any(map(self.will_grant, others))

    def will_grant(self, source: SourceId) -> bool:
        """Whether a slot of a source comes free although nobody who is parked gets storage."""
        parked = [a for a, account in self.undecided() if account.place and not account.storage]
        if source in self.dead | self.doomed or source == self.local:
            return False
        return any(
            at == source and not slot.apart and slot.holder not in parked
            for (at, _), slot in self.slots.items()
        )

    def is_jammed(self, account: Account) -> bool:
        """Whether a slot comes free only with storage, and storage only with a slot."""
        holders = [other for other in self.accounts.values() if other.storage]
        stuck = not any(other.place or other.local or other.all_kept for other in holders)
        if not account.storage or self.num_expected or not stuck:
            return False
        return not any(map(self.will_grant, {at for at, _ in self.slots}))

    @property
    def lane_in_service(self) -> bool:
        return self.lanes_apart < self.terms.num_lanes

    @property
    def slot_in_service(self) -> bool:
        """Whether some source may grant a slot, now or later."""
        gone = {*self.dead, *self.doomed, self.local}
        slots = self.slots.items()
        return self.num_expected > 0 or any(
            at not in gone and not slot.apart for (at, _), slot in slots
        )

    @property
    def local_in_service(self) -> bool:
        """Whether the owner's own engine may get a slot, now or later."""
        return any(at == self.local and not slot.apart for (at, _), slot in self.slots.items())

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
            cells = self.terms.cells(span, account.start)
            if not self.terms.inside(span) or cells & seen:
                return False
            seen |= cells
        return True

    def _follow_if_quiet(self, attempt: AttemptId) -> None:
        """The next attempt takes the place of one that was given up, and its storage."""
        old = self.accounts[attempt]
        if old.given_up is None or old.flights or old.outcome is not None:
            return
        local = old.given_up is Cause.NO_SOURCE or attempt.attempt >= self.terms.num_attempts
        avoid = None if old.place is None else old.place[0]
        new = Account(old.deadline_ns, local, avoid, storage=old.storage, start=old.start)
        old.storage, old.followed = False, True
        self.accounts = dict(sorted([*self.accounts.items(), (attempt.next, new)]))
        self.retries.add(attempt)

    def _stop(self, attempt: AttemptId, now_ns: int, *, must_cancel: bool) -> None:
        if any(slot.writer and slot.holder == attempt for slot in self.slots.values()):
            self.cancels[attempt] = must_cancel
        self._end_slot(self.accounts[attempt], now_ns)

    def _end_slot(self, account: Account, now_ns: int) -> None:
        if account.place is not None:
            self.slots[account.place].ended_ns = now_ns
            self._quiet(account.place)

    def _quiet(self, place: Place) -> None:
        slot = self.slots[place]
        if slot.ended_ns is not None and not slot.writer and not slot.readers:
            self.slots[place] = SlotAccount(generation=slot.generation)
