"""Route `auto`: which route and which cuts are predicted to bring the first token soonest.

A request's layer groups are computed one after another, and each is written, announced and imported
while the next is computed. What that comes to is found by running the two ends on paper: the source
is ready with a group when it has computed and written it, the owner begins its import when it was
told and has the one before. The same sum for one group of everything is the whole route.

The figures are the owner's own. Speed of copies and cost of a message come from a probe when the
first request asks for `auto`; every published request then corrects them, and tells how long this
source computes for a prompt of that length. Until one has, compute counts as nothing, which is the
case in which streaming hides least.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

from headrace.geometry import Emission
from headrace.ids import SourceId, Span
from headrace.messages import MAX_CHOICE_TEXT, Measured, Route, RouteChoice, travelling_text
from headrace.plan import Plan
from headrace.protocol.source import MOST_SPANS
from headrace.runtime.probe import Probe, probe
from headrace.runtime.requests import RequestOptions

LEAST_GAIN: Final = 0.005  # of the predicted time to the first token: below it, whole stays
LEAST_GAIN_NS: Final = 100_000  # what two runs of the same request differ by on a quiet machine
KEPT_PREFILLS: Final = 64  # lengths and times, of the last ones
NEWEST: Final = 0.25  # what the newest request counts in a running mean
LEAST_NBYTES: Final = 1 << 20  # of an import from which a speed is learned
GROUP_LAYERS: Final = (1, 2, 4, 8, 16, 32)
CHUNK_NBYTES: Final = 8 << 20  # what a span may hold before its import is worth beginning sooner


class Step(NamedTuple):
    """One progress message: the share of all compute that lies before it, its bytes and spans."""

    computed: float
    nbytes: int


@dataclass(slots=True)
class Costs:
    """What one source and the way to this owner cost, in ns.

    prefills: (tokens, compute time) of the last requests. announce_ns: what a message holds the
    source up. fixed_ns: what a hand-off takes beyond the copy of its last bytes.
    """

    write_ns_per_byte: float
    import_ns_per_byte: float
    announce_ns: float
    fixed_ns: float
    prefills: list[tuple[int, float]] = field(default_factory=list)

    def compute_ns(self, num_tokens: int) -> float | None:
        """Time to compute a prompt of this length, from the nearest measured ones; None at first.

        Between two lengths it is interpolated; beyond them it grows as the number of tokens does.
        """
        if not self.prefills:
            return None
        by_length: dict[int, list[float]] = {}
        for tokens, ns in self.prefills:
            by_length.setdefault(tokens, []).append(ns)
        known = sorted((tokens, sorted(ns)[len(ns) // 2]) for tokens, ns in by_length.items())
        for (low, low_ns), (high, high_ns) in pairwise(known):
            if low <= num_tokens <= high:
                return low_ns + (high_ns - low_ns) * (num_tokens - low) / (high - low)
        nearest, ns = known[0] if num_tokens < known[0][0] else known[-1]
        return ns * num_tokens / nearest

    def predict_ns(self, compute_ns: float, steps: Sequence[Step]) -> float:
        """From the grant to publishing, if the prefill is told in these steps."""
        source_ns = owner_ns = computed = 0.0
        for step in steps:
            source_ns += compute_ns * (step.computed - computed)
            source_ns += self.write_ns_per_byte * step.nbytes + self.announce_ns
            computed = step.computed
            owner_ns = max(owner_ns, source_ns) + self.import_ns_per_byte * step.nbytes
        return max(owner_ns, source_ns) + self.fixed_ns


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
        self, source: SourceId, plan: Plan, options: RequestOptions, emits: Sequence[Emission]
    ) -> RouteChoice:
        """The route of one request that asked for `auto`, how it is cut, and why."""
        choice = self._choose(source, plan, options, emits)
        self._chosen[choice.route] += 1
        return choice

    def learn(
        self, source: SourceId, plan: Plan, options: RequestOptions, measured: Measured
    ) -> None:
        """A request was published: `options` are those that it was granted with.

        Nothing is learned before somebody asks for `auto`, nor from a request with digests or
        poison, which make its copies slower and no other's.
        """
        if self._probed is None or not measured.import_ns or options.digest or options.poison:
            return
        costs = self._costs_of(source)
        if measured.kv_nbytes >= LEAST_NBYTES:
            speed = measured.import_ns / measured.kv_nbytes
            costs.import_ns_per_byte = _mean(costs.import_ns_per_byte, speed)
        prefill_ns = float(measured.source_final_ns - measured.prefill_begun_ns)
        tail_ns = measured.published_ns - measured.source_final_ns - measured.decode_in_the_way_ns
        if options.route == "streamed":
            writing_ns = costs.write_ns_per_byte * plan.nbytes + costs.announce_ns * measured.groups
            prefill_ns = max(0.0, prefill_ns - writing_ns)
            last_ns = costs.import_ns_per_byte * measured.last_group_nbytes
            costs.fixed_ns = _mean(costs.fixed_ns, max(0.0, tail_ns - last_ns))
        elif options.route == "whole" and plan.nbytes >= LEAST_NBYTES:
            writing_ns = max(0.0, tail_ns - measured.import_ns - costs.fixed_ns)
            costs.write_ns_per_byte = _mean(costs.write_ns_per_byte, writing_ns / plan.nbytes)
        costs.prefills.append((plan.num_tokens, prefill_ns))
        del costs.prefills[:-KEPT_PREFILLS]

    def forget(self, source: SourceId) -> None:
        """A source is gone."""
        self._costs.pop(source, None)

    def statistics(self) -> dict[str, int]:
        """Requests that `auto` sent by each route."""
        return dict(self._chosen)

    def _choose(
        self, source: SourceId, plan: Plan, options: RequestOptions, emits: Sequence[Emission]
    ) -> RouteChoice:
        whole = Candidate("whole", 1, 0, (Step(1.0, plan.nbytes),))
        if not emits:
            return _choice(whole, "this source gives whole results only")
        if not plan.nbytes:
            return _choice(whole, "there is nothing to move")
        costs = self._costs_of(source)
        known_ns = costs.compute_ns(plan.num_tokens)
        compute_ns = known_ns or 0.0
        whole_ns = costs.predict_ns(compute_ns, whole.steps)
        others = [
            (costs.predict_ns(compute_ns, each.steps), each)
            for each in candidates(plan, options, emits)
        ]
        best_ns, best = min(others, default=(whole_ns, whole), key=lambda pair: pair[0])
        compute = "no prefill measured yet" if known_ns is None else f"compute {_ms(known_ns)}"
        speed = 1 / max(costs.import_ns_per_byte, 1e-9)
        basis = f"{compute}, imports at {speed:.2f} GB/s"
        if whole_ns - best_ns < max(LEAST_GAIN * whole_ns, LEAST_GAIN_NS):
            reason = f"{best.name} would gain less than {100 * LEAST_GAIN:.1f} % or 0.1 ms"
            return _choice(whole, f"{reason}: {_ms(best_ns)} against {_ms(whole_ns)} ({basis})")
        return _choice(best, f"predicted {_ms(best_ns)} against {_ms(whole_ns)} whole ({basis})")

    def _costs_of(self, source: SourceId) -> Costs:
        if source not in self._costs:
            copy_ns, announce_ns = self.prepare()
            self._costs[source] = Costs(copy_ns, copy_ns, announce_ns, 4 * announce_ns)
        return self._costs[source]


def candidates(
    plan: Plan, options: RequestOptions, emits: Sequence[Emission]
) -> Iterator[Candidate]:
    """What could be done instead of the whole route, each with its steps."""
    n = plan.num_tokens
    computed = min(options.prefill_chunk or n, n)
    bounds = [(at, min(at + computed, n)) for at in range(0, n, computed)]
    if len(bounds) > 1 and len(bounds) <= MOST_SPANS:
        layers = [(0, len(plan.layers))]
        yield Candidate("chunked", 1, 0, tuple(_steps(plan, [layers], bounds, 0)))
    if options.emission not in emits:
        return
    for size in (size for size in GROUP_LAYERS if size < len(plan.layers)):
        groups = [
            [(run.start, run.stop) for run in runs]
            for runs in plan.layer_groups(size, options.emission)
        ]
        for chunk in dict.fromkeys((0, _chunk_of(plan, size, computed))):
            num_chunks = sum(-(-(stop - start) // (chunk or n)) for start, stop in bounds)
            if num_chunks * sum(map(len, groups)) <= MOST_SPANS // 2:
                steps = tuple(_steps(plan, groups, bounds, chunk))
                yield Candidate("streamed", size, chunk, steps)


def _chunk_of(plan: Plan, size: int, computed: int) -> int:
    """Positions after which a group of `size` layers is cut, 0 where it is small enough."""
    per_position = size * max(layer.row_nbytes for layer in plan.layers)
    positions = max(1, CHUNK_NBYTES // max(1, per_position))
    return positions if positions < computed else 0


def _steps(
    plan: Plan,
    groups: Sequence[Sequence[tuple[int, int]]],
    bounds: Sequence[tuple[int, int]],
    chunk: int,
) -> Iterator[Step]:
    """The progress messages in order: prefill chunks, in them layer groups, in them chunks."""
    num_layers, n = len(plan.layers), plan.num_tokens
    for start, stop in bounds:
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


def _mean(running: float, newest: float) -> float:
    return running + NEWEST * (newest - running)


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.1f} ms"
