"""Route `auto`: which route and which cuts are predicted to bring the first token soonest.

A request's layer groups are computed one after another, and each is written, announced and imported
while the next is computed. What that comes to is found by running the two ends on paper: the source
is ready with a group when it has computed and written it, the owner begins its import when it was
told and has the one before. The same sum for one group of everything is the whole route.

The figures are the owner's own. Speed of copies and cost of a message come from a probe when the
first request asks for `auto`; every published request then corrects them, and tells how long this
source computes for a prompt of that length. Until one has, compute is taken to last as long as the
copies, which no device that computes a prompt is known to undercut.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

from headrace.geometry import Emission
from headrace.ids import SourceId, Span
from headrace.messages import MAX_CHOICE_TEXT, Measured, Route, RouteChoice, travelling_text
from headrace.plan import Plan
from headrace.protocol.source import MOST_SPANS
from headrace.runtime.importing import IDLE_CHUNK_NBYTES, SHARED_CHUNK_NBYTES
from headrace.runtime.probe import Probe, probe
from headrace.runtime.requests import RequestOptions

LEAST_GAIN: Final = 0.005  # of the predicted time to the first token: below it, whole stays
LEAST_GAIN_NS: Final = 100_000  # what two runs of the same request differ by on a quiet machine
KEPT_PREFILLS: Final = 64  # lengths and times, of the last ones
NEWEST: Final = 0.25  # what the newest request counts in a running mean
MOST_OFF: Final = 2.0  # what a prediction is corrected by at most, either way
LEAST_NBYTES: Final = 1 << 20  # of an import from which a speed is learned
GROUP_LAYERS: Final = (1, 2, 4, 8, 16, 32)
CHUNK_NBYTES: Final = SHARED_CHUNK_NBYTES  # of a span: beyond it, its import may as well begin


class Step(NamedTuple):
    """One progress message: the share of all compute that lies before it, and its bytes."""

    computed: float
    nbytes: int


@dataclass(slots=True)
class Costs:
    """What one source and the way to this owner cost, in ns.

    announce_ns: what a message holds the source up. piece_ns: what an import costs its owner beside
    the copy. fixed_ns: what a hand-off takes beyond the copy
    of its last bytes. prefills: (tokens, compute time) of the last requests; those that went whole
    count alone where there are any, since their compute is not mixed with writing. off: by route,
    what hand-offs took over what was predicted, such as copies that slow each other down.
    """

    write_ns_per_byte: float
    import_ns_per_byte: float
    announce_ns: float
    piece_ns: float
    fixed_ns: float
    prefills: list[Prefilled] = field(default_factory=list)
    off: dict[Route, float] = field(default_factory=dict)

    def compute_ns(self, num_tokens: int) -> float | None:
        """Time to compute a prompt of this length, from the nearest measured ones; None at first.

        Between two lengths it is interpolated; beyond them it grows as the number of tokens does.
        """
        if not self.prefills:
            return None
        by_length: dict[int, list[Prefilled]] = {}
        for each in self.prefills:
            by_length.setdefault(each.num_tokens, []).append(each)
        known = sorted((tokens, _typical_ns(some)) for tokens, some in by_length.items())
        for (low, low_ns), (high, high_ns) in pairwise(known):
            if low <= num_tokens <= high:
                return low_ns + (high_ns - low_ns) * (num_tokens - low) / (high - low)
        nearest, ns = known[0] if num_tokens < known[0][0] else known[-1]
        return ns * num_tokens / nearest

    def predict_ns(self, compute_ns: float, way: Candidate, slowdown: float = 1.0) -> float:
        """From the grant to publishing, if the request goes this way.

        `slowdown`: of imports that have a share of the owner's time only, since entries decode.
        """
        return self.off.get(way.route, 1.0) * self.ideal_ns(compute_ns, way.steps, slowdown)

    def ideal_ns(self, compute_ns: float, steps: Sequence[Step], slowdown: float = 1.0) -> float:
        """The same if copies do not slow each other down."""
        piece_nbytes = IDLE_CHUNK_NBYTES if slowdown == 1.0 else SHARED_CHUNK_NBYTES
        source_ns = owner_ns = computed = 0.0
        for step in steps:
            source_ns += compute_ns * (step.computed - computed)
            source_ns += self.write_ns_per_byte * step.nbytes + self.announce_ns
            computed = step.computed
            num_pieces = -(-step.nbytes // piece_nbytes)
            import_ns = self.import_ns_per_byte * step.nbytes + self.piece_ns * num_pieces
            owner_ns = max(owner_ns, source_ns) + import_ns * slowdown
        return max(owner_ns, source_ns) + self.fixed_ns


class Prefilled(NamedTuple):
    """A prefill that was measured: its length, its compute, and whether it went whole."""

    num_tokens: int
    ns: float
    whole: bool


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


class RouteChooser:
    """Chooses, and learns from what was published."""

    def __init__(self, run_probe: Callable[[], Probe] = probe) -> None:
        self._run_probe = run_probe
        self._probed: Probe | None = None
        self._costs: dict[SourceId, Costs] = {}
        self._chosen: Counter[str] = Counter()

    def prepare(self) -> Probe:
        """Run the probe, unless it has run. Raises: Refused when there is no memory for it."""
        if self._probed is None:
            self._probed = self._run_probe()
        return self._probed

    def choose(
        self,
        source: SourceId,
        plan: Plan,
        options: RequestOptions,
        emits: Sequence[Emission],
        *,
        slowdown: float = 1.0,
    ) -> RouteChoice:
        """The route of one request that asked for `auto`, how it is cut, and why.

        `slowdown`: by what imports take longer than alone, since entries decode at the owner.
        """
        choice = self._choose(source, plan, options, emits, slowdown)
        self._chosen[choice.route] += 1
        return choice

    def learn(
        self, source: SourceId, plan: Plan, options: RequestOptions, measured: Measured
    ) -> None:
        """A request was published: `options` are those that it was granted with.

        Nothing is learned before somebody asks for `auto`, nor from a request with digests or
        poison, which make its copies slower and no other's, nor from times that make no sense.
        """
        if self._probed is None or options.digest or options.poison or not _is_sound(measured):
            return
        costs = self._costs_of(source)
        took_ns = measured.published_ns - measured.prefill_begun_ns - measured.decode_in_the_way_ns
        known_ns = costs.compute_ns(plan.num_tokens)
        if known_ns is not None and not measured.decode_in_the_way_ns:
            way = _way_of(plan, options)
            expected_ns = costs.ideal_ns(known_ns, way.steps)
            off = min(MOST_OFF, max(1 / MOST_OFF, took_ns / max(1.0, expected_ns)))
            costs.off[way.route] = _mean(costs.off.get(way.route, 1.0), off)
        self._learn_speeds(costs, plan, options, measured)

    def _learn_speeds(
        self, costs: Costs, plan: Plan, options: RequestOptions, measured: Measured
    ) -> None:
        if measured.kv_nbytes >= LEAST_NBYTES:
            speed = measured.import_ns / measured.kv_nbytes
            costs.import_ns_per_byte = _mean(costs.import_ns_per_byte, speed)
        prefill_ns = float(measured.source_final_ns - measured.prefill_begun_ns)
        tail_ns = measured.published_ns - measured.source_final_ns - measured.decode_in_the_way_ns
        if options.route == "streamed":
            writing_ns = costs.write_ns_per_byte * plan.nbytes + costs.announce_ns * measured.groups
            prefill_ns = max(0.0, prefill_ns - writing_ns)
            last_ns = costs.import_ns_per_byte * measured.last_group_nbytes
            if not measured.decode_in_the_way_ns:
                costs.fixed_ns = _mean(costs.fixed_ns, max(0.0, tail_ns - last_ns))
        elif options.route == "whole" and plan.nbytes >= LEAST_NBYTES:
            writing_ns = max(0.0, tail_ns - measured.import_ns - costs.fixed_ns)
            costs.write_ns_per_byte = _mean(costs.write_ns_per_byte, writing_ns / plan.nbytes)
        costs.prefills.append(Prefilled(plan.num_tokens, prefill_ns, options.route == "whole"))
        del costs.prefills[:-KEPT_PREFILLS]

    def keep(self, sources: Container[SourceId]) -> None:
        """Forget all other sources: they are gone."""
        for source in [each for each in self._costs if each not in sources]:
            del self._costs[source]

    def statistics(self) -> dict[str, int]:
        """Requests that `auto` sent by each route."""
        return dict(self._chosen)

    def _choose(
        self,
        source: SourceId,
        plan: Plan,
        options: RequestOptions,
        emits: Sequence[Emission],
        slowdown: float,
    ) -> RouteChoice:
        whole = _whole(plan)
        if not emits:
            return _choice(whole, "this source gives whole results only")
        if not plan.nbytes:
            return _choice(whole, "there is nothing to move")
        costs = self._costs_of(source)
        known_ns = costs.compute_ns(plan.num_tokens)
        copies_ns = (costs.write_ns_per_byte + costs.import_ns_per_byte) * plan.nbytes
        compute_ns = copies_ns if known_ns is None else known_ns
        whole_ns = costs.predict_ns(compute_ns, whole, slowdown)
        others = [
            (costs.predict_ns(compute_ns, each, slowdown), each)
            for each in candidates(plan, options, emits)
        ]
        least_ns = min((ns for ns, _ in others), default=whole_ns)
        enough_ns = least_ns + LEAST_GAIN_NS  # of those that differ by less, the finest cut
        best_ns, best = next((o for o in others if o[0] <= enough_ns), (whole_ns, whole))
        compute = "no prefill measured yet" if known_ns is None else f"compute {_ms(known_ns)}"
        speed = 1 / max(costs.import_ns_per_byte, 1e-9)
        basis = f"{compute}, imports at {speed / slowdown:.2f} GB/s"
        if whole_ns - best_ns < max(LEAST_GAIN * whole_ns, LEAST_GAIN_NS):
            reason = f"{best.name} would gain less than {100 * LEAST_GAIN:.1f} % or 0.1 ms"
            return _choice(whole, f"{reason}: {_ms(best_ns)} against {_ms(whole_ns)} ({basis})")
        return _choice(best, f"predicted {_ms(best_ns)} against {_ms(whole_ns)} whole ({basis})")

    def _costs_of(self, source: SourceId) -> Costs:
        if source not in self._costs:
            copy_ns, announce_ns = self.prepare()
            first = Costs(copy_ns, copy_ns, announce_ns, 2 * announce_ns, 4 * announce_ns)
            self._costs[source] = first
        return self._costs[source]


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


def _way_of(plan: Plan, options: RequestOptions) -> Candidate:
    """The way that a request went, by the options that it was granted with."""
    n = plan.num_tokens
    computed = min(options.prefill_chunk or n, n)
    if options.route == "streamed":
        return _streamed(plan, computed, options.group_layers, options.emission, options.chunk)
    return _chunked(plan, computed, options.chunk) if options.route == "chunked" else _whole(plan)


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
    for start in range(0, n, computed):
        stop = min(start + computed, n)
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


def _choice(taken: Candidate, reason: str) -> RouteChoice:
    text = travelling_text(f"{taken.name}: {reason}")[:MAX_CHOICE_TEXT]
    return RouteChoice(taken.route, taken.group_layers, taken.chunk, text)


def _is_sound(measured: Measured) -> bool:
    """Whether it holds an import, and times of a source whose clock is the owner's."""
    begun_ns, final_ns = measured.prefill_begun_ns, measured.source_final_ns
    in_order = measured.submitted_ns <= begun_ns <= final_ns <= measured.published_ns
    return in_order and measured.import_ns > 0


def _mean(running: float, newest: float) -> float:
    return running + NEWEST * (newest - running)


def _typical_ns(some: Sequence[Prefilled]) -> float:
    pure = [each.ns for each in some if each.whole]
    return statistics.median(pure or [each.ns for each in some])


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.1f} ms"
