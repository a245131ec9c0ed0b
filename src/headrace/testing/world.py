"""One real owner, the ledger that watches it, and the clock: what the explorer takes steps in."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import assert_never

from headrace.errors import HeadraceError, LocalProtocolError, Refused
from headrace.ids import AttemptId, ImportId, RequestId, SourceId
from headrace.protocol.commands import Free, Outcome, Publish, Reserve
from headrace.protocol.owner import Owner
from headrace.testing.events import (
    Answer,
    Begin,
    Cancel,
    Die,
    Digested,
    Event,
    Forget,
    Imported,
    Misuse,
    Outrun,
    Request,
    Retire,
    Submit,
    Tell,
    Tick,
    events,
)
from headrace.testing.instances import DIGEST, EPOCH, Instance
from headrace.testing.keys import key_of
from headrace.testing.ledger import AttemptMessage, Ledger, Verdict, rule
from headrace.testing.rules import check_command, settle


class World:
    """A tiny owner in one of its states."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.now_ns = 0
        self.owner = Owner(EPOCH, instance.limits)
        self.ledger = Ledger(instance.terms)
        self.unanswered: tuple[Request, ...] = ()
        for at, num_slots in enumerate(instance.slots):
            self.owner.add_source(SourceId(at), num_slots, instance.plan_for, 0)
            self.ledger.attached(SourceId(at), num_slots)

    @property
    def key(self) -> Hashable:
        """The same for two states that differ in nothing that matters."""
        return key_of(self.owner, self.ledger, self.now_ns), self.unanswered

    def events(self) -> Iterator[Event]:
        """Every event that can come now, legal or not."""
        return events(self.instance, self.ledger, self.unanswered)

    def is_idle(self, event: Event) -> bool:
        """Whether the event must change nothing."""
        match event:
            case Tell(source=source, message=message):
                return self.ledger.verdict(source, message) is Verdict.DROP
            case Submit() | Outrun(first=Submit()):
                return not (self.ledger.slot_in_service and self.ledger.lane_in_service)
            case Cancel(request=request):
                return self.ledger.accounts[_attempt(request)].outcome is not None
            case Forget(source=source):
                return not self.ledger.may_forget(source)
            case Misuse():
                return True
            case _:
                return False

    def bring_idle(self, event: Event) -> None:
        """Bring an event that must change nothing, and check that it gives no command.

        Raises:
            Violation: it was taken, counted wrong or answered; the caller compares the keys.
        """
        owner = self.owner
        dropped = owner.dropped.total()
        match event:
            case Tell(source=source, message=message):
                dead = owner.dropped["dead"] + (source in self.ledger.dead)
                owner.message(source, message, self.now_ns)
                rule(owner.dropped.total() == dropped + 1, "a dropped message was not counted")
                rule(owner.dropped["dead"] == dead, "dropped as of a dead source, or not as one")
            case Submit() | Outrun(first=Submit()):
                with _raises(Refused):
                    owner.submit(self.instance.num_tokens, self.now_ns)
            case Cancel(request=request):
                rule(not owner.cancel(request, self.now_ns), "a decided hand-off was cancelled")
            case Forget(source=source):
                rule(not owner.forget_source(source), "source", source, "was forgotten in use")
            case Misuse():
                with _raises(LocalProtocolError):
                    self._misuse(event)
            case _:
                raise LocalProtocolError(f"{event} may change something")
        commands = owner.commands()
        rule(not commands, "an event that must change nothing gave", commands)

    def bring(self, event: Event) -> set[Outcome]:
        """Bring an event to the ledger and to the owner, and check what the owner commands.

        Returns the terminals that were due, and so were reported.

        Raises:
            Violation: a command was too early, wrong, or is missing.
        """
        begun_nbytes = self._bring(event)
        self.ledger.strand(self.now_ns)
        budget_nbytes = self.ledger.budget_nbytes
        due = set(self.ledger.due.values())
        for command in self.owner.commands():
            check_command(self.ledger, command, self.now_ns)
            due |= set(self.ledger.due.values())
            faulty = isinstance(command, Reserve | Free) and self.instance.device_faults
            if isinstance(command, Publish) or (isinstance(command, Request) and faulty):
                self.unanswered = (*self.unanswered, command)
        spent = budget_nbytes - self.ledger.budget_nbytes
        rule(spent == begun_nbytes, begun_nbytes, "bytes begun, and commands of", spent)
        settle(self.ledger)
        return due

    def check(self) -> None:
        """That the owner calls everything what the ledger calls it, and its own integrity.

        Raises:
            Violation, LocalProtocolError: with what differs.
        """
        ledger, owner = self.ledger, self.owner
        for attempt, account in ledger.accounts.items():
            state = owner.state_of(attempt.request)
            rule(state.name == account.word, attempt, "is", state.name, "and has", account)
        for (source, index), slot in ledger.slots.items():
            found = list(owner._sources[source].slots)[index].state
            rule(found.name == slot.word, "slot", index, "is", found.name, "and has", slot)
        rule({at for at, _ in ledger.slots} == set(owner._sources), "sources", set(owner._sources))
        rule(owner.num_in_flight == len(ledger.tickets), owner.num_in_flight, "in flight")
        for import_id, ticket in ledger.tickets.items():
            rule(owner.is_in_flight(import_id), import_id, "is not in flight:", ticket)
            due_ns = ticket.since_ns + ledger.terms.drain_timeout_ns
            rule(due_ns > self.now_ns, import_id, "is waited for past its deadline:", ticket)
        for slot in ledger.slots.values():
            for reader in slot.readers - ledger.tickets.keys():
                rule(not owner.is_in_flight(reader), reader, "is waited for, and was given up")
        lanes = owner._admission.lanes_free
        rule(lanes == ledger.lanes_free, lanes, "lanes free, and should be", ledger.lanes_free)
        next_ns = owner.next_deadline_ns()
        rule(next_ns is None or next_ns > self.now_ns, "a deadline was passed by:", next_ns)
        owner.check_integrity()

    def states(self) -> Iterator[Enum]:
        """The states of all hand-offs and slots."""
        for attempt in self.ledger.accounts:
            yield self.owner.state_of(attempt.request)
        for source in self.owner._sources.values():
            for slot in source.slots:
                yield slot.state

    def check_over(self) -> bool:
        """That everything has ended, where no good event is left; true if a drain is waited for.

        A slot may still miss the read token of an import that was given up or that the device
        failed, and a hand-off may wait for that slot until its drain deadline.

        Raises:
            Violation: something waits for ever, or for what something in service could do.
        """
        ledger = self.ledger
        for place, slot in ledger.slots.items():
            lost = slot.ended_ns is not None and not slot.writer
            lost = lost and not any(reader in ledger.tickets for reader in slot.readers)
            rule(slot.holder is None or lost, "slot", place, "is never given back:", slot)
        alive = [
            slot
            for (at, _), slot in ledger.slots.items()
            if at not in ledger.dead | ledger.doomed and not slot.apart
        ]
        overdue = bool(alive) and all(slot.ended_ns is not None for slot in alive)
        waits = False
        for attempt, account in ledger.accounts.items():
            if account.outcome is None and account.place is None and overdue:
                waits = True
            else:
                rule(account.over, attempt, "never ends:", account)
        return waits

    def _bring(self, event: Event) -> int:
        owner, ledger, now_ns = self.owner, self.ledger, self.now_ns
        match event:
            case Submit():
                deadline = self.instance.deadline
                deadline_ns = None if deadline is None else now_ns + deadline
                request = owner.submit(
                    self.instance.num_tokens, now_ns, deadline_ns, digest=self.instance.digest
                )
                ledger.submitted(_attempt(request), deadline_ns)
            case Tell(source=source, message=message):
                self._tell(source, message)
            case Begin(budget_nbytes=budget_nbytes):
                ledger.budget_nbytes = budget_nbytes
                return owner.begin_imports(budget_nbytes, self.now_ns)
            case Imported(import_id=import_id, good=good):
                self._imported(import_id, good=good)
            case Digested(import_id=import_id, good=good):
                ledger.digest_checked(import_id, right=good, now_ns=now_ns)
                owner.digest_checked(import_id, DIGEST if good else DIGEST + 1, now_ns)
            case Answer():
                self._answer(event)
            case Retire(request=request, good=good):
                ledger.retired(_attempt(request), unsafe=not good)
                owner.retire(request, now_ns, "" if good else "device")
            case Cancel(request=request):
                ledger.decide(_attempt(request), Outcome.CANCELLED, now_ns)
                rule(owner.cancel(request, now_ns), "an undecided hand-off was not cancelled")
            case Die(source=source):
                ledger.died(source, now_ns)
                owner.source_died(source, "killed", now_ns)
            case Forget(source=source):
                ledger.forgot(source)
                rule(owner.forget_source(source), "source", source, "was not forgotten")
            case Tick():
                self.now_ns += 1
                ledger.clock(self.now_ns)
                owner.tick(self.now_ns)
            case Outrun(first=first, cancel=cancel):
                self._bring(first)
                if not self.is_idle(cancel):
                    self._bring(cancel)
            case Misuse():
                raise LocalProtocolError(f"{event} must change nothing")
            case _:
                assert_never(event)
        return 0

    def _tell(self, source: SourceId, message: AttemptMessage) -> None:
        malformed = self.ledger.verdict(source, message) is Verdict.FAULT
        dropped = self.owner.dropped.total()
        self.ledger.told(source, message, self.now_ns)
        self.owner.message(source, message, self.now_ns)
        counted = self.owner.dropped.total() - dropped
        rule(counted == malformed, "malformed", malformed, "and counted", counted)

    def _imported(self, import_id: ImportId, *, good: bool) -> None:
        self.ledger.import_ended(import_id, failed=not good, now_ns=self.now_ns)
        if good:
            self.owner.import_done(import_id, self.now_ns)
        else:
            self.owner.import_failed(import_id, "", self.now_ns)

    def _answer(self, answer: Answer) -> None:
        (command, *rest), now_ns = self.unanswered, self.now_ns
        attempt = command.attempt
        ended = answer.how != "done" and not isinstance(command, Free)
        # The shell carries nothing more out for an attempt that it has just reported as failed.
        self.unanswered = tuple(c for c in rest if not (ended and c.attempt == attempt))
        match answer.how, command:
            case "done", Publish():
                self.ledger.published(attempt, now_ns)
                self.owner.published(attempt, now_ns)
            case "failed", Free():
                self.ledger.lane_lost()
                self.owner.lane_lost(now_ns)
            case "failed", _:
                self.ledger.device_failed(attempt, now_ns)
                self.owner.device_failed(attempt, "", now_ns)
            case "refused", _:
                self.ledger.reserve_refused(attempt, now_ns)
                self.owner.reserve_refused(attempt, "no memory", now_ns)

    def _misuse(self, misuse: Misuse) -> None:
        owner, now_ns = self.owner, self.now_ns
        match misuse.subject:
            case AttemptId() as attempt if misuse.call == "reserve_refused":
                owner.reserve_refused(attempt, "no memory", now_ns)
            case AttemptId() as attempt:
                owner.published(attempt, now_ns)
            case RequestId() as request:
                owner.retire(request, now_ns)
            case int() as number if misuse.call == "add_source":
                owner.add_source(SourceId(number), 1, self.instance.plan_for, now_ns)
            case int() as number if misuse.call == "forget_source":
                owner.forget_source(SourceId(number))
            case int() as number if misuse.call == "digest_checked":
                owner.digest_checked(ImportId(number), DIGEST, now_ns)
            case int() as number:
                owner.import_done(ImportId(number), now_ns)


def _attempt(request: RequestId) -> AttemptId:
    return AttemptId(*request, 1)


@contextmanager
def _raises(expected: type[HeadraceError]) -> Iterator[None]:
    try:
        yield
    except expected:
        return
    rule(False, f"no {expected.__name__} was raised")
