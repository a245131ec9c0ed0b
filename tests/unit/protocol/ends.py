"""Two ends: an owner and its sources, joined by queues of encoded messages."""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, assert_never

import msgspec

from headrace.errors import Cancelled
from headrace.ids import AttemptId, ImportId, RequestId, SourceId, Span
from headrace.messages import (
    Cancel,
    Computing,
    Failed,
    FromSource,
    Prefill,
    Progress,
    Released,
    SourceFinal,
    ToSource,
    decode_from_source,
    decode_to_source,
    encode,
)
from headrace.plan import Plan
from headrace.protocol.commands import (
    Cause,
    CheckDigest,
    Command,
    Free,
    KillSource,
    Outcome,
    Publish,
    Quarantine,
    Report,
    Reserve,
    Retry,
    SendCancel,
    StartImport,
    StartPrefill,
)
from headrace.protocol.handoff import HandoffState
from headrace.protocol.owner import Owner
from headrace.protocol.source import SourceAttempt
from tests.unit.protocol.builders import Cell, cells_of

Program: TypeAlias = list[list[Span]]


def rectangles(plan: Plan, groups: Sequence[tuple[range, ...]], chunk: int) -> Program:
    """What a source commits: each layer group cut by position into chunks."""
    step = chunk or plan.num_tokens
    return [
        [Span(run.start, run.stop, at, min(at + step, plan.num_tokens)) for run in group]
        for group in groups
        for at in range(0, plan.num_tokens, step)
    ]


def program_of(plan: Plan, prefill: Prefill) -> Program:
    """The batches of spans that an engine commits when it cuts as it was asked to."""
    everything = [(range(len(plan.layers)),)]
    if prefill.route == "whole":
        return rectangles(plan, everything, 0)
    if prefill.route == "chunked":
        return rectangles(plan, everything, prefill.chunk)
    groups = plan.layer_groups(prefill.group_layers, prefill.emission)
    return rectangles(plan, groups, prefill.chunk)


def digest_of(cells: Mapping[Cell, AttemptId], plan: Plan, span: Span) -> int:
    return zlib.crc32(repr([(cell, cells[cell]) for cell in cells_of(plan, span)]).encode())


class Source:
    """A source's end: its attempt, what its engine still has to commit, and both its queues."""

    def __init__(self, num_slots: int, plan_for: Callable[[int, int], Plan]) -> None:
        self.plan_for = plan_for
        self.slots: list[dict[Cell, AttemptId]] = [{} for _ in range(num_slots)]
        self.inbox: deque[bytes] = deque()
        self.outbox: deque[bytes] = deque()
        self.attempt: SourceAttempt | None = None
        self.program: Program = []
        self.alive = True

    def step(self, *, broken: bool = False) -> None:
        """Take in one message, or else commit the next batch, the final or the release."""
        if self.inbox and (self.attempt is None or self.inbox[0][:8].find(b"cancel") >= 0):
            self._take(decode_to_source(self.inbox.popleft()))
        elif self.attempt is not None:
            self._run(self.attempt, broken)

    def _take(self, message: ToSource) -> None:
        if isinstance(message, Prefill):
            plan = self.plan_for(message.num_tokens, message.start)
            self.attempt = SourceAttempt(message, plan)
            self.attempt.start(0)
            self.program = program_of(plan, message)
        elif self.attempt is not None and message == Cancel(self.attempt.prefill.attempt):
            self.attempt.cancel()

    def _run(self, attempt: SourceAttempt, broken: bool) -> None:
        try:
            attempt.check_running()
            if broken:
                raise RuntimeError("the engine broke")
            if self.program:
                self._send(*self._commit(attempt, self.program.pop(0)))
                return
            self._send(*attempt.final(None, 0, 0))
        except Cancelled:
            pass
        except RuntimeError as exc:
            self._send(*attempt.fail(str(exc)))
        self._send(attempt.returned())
        self.attempt = None

    def _commit(self, attempt: SourceAttempt, spans: list[Span]) -> list[Progress]:
        prefill, slot = attempt.prefill, self.slots[attempt.prefill.slot]
        for cell in cells_of(attempt.plan, *spans):
            slot[cell] = prefill.attempt
        digests = [digest_of(slot, attempt.plan, span) for span in spans] if prefill.digest else []
        return attempt.commit(spans, digests, 0)

    def _send(self, *messages: FromSource) -> None:
        self.outbox += map(encode, messages)


class Ends:
    """An owner and its sources joined by queues of encoded messages, over memory of cells.

    A cell holds the attempt that wrote it. Bytes are read when an import ends, as late as may be,
    so that a slot given to another too early shows in what is published; and so does a cell that
    an attempt left in the storage which it passed on.
    """

    def __init__(
        self,
        owner: Owner,
        plan_for: Callable[[int, int], Plan],
        options: Callable[[AttemptId], Prefill],
    ) -> None:
        """`options` of an attempt are those of its grant, all but the ids."""
        self.owner = owner
        self.plan_for = plan_for
        self.options = options
        self.now_ns = 0
        self.sources: dict[SourceId, Source] = {}
        self.local: SourceId | None = None
        self.expected = 0
        self.storage: dict[AttemptId, dict[Cell, AttemptId]] = {}
        self.flights: dict[ImportId, StartImport | CheckDigest] = {}
        self.ends: dict[RequestId, Outcome] = {}
        self.causes: Counter[Cause] = Counter()
        self.retried: list[AttemptId] = []
        self.granted: list[StartPrefill] = []
        self.published: set[RequestId] = set()
        self.seen: set[HandoffState] = set()
        self.to_kill: list[SourceId] = []
        self.to_refuse: list[RequestId] = []
        self.refuses = self.loses = False  # the next reservation, the next lane that is freed
        self.spoils = self.poisons = False  # the next digest, the next publish

    def add_source(
        self, num_slots: int, *, expected: bool = False, local: bool = False
    ) -> SourceId:
        source = SourceId(len(self.sources))
        self.sources[source] = Source(num_slots, self.plan_for)
        self.local = source if local else self.local
        self.expected -= expected
        self.owner.add_source(
            source, num_slots, self.plan_for, self.now_ns, expected=expected, local=local
        )
        self.obey()
        return source

    def expect_source(self) -> None:
        self.expected += 1
        self.owner.expect_source()

    def source_not_coming(self) -> None:
        self.expected -= 1
        self.owner.source_not_coming("it died too often", self.now_ns)
        self.obey()

    def deliver(self, source: SourceId) -> None:
        """The owner reads one message of a source, if there is one."""
        if self.sources[source].outbox:
            message = decode_from_source(self.sources[source].outbox.popleft())
            assert isinstance(message, Computing | Progress | SourceFinal | Failed | Released)
            self.owner.message(source, message, self.now_ns)
            self.obey()

    def garble(self, source: SourceId) -> None:
        """A message of a source is lost, and the owner reads what is none."""
        if self.sources[source].outbox:
            if decode_from_source(self.sources[source].outbox[0]).__class__ is not Released:
                self.sources[source].outbox.popleft()
            self.owner.undecodable(source, "not a message", self.now_ns)
            self.obey()

    def begin(self, budget_nbytes: int) -> None:
        self.owner.begin_imports(budget_nbytes, self.now_ns)
        self.obey()

    def land(self, import_id: ImportId) -> None:
        """An import, or the check of a digest, ends."""
        flight = self.flights.pop(import_id)
        held, plan = self.storage[flight.attempt], self._plan(flight.attempt)
        if isinstance(flight, CheckDigest):
            actual = digest_of(held, plan, flight.span) + self.spoils
            self.spoils = False
            self.owner.digest_checked(import_id, actual, self.now_ns)
        else:
            slot = self.sources[flight.source].slots[flight.slot]
            held |= {cell: slot[cell] for cell in cells_of(plan, flight.piece)}
            self.owner.import_done(import_id, self.now_ns)
        self.obey()

    def break_import(self, import_id: ImportId) -> None:
        self.flights.pop(import_id)
        self.owner.import_failed(import_id, "device", self.now_ns)
        self.obey()

    def kill(self, source: SourceId) -> None:
        """The source dies; what it had said is still read."""
        while self.sources[source].outbox:
            self.deliver(source)
        self.sources[source].alive = False
        self.owner.source_died(source, "killed", self.now_ns)
        self.obey()

    def reinstate(self, attempt: AttemptId) -> None:
        """An operator found that nothing writes any more what an attempt left behind."""
        self.owner.reinstate(attempt, self.now_ns)
        self.obey()

    def obey(self) -> None:
        """Carry out the owner's commands, after a look at its integrity."""
        self.owner.check_integrity()
        for request in list(self.owner._requests):
            self.seen.add(self.owner.state_of(request))
        for import_id in list(self.flights):
            if not self.owner.is_in_flight(import_id):  # given up: its fence means nothing any more
                del self.flights[import_id]
        while commands := self.owner.commands():
            for command in commands:
                self._obey(command)
            while self.to_refuse:
                attempt = self.owner.attempt_of(self.to_refuse.pop())
                assert attempt is not None
                self.owner.reserve_refused(attempt, "no memory", self.now_ns)
            self.owner.check_integrity()
        while self.to_kill:
            self.kill(self.to_kill.pop())

    def _obey(self, command: Command) -> None:
        match command:
            case Reserve(attempt):
                assert attempt not in self.storage
                if self.refuses:  # told when all that was commanded with it is done
                    self.to_refuse.append(attempt.request)
                else:
                    self.storage[attempt] = {}
                self.refuses = False
            case StartPrefill(attempt, source, slot, generation):
                prefill = msgspec.structs.replace(
                    self.options(attempt), attempt=attempt, slot=slot, generation=generation
                )
                self.granted.append(command)
                self.sources[source].inbox.append(encode(prefill))
            case SendCancel(attempt, source):
                self.sources[source].inbox.append(encode(Cancel(attempt)))
            case KillSource(source):
                assert self.sources[source].alive
                assert source != self.local
                self.to_kill.append(source)  # when all that was commanded with it is done
            case StartImport() | CheckDigest():
                assert command.attempt in self.storage
                self.flights[command.import_id] = command
            case Publish(attempt):
                self._publish(attempt)
            case Free(attempt) | Quarantine(attempt):
                assert not self._flights_of(attempt)
                del self.storage[attempt]
                if self.loses and isinstance(command, Free):
                    self.loses = False
                    self.owner.lane_lost(attempt, "not freed", self.now_ns)
            case Retry(attempt):
                assert not self._flights_of(attempt)
                assert attempt.request not in self.ends
                if attempt in self.storage:
                    self.storage[attempt.next] = self.storage.pop(attempt)
                self.retried.append(attempt)
            case Report(request, outcome, cause):
                assert request not in self.ends
                assert (outcome is Outcome.PUBLISHED) == (request in self.published)
                assert (outcome is Outcome.PUBLISHED) == (cause is None)
                self.ends[request] = outcome
                self.causes.update([] if cause is None else [cause])
            case _:
                assert_never(command)

    def _publish(self, attempt: AttemptId) -> None:
        assert not self._flights_of(attempt)
        if self.poisons:
            self.poisons = False
            self.owner.publish_refused(attempt, "poison", self.now_ns)
            return
        plan = self._plan(attempt)
        assert self.storage[attempt] == dict.fromkeys(cells_of(plan, plan.whole()), attempt)
        self.published.add(attempt.request)
        self.owner.published(attempt, self.now_ns)

    def _flights_of(self, attempt: AttemptId) -> list[StartImport | CheckDigest]:
        return [flight for flight in self.flights.values() if flight.attempt == attempt]

    def _plan(self, attempt: AttemptId) -> Plan:
        options = self.options(attempt)
        return self.plan_for(options.num_tokens, options.start)
