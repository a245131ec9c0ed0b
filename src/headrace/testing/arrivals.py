"""Random arrivals at an owner of one lane: every request gets what it gets alone.

A pattern is drawn from a seed: two or three requests, each with one of a few prompts, a route and a
cut, a number of turns after the one before it, and a number of tokens to decode, or of turns that
its entry is held where the decoder computes nothing. Some are disturbed: cancelled after so many
turns, given a deadline that may pass, or failed by their source at one of its points.

Each request that finishes is compared with the same prompt alone, each other one must have ended by
its own disturbance. The owner, its decoder and its source are the caller's, so that any pair can be
driven; the source is opened as `FACTORY` around the caller's engine, so that it can fail.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from msgspec import Struct

from headrace.backends.base import Decoder, PrefillEngine, PrefillSink, SpanWriter
from headrace.backends.load import open_source
from headrace.backends.options import read_options
from headrace.errors import HeadraceError
from headrace.geometry import Manifest
from headrace.ids import Span
from headrace.messages import Route
from headrace.runtime.owner import DecoderOwner
from headrace.runtime.requests import Request, RequestOptions

FACTORY: Final = "headrace.testing.arrivals:open"
FAILS: Final = 0
"""The first token of a prompt that its source fails, at the point that the second token numbers."""

MOST_POINTS: Final = 12
_TURN_S: Final = 0.001  # what a turn waits at most where nothing happens
_MOST_TURNS: Final = 20_000
_ROUTES: Final[tuple[Route, ...]] = ("streamed", "streamed", "chunked", "whole")

Disturbance: TypeAlias = Literal["", "cancel", "deadline", "source"]
_ENDS: Final[dict[Disturbance, str]] = {
    "cancel": "cancelled",
    "deadline": "deadline",
    "source": "source-failed",
}


class Inexact(HeadraceError):
    """A request of a pattern did not get what it gets alone, or ended as nothing made it."""


class Subject(NamedTuple):
    """An owner with its source attached, and its decoder, which has one lane."""

    owner: DecoderOwner
    decoder: Decoder


Make: TypeAlias = Callable[[int], AbstractContextManager[Subject]]
"""Opens a subject of a prefetch depth."""


class Arrival(NamedTuple):
    """One request of a pattern. turns: after the one before it. length: tokens that it decodes, or
    turns for which it is held. at: turns, ms or points until it is disturbed.
    """

    turns: int
    prompt: int
    route: Route
    group_layers: int
    chunk: int
    length: int
    disturbance: Disturbance
    at: int


class Outcome(NamedTuple):
    """What a request came to: its tokens, a digest of its rows of logits, and of its cells."""

    tokens: tuple[int, ...]
    logits: str
    cells: tuple[str, ...]


def draw_pattern(seed: int, num_prompts: int, *, disturbed: bool) -> tuple[Arrival, ...]:
    """The pattern of a seed; where `disturbed`, about every second request of it is."""
    rng = random.Random(seed)
    ways: tuple[Disturbance, ...] = ("", "", "", "cancel", "deadline", "source")
    return tuple(
        Arrival(
            turns=rng.choice((0, 0, 1, 3, rng.randrange(12))),
            prompt=rng.randrange(num_prompts),
            route=rng.choice(_ROUTES),
            group_layers=rng.choice((1, 1, 2)),
            chunk=rng.choice((0, 0, 5)),
            length=rng.choice((1, 2, 4)),
            disturbance=rng.choice(ways) if disturbed else "",
            at=rng.choice((1, rng.randrange(1, MOST_POINTS))),
        )
        for _ in range(rng.randrange(2, 4))
    )


def run_patterns(
    make: Make, prompts: Sequence[Sequence[int]], seeds: Iterable[int], depths: Sequence[int]
) -> dict[int, Counter[str]]:
    """Run the pattern of each seed at a subject of each prefetch depth, every second disturbed.

    What a prompt gives alone is found once, at the first depth. Returns for each depth how many
    requests were `parked` at some time, and how many ended how: `finished`, or their cause.

    Raises:
        Inexact: a request did not get what it gets alone, or ended as nothing made it.
    """
    seeds, alone = tuple(seeds), dict[tuple[int, int], Outcome]()
    seen: dict[int, Counter[str]] = {}
    for depth in depths:
        with make(depth) as subject:
            driver = Driver(subject, prompts, alone)
            for seed in seeds:
                driver.run(seed, draw_pattern(seed, len(prompts), disturbed=seed % 2 == 1))
            seen[depth] = driver.seen
    return seen


@dataclass(slots=True)
class _Running:
    """A request of the pattern that runs. due: the turn at which its entry is given back."""

    arrival: Arrival
    request: Request
    since: int
    due: int | None = None
    cells: tuple[str, ...] = field(default=())


class Driver:
    """Brings patterns to one subject; `alone` is what is known of prompts alone, and learned."""

    def __init__(
        self,
        subject: Subject,
        prompts: Sequence[Sequence[int]],
        alone: dict[tuple[int, int], Outcome],
    ) -> None:
        self.seen: Counter[str] = Counter()
        self._owner, self._decoder = subject
        self._decodes = subject.decoder.caps.decodes
        self._prompts = prompts
        self._alone = alone
        self._turn = 0

    def run(self, seed: int, pattern: Sequence[Arrival]) -> None:
        """One pattern, from an idle owner to an idle owner.

        Raises:
            Inexact: as `run_patterns` says.
        """
        for arrival in pattern:
            self._learn(arrival)
        for place, one in enumerate(self._bring(pattern, f"pattern {seed}")):
            self._check(one, f"pattern {seed}, request {place} ({one.arrival})")
        self._owner.check_integrity()

    def _learn(self, arrival: Arrival) -> None:
        key = self._key_of(arrival)
        if key not in self._alone:
            quiet = Arrival(0, arrival.prompt, "whole", 1, 0, arrival.length, "", 0)
            (one,) = self._bring([quiet], f"{key} alone")
            if one.request.outcome != "finished":
                raise Inexact(f"{key} alone {one.request.outcome}: {one.request.reason}")
            self._alone[key] = _outcome_of(one)

    def _key_of(self, arrival: Arrival) -> tuple[int, int]:
        """Prompt, and tokens to decode."""
        return arrival.prompt, arrival.length if self._decodes else 0

    def _bring(self, pattern: Sequence[Arrival], what: str) -> list[_Running]:
        running: list[_Running] = []
        waiting, last = list(pattern), self._turn
        ends_by = self._turn + _MOST_TURNS
        while waiting or not self._owner.idle:
            if self._turn >= ends_by:
                raise Inexact(f"{what}: after {_MOST_TURNS} turns it is not at rest")
            while waiting and self._turn >= last + waiting[0].turns:
                arrival, last = waiting.pop(0), self._turn
                running.append(_Running(arrival, self._submit(arrival), last))
            for one in running:
                self._disturb(one)
                self._give_back(one)
            self._owner.turn(_TURN_S)
            self._turn += 1
        return running

    def _submit(self, arrival: Arrival) -> Request:
        tokens = list(self._prompts[arrival.prompt])
        if arrival.disturbance == "source":
            tokens[:2] = [FAILS, arrival.at]
        options = RequestOptions(
            route=arrival.route,
            group_layers=arrival.group_layers,
            chunk=arrival.chunk,
            max_tokens=arrival.length if self._decodes else 0,
            audit=True,
            hold=not self._decodes,
            trace=True,
            deadline_s=arrival.at / 1e3 if arrival.disturbance == "deadline" else None,
        )
        return self._owner.submit(tokens, options)

    def _disturb(self, one: _Running) -> None:
        if one.arrival.disturbance == "cancel" and self._turn >= one.since + one.arrival.at:
            self._owner.cancel(one.request)

    def _give_back(self, one: _Running) -> None:
        """Hold the entry of a decoder that computes nothing for as long as is asked."""
        if one.request.entry is None:
            return
        if one.due is None:
            one.due = self._turn + one.arrival.length
        if self._turn >= one.due:
            one.cells = self._digests(one.request)
            self._owner.release(one.request)

    def _digests(self, request: Request) -> tuple[str, ...]:
        plan = self._owner.plan_of(request)
        return tuple(
            hashlib.blake2b(self._owner.read(request, layer, part)).hexdigest()
            for layer in range(len(plan.layers))
            for part in range(len(plan.layers[layer].parts))
        )

    def _check(self, one: _Running, what: str) -> None:
        request, disturbance = one.request, one.arrival.disturbance
        self.seen[request.cause or request.outcome] += 1
        self.seen["parked"] += any(each.kind == "parked" for each in request.owner_intervals)
        alone, mine = self._alone[self._key_of(one.arrival)], _outcome_of(one)
        if request.outcome != "finished":
            if request.cause != _ENDS.get(disturbance):
                raise Inexact(f"{what} {request.outcome}: {request.cause}, {request.reason}")
            if mine.tokens != alone.tokens[: len(mine.tokens)]:
                raise Inexact(f"{what} had {mine.tokens} before its end, and {alone.tokens} alone")
        elif disturbance == "source":
            raise Inexact(f"{what} finished, and its source was to fail")
        elif mine != alone:
            raise Inexact(f"{what} gave {mine}, and {alone} alone")


def _outcome_of(one: _Running) -> Outcome:
    request = one.request
    return Outcome(
        tuple(request.tokens), request.logits_digest, one.cells or tuple(request.kv_digests)
    )


class Options(Struct, frozen=True, forbid_unknown_fields=True):
    """The engine that is wrapped, and its own options."""

    engine: str
    options: dict[str, Any] = {}


def open(options: Mapping[str, Any]) -> FailingEngine:
    """The factory; options as in `Options`."""
    read = read_options(options, Options, "arrivals")
    return FailingEngine(open_source(read.engine, read.options))


class FailingEngine:
    """Serves as the wrapped engine does, but for prompts that begin with `FAILS`."""

    def __init__(self, engine: PrefillEngine) -> None:
        self._engine = engine

    def manifest(self) -> Manifest:
        return self._engine.manifest()

    def prefill_stream(self, tokens: Sequence[int], sink: PrefillSink, start: int = 0) -> None:
        if tokens[0] == FAILS and len(tokens) > 1:
            sink = FailingSink(sink, tokens[1])
        self._engine.prefill_stream(tokens, sink, start)

    def close(self) -> None:
        self._engine.close()


class FailingSink:
    """A sink whose `at`-th call fails, and its final if none did; implements `PrefillSink`."""

    def __init__(self, sink: PrefillSink, at: int) -> None:
        self.plan = sink.plan
        self.options = sink.options
        self._sink = sink
        self._left = at

    def check(self) -> None:
        self._come_to_a_point()
        self._sink.check()

    def write(self, *spans: Span) -> SpanWriter:
        self._come_to_a_point()
        return self._sink.write(*spans)

    def final(
        self,
        logits: memoryview | bytes | None,
        *,
        token: int | None = None,
        ready_ns: int | None = None,
    ) -> None:
        raise RuntimeError("the source was to fail, and does so at its final")

    def _come_to_a_point(self) -> None:
        self._left -= 1
        if self._left <= 0:
            raise RuntimeError("the source was to fail here")
