"""The owner's rules, stated a second time and without its tables.

A rule is checked in both directions against the ledger's facts: what each command needs before it
may be given (`check_command`), and what must have been given when an event is over (`settle`). So
nothing happens too early, twice or to the wrong one, and nothing is forgotten.
"""

from __future__ import annotations

from typing import assert_never

from headrace.ids import AttemptId, SourceId
from headrace.protocol.commands import (
    CheckDigest,
    Command,
    Free,
    KillSource,
    Publish,
    Quarantine,
    Report,
    Reserve,
    Retry,
    SendCancel,
    StartImport,
    StartPrefill,
)
from headrace.testing.facts import Account, Ticket, rule
from headrace.testing.ledger import Ledger


def check_command(ledger: Ledger, command: Command, now_ns: int) -> None:
    """Check one command against the facts, then note it.

    Raises:
        Violation: it was not allowed.
    """
    match command:
        case Reserve():
            _reserve(ledger, command)
        case StartPrefill():
            _start_prefill(ledger, command, now_ns)
        case SendCancel(attempt=attempt, source=source):
            if attempt not in ledger.cancels:
                ledger.strand(now_ns)
            place = ledger.accounts[attempt].place
            rule(place is not None and place[0] == source, command, "to another's source")
            rule(ledger.cancels.pop(attempt, None) is not None, command, "of nothing withdrawn")
        case KillSource(source=source):
            overdue = next((place for place in ledger.kills if place[0] == source), None)
            rule(overdue is not None, command, "where no write token is overdue")
            ledger.kills -= {overdue}
            ledger.doomed.add(source)
        case StartImport():
            _start_import(ledger, command, now_ns)
        case CheckDigest():
            _check_digest(ledger, command, now_ns)
        case Publish():
            _publish(ledger, command)
        case Free(attempt=attempt) | Quarantine(attempt=attempt):
            _give_back(ledger, attempt, apart=isinstance(command, Quarantine))
        case Retry():
            if command.attempt not in ledger.retries:
                ledger.strand(now_ns)
            rule(command.attempt in ledger.retries, command, "where none is due")
            ledger.retries.remove(command.attempt)
        case Report():
            if command.request not in ledger.due:
                ledger.strand(now_ns)
            due = ledger.due.pop(command.request, None)
            rule(due == (command.outcome, command.cause), command, "where due was", due)
        case _:
            assert_never(command)


def settle(ledger: Ledger, now_ns: int) -> None:
    """Check that the event left nothing undone.

    Raises:
        Violation: with what is missing.
    """
    ledger.strand(now_ns)
    rule(not ledger.due, "no Report of", ledger.due)
    rule(not any(ledger.cancels.values()), "no SendCancel of", ledger.cancels)
    ledger.cancels.clear()
    rule(not ledger.retries, "no Retry of", ledger.retries)
    rule(not ledger.kills, "no KillSource for", ledger.kills)
    for attempt, account in ledger.accounts.items():
        rule(not (account.over and account.storage), attempt, "is over and keeps its storage")
        if account.live:
            ready = is_publishable(ledger, account)
            rule(ready == account.asked_to_publish, attempt, "is complete, and no Publish")
            for cells, _ in account.digests:
                rule(bool(cells & ~account.fenced), attempt, "has a digest that is not checked")
    if ledger.budget_nbytes > 0:
        left = [str(attempt) for attempt, account in ledger.undecided() if _has_queued(account)]
        rule(not left, "a budget of", ledger.budget_nbytes, "is left, and so are imports of", left)
    ledger.budget_nbytes = 0
    _settle_admission(ledger)


def is_publishable(ledger: Ledger, account: Account) -> bool:
    """Rule 1: exactly complete, the source-final input there, nothing in flight."""
    return (
        account.landed == ledger.terms.transfer_set(account.start)
        and account.final
        and not account.flights
        and account.storage
        and (account.place is not None or account.all_kept)
        and account.live
    )


def _reserve(ledger: Ledger, command: Reserve) -> None:
    account = ledger.accounts[command.attempt]
    rule(ledger.lanes_free > 0, command, "without a free lane")
    rule(account.live and not account.storage, command, "where it has", account)
    parked = [a for a, c in ledger.undecided() if c.place and not c.storage]
    waiting = [a for a, c in ledger.undecided() if not c.place and not c.storage]
    rule(command.attempt == (parked + waiting)[0], command, "where first is", parked, waiting)
    account.storage = True


def _start_prefill(ledger: Ledger, command: StartPrefill, now_ns: int) -> None:
    place = (command.source, int(command.slot))
    slot, account = ledger.slots[place], ledger.accounts[command.attempt]
    outrun = command.attempt.request in ledger.due  # the cancel came before this was given out
    rule(account.live or outrun, command, "where it has", account)
    rule(account.place is None, command, "where it has", account.place)
    rule(command.source not in ledger.dead, command, "to a dead source")
    rule(command.source not in ledger.doomed, command, "to a source that is to be killed")
    rule(ledger.idle(command.source), command, "to a busy source")
    rule(slot.holder is None, command, "into a slot that is", slot.word, slot)
    rule(command.generation > slot.generation, command, "after generation", slot.generation)
    if not outrun:
        _check_turn(ledger, command)
    account.place, account.generation, account.since_ns = place, command.generation, now_ns
    slot.holder, slot.generation, slot.writer = command.attempt, command.generation, True
    if outrun:  # the grant is given all the same, and taken back at once
        slot.ended_ns = now_ns
        ledger.cancels[command.attempt] = True


def _check_turn(ledger: Ledger, command: StartPrefill) -> None:
    holding, first = _lacking_a_slot(ledger)
    if not holding:
        rule(_may_park(ledger, command.source), command, "parks beyond the bound")
    fitting = [a for a in holding or first if _fits(ledger, command.source, a)]
    rule(command.attempt in fitting[:1], command, "where first is", fitting, holding, first)


def _lacking_a_slot(ledger: Ledger) -> tuple[list[AttemptId], list[AttemptId]]:
    """Those that hold storage and lack a slot; and the first of those that have neither."""
    waiting = [(a, c) for a, c in ledger.undecided() if c.place is None]
    holding = [a for a, c in waiting if c.storage and not c.all_kept]
    return holding, [a for a, c in waiting if not c.storage][:1]


def _fits(ledger: Ledger, source: SourceId, attempt: AttemptId) -> bool:
    account = ledger.accounts[attempt]
    return not account.all_kept and ledger.fits(source, account)


def _start_import(ledger: Ledger, command: StartImport, now_ns: int) -> None:
    account = ledger.accounts[command.attempt]
    place = (command.source, int(command.slot))
    slot = ledger.slots[place]
    rule(account.live, command, "where it has", account)
    rule(account.storage, command, "without storage")
    rule(account.place == place, command, "where it was granted", account.place)
    rule(slot.holder == command.attempt, command, "where the slot is", slot.holder)
    rule(account.generation == slot.generation, command, "of generation", account.generation)
    cells = ledger.terms.cells(command.piece, account.start)
    nbytes = ledger.terms.nbytes(cells)
    rule(cells != 0 and not cells & ~account.told, command, "of cells not told")
    rule(not cells & account.asked, command, "of cells that were imported before")
    small = cells.bit_count() == 1 or nbytes <= ledger.terms.chunk_nbytes
    rule(small, command, "of", nbytes, "bytes in one chunk")
    rule(ledger.budget_nbytes > 0, command, "beyond the budget")
    nearest = min(_distance(ledger, c) for _, c in ledger.undecided() if _has_queued(c))
    rule(_distance(ledger, account) == nearest, command, "where another is nearer to publishing")
    ledger.budget_nbytes -= nbytes
    account.asked |= cells
    account.flights += 1
    slot.readers.add(command.import_id)
    _issue(ledger, command, Ticket(command.attempt, cells, False, now_ns))


def _check_digest(ledger: Ledger, command: CheckDigest, now_ns: int) -> None:
    account = ledger.accounts[command.attempt]
    entry = (ledger.terms.cells(command.span, account.start), command.expected)
    rule(account.live, command, "where it has", account)
    rule(entry in account.digests, command, "where open are", account.digests)
    rule(not entry[0] & ~account.fenced, command, "before every piece is fenced")
    account.digests = tuple(other for other in account.digests if other != entry)
    account.flights += 1
    _issue(ledger, command, Ticket(command.attempt, entry[0], True, now_ns))


def _issue(ledger: Ledger, command: StartImport | CheckDigest, ticket: Ticket) -> None:
    rule(command.import_id not in ledger.tickets, command, "uses an id that is in flight")
    ledger.tickets[command.import_id] = ticket


def _publish(ledger: Ledger, command: Publish) -> None:
    account = ledger.accounts[command.attempt]
    rule(not account.asked_to_publish, command, "twice")
    rule(is_publishable(ledger, account), command, "where it has", account)
    place = account.place or (None, None)
    rule(place == (command.source, command.slot), command, "of another slot")
    rule(account.token == command.token, command, "where the token was", account.token)
    account.asked_to_publish = True


def _give_back(ledger: Ledger, attempt: AttemptId, *, apart: bool) -> None:
    account = ledger.accounts[attempt]
    rule(account.storage, attempt, "gives storage back that it does not hold")
    rule(account.over, attempt, "gives storage back while it is", account.word)
    rule(account.unsafe == apart, attempt, "device failed", account.unsafe, "quarantine", apart)
    account.storage = False
    if apart:
        ledger.lane_lost(attempt)


def _settle_admission(ledger: Ledger) -> None:
    if ledger.lanes_free > 0:
        lacking = [str(a) for a, account in ledger.undecided() if not account.storage]
        rule(not lacking, "a lane is free, and storage is lacked by", lacking)
    holding, first = _lacking_a_slot(ledger)
    for (source, index), slot in ledger.slots.items():
        gone = source in ledger.dead | ledger.doomed
        if slot.holder is None and not gone and ledger.idle(source):
            due = any(_fits(ledger, source, attempt) for attempt in holding or first)
            due = due and (bool(holding) or _may_park(ledger, source))
            rule(not due, "slot", index, "of source", source, "is free, and a hand-off lacks one")


def _has_queued(account: Account) -> bool:
    queued = account.told & ~account.asked
    return bool(queued) and account.storage and account.place is not None


def _distance(ledger: Ledger, account: Account) -> tuple[bool, int]:
    return not account.final, ledger.terms.nbytes(account.told & ~account.asked)


def _may_park(ledger: Ledger, source: SourceId) -> bool:
    parked = sum(account.word == "PARKED" for _, account in ledger.undecided())
    num_slots = sum(place[0] == source for place in ledger.slots)
    return parked < min(ledger.terms.prefetch_depth, num_slots - 1)
