"""The real owner and source attempts of a schedule, watched by a second statement of their rules.

The owner is watched by the explorer's own `World`: its ledger and rules, which know no table. Here
that is made fit for prompts of several lengths, for real digests, and for time that jumps.

A source attempt is watched by facts of what it was called with: what it must raise, and what it
must send.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from headrace.errors import Cancelled, HeadraceError, LocalProtocolError
from headrace.ids import AttemptId, ImportId, SourceId, Span
from headrace.messages import Computing, Failed, Prefill, Progress, Released, SourceFinal
from headrace.plan import Plan
from headrace.protocol import source as source_machine
from headrace.protocol.commands import Cause, Command, Outcome, Report
from headrace.protocol.owner import Owner
from headrace.protocol.source import SourceAttempt, SourceState
from headrace.testing.events import Digested, Event, Submit
from headrace.testing.facts import Terms, Verdict, rule
from headrace.testing.fault_lab.geometries import Geometry, PromptTerms
from headrace.testing.fault_lab.safety import Broken
from headrace.testing.fault_lab.setting import MAX_PROGRESS, MAX_SPANS, Asked, Tiny
from headrace.testing.instances import EPOCH
from headrace.testing.ledger import AttemptMessage, Ledger
from headrace.testing.world import World


class Attach(NamedTuple):
    """A source attaches; `expected`: in place of one that died, `local`: the owner's own engine."""

    source: SourceId
    num_slots: int
    expected: bool
    local: bool


LabEvent: TypeAlias = Event | Attach


class Commands(list[Command]):
    """The owner's commands; while they are gone through, the ledger has each one's own terms."""

    def __init__(self, commands: list[Command], ledger: PromptLedger) -> None:
        super().__init__(commands)
        self._ledger = ledger

    def __iter__(self) -> Iterator[Command]:
        for command in super().__iter__():
            if isinstance(command, Report):
                self._ledger.turn_to(command.request.counter)
            elif hasattr(command, "attempt"):
                self._ledger.turn_to(command.attempt.counter)
            yield command


class WatchedOwner(Owner):
    """The owner; `given` are the commands that it gave out last."""

    ledger: PromptLedger
    given: list[Command]
    due_ns: int | None

    def commands(self) -> list[Command]:
        self.given = super().commands()
        return Commands(self.given, self.ledger)

    def next_deadline_ns(self) -> int | None:
        self.due_ns = super().next_deadline_ns()
        return self.due_ns


class PromptLedger(Ledger):
    """The ledger, with terms of their own for each request."""

    terms: PromptTerms

    def __init__(self, terms: PromptTerms) -> None:
        super().__init__(terms)
        self._of: dict[int, PromptTerms] = {}

    def turn_to(self, request: int) -> None:
        """What is looked at next is of this request."""
        self.terms = self._of.get(request, self.terms)

    def submitted(self, attempt: AttemptId, deadline_ns: int | None, start: int = 0) -> None:
        super().submitted(attempt, deadline_ns, start)
        self._of[attempt.counter] = self.terms
        self._pad(attempt)

    def verdict(self, source: SourceId, message: AttemptMessage, *, fault: bool = False) -> Verdict:
        self.turn_to(message.attempt.counter)
        return super().verdict(source, message, fault=fault)

    def fail(
        self, attempt: AttemptId, cause: Cause, now_ns: int, *, must_cancel: bool = True
    ) -> None:
        self.turn_to(attempt.counter)
        super().fail(attempt, cause, now_ns, must_cancel=must_cancel)

    def _follow_if_quiet(self, attempt: AttemptId) -> None:
        self.turn_to(attempt.counter)
        super()._follow_if_quiet(attempt)
        if self.accounts[attempt].followed and not self.accounts[attempt.next].told:
            self._pad(attempt.next)

    def due_ns(self) -> int | None:
        """When the next deadline passes."""
        terms = self.terms
        due = [ticket.since_ns + terms.drain_timeout_ns for ticket in self.tickets.values()]
        for (source, _), slot in self.slots.items():
            if slot.ended_ns is not None and not slot.apart:
                due.append(slot.ended_ns + terms.drain_timeout_ns)
            if slot.writer and slot.holder is not None and source not in {*self.doomed, self.local}:
                account = self.accounts[slot.holder]
                if account.live and account.final:
                    due.append(account.since_ns + terms.drain_timeout_ns)
        for account in self.accounts.values():
            if account.outcome is None and not account.followed:
                due += [] if account.deadline_ns is None else [account.deadline_ns]
                if account.live and account.place is not None and not account.final:
                    due.append(account.since_ns + terms.progress_timeout_ns)
        return min(due, default=None)

    def _pad(self, attempt: AttemptId) -> None:
        """What a prompt of this length does not have counts as had."""
        account, padding = self.accounts[attempt], self.terms.padding
        account.told |= padding
        account.asked |= padding
        account.fenced |= padding
        account.landed |= padding


class WatchedWorld(World):
    """The owner of a schedule and its ledger."""

    owner: WatchedOwner
    ledger: PromptLedger

    def __init__(self, tiny: Tiny) -> None:
        super().__init__(replace(tiny, slots=()))
        self._tiny = tiny
        self.base_terms = tiny.terms
        self.owner = WatchedOwner(EPOCH, tiny.limits)
        self.ledger = PromptLedger(tiny.geometry.terms(tiny.terms, 1))
        self.owner.ledger = self.ledger
        self.owner.due_ns = None
        self.ticked_ns = -1
        self.digests: dict[ImportId, tuple[int, str]] = {}  # what came of each check, and why not

    def ask(self, asked: Asked) -> Submit:
        """The event that submits a request."""
        instance = self.instance = replace(
            self._tiny,
            num_tokens=asked.num_tokens,
            digest=asked.digest,
            deadline=asked.deadline_ns,
            attempts=asked.attempts,
            local=asked.local,
        )
        self.ledger.terms = self._tiny.geometry.terms(instance.terms, asked.num_tokens)
        return Submit()

    def is_idle(self, event: LabEvent) -> bool:
        return not isinstance(event, Attach) and super().is_idle(event)

    def bring(self, event: LabEvent) -> set[Outcome]:
        return super().bring(event)  # type: ignore[arg-type]  # `_bring` below takes the rest

    def check(self) -> None:
        """As the explorer's; a deadline may be passed by until the timer fires."""
        now_ns, self.now_ns = self.now_ns, self.ticked_ns
        try:
            super().check()
        finally:
            self.now_ns = now_ns
        due_ns = self.ledger.due_ns()
        own_ns = self.owner.due_ns  # a timer may fire for nothing, and never too late
        in_time = due_ns is None or (own_ns is not None and own_ns <= due_ns)
        rule(in_time, "next due is", own_ns, "and should be", due_ns)

    def _bring(self, event: LabEvent) -> int:
        if isinstance(event, Attach):
            plan_for = self._tiny.plan_for
            how = {"expected": event.expected, "local": event.local}
            self.owner.add_source(event.source, event.num_slots, plan_for, self.now_ns, **how)
            self.ledger.num_expected -= event.expected
            self.ledger.attached(event.source, event.num_slots, local=event.local)
            return 0
        if isinstance(event, Digested):
            self.ledger.digest_checked(event.import_id, right=event.good, now_ns=self.now_ns)
            actual, reason = self.digests.pop(event.import_id)
            self.owner.digest_checked(event.import_id, actual, self.now_ns, reason)
            return 0
        return super()._bring(event)


class WatchedAttempt:
    """One real source attempt; each call checks what comes of it."""

    def __init__(self, prefill: Prefill, plan: Plan, geometry: Geometry, base: Terms) -> None:
        self.machine = SourceAttempt(prefill, plan)
        self.prefill = prefill
        self.cancelled = False
        self.committed: list[Span] = []
        self._digests: list[int] = []
        self._terms = geometry.terms(base, prefill.num_tokens)
        self._told = 0  # cells, as the ledger's bits
        self._num_told = 0  # spans in messages
        self._num_sent = 0
        self._ended = False
        self._broken = False
        self._heard_ns = 0  # when something was said that holds the progress deadline off

    def start(self, now_ns: int) -> None:
        self.machine.start(now_ns)
        self._heard_ns = now_ns

    def cancel(self) -> None:
        self.machine.cancel()
        self.cancelled = True

    def cancel_late(self, attempt: AttemptId) -> None:
        """A cancel comes when the engine has returned: it changes nothing."""
        if attempt == self.prefill.attempt:
            self.machine.cancel()
            rule(self.machine.state is SourceState.DONE, "a late cancel led to", self.machine.state)

    def working(self, now_ns: int) -> list[Computing]:
        """The engine says that it is at work."""
        with _Expected(self._refusal()):
            sent = self.machine.computing(now_ns)
        silent_ns = now_ns - self._heard_ns
        due = silent_ns >= source_machine.HEARTBEAT_NS
        rule(len(sent) == due, f"{len(sent)} words {silent_ns} ns after the last that counts")
        self._heard_ns = now_ns if sent else self._heard_ns
        self._check_lease(sent)
        return sent

    def writable(self, spans: Sequence[Span]) -> None:
        """The engine asks for cells to write."""
        refusal = self._refusal()
        if refusal is None and not self._fresh(spans):
            refusal, self._broken = LocalProtocolError, True
        with _Expected(refusal):
            self.machine.check_writable(spans)

    def commit(self, spans: Sequence[Span], digests: Sequence[int], now_ns: int) -> list[Progress]:
        """The engine announces spans."""
        refusal = self._refusal()
        if len(digests) != (len(spans) if self.prefill.digest else 0):
            refusal = refusal or LocalProtocolError
        bad = not self._fresh(spans)
        held = len(self.committed) - self._num_told + len(spans)
        crowded = held > MAX_SPANS * (MAX_PROGRESS - 2 - self._num_sent)
        if refusal is None and (bad or crowded):
            refusal = LocalProtocolError
            self._broken |= bad and not crowded
        with _Expected(refusal):
            sent = self.machine.commit(spans, digests, now_ns)
        self.committed += spans
        self._digests += digests
        for span in spans:
            self._told |= self._terms.cells(span, 0)
        self._check_progress(sent, now_ns)
        held = len(self.committed) - self._num_told
        rule(held < MAX_SPANS or self._num_sent >= MAX_PROGRESS - 3, held, "spans are held")
        return sent

    def final(self, token: int | None, now_ns: int) -> list[Progress | SourceFinal]:
        """The engine gives the source-final input."""
        complete = self._told == self._terms.transfer_set(0) & ~self._terms.padding
        refusal = self._refusal() or (None if complete else LocalProtocolError)
        with _Expected(refusal):
            sent = self.machine.final(token, now_ns, now_ns)
        self._check_progress([m for m in sent if isinstance(m, Progress)], now_ns)
        rule(self._num_told == len(self.committed), "spans are held at the final")
        finals = [m for m in sent if isinstance(m, SourceFinal)]
        rule(sent[-1:] == finals, "the final is not the last of", sent)
        told = (finals[0].token if finals[0].first == "token" else None) if finals else -1
        rule(told == token, "told", told, "as the final, which is", token)
        self._ended = True
        self._check_lease(sent)
        return sent

    def fail(self, reason: str) -> list[Failed]:
        """The engine raised, or returned too early."""
        silent = self._ended or self.cancelled
        sent = self.machine.fail(reason)
        rule(len(sent) == (not silent), sent, "after the end or a cancel", silent)
        self._ended = True
        self._check_lease(sent)
        return sent

    def returned(self) -> Released:
        """The engine returned."""
        released = self.machine.returned()
        rule(self.machine.state is SourceState.DONE, "returned, and is", self.machine.state)
        self._check_lease([released])
        return released

    def _refusal(self) -> type[HeadraceError] | None:
        """What every call of the sink must raise now."""
        if self.cancelled:
            return Cancelled
        return LocalProtocolError if self._ended or self._broken else None

    def _fresh(self, spans: Sequence[Span]) -> bool:
        seen = self._told
        for span in spans:
            cells = self._terms.cells(span, 0)
            if not self._terms.inside(span) or cells & seen:
                return False
            seen |= cells
        return True

    def _check_progress(self, sent: Sequence[Progress], now_ns: int) -> None:
        for message in sent:
            stop = self._num_told + len(message.spans)
            due = self.committed[self._num_told : stop], self._digests[self._num_told : stop]
            told = [*message.spans], [*message.digests]
            rule(told == due, "told", told, "and next was", due)
            rule(1 <= len(message.spans) <= MAX_SPANS, len(message.spans), "spans in a message")
            self._num_told = stop
        self._num_sent += len(sent)
        rule(self._num_sent <= MAX_PROGRESS - 2, self._num_sent, "progress messages")
        if any(self._terms.cells(span, 0) for message in sent for span in message.spans):
            self._heard_ns = now_ns
        self._check_lease(sent)

    def _check_lease(
        self, sent: Sequence[Computing | Progress | SourceFinal | Failed | Released]
    ) -> None:
        mine = self.prefill.attempt, self.prefill.slot, self.prefill.generation
        for message in sent:
            lease = message.attempt, message.slot, message.generation
            rule(lease == mine, message, "is not of", mine)


class _Expected:
    """A block that must raise `expected`, or nothing if that is None; what it raises goes on."""

    def __init__(self, expected: type[HeadraceError] | None) -> None:
        self.expected = expected

    def __enter__(self) -> _Expected:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: object, trace: object) -> None:
        if kind is not self.expected and not (kind and issubclass(kind, Broken)):
            wanted = self.expected.__name__ if self.expected else "nothing"
            rule(False, f"a source attempt raised {exc!r}, expected {wanted}")
