"""One real owner, the ledger that watches it, and the clock: what the explorer takes steps in."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import assert_never

from headrace.errors import HeadraceError, LocalProtocolError, Refused
from headrace.ids import AttemptId, ImportId, RequestId, SourceId
from headrace.protocol.commands import Cause, Free, Outcome, Publish, Report, Reserve
from headrace.protocol.owner import Owner
from headrace.testing.events import (
    Answer,
    Arrive,
    Begin,
    Cancel,
    Die,
    Digested,
    Event,
    Forget,
    Garble,
    GiveUp,
    Imported,
    Misuse,
    Outrun,
    Reinstate,
    Request,
    Retire,
    Submit,
    Tell,
    Tick,
    events,
)
from headrace.testing.facts import Account, Verdict, rule
from headrace.testing.instances import DIGEST, EPOCH, Instance
from headrace.testing.keys import key_of
from headrace.testing.ledger import AttemptMessage, Ledger
from headrace.testing.rules import check_command, settle

_LACKING = ("WAITING", "PARKED", "RESERVED")


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
        if instance.local:
            local = SourceId(len(instance.slots))
            self.owner.add_source(local, 1, instance.plan_for, 0, local=True)
            self.ledger.attached(local, 1, local=True)
        self.ledger.num_first = self.ledger.num_sources

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
            case Tell(source=source, message=message, fault=fault):
                return self.ledger.verdict(source, message, fault=fault) is Verdict.DROP
            case Garble(source=source):
                return self.ledger.running(source) is None
            case Submit() | Outrun(first=Submit()):
                local = self.instance.local and self.ledger.local_in_service
                served = self.ledger.slot_in_service or local or self._all_kept()
                return not (served and self.ledger.lane_in_service)
            case Cancel(request=request):
                return self.ledger.current(request)[1].outcome is not None
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
            case Garble(source=source):
                owner.undecodable(source, "garbage", self.now_ns)
                rule(owner.dropped.total() == dropped + 1, "garbage was not counted")
            case Tell(source=source, message=message, fault=fault):
                dead = owner.dropped["dead"] + (source in self.ledger.dead)
                owner.message(source, message, self.now_ns, "no such token" if fault else "")
                rule(owner.dropped.total() == dropped + 1, "a dropped message was not counted")
                rule(owner.dropped["dead"] == dead, "dropped as of a dead source, or not as one")
            case Submit() | Outrun(first=Submit()):
                with _raises(Refused):
                    owner.submit(
                        self.instance.num_tokens,
                        self.now_ns,
                        policy=self.instance.policy,
                        start=self._start(),
                    )
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

        Returns the terminals that were reported.

        Raises:
            Violation: a command was too early, wrong, or is missing.
        """
        begun_nbytes = self._bring(event)
        budget_nbytes = self.ledger.budget_nbytes
        outcomes = set()
        for command in self.owner.commands():
            check_command(self.ledger, command, self.now_ns)
            if isinstance(command, Report):
                outcomes.add(command.outcome)
            faulty = isinstance(command, Reserve | Free) and self.instance.device_faults
            if isinstance(command, Publish) or (isinstance(command, Request) and faulty):
                self.unanswered = (*self.unanswered, command)
        spent = budget_nbytes - self.ledger.budget_nbytes
        rule(spent == begun_nbytes, begun_nbytes, "bytes begun, and commands of", spent)
        settle(self.ledger, self.now_ns)
        return outcomes

    def check(self) -> None:
        """That the owner calls everything what the ledger calls it, and its own integrity.

        Raises:
            Violation, LocalProtocolError: with what differs.
        """
        ledger, owner = self.ledger, self.owner
        for attempt, account in ledger.accounts.items():
            if not account.followed:
                state = owner.state_of(attempt.request)
                rule(state.name == account.word, attempt, "is", state.name, "and has", account)
                at = owner.attempt_of(attempt.request)
                rule(account.over or at == attempt, "the request is at", at, "and not", attempt)
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
        rule(owner._expected == ledger.num_expected, owner._expected, "sources expected")
        rule(set(owner.apart) == set(ledger.apart), "apart are", owner.apart, ledger.apart)
        lines = owner.snapshot().slots
        rule(len(lines) == len(ledger.slots), "a snapshot of", lines, "and has", ledger.slots)
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
        waiting = [a for a, account in ledger.undecided() if account.word in _LACKING]
        held = [ledger.accounts[a] for a in waiting if ledger.accounts[a].word == "RESERVED"]
        first = held or [ledger.accounts[a] for a in waiting]  # the others wait for these
        waits = any(map(self._overdue, first))
        for place, slot in ledger.slots.items():
            lost = slot.ended_ns is not None and not slot.writer
            lost = lost and not any(reader in ledger.tickets for reader in slot.readers)
            lost = lost or (waits and slot.holder in waiting)
            rule(slot.holder is None or lost, "slot", place, "is never given back:", slot)
        for attempt, account in ledger.accounts.items():
            if not (waits and attempt in waiting):
                rule(account.over, attempt, "never ends:", account)
        return waits

    def _start(self) -> int:
        """Positions that are kept of the next request's prompt."""
        return self.instance.start_of(len({at.request for at in self.ledger.accounts}))

    def _all_kept(self) -> bool:
        return self._start() == self.instance.num_tokens

    def _overdue(self, account: Account) -> bool:
        """Whether the slots that an attempt could get are all given up at their drain deadline."""
        gone = self.ledger.dead | self.ledger.doomed
        fitting = [
            slot
            for (at, _), slot in self.ledger.slots.items()
            if at not in gone and not slot.apart and self.ledger.fits(at, account)
        ]
        return bool(fitting) and all(slot.ended_ns is not None for slot in fitting)

    def _bring(self, event: Event) -> int:
        owner, ledger, now_ns = self.owner, self.ledger, self.now_ns
        match event:
            case Submit():
                deadline = self.instance.deadline
                deadline_ns = None if deadline is None else now_ns + deadline
                start = self._start()
                request = owner.submit(
                    self.instance.num_tokens,
                    now_ns,
                    deadline_ns,
                    digest=self.instance.digest,
                    policy=self.instance.policy,
                    start=start,
                )
                ledger.submitted(AttemptId(*request, 1), deadline_ns, start)
            case Tell(source=source, message=message, fault=fault):
                self._tell(source, message, fault=fault)
            case Garble(source=source):
                running = ledger.running(source)
                if running is not None:
                    ledger.fail(running, Cause.MALFORMED, now_ns)
                owner.undecodable(source, "garbage", now_ns)
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
                ledger.retired(ledger.current(request)[0], unsafe=not good)
                owner.retire(request, now_ns, "" if good else "device")
            case Cancel(request=request):
                attempt, _ = ledger.current(request)
                ledger.decide(attempt, Outcome.CANCELLED, Cause.CANCELLED, now_ns)
                rule(owner.cancel(request, now_ns), "an undecided hand-off was not cancelled")
            case Die(source=source, restart=restart):
                if restart:
                    ledger.num_expected += 1
                    owner.expect_source()
                ledger.died(source, now_ns)
                owner.source_died(source, "killed", now_ns)
            case Arrive():
                source, num_slots = SourceId(ledger.num_sources), self.instance.slots[0]
                ledger.num_expected -= 1
                ledger.attached(source, num_slots)
                owner.add_source(source, num_slots, self.instance.plan_for, now_ns, expected=True)
            case GiveUp():
                ledger.num_expected -= 1
                owner.source_not_coming("it dies again and again", now_ns)
            case Reinstate(attempt=attempt):
                ledger.reinstated(attempt)
                owner.reinstate(attempt, now_ns)
            case Forget(source=source):
                ledger.forgot(source)
                rule(owner.forget_source(source), "source", source, "was not forgotten")
            case Tick():
                self.now_ns += 1
                ledger.clock(self.now_ns)
                owner.tick(self.now_ns)
            case Outrun(first=first, cancel=cancel):
                self._bring(first)
                ledger.strand(now_ns)
                if not self.is_idle(cancel):
                    self._bring(cancel)
            case Misuse():
                raise LocalProtocolError(f"{event} must change nothing")
            case _:
                assert_never(event)
        return 0

    def _tell(self, source: SourceId, message: AttemptMessage, *, fault: bool) -> None:
        malformed = self.ledger.verdict(source, message, fault=fault) is Verdict.FAULT
        dropped = self.owner.dropped.total()
        self.ledger.told(source, message, self.now_ns, fault=fault)
        self.owner.message(source, message, self.now_ns, "no such token" if fault else "")
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
        request = command.attempt.request
        ended = answer.how != "done" and not isinstance(command, Free)
        # The shell carries nothing more out for an attempt that it has just reported as failed.
        self.unanswered = tuple(c for c in rest if not (ended and c.attempt.request == request))
        # A retry may have taken the storage over by now, and with it what becomes of it.
        attempt = command.attempt
        if isinstance(command, Reserve):
            attempt, _ = self.ledger.current(request)
        match answer.how, command:
            case "done", Publish():
                self.ledger.published(attempt, now_ns)
                self.owner.published(attempt, now_ns)
            case "failed", Free():
                self.ledger.lane_lost(attempt)
                self.owner.lane_lost(attempt, "", now_ns)
            case "failed", _:
                self.ledger.device_failed(attempt, now_ns)
                self.owner.device_failed(attempt, "", now_ns)
            case "refused", Publish():
                self.ledger.fail(attempt, Cause.CORRUPT, now_ns)
                self.owner.publish_refused(attempt, "poison", now_ns)
            case "refused", _:
                self.ledger.reserve_refused(attempt, now_ns)
                self.owner.reserve_refused(attempt, "no memory", now_ns)

    def _misuse(self, misuse: Misuse) -> None:
        owner, now_ns = self.owner, self.now_ns
        match misuse.subject:
            case AttemptId() as attempt if misuse.call == "reserve_refused":
                owner.reserve_refused(attempt, "no memory", now_ns)
            case AttemptId() as attempt if misuse.call == "publish_refused":
                owner.publish_refused(attempt, "poison", now_ns)
            case AttemptId() as attempt if misuse.call == "reinstate":
                owner.reinstate(attempt, now_ns)
            case int() if misuse.call == "not_coming":
                owner.source_not_coming("none was", now_ns)
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


@contextmanager
def _raises(expected: type[HeadraceError]) -> Iterator[None]:
    try:
        yield
    except expected:
        return
    rule(False, f"no {expected.__name__} was raised")
