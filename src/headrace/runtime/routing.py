"""Route `auto`: which route and which cuts are predicted to bring the first token soonest.

A request's layer groups are computed one after another, and each is written, announced and imported
while the next is computed. What that comes to is found by running the two ends on paper: the source
is ready with a group when it has computed and written it, the owner begins its import when it was
told and has the one before. The same sum for one group of everything is the whole route.

The figures are the owner's own. Speed of copies and cost of a message come from a probe when the
first request asks for `auto`; every published request then corrects them, and tells how long this
source computes for a prompt of that length. Until one has, compute is taken to last as long as the
copies, which no device that computes a prompt is known to undercut.

How it is learned is in `headrace.runtime.costs`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from headrace.errors import HeadraceError
from headrace.geometry import Emission
from headrace.ids import SourceId, Span
from headrace.messages import (
    MAX_CHOICE_TEXT,
    ChoiceKind,
    Measured,
    Route,
    RouteChoice,
    travelling_text,
)
from headrace.plan import Plan
from headrace.protocol.source import MOST_SPANS
from headrace.runtime.costs import Costs, Sample, Step
from headrace.runtime.importing import SHARED_CHUNK_NBYTES
from headrace.runtime.probe import Probe, probe
from headrace.runtime.requests import RequestOptions

LEAST_GAIN: Final = 0.005  # of the predicted time to the first token: below it, whole stays
MOST_TRIED: Final = 1.25  # of the best: what the first whole request may cost, to be measured
LEAST_GAIN_NS: Final = 100_000  # what two runs of the same request differ by on a quiet machine
GROUP_LAYERS: Final = (1, 2, 4, 8, 16, 32)
CHUNK_NBYTES: Final = SHARED_CHUNK_NBYTES  # of a span: beyond it, its import may as well begin
MOST_PREFILL_CHUNKS: Final = 32  # that are run on paper one by one; more are taken together


class Candidate(NamedTuple):
    """A way to hand a request over, and what it is told in."""

    route: Route
    group_layers: int
    chunk: int
    steps: tuple[Step, ...]

    @property
    def name(self) -> str:
        cut = f" in chunks of {self.chunk}" if self.chunk else ""
        layers = f" by {self.group_layers} layers" if self.route == "streamed" else ""
        return f"{self.route}{layers}{cut}"


class Decision(NamedTuple):
    """A choice, and the time that it is expected to take, not corrected by route; 0 if unknown."""

    choice: RouteChoice
    expected_ns: float


class RouteChooser:
    """Chooses, and learns from what was published."""

    def __init__(self, run_probe: Callable[[], Probe] = probe) -> None:
        self._run_probe = run_probe
        self._probed: Probe | None = None
        self._trouble = ""  # why there is no probe
        self._costs: dict[SourceId, Costs] = {}
        self._chosen: Counter[str] = Counter()
        self._kinds: Counter[str] = Counter()

    def prepare(self) -> None:
        """Run the probe, unless it has run; where it fails, requests go whole."""
        if self._probed is not None:
            return
        try:
            self._probed = self._run_probe()
            self._trouble = ""
        except (HeadraceError, OSError, MemoryError) as exc:
            self._trouble = f"this machine could not be measured: {exc}"

    def choose(
        self,
        source: SourceId,
        plan: Plan,
        options: RequestOptions,
        emits: Sequence[Emission],
        *,
        slowdown: float = 1.0,
    ) -> Decision:
        """The route of one attempt that asked for `auto`, how it is cut, and why.

        `slowdown`: by what imports take longer than alone, since entries decode at the owner.
        """
        decision = self._choose(source, plan, options, emits, slowdown)
        self._chosen[decision.choice.route] += 1
        self._kinds[decision.choice.kind] += 1
        return decision

    def learn(self, source: SourceId, sample: Sample) -> None:
        """A request was published.

        Nothing is learned before somebody asks for `auto`, nor from a request with digests or
        poison, which make its copies slower and no other's, nor from times that make no sense.
        """
        odd = sample.options.digest or sample.options.poison or not _is_sound(sample.measured)
        if self._probed is not None and not odd:
            self._costs_of(source, self._probed).learn(sample)

    def known(self, sources: Iterable[SourceId]) -> Costs | None:
        """What is known of the first of these sources of which anything is; None before that."""
        return next((self._costs[each] for each in sources if each in self._costs), None)

    def keep(self, sources: Container[SourceId]) -> None:
        """Forget all other sources: they are gone."""
        for source in [each for each in self._costs if each not in sources]:
            del self._costs[source]

    def statistics(self) -> dict[str, dict[str, int]]:
        """Attempts that `auto` sent, by route and by the kind of reason."""
        return {"auto": dict(self._chosen), "auto_kinds": dict(self._kinds)}

    def _choose(
        self,
        source: SourceId,
        plan: Plan,
        options: RequestOptions,
        emits: Sequence[Emission],
        slowdown: float,
    ) -> Decision:
        whole = _whole(plan)
        if not emits:
            reason = "source and decoder take whole results only"
            return Decision(_choice(whole, "whole-only", reason), 0.0)
        if not plan.nbytes:
            return Decision(_choice(whole, "nothing-to-move", "there is nothing to move"), 0.0)
        self.prepare()
        if self._probed is None:
            return Decision(_choice(whole, "not-measured", self._trouble), 0.0)
        costs = self._costs_of(source, self._probed)
        known_ns = costs.compute_ns(plan.num_tokens, options.prefill_chunk)
        copies = costs.write_ns_per_byte.value + costs.import_ns_per_byte.value
        compute_ns = copies * plan.nbytes if known_ns is None else known_ns
        known, others = known_ns is not None, candidates(plan, options, emits)
        taken, kind, reason = _best(costs, compute_ns, whole, others, slowdown, known=known)
        compute = "no prefill measured yet" if known_ns is None else f"compute {_ms(known_ns)}"
        speed = 1 / max(costs.import_ns_per_byte.value * slowdown, 1e-9)
        expected_ns = 0.0 if known_ns is None else costs.ideal_ns(known_ns, taken.steps, slowdown)
        choice = _choice(taken, kind, f"{reason} ({compute}, imports at {speed:.2f} GB/s)")
        return Decision(choice, expected_ns)

    def _costs_of(self, source: SourceId, probed: Probe) -> Costs:
        if source not in self._costs:
            self._costs[source] = Costs(*probed)
        return self._costs[source]


def _best(
    costs: Costs,
    compute_ns: float,
    whole: Candidate,
    others: Iterable[Candidate],
    slowdown: float,
    *,
    known: bool,
) -> tuple[Candidate, ChoiceKind, str]:
    """The way to go, and why; of those that differ by next to nothing, the finest cut."""
    whole_ns = costs.predict_ns(compute_ns, whole.route, whole.steps, slowdown)
    predicted = [
        (costs.predict_ns(compute_ns, each.route, each.steps, slowdown), each) for each in others
    ]
    if not predicted:
        return whole, "no-alternative", "nothing else can be told"
    enough_ns = min(ns for ns, _ in predicted) + LEAST_GAIN_NS
    best_ns, best = next(each for each in predicted if each[0] <= enough_ns)
    if known and whole_ns <= MOST_TRIED * best_ns and costs.try_whole():
        reason = f"tried, to be measured: {_ms(whole_ns)} against {_ms(best_ns)}"
        return whole, "trial", reason
    if whole_ns - best_ns < max(LEAST_GAIN * whole_ns, LEAST_GAIN_NS):
        reason = f"{best.name} would gain less than {100 * LEAST_GAIN:.1f} % or 0.1 ms"
        return whole, "small-gain", f"{reason}: {_ms(best_ns)} against {_ms(whole_ns)}"
    return best, "predicted", f"predicted {_ms(best_ns)} against {_ms(whole_ns)} whole"


def candidates(
    plan: Plan, options: RequestOptions, emits: Sequence[Emission]
) -> Iterator[Candidate]:
    """What could be done instead of the whole route, each with its steps; finest cuts first."""
    n = plan.num_tokens
    computed = min(options.prefill_chunk or n, n)
    num_chunks = -(-n // computed)
    if 1 < num_chunks <= MOST_SPANS:
        yield _chunked(plan, computed, 0)
    if options.emission not in emits:
        return
    for size in (size for size in GROUP_LAYERS if size < len(plan.layers)):
        num_runs = sum(map(len, plan.layer_groups(size, options.emission)))
        for chunk in dict.fromkeys((0, _chunk_of(plan, size, computed))):
            if num_chunks * -(-computed // (chunk or computed)) * num_runs <= MOST_SPANS // 2:
                yield _streamed(plan, computed, size, options.emission, chunk)


def _whole(plan: Plan) -> Candidate:
    return Candidate("whole", 1, 0, (Step(1.0, plan.nbytes),))


def _chunked(plan: Plan, computed: int, chunk: int) -> Candidate:
    everything = [[(0, len(plan.layers))]]
    return Candidate("chunked", 1, chunk, tuple(_steps(plan, everything, computed, chunk)))


def _streamed(plan: Plan, computed: int, size: int, emission: Emission, chunk: int) -> Candidate:
    groups = [[(run.start, run.stop) for run in runs] for runs in plan.layer_groups(size, emission)]
    return Candidate("streamed", size, chunk, tuple(_steps(plan, groups, computed, chunk)))


def _chunk_of(plan: Plan, size: int, computed: int) -> int:
    """Positions after which a group of `size` layers is cut, 0 where it is small enough."""
    per_position = size * max(layer.row_nbytes for layer in plan.layers)
    positions = max(1, CHUNK_NBYTES // max(1, per_position))
    return positions if positions < computed else 0


def _steps(
    plan: Plan,
    groups: Sequence[Sequence[tuple[int, int]]],
    computed: int,
    chunk: int,
) -> Iterator[Step]:
    """The progress messages in order: prefill chunks, in them layer groups, in them chunks."""
    num_layers, n = len(plan.layers), plan.num_tokens
    for start, stop in _bounds(n, computed):
        for runs in groups:
            layers_done = max(last for _, last in runs) / num_layers
            share = (start + (stop - start) * layers_done) / n
            step = chunk or stop - start
            for at in range(start, stop, step):
                ended = min(at + step, stop)
                spans = (Span(first, last, at, ended) for first, last in runs)
                nbytes = sum(map(plan.span_nbytes, spans))
                if nbytes:
                    yield Step(share, nbytes)
    yield Step(1.0, 0)


def _bounds(n: int, computed: int) -> Iterator[tuple[int, int]]:
    """What is computed at once, position by position; of very many, all but the last together."""
    num_chunks = -(-n // computed)
    stride = computed * -(-num_chunks // MOST_PREFILL_CHUNKS)
    last = computed * (num_chunks - 1)
    for start in range(0, last, stride):
        yield start, min(start + stride, last)
    yield last, n


def _choice(taken: Candidate, kind: ChoiceKind, reason: str) -> RouteChoice:
    text = travelling_text(f"{taken.name}: {reason}")[:MAX_CHOICE_TEXT]
    return RouteChoice(taken.route, taken.group_layers, taken.chunk, text, kind)


def _is_sound(measured: Measured) -> bool:
    """Whether it holds an import, and times of a source whose clock is the owner's."""
    begun_ns, final_ns = measured.prefill_begun_ns, measured.source_final_ns
    in_order = measured.submitted_ns <= begun_ns <= final_ns <= measured.published_ns
    return in_order and measured.import_ns > 0


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.1f} ms"
