"""Legal inputs for the tests of the core: manifests, plans, grants, messages, an owner at work.

Two ends that are joined are in `tests.unit.protocol.ends`; requests in every state in
`tests.unit.protocol.scenes`.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

from hypothesis import settings
from hypothesis import strategies as st

from headrace.geometry import Full, Kind, Layer, Layout, Manifest, Part, Shared, Sliding
from headrace.ids import AttemptId, ImportId, RequestId, SourceId, Span
from headrace.messages import (
    Computing,
    Failed,
    Prefill,
    Progress,
    Released,
    Route,
    SourceFinal,
)
from headrace.plan import Plan, compile_plan
from headrace.protocol.books import AttemptMessage, Limits
from headrace.protocol.commands import (
    CheckDigest,
    Command,
    Publish,
    StartImport,
    StartPrefill,
)
from headrace.protocol.machine import Machine
from headrace.protocol.owner import Owner

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
    num_tokens: int,
    *kinds: Kind,
    layout: Layout = "head_major",
    context: int = CONTEXT,
    start: int = 0,
) -> Plan:
    return compile_plan(decoder_manifest(*kinds), layout, num_tokens, context, start)


def cells_of(plan: Plan, *spans: Span) -> list[Cell]:
    """The (layer, position) cells of the spans, span by span, as often as they are told."""
    return [
        (layer, position)
        for span in spans
        for layer in range(span.layer_start, span.layer_stop)
        for position in range(span.start, span.stop)
        if plan.windows[layer][0] <= position < plan.windows[layer][1]
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

    def plan_for(self, num_tokens: int, start: int = 0) -> Plan:
        return make_plan(num_tokens, *self.kinds, start=start)

    def add_source(self, source: int, num_slots: int, **kind: bool) -> None:
        self.owner.add_source(SourceId(source), num_slots, self.plan_for, self.now_ns, **kind)
        self.take()

    def not_coming(self, reason: str = "it died three times") -> None:
        self.owner.source_not_coming(reason, self.now_ns)
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

    def attempt_of(self, request: RequestId) -> AttemptId:
        """The attempt that a request is at; the first of one that is forgotten."""
        return self.owner.attempt_of(request) or AttemptId(*request, 1)

    def grants_of(self, request: RequestId) -> list[StartPrefill]:
        """All grants of a request, one for each attempt that got a slot."""
        return [g for g in self.all(StartPrefill) if g.attempt.request == request]

    def grant_of(self, request: RequestId) -> StartPrefill:
        """The grant of a request's first attempt."""
        return self.grants_of(request)[0]

    def send(self, message: AttemptMessage, source: int | None = None, fault: str = "") -> None:
        """By default from the source that the attempt was granted to."""
        if source is None:
            grants = self.all(StartPrefill)
            source = next(g.source for g in grants if g.attempt == message.attempt)
        self.owner.message(SourceId(source), message, self.now_ns, fault)
        self.take()

    def undecodable(self, source: int = 0) -> None:
        self.owner.undecodable(SourceId(source), "not a message", self.now_ns)
        self.take()

    def progress(self, request: RequestId, *spans: Span, digests: Sequence[int] = ()) -> None:
        """The source of the last attempt tells spans; without any, all cells."""
        told = spans or (Span(0, len(self.kinds), 0, 4),)
        g = self.grants_of(request)[-1]
        self.send(Progress(g.attempt, g.slot, g.generation, told, tuple(digests), 0, 0, 0))

    def computing(self, request: RequestId) -> None:
        g = self.grants_of(request)[-1]
        self.send(Computing(g.attempt, g.slot, g.generation))

    def final(self, request: RequestId, token: int | None = None) -> None:
        g = self.grants_of(request)[-1]
        first, value = ("logits", 0) if token is None else ("token", token)
        self.send(SourceFinal(g.attempt, g.slot, g.generation, first, value, 0, 0))  # type: ignore[arg-type]

    def failed(self, request: RequestId, reason: str = "engine") -> None:
        g = self.grants_of(request)[-1]
        self.send(Failed(g.attempt, g.slot, g.generation, reason))

    def released(self, request: RequestId, at: int = -1) -> None:
        """The source of the last grant, or of that in order, gives its write token back."""
        g = self.grants_of(request)[at]
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

    def checked(self, check: CheckDigest, actual: int, reason: str = "") -> None:
        self.owner.digest_checked(check.import_id, actual, self.now_ns, reason)
        self.take()

    def import_failed(self, import_id: ImportId, reason: str = "device") -> None:
        self.owner.import_failed(import_id, reason, self.now_ns)
        self.take()

    def publish(self, request: RequestId) -> None:
        """Carry out the request's last Publish."""
        *_, command = (p for p in self.all(Publish) if p.attempt.request == request)
        self.owner.published(command.attempt, self.now_ns)
        self.take()

    def publish_refused(self, request: RequestId, reason: str = "poison") -> None:
        self.owner.publish_refused(self.attempt_of(request), reason, self.now_ns)
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
        self.owner.reserve_refused(self.attempt_of(request), reason, self.now_ns)
        self.take()

    def device_failed(self, request: RequestId, reason: str = "device") -> None:
        self.owner.device_failed(self.attempt_of(request), reason, self.now_ns)
        self.take()

    def lane_lost(self, request: RequestId, reason: str = "not freed") -> None:
        self.owner.lane_lost(AttemptId(*request, 1), reason, self.now_ns)
        self.take()

    def reinstate(self, request: RequestId, attempt: int = 1) -> None:
        self.owner.reinstate(AttemptId(*request, attempt), self.now_ns)
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
