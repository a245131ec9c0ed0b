"""Every event that can reach a tiny owner in one of its states, legal or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

from headrace.ids import AttemptId, Generation, ImportId, RequestId, SlotIndex, SourceId, Span
from headrace.messages import Computing, Failed, Progress, Released, SourceFinal
from headrace.protocol.commands import Free, Outcome, Publish, Reserve
from headrace.testing.facts import Account
from headrace.testing.instances import DIGEST, EPOCH, Instance
from headrace.testing.ledger import AttemptMessage, Ledger

Request: TypeAlias = Reserve | Publish | Free  # what a decoder may fail to carry out


class Submit(NamedTuple):
    """A caller brings a request."""


class Tell(NamedTuple):
    """A source says something; `good`: as the protocol has it, `fault`: the shell finds it bad."""

    source: SourceId
    message: AttemptMessage
    good: bool
    fault: bool = False


class Garble(NamedTuple):
    """A source sends what is no message."""

    source: SourceId


class Begin(NamedTuple):
    """The shell begins imports."""

    budget_nbytes: int


class Imported(NamedTuple):
    """An import is over: fenced, or failed without a fence."""

    import_id: ImportId
    good: bool


class Digested(NamedTuple):
    """A digest was computed: the one that was sent, or another."""

    import_id: ImportId
    good: bool


class Answer(NamedTuple):
    """The decoder carried a command out, failed to, or (a `Reserve`) set nothing aside."""

    command: Request
    how: Literal["done", "failed", "refused"]


class Retire(NamedTuple):
    """Nobody decodes the entry any more; `good`: nor does the device still write it."""

    request: RequestId
    good: bool


class Cancel(NamedTuple):
    """The caller wants no more."""

    request: RequestId


class Die(NamedTuple):
    """A source is proven dead; `restart`: it is started again."""

    source: SourceId
    restart: bool = False


class Arrive(NamedTuple):
    """A source that was expected attaches."""


class GiveUp(NamedTuple):
    """A source that was expected does not come."""


class Reinstate(NamedTuple):
    """An operator brings back what an attempt had set apart."""

    attempt: AttemptId


class Forget(NamedTuple):
    """The shell drops a source; nothing changes unless it is dead and all its slots are free."""

    source: SourceId


class Tick(NamedTuple):
    """Time passes, and the timer fires."""


class Outrun(NamedTuple):
    """A cancel comes before the shell has taken the commands of another event."""

    first: Submit | Tell | Imported
    cancel: Cancel


class Misuse(NamedTuple):
    """A call that the shell must not make; it raises and leaves no trace."""

    call: Literal[
        "import_done",
        "digest_checked",
        "published",
        "retire",
        "add_source",
        "forget_source",
        "reserve_refused",
        "publish_refused",
        "reinstate",
        "not_coming",
    ]
    subject: ImportId | AttemptId | RequestId | SourceId


Event: TypeAlias = (
    Submit
    | Tell
    | Garble
    | Begin
    | Imported
    | Digested
    | Answer
    | Retire
    | Cancel
    | Die
    | Arrive
    | GiveUp
    | Reinstate
    | Forget
    | Tick
    | Outrun
    | Misuse
)


def is_good(event: Event) -> bool:
    """Whether the event comes without a fault, a cancel or a deadline."""
    match event:
        case Tell(good=good) | Imported(good=good) | Digested(good=good) | Retire(good=good):
            return good
        case Answer(how=how):
            return how == "done"
        case Submit() | Begin() | Arrive():
            return True
        case _:
            return False


def events(instance: Instance, ledger: Ledger, unanswered: tuple[Request, ...]) -> Iterator[Event]:
    """Every event that can come now. A command's answer comes before anything else."""
    if unanswered:
        yield Answer(unanswered[0], "done")
        if instance.device_faults:
            yield Answer(unanswered[0], "failed")
            if isinstance(unanswered[0], Reserve | Publish):
                yield Answer(unanswered[0], "refused")
        return
    num_requests = len({attempt.request for attempt in ledger.accounts})
    if num_requests < instance.requests:
        yield Submit()
        if instance.malice and instance.cancels:
            yield Outrun(Submit(), Cancel(RequestId(EPOCH, num_requests)))
    for attempt, account in ledger.accounts.items():
        yield from _events_of(instance, ledger, attempt, account)
    for budget_nbytes in instance.budgets:
        yield Begin(budget_nbytes)
    for import_id, ticket in ledger.tickets.items():
        if instance.malice:  # a copy reported as a digest, or the other way round
            yield Misuse("import_done" if ticket.check else "digest_checked", import_id)
        for good in (True, False):
            if ticket.check:
                yield Digested(import_id, good)
            elif good or instance.device_faults:
                yield Imported(import_id, good)
                if good and instance.malice and instance.cancels and not instance.digest:
                    yield Outrun(Imported(import_id, good), Cancel(ticket.attempt.request))
    for at in range(ledger.num_sources):
        if instance.deaths and at not in ledger.dead and at != ledger.local:
            yield Die(SourceId(at))
            if ledger.num_sources - ledger.num_first + ledger.num_expected < instance.restarts:
                yield Die(SourceId(at), restart=True)
        if instance.deaths and at not in ledger.forgotten:
            yield Forget(SourceId(at))
    if ledger.num_expected:
        yield Arrive()
        yield GiveUp()
    if instance.reinstates:
        for attempt in ledger.apart:
            yield Reinstate(attempt)
    if instance.ticks:
        yield Tick()
    if instance.malice:
        yield Misuse("import_done", ImportId(1 << 20))
        yield Misuse("digest_checked", ImportId(1 << 20))
        for at in range(ledger.num_sources):
            if at not in ledger.dead:
                yield Garble(SourceId(at))
            known = at not in ledger.forgotten
            yield Misuse("add_source" if known else "forget_source", SourceId(at))
        yield Misuse("reinstate", AttemptId(EPOCH, 99, 1))
        if not ledger.num_expected:
            yield Misuse("not_coming", SourceId(0))
        for slot in ledger.slots.values():
            for given_up in slot.readers - ledger.tickets.keys():
                yield Misuse("import_done", given_up)


def _events_of(
    instance: Instance, ledger: Ledger, attempt: AttemptId, account: Account
) -> Iterator[Event]:
    decided = not account.live
    if not account.followed:
        yield from _calls(instance, attempt, account)
    if account.place is None:
        if instance.malice and SourceId(0) not in ledger.forgotten:
            yield Tell(SourceId(0), _progress(attempt, 0, 0, instance.spans[:1]), good=False)
            yield Tell(SourceId(0), Computing(attempt, 0, 0), good=False)
            yield Tell(SourceId(0), Released(attempt, 0, 0), good=False)
        return
    source = account.place[0]
    if source in (ledger.forgotten if instance.malice else ledger.dead):
        return
    for message, good in _messages(instance, ledger, attempt, account):
        yield Tell(source, message, good)
        if isinstance(message, SourceFinal) and instance.malice:
            yield Tell(source, message, good=False, fault=True)
        if good and isinstance(message, SourceFinal) and instance.malice and instance.cancels:
            yield Outrun(Tell(source, message, good), Cancel(attempt.request))
    if instance.malice:
        for message in _malformed(instance, ledger, attempt, account, decided):
            yield Tell(source, message, good=False)
        for other in range(ledger.num_sources):
            if other != source and other not in ledger.dead:
                _, index = account.place
                for theirs in (
                    _progress(attempt, index, account.generation, instance.spans[:1]),
                    Computing(attempt, index, account.generation),
                    Released(attempt, index, account.generation),
                ):
                    yield Tell(SourceId(other), theirs, good=False)


def _calls(instance: Instance, attempt: AttemptId, account: Account) -> Iterator[Event]:
    """What the caller and the shell may do with the attempt that a request is at."""
    if instance.cancels:
        yield Cancel(attempt.request)
    if account.outcome is Outcome.PUBLISHED and not account.over:
        yield Retire(attempt.request, good=True)
        if instance.device_faults:
            yield Retire(attempt.request, good=False)
    elif instance.malice and not account.over:
        yield Misuse("retire", attempt.request)
    if instance.malice and not account.over:
        yield Misuse("published", attempt)
        yield Misuse("publish_refused", attempt)
        if account.outcome is not None or account.flights or not account.storage:
            yield Misuse("reserve_refused", attempt)


def _messages(
    instance: Instance, ledger: Ledger, attempt: AttemptId, account: Account
) -> Iterator[tuple[AttemptMessage, bool]]:
    """What a source may say of its own lease; true where it would by the protocol."""
    assert account.place is not None
    (_, slot), generation = account.place, account.generation
    writing = any(c.writer and c.holder == attempt for c in ledger.slots.values())
    telling = writing and account.live and not account.final
    digests = (DIGEST,) if instance.digest else ()
    for span in instance.spans:
        cells = ledger.terms.cells(span, account.start)
        fresh = bool(cells) and not cells & account.told
        if (telling and fresh) or instance.malice or not cells:
            message = _progress(attempt, slot, generation, (span,), digests)
            yield message, telling and fresh
    if instance.malice or telling:
        yield Computing(attempt, slot, generation), telling
    complete = account.told == ledger.terms.transfer_set(account.start)
    if instance.malice or (telling and complete):
        first: Literal["logits", "token"] = "token" if instance.digest else "logits"
        final = SourceFinal(attempt, slot, generation, first, 5, 0, 0)
        yield final, telling and complete
    if instance.malice or telling:
        yield Failed(attempt, slot, generation, "engine"), False
    over = account.final or not account.live
    if instance.malice or writing:
        yield Released(attempt, slot, generation), writing and over


def _malformed(
    instance: Instance, ledger: Ledger, attempt: AttemptId, account: Account, decided: bool
) -> Iterator[AttemptMessage]:
    """What no source may say: about this attempt's lease, or about another with its own."""
    assert account.place is not None
    (source, slot), generation = account.place, account.generation
    layers, n = len(instance.kinds), instance.num_tokens
    first = instance.spans[:1]
    if not decided:
        for span in (
            Span(0, layers + 1, 0, n),
            Span(0, layers, 0, n + 1),
            Span(layers - 1, layers, n - 1, n - 1),
            Span(0, layers, 0, n),  # legal, unless cells of it were told
        ):
            yield _progress(attempt, slot, generation, (span,))
        yield _progress(attempt, slot, generation, (*instance.spans, *instance.spans[-1:]))
        yield _progress(attempt, slot, generation, first, (DIGEST, DIGEST))
    for stale in (generation - 1, generation + 1):
        yield _progress(attempt, slot, stale, first)
        yield Computing(attempt, slot, stale)
        yield Released(attempt, slot, stale)
    num_slots = sum(at == source for at, _ in ledger.slots)
    for other in {*range(num_slots), 99} - {slot}:
        yield _progress(attempt, other, generation, first)
        yield Computing(attempt, other, generation)
        yield SourceFinal(attempt, other, generation, "logits", 0, 0, 0)
        yield Released(attempt, other, generation)
    for unknown in (
        AttemptId(EPOCH, 99, 1),
        AttemptId(EPOCH, attempt.counter, 9),
        AttemptId(EPOCH - 1, attempt.counter, 1),
    ):
        yield _progress(unknown, slot, generation, first)
        yield Computing(unknown, slot, generation)
        yield Released(unknown, slot, generation)


def _progress(
    attempt: AttemptId,
    slot: int,
    generation: int,
    spans: tuple[Span, ...],
    digests: tuple[int, ...] = (),
) -> Progress:
    return Progress(attempt, SlotIndex(slot), Generation(generation), spans, digests, 0, 0, 0)
