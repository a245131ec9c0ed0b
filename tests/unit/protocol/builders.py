"""Legal inputs for the tests of the core: manifests, plans, grants, messages, an owner at work."""

from __future__ import annotations

import pickle
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, assert_never

import msgspec
from hypothesis import settings
from hypothesis import strategies as st

from headrace.errors import Cancelled
from headrace.geometry import Full, Kind, Layer, Layout, Manifest, Part, Shared, Sliding
from headrace.ids import AttemptId, ImportId, RequestId, SourceId, Span
from headrace.messages import (
    Cancel,
    Computing,
    Failed,
    FromSource,
    Prefill,
    Progress,
    Released,
    Route,
    SourceFinal,
    ToSource,
    decode_from_source,
    decode_to_source,
    encode,
)
from headrace.plan import Plan, compile_plan
from headrace.protocol.books import AttemptMessage, Limits
from headrace.protocol.commands import (
    CheckDigest,
    Command,
    Free,
    KillSource,
    Outcome,
    Publish,
    Quarantine,
    Report,
    Reserve,
    SendCancel,
    StartImport,
    StartPrefill,
)
from headrace.protocol.handoff import HandoffState
from headrace.protocol.machine import Machine
from headrace.protocol.owner import Owner
from headrace.protocol.source import SourceAttempt

C = TypeVar("C")

Cell: TypeAlias = tuple[int, int]

FEW = settings(max_examples=15, deadline=None, database=None, derandomize=True)

EPOCH = 7
CONTEXT = 64
WINDOW = 4
PARTS = (Part("k", 2, 4, "bfloat16"), Part("v", 2, 8, "bfloat16"))  # K and V differ in size
ROW_NBYTES = 48  # of one position of a layer
HYBRID: tuple[Kind, ...] = (
    Sliding(WINDOW, WINDOW),
    Full(),
    Sliding(WINDOW, WINDOW - 1),
    Shared("layers.1"),
    Full(),
)
FULL: tuple[Kind, ...] = (Full(), Full(), Full())


def layers(*kinds: Kind, parts: tuple[Part, ...] = PARTS) -> tuple[Layer, ...]:
    """Layers named `layers.N`; those that share own no parts."""
    return tuple(
        Layer(index, f"layers.{index}", kind, () if isinstance(kind, Shared) else parts)
        for index, kind in enumerate(kinds)
    )


def decoder_manifest(*kinds: Kind, **changes: Any) -> Manifest:
    """A decoder's manifest; `changes` replace its fields."""
    facts: dict[str, Any] = {
        "role": "decoder",
        "model": "fingerprint",
        "layers": layers(*(kinds or HYBRID)),
        "layouts": ("head_major", "token_major"),
        "vocab_size": 11,
        "logits_dtype": "float32",
        "max_positions": CONTEXT,
    }
    return Manifest(**facts | changes)


def source_manifest(*kinds: Kind, **changes: Any) -> Manifest:
    """The manifest of a source that fits `decoder_manifest` of the same kinds."""
    return decoder_manifest(*kinds, **{"role": "source", "layouts": ("head_major",)} | changes)


def make_plan(
    num_tokens: int, *kinds: Kind, layout: Layout = "head_major", context: int = CONTEXT
) -> Plan:
    return compile_plan(decoder_manifest(*kinds), layout, num_tokens, context)


def cells_of(plan: Plan, *spans: Span) -> list[Cell]:
    """The (layer, position) cells of the spans, span by span, as often as they are told."""
    return [
        (layer, position)
        for span in spans
        for layer in range(span.layer_start, span.layer_stop)
        for position in range(span.start, span.stop)
        if plan.windows[layer][0] <= position < plan.windows[layer][1]
    ]


def rectangles(plan: Plan, groups: Sequence[tuple[range, ...]], chunk: int) -> list[list[Span]]:
    """What a source commits: each layer group cut by position into chunks."""
    step = chunk or plan.num_tokens
    return [
        [Span(run.start, run.stop, at, min(at + step, plan.num_tokens)) for run in group]
        for group in groups
        for at in range(0, plan.num_tokens, step)
    ]


def attempt_id(counter: int = 0, attempt: int = 1) -> AttemptId:
    return AttemptId(EPOCH, counter, attempt)


def grant(
    num_tokens: int, *, digest: bool = False, chunk: int = 0, route: Route = "streamed"
) -> Prefill:
    """The grant of slot 0, generation 0, in layer groups of one layer."""
    return Prefill(attempt_id(), 0, 0, num_tokens, route, 1, chunk, 0, "layers", digest)


def trace_of(machine: Machine[Any, Any]) -> bytes:
    """Everything a machine holds; equal before and after an event that left no trace."""
    return pickle.dumps(vars(machine))


@st.composite
def geometries(draw: st.DrawFn) -> tuple[Manifest, Layout, int, int]:
    """A small decoder manifest of any mix of kinds and shapes, a layout, n and the context."""
    sizes = st.integers(1, 3)
    first: list[Kind] = [Full(), Sliding(2, 2), Sliding(3, 2)]
    kinds = [draw(st.sampled_from(first))]
    for _ in range(draw(st.integers(0, 4))):
        owners = [f"layers.{i}" for i, k in enumerate(kinds) if not isinstance(k, Shared)]
        kinds.append(
            draw(
                st.one_of(
                    st.just(Full()),
                    st.builds(Sliding, st.just(5), st.integers(0, 5)),
                    st.builds(Shared, st.sampled_from(owners)),
                )
            )
        )
    parts = st.builds(Part, st.just("k"), sizes, sizes, st.sampled_from(["bfloat16", "float32"]))
    shapes = [tuple(draw(st.lists(parts, min_size=1, max_size=2))) for _ in range(2)]
    model = tuple(
        Layer(
            i,
            f"layers.{i}",
            kind,
            () if isinstance(kind, Shared) else draw(st.sampled_from(shapes)),
        )
        for i, kind in enumerate(kinds)
    )
    listed = tuple(draw(st.permutations(model)))
    context = draw(st.integers(1, 8))
    layout: Layout = draw(st.sampled_from(["head_major", "token_major"]))
    return decoder_manifest(layers=listed), layout, draw(st.integers(1, context)), context


@st.composite
def spans_in(draw: st.DrawFn, num_layers: int, num_positions: int) -> Span:
    """A legal rectangle of a model."""
    a, b = sorted(draw(st.tuples(st.integers(0, num_layers - 1), st.integers(0, num_layers - 1))))
    p, q = sorted(
        draw(st.tuples(st.integers(0, num_positions - 1), st.integers(0, num_positions - 1)))
    )
    return Span(a, b + 1, p, q + 1)


class Shell:
    """An owner, the commands that it gave so far, and its sources' side played by hand.

    After every step the commands are taken and the owner's integrity is checked.
    """

    def __init__(
        self,
        *,
        lanes: int = 1,
        slots: Sequence[int] = (2,),
        depth: int = 1,
        kinds: Sequence[Kind] = FULL,
        chunk_nbytes: int = 1 << 20,
        progress_timeout_ns: int = 100,
        drain_timeout_ns: int = 50,
    ) -> None:
        self.kinds = tuple(kinds)
        self.now_ns = 0
        limits = Limits(lanes, CONTEXT, depth, chunk_nbytes, progress_timeout_ns, drain_timeout_ns)
        self.owner = Owner(EPOCH, limits)
        self.given: list[Command] = []
        for index, num_slots in enumerate(slots):
            self.add_source(index, num_slots)

    def plan_for(self, num_tokens: int) -> Plan:
        return make_plan(num_tokens, *self.kinds)

    def add_source(self, source: int, num_slots: int) -> None:
        self.owner.add_source(SourceId(source), num_slots, self.plan_for, self.now_ns)
        self.take()

    def take(self) -> list[Command]:
        """Take the commands, after a look at the owner's integrity."""
        self.owner.check_integrity()
        taken = self.owner.commands()
        self.given += taken
        return taken

    def all(self, kind: type[C]) -> list[C]:
        """All commands of a kind given so far."""
        return [command for command in self.given if isinstance(command, kind)]

    def submit(self, num_tokens: int = 4, **options: Any) -> RequestId:
        request = self.owner.submit(num_tokens, self.now_ns, **options)
        self.take()
        return request

    def grant_of(self, request: RequestId) -> StartPrefill:
        """The grant that a request's source was given."""
        return next(g for g in self.all(StartPrefill) if g.attempt.request == request)

    def send(self, message: AttemptMessage, source: int | None = None) -> None:
        sender = (
            SourceId(source)
            if source is not None
            else self.grant_of(message.attempt.request).source
        )
        self.owner.message(sender, message, self.now_ns)
        self.take()

    def progress(self, request: RequestId, *spans: Span, digests: Sequence[int] = ()) -> None:
        """Tell spans; without any, all cells."""
        told = spans or (Span(0, len(self.kinds), 0, 4),)
        g = self.grant_of(request)
        self.send(Progress(g.attempt, g.slot, g.generation, told, tuple(digests), 0, 0))

    def computing(self, request: RequestId) -> None:
        g = self.grant_of(request)
        self.send(Computing(g.attempt, g.slot, g.generation))

    def final(self, request: RequestId, token: int | None = None) -> None:
        g = self.grant_of(request)
        first, value = ("logits", 0) if token is None else ("token", token)
        self.send(SourceFinal(g.attempt, g.slot, g.generation, first, value, 0, 0))  # type: ignore[arg-type]

    def failed(self, request: RequestId, reason: str = "engine") -> None:
        g = self.grant_of(request)
        self.send(Failed(g.attempt, g.slot, g.generation, reason))

    def released(self, request: RequestId) -> None:
        g = self.grant_of(request)
        self.send(Released(g.attempt, g.slot, g.generation))

    def prefill(self, request: RequestId, token: int | None = None) -> None:
        """The source tells everything and returns."""
        self.progress(request)
        self.final(request, token)
        self.released(request)

    def begin(self, budget_nbytes: int = 1 << 40) -> list[StartImport]:
        self.owner.begin_imports(budget_nbytes, self.now_ns)
        return [c for c in self.take() if isinstance(c, StartImport)]

    def done(self, import_id: ImportId) -> None:
        self.owner.import_done(import_id, self.now_ns)
        self.take()

    def land(self) -> None:
        """Begin and fence all that is queued."""
        for command in self.begin():
            self.done(command.import_id)

    def checked(self, check: CheckDigest, actual: int) -> None:
        self.owner.digest_checked(check.import_id, actual, self.now_ns)
        self.take()

    def import_failed(self, import_id: ImportId, reason: str = "device") -> None:
        self.owner.import_failed(import_id, reason, self.now_ns)
        self.take()

    def publish(self, request: RequestId) -> None:
        """Carry out the request's Publish."""
        command = next(p for p in self.all(Publish) if p.attempt.request == request)
        self.owner.published(command.attempt, self.now_ns)
        self.take()

    def serve(self, request: RequestId) -> None:
        """All of it up to publishing."""
        self.prefill(request)
        self.land()
        self.publish(request)

    def cancel(self, request: RequestId, **options: Any) -> bool:
        decided = self.owner.cancel(request, self.now_ns, **options)
        self.take()
        return decided

    def retire(self, request: RequestId, quarantine_reason: str = "") -> None:
        self.owner.retire(request, self.now_ns, quarantine_reason)
        self.take()

    def reserve_refused(self, request: RequestId, reason: str = "no memory") -> None:
        self.owner.reserve_refused(AttemptId(*request, 1), reason, self.now_ns)
        self.take()

    def device_failed(self, request: RequestId, reason: str = "device") -> None:
        self.owner.device_failed(AttemptId(*request, 1), reason, self.now_ns)
        self.take()

    def lane_lost(self) -> None:
        self.owner.lane_lost(self.now_ns)
        self.take()

    def died(self, source: int = 0, reason: str = "killed") -> None:
        self.owner.source_died(SourceId(source), reason, self.now_ns)
        self.take()

    def forget(self, source: int = 0) -> bool:
        forgotten = self.owner.forget_source(SourceId(source))
        self.take()
        return forgotten

    def tick(self, now_ns: int) -> None:
        self.now_ns = now_ns
        self.owner.tick(now_ns)
        self.take()


Program: TypeAlias = list[list[Span]]


def program_of(plan: Plan, prefill: Prefill) -> Program:
    """The batches of spans that an engine commits when it cuts as it was asked to."""
    everything = [(range(len(plan.layers)),)]
    if prefill.route == "whole":
        return rectangles(plan, everything, 0)
    if prefill.route == "chunked":
        return rectangles(plan, everything, prefill.chunk)
    groups = plan.layer_groups(prefill.group_layers, prefill.emission)
    return rectangles(plan, groups, prefill.chunk)


class Source:
    """A source's end: its attempt, what its engine still has to commit, and both its queues."""

    def __init__(self, num_slots: int, plan_for: Callable[[int], Plan]) -> None:
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
            plan = self.plan_for(message.num_tokens)
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


def digest_of(cells: Mapping[Cell, AttemptId], plan: Plan, span: Span) -> int:
    return zlib.crc32(repr([(cell, cells[cell]) for cell in cells_of(plan, span)]).encode())


class Ends:
    """An owner and its sources joined by queues of encoded messages, over memory of cells.

    A cell holds the attempt that wrote it. Bytes are read when an import ends, as late as may be,
    so that a slot given to another too early shows in what is published.
    """

    def __init__(
        self, owner: Owner, plan_for: Callable[[int], Plan], options: Callable[[AttemptId], Prefill]
    ) -> None:
        """`options` of an attempt are those of its grant, all but the ids."""
        self.owner = owner
        self.plan_for = plan_for
        self.options = options
        self.now_ns = 0
        self.sources: dict[SourceId, Source] = {}
        self.storage: dict[AttemptId, dict[Cell, AttemptId]] = {}
        self.flights: dict[ImportId, StartImport | CheckDigest] = {}
        self.ends: dict[RequestId, Outcome] = {}
        self.published: set[RequestId] = set()
        self.seen: set[HandoffState] = set()
        self.to_kill: list[SourceId] = []
        self.to_refuse: list[AttemptId] = []
        self.refuses = self.loses = False  # the next reservation, the next lane that is freed

    def add_source(self, num_slots: int) -> SourceId:
        source = SourceId(len(self.sources))
        self.sources[source] = Source(num_slots, self.plan_for)
        self.owner.add_source(source, num_slots, self.plan_for, self.now_ns)
        self.obey()
        return source

    def deliver(self, source: SourceId) -> None:
        """The owner reads one message of a source, if there is one."""
        if self.sources[source].outbox:
            message = decode_from_source(self.sources[source].outbox.popleft())
            assert isinstance(message, Computing | Progress | SourceFinal | Failed | Released)
            self.owner.message(source, message, self.now_ns)
            self.obey()

    def begin(self, budget_nbytes: int) -> None:
        self.owner.begin_imports(budget_nbytes, self.now_ns)
        self.obey()

    def land(self, import_id: ImportId) -> None:
        """An import, or the check of a digest, ends."""
        flight = self.flights.pop(import_id)
        held, plan = self.storage[flight.attempt], self._plan(flight.attempt)
        if isinstance(flight, CheckDigest):
            actual = digest_of(held, plan, flight.span)
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
                self.owner.reserve_refused(self.to_refuse.pop(), "no memory", self.now_ns)
            self.owner.check_integrity()
        while self.to_kill:
            self.kill(self.to_kill.pop())

    def _obey(self, command: Command) -> None:
        match command:
            case Reserve(attempt):
                assert attempt not in self.storage
                if self.refuses:
                    self.to_refuse.append(attempt)  # when all that was commanded with it is done
                else:
                    self.storage[attempt] = {}
                self.refuses = False
            case StartPrefill(attempt, source, slot, generation):
                prefill = msgspec.structs.replace(
                    self.options(attempt), attempt=attempt, slot=slot, generation=generation
                )
                self.sources[source].inbox.append(encode(prefill))
            case SendCancel(attempt, source):
                self.sources[source].inbox.append(encode(Cancel(attempt)))
            case KillSource(source):
                assert self.sources[source].alive
                self.to_kill.append(source)  # when all that was commanded with it is done
            case StartImport() | CheckDigest():
                assert command.attempt in self.storage
                self.flights[command.import_id] = command
            case Publish(attempt):
                assert not [f for f in self.flights.values() if f.attempt == attempt]
                plan = self._plan(attempt)
                assert self.storage[attempt] == dict.fromkeys(cells_of(plan, plan.whole()), attempt)
                self.published.add(attempt.request)
                self.owner.published(attempt, self.now_ns)
            case Free(attempt) | Quarantine(attempt):
                assert not [f for f in self.flights.values() if f.attempt == attempt]
                del self.storage[attempt]
                if self.loses and isinstance(command, Free):
                    self.loses = False
                    self.owner.lane_lost(self.now_ns)
            case Report(request, outcome):
                assert request not in self.ends
                assert (outcome is Outcome.PUBLISHED) == (request in self.published)
                self.ends[request] = outcome
            case _:
                assert_never(command)

    def _plan(self, attempt: AttemptId) -> Plan:
        return self.plan_for(self.options(attempt).num_tokens)
