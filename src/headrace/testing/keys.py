"""When two states of an owner are the same: a canonical, hashable form of one.

Left out is what can change nothing any more: counters of dropped messages, the numbers of imports
(an import is known by what it carries), the cells of a hand-off that is decided, the age of what
has no deadline, and the count of progress messages where no walk reaches their bound. Every
attribute of the machines is named here, read or left out on purpose: `check_complete` raises when a
machine has one that this module does not know.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Final

from headrace.coverage import Coverage
from headrace.errors import LocalProtocolError
from headrace.ids import ImportId
from headrace.messages import MAX_PROGRESS
from headrace.protocol.handoff import Handoff, HandoffState
from headrace.protocol.owner import Owner
from headrace.protocol.slots import Slot, SlotState
from headrace.testing.facts import Account
from headrace.testing.ledger import Ledger

_OVER: Final = (HandoffState.PUBLISHED, HandoffState.DRAINING, HandoffState.ENDED)

_OWNER: Final = (
    "epoch limits chunk_nbytes dropped ended num_retries _lanes_quarantined _apart _expected "
    "_admission _sources _requests _imports _commands _next_request _next_import"
)
_ADMISSION: Final = "lanes_free prefetch_depth _queue"
_HANDOFF: Final = (
    "state _name attempt num_tokens digest local avoid start outcome reason has_storage source "
    "lease final token last_progress_ns quarantine_reason lost_reads _plan _claimed _landed _queue "
    "_flights _queued_nbytes _num_progress"
)
_IMPORT: Final = "handoff slot begun_ns expected"
_SOURCE: Final = "slots plan_for local running ending dead"
_SLOT: Final = "state _name index generation holder writer_out readers draining_since_ns"
_COVERAGE: Final = "_windows _num_positions _have _open"


def check_complete(owner: Owner) -> None:
    """Raise LocalProtocolError if a machine has an attribute that `key_of` does not know."""
    _same(owner, _OWNER)
    _same(owner._admission, _ADMISSION)
    for entry in owner._requests.values():
        _same(entry.handoff, _HANDOFF)
        _same(entry.handoff._claimed, _COVERAGE)
    for record in owner._imports.values():
        _same(record, _IMPORT)
    for source in owner._sources.values():
        _same(source, _SOURCE)
        for slot in source.slots:
            _same(slot, _SLOT)


def key_of(owner: Owner, ledger: Ledger, now_ns: int) -> Hashable:
    """The canonical form of an owner and of the ledger that watches it."""
    bound = ledger.terms.max_progress if ledger.terms.max_progress < MAX_PROGRESS else 0
    return _owner_key(owner, bound, now_ns), _ledger_key(ledger, bound, now_ns)


def _same(machine: object, known: str) -> None:
    names = vars(machine) if hasattr(machine, "__dict__") else getattr(machine, "__slots__", ())
    odd = set(names) ^ set(known.split())
    if odd:
        raise LocalProtocolError(f"keys: unknown attributes {odd} of {type(machine).__name__}")


def _owner_key(owner: Owner, bound: int, now_ns: int) -> Hashable:
    carried: dict[ImportId, Hashable] = {}
    for entry in owner._requests.values():
        handoff = entry.handoff
        for import_id, flight in handoff._flights.items():
            record = owner._imports.get(import_id)
            of: Hashable = None
            if record is not None:
                age = _age(record.begun_ns, owner.limits.drain_timeout_ns, now_ns)
                of = (record.handoff.attempt, record.expected, record.slot is None, age)
            span = flight.span_import
            carried[import_id] = (
                *(handoff.attempt.counter, flight.nbytes, flight.digest_check),
                *(span.span, span.open_pieces if handoff.state not in _OVER else 0),
                of,
            )
    handoffs = tuple(
        (
            *(counter, _left(entry.deadline_ns, now_ns)),
            *(_handoff_key(entry.handoff, owner, now_ns), min(entry.handoff._num_progress, bound)),
        )
        for (_, counter), entry in owner._requests.items()
    )
    sources = tuple(
        (
            *(source_id, source.dead, source.ending, source.running),
            tuple(_slot_key(slot, carried, owner, now_ns) for slot in source.slots),
        )
        for source_id, source in owner._sources.items()
    )
    return (
        handoffs,
        sources,
        tuple(sorted(map(repr, carried.values()))),
        len(owner._imports),
        owner._lanes_quarantined,
        owner._expected,
        tuple((at, apart.lane, _places(apart.lost_reads)) for at, apart in owner._apart.items()),
        owner._admission.lanes_free,
        tuple(handoff.attempt.counter for handoff in owner._admission._queue),
        owner._next_request,
        len(owner._commands),
    )


def _handoff_key(handoff: Handoff, owner: Owner, now_ns: int) -> Hashable:
    facts = (
        *(handoff.attempt, handoff.state._value_, handoff.has_storage, handoff.source),
        *(handoff.lease, bool(handoff.quarantine_reason), handoff.outcome is None),
        *(handoff.local, handoff.avoid, _places(handoff.lost_reads)),
    )
    if handoff.state in _OVER:
        return facts
    age = 0
    if handoff.lease is not None and not handoff.final:
        age = min(now_ns - handoff.last_progress_ns, owner.limits.progress_timeout_ns)
    queue = tuple(
        (entry.span, entry.digest, entry.open_pieces, piece, nbytes)
        for entry, piece, nbytes in handoff._queue
    )
    coverage = (_coverage_key(handoff._claimed), _coverage_key(handoff._landed))
    return facts, handoff.final, handoff.token, age, queue, handoff._queued_nbytes, coverage


def _places(lost_reads: Iterable[tuple[Slot, ImportId]]) -> Hashable:
    return tuple(sorted(slot.index for slot, _ in lost_reads))


def _coverage_key(coverage: Coverage) -> Hashable:
    return tuple(coverage._have), coverage.complete


def _slot_key(
    slot: Slot, carried: Mapping[ImportId, Hashable], owner: Owner, now_ns: int
) -> Hashable:
    age = 0
    if slot.state is SlotState.DRAINING:
        age = min(now_ns - slot.draining_since_ns, owner.limits.drain_timeout_ns)
    readers = sorted(repr(carried.get(reader)) for reader in slot.readers)
    state = slot.state._value_
    return state, slot.generation, slot.holder, slot.writer_out, tuple(readers), age


def _ledger_key(ledger: Ledger, bound: int, now_ns: int) -> Hashable:
    accounts = tuple(
        (attempt, _account_key(account, ledger, now_ns), min(account.num_progress, bound))
        for attempt, account in ledger.accounts.items()
    )
    tickets = sorted(
        (
            *(ticket.attempt.counter, ticket.cells, ticket.check),
            _age(ticket.since_ns, ledger.terms.drain_timeout_ns, now_ns),
        )
        for ticket in ledger.tickets.values()
    )
    slots = tuple(
        (
            slot.holder,
            slot.generation,
            slot.writer,
            _tickets_of(slot.readers, ledger),
            _age(slot.ended_ns, ledger.terms.drain_timeout_ns, now_ns),
            slot.apart,
        )
        for slot in ledger.slots.values()
    )
    gone = (frozenset(ledger.dead), frozenset(ledger.doomed), frozenset(ledger.forgotten))
    apart = tuple(
        (attempt, kept.lane, tuple(sorted(place for place, _ in kept.lost_reads)))
        for attempt, kept in ledger.apart.items()
    )
    counts = (ledger.num_expected, ledger.num_sources)
    return accounts, slots, tuple(tickets), ledger.lanes_apart, gone, apart, counts


def _account_key(account: Account, ledger: Ledger, now_ns: int) -> Hashable:
    place = (account.place, account.generation, account.storage)
    if not account.live:
        lost = tuple(sorted(place for place, _ in account.lost_reads))
        again = (account.given_up, account.followed, account.outcome is None)
        left = _left(account.deadline_ns, now_ns) if account.outcome is None else -1
        return place, account.word, account.unsafe, account.flights, lost, again, left
    age = None
    if account.place is not None and not account.final:
        age = _age(account.since_ns, ledger.terms.progress_timeout_ns, now_ns)
    return (
        *(place, age, _left(account.deadline_ns, now_ns), account.local, account.avoid),
        *(account.told, account.asked, account.fenced, account.landed, account.digests),
        *(account.final, account.token, account.flights, account.asked_to_publish),
    )


def _tickets_of(readers: set[ImportId], ledger: Ledger) -> Hashable:
    tickets = (ledger.tickets.get(reader) for reader in readers)
    return tuple(sorted(-1 if ticket is None else ticket.cells for ticket in tickets))


def _age(since_ns: int | None, timeout_ns: int, now_ns: int) -> int:
    return -1 if since_ns is None else min(now_ns - since_ns, timeout_ns)


def _left(deadline_ns: int | None, now_ns: int) -> int:
    return -1 if deadline_ns is None else max(0, deadline_ns - now_ns)
