"""What a source and the way to its owner cost, as learned from what was published.

One request that was held up must not decide over those after it: figures are medians of the last
ones; by how much predictions were off is believed only when several say so; where requests shared
the owner only compute and the speed of imports are learned; and what is known of a route fades
while it is not taken, so that it is tried again.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from headrace.messages import AskedRoute, Measured, Route
from headrace.plan import Plan
from headrace.runtime.importing import IDLE_CHUNK_NBYTES, SHARED_CHUNK_NBYTES
from headrace.runtime.requests import ROUTES, RequestOptions

KEPT_PREFILLS: Final = 64  # lengths and times, of the last ones
KEPT: Final = 9  # samples of any other figure,
GUESSES: Final = 3  # of which the first guess counts as so many
FADES_AFTER: Final = 8  # requests by other routes, a sample of what a route was off by is let go
WHOLE_TRIES: Final = 2  # requests that go whole to be measured, at most
MOST_OFF: Final = 2.0  # what a prediction is corrected by at most, either way
LEAST_NBYTES: Final = 1 << 20  # of an import from which a speed is learned


class Step(NamedTuple):
    """One progress message: the share of all compute that lies before it, and its bytes."""

    computed: float
    nbytes: int


class Figure:
    """A figure that is learned: the median of the last samples.

    The first guess is among them as so many samples, or else holds until something is measured.
    """

    def __init__(self, guess: float, guesses: int = 0) -> None:
        self._guess = guess
        self._samples = deque([guess] * guesses, maxlen=KEPT)

    @property
    def value(self) -> float:
        return statistics.median(self._samples or [self._guess])

    def add(self, sample: float) -> None:
        """One more was measured."""
        self._samples.append(sample)

    def fade(self) -> None:
        """Nothing was measured for long: the first guess gains."""
        self._samples.append(self._guess)


class Prefilled(NamedTuple):
    """A prefill that was measured: its length and cut, its compute, and whether it went whole."""

    num_tokens: int
    prefill_chunk: int
    ns: float
    whole: bool


class Costs:
    """What one source and the way to this owner cost, in ns.

    announce_ns: what a message holds the source up. piece_ns: what an import costs its owner beside
    the copy. fixed_ns: what any hand-off takes beyond its copies. prefills: of the last requests;
    those that went whole count alone where there are any, since their compute is not mixed with
    writing. off: by route, what hand-offs took over what was predicted, such as copies that slow
    each other down.
    """

    def __init__(self, copy_ns_per_byte: float, announce_ns: float) -> None:
        self.write_ns_per_byte = Figure(copy_ns_per_byte)
        self.import_ns_per_byte = Figure(copy_ns_per_byte)
        self.announce_ns = announce_ns
        self.piece_ns = 2 * announce_ns
        self.fixed_ns = 4 * announce_ns
        self.prefills: deque[Prefilled] = deque(maxlen=KEPT_PREFILLS)
        self.off: dict[Route, Figure] = {route: Figure(1.0, GUESSES) for route in ROUTES}
        self.knows_whole = False  # whether one that went whole had its owner to itself
        self._whole_tries = 0
        self._taken: Counter[Route] = Counter()

    def compute_ns(self, num_tokens: int, prefill_chunk: int) -> float | None:
        """Time to compute a prompt of this length, from the nearest measured ones; None at first.

        Between two lengths it is interpolated; beyond them it grows as the number of tokens does.
        """
        by_length: dict[int, list[Prefilled]] = {}
        for each in self.prefills:
            if each.prefill_chunk == prefill_chunk:
                by_length.setdefault(each.num_tokens, []).append(each)
        if not by_length:
            return None
        known = sorted((tokens, _typical_ns(some)) for tokens, some in by_length.items())
        for (low, low_ns), (high, high_ns) in pairwise(known):
            if low <= num_tokens <= high:
                return low_ns + (high_ns - low_ns) * (num_tokens - low) / (high - low)
        nearest, ns = known[0] if num_tokens < known[0][0] else known[-1]
        return ns * num_tokens / nearest

    def predict_ns(
        self, compute_ns: float, route: Route, steps: Sequence[Step], slowdown: float = 1.0
    ) -> float:
        """From the grant to publishing, if the request goes by this route, told in these steps.

        `slowdown`: of imports that have a share of the owner's time only, since entries decode.
        """
        return self.off[route].value * self.ideal_ns(compute_ns, steps, slowdown)

    def ideal_ns(self, compute_ns: float, steps: Sequence[Step], slowdown: float = 1.0) -> float:
        """The same if copies do not slow each other down."""
        write_ns, import_ns = self.write_ns_per_byte.value, self.import_ns_per_byte.value
        piece_nbytes = IDLE_CHUNK_NBYTES if slowdown == 1.0 else SHARED_CHUNK_NBYTES
        source_ns = owner_ns = computed = 0.0
        for step in steps:
            source_ns += compute_ns * (step.computed - computed)
            source_ns += write_ns * step.nbytes + self.announce_ns
            computed = step.computed
            num_pieces = -(-step.nbytes // piece_nbytes)
            took_ns = import_ns * step.nbytes + self.piece_ns * num_pieces
            owner_ns = max(owner_ns, source_ns) + took_ns * slowdown
        return max(owner_ns, source_ns) + self.fixed_ns

    def try_whole(self) -> bool:
        """Whether one more request may go whole to be measured; an owner under load learns nothing
        from it, so there is an end.
        """
        if self.knows_whole or self._whole_tries == WHOLE_TRIES:
            return False
        self._whole_tries += 1
        return True

    def learn(self, sample: Sample) -> None:
        """A request was published."""
        measured, plan, options = sample.measured, sample.plan, sample.options
        if plan.nbytes >= LEAST_NBYTES:
            self.import_ns_per_byte.add(measured.import_ns / plan.nbytes)
        prefill_ns = float(measured.source_final_ns - measured.prefill_begun_ns)
        whole = options.route == "whole"
        if not whole:
            writing_ns = self.write_ns_per_byte.value * plan.nbytes
            prefill_ns -= writing_ns + self.announce_ns * measured.groups
        elif sample.alone:
            self.knows_whole = True
            if plan.nbytes >= LEAST_NBYTES:
                writing_ns = max(0.0, measured.tail_ns - measured.import_ns - self.fixed_ns)
                self.write_ns_per_byte.add(writing_ns / plan.nbytes)
        cut, compute_ns = options.prefill_chunk, max(0.0, prefill_ns)
        self.prefills.append(Prefilled(plan.num_tokens, cut, compute_ns, whole))
        if sample.alone and sample.expected_ns:
            took_ns = measured.published_ns - measured.prefill_begun_ns
            self._correct(options.route, took_ns / sample.expected_ns)

    def _correct(self, taken: AskedRoute, off: float) -> None:
        for route, figure in self.off.items():
            if route == taken:
                self._taken[route] = 0
                figure.add(min(MOST_OFF, max(1 / MOST_OFF, off)))
                continue
            self._taken[route] += 1
            if self._taken[route] == FADES_AFTER:
                self._taken[route] = 0
                figure.fade()


class Sample(NamedTuple):
    """A request that was published: what it was granted with, what `auto` expected if it chose, not
    corrected by route, and whether it had its owner to itself.
    """

    plan: Plan
    options: RequestOptions
    measured: Measured
    expected_ns: float
    alone: bool


def _typical_ns(some: Sequence[Prefilled]) -> float:
    pure = [each.ns for each in some if each.whole]
    return statistics.median(pure or [each.ns for each in some])
