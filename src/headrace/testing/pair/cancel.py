"""Cases: a cancel at each numbered step of a hand-off.

1 waiting                  4 streaming, before the first span    7 decoding
2 holding storage, no slot 5 streaming, after k spans            8 after its end
3 parked, k spans there    6 sealed, imports in flight
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import SkipTest

from headrace.runtime.requests import Request
from headrace.testing.conformance_engine import require
from headrace.testing.faulty import Point
from headrace.testing.pair.exactness import ExactnessCases
from headrace.testing.pair.gate import Gate
from headrace.testing.pair.neighbours import Neighbours
from headrace.testing.pair.stand import Stand
from headrace.testing.pair.suite import case

VICTIM_TOKENS = 14
MANY_TOKENS = 12


class CancelCases(ExactnessCases):
    """The caller hears at once and once, lanes and slots come back, the next request is exact."""

    @case
    def test_cancel_while_it_waits(self) -> None:
        """A request that waits for storage or a slot ends at once, and whoever runs is exact."""
        with self.step("1 before the owner had a turn") as measured:
            stand = self.stand(num_slots=1)
            victim = stand.submit(self.cancelled_tokens)
            self.cancel(stand, victim, measured)
            self._until_free(stand, measured)
        with self.step("1 waiting for storage and slot") as measured:
            self._while_another_runs(self.pair.decoder.caps.max_lanes - 1, "waiting", measured)
        with self.step("2 holding storage, waiting for a slot") as measured:
            if self.pair.decoder.caps.max_lanes < 2:
                raise SkipTest("the decoder has one lane")
            self._while_another_runs(0, "reserved", measured)

    @case
    def test_cancel_while_streaming(self) -> None:
        """The source hears of it at its next call of the sink, the lane does not wait for that."""
        for number, point, count in self.moments():
            with self.step(f"{number} streaming, {where(point, count)}") as measured:
                self._while_streaming(point, count, measured)

    @case
    def test_cancel_when_sealed(self) -> None:
        """All was told and imports still run: the lane is free when they are fenced."""
        with self.step("6 sealed") as measured:
            stand = self.stand(budget_nbytes=1, chunk_nbytes=1)  # one position of a layer per turn
            with self.ordered(stand) as (victim, gate):
                stand.until_at(gate, victim, "begin")
                while gate.events[-1].point != "return":  # and the owner has no turn meanwhile
                    gate.allow()
                    require(gate.wait(len(gate.events) + 1, self.within_s), "the source is stuck")
                stand.owner.turn(0.0)
                there = stand.counts("handoffs")
                require(there.get("sealed") == 1, f"it is not sealed: {there}")
                self.cancel(stand, victim, measured)
                gate.open()
                self._until_free(stand, measured)

    @case
    def test_cancel_while_decoding(self) -> None:
        """The caller keeps its tokens, its lane is free at once, and its neighbours are exact."""
        for count in (1, 3):
            with self.step(f"7 decoding, after {count} tokens") as measured:
                if not self.pair.decodes:
                    raise SkipTest("the decoder decodes nothing")
                stand = self.stand()
                neighbours = Neighbours(stand)
                victim = stand.submit(self.cancelled_tokens, max_tokens=MANY_TOKENS)
                stand.until(lambda: len(victim.tokens) >= count, "it decodes")  # noqa: B023
                self.cancel(stand, victim, measured)
                require(len(victim.tokens) < MANY_TOKENS, "it was at its end already")
                neighbours.end()
                self._until_free(stand, measured)
        with self.step("8 after its end"):
            stand = self.stand()
            tokens = self.cancelled_tokens
            stand.reference(tokens)
            held = stand.hold(tokens)
            stand.owner.cancel(held)
            require(held.outcome == "finished", f"its outcome became {held.outcome}")
            stand.check_held(held, tokens, "the held entry")
            stand.owner.release(held)

    @case
    def test_cancel_at_every_turn(self) -> None:
        """Cancelled after each single turn of the owner, from none to its end."""
        with self.step("after 0, 1, 2 ... turns") as measured:
            stand = self.stand()
            tokens = self.cancelled_tokens
            outcomes: dict[str, int] = {}
            for turns in range(8 if self.quick else 40):
                victim = stand.submit(tokens)
                for _ in range(turns):
                    if not victim.done:
                        stand.owner.turn(0.0)
                stand.owner.cancel(victim)
                outcomes[victim.outcome] = outcomes.get(victim.outcome, 0) + 1
                stand.settle()
            measured["outcomes"] = outcomes
            require(set(outcomes) <= {"cancelled", "finished"}, f"they ended as {outcomes}")

    # What the cases are made of.

    def cancel(self, stand: Stand, victim: Request, measured: dict[str, Any]) -> None:
        """Cancel a request: it hears at once, once, and keeps the tokens that it has."""
        tokens = list(victim.tokens)
        begun_s = time.monotonic()
        stand.owner.cancel(victim)
        measured["terminal_s"] = time.monotonic() - begun_s
        require(victim.outcome == "cancelled", f"its outcome is {victim.outcome!r}")
        require(victim.cause == "cancelled", f"its cause is {victim.cause!r}")
        require(victim.tokens == tokens, "its tokens changed")
        within = measured["terminal_s"] <= self.cancel_within_s
        require(within, f"the caller heard after {measured['terminal_s']:.3f} s")
        stand.owner.check_integrity()
        first = victim.outcome, victim.reason
        stand.owner.cancel(victim)
        require((victim.outcome, victim.reason) == first, "a second cancel changed its terminal")

    def moments(self) -> list[tuple[int, Point, int]]:
        """Where a hand-off is taken hold of: before its first span, after some, after all."""
        stand = self.stand()
        tokens = self.cancelled_tokens
        with stand.ordering(tokens, gated=False) as gate:
            request = stand.submit(tokens)
            stand.until_done(request)
            require(request.outcome == "finished", f"a request {request.outcome}")
            stand.until(lambda: gate.count("return") == 1, "the source has returned")
            num_commits = gate.count("commit")
        some = sorted({1, num_commits // 2, num_commits - 1} - {0, num_commits})
        if self.quick:
            some = some[:1]
        told: list[tuple[int, Point, int]] = [(5, "commit", count + 1) for count in some]
        return [(4, "begin", 1), *told, (5, "final", 1)]

    @contextmanager
    def ordered(self, stand: Stand, **order: Any) -> Iterator[tuple[Request, Gate]]:
        """A request that waits at a gate, at each point that its source comes to."""
        tokens = self.cancelled_tokens
        with stand.ordering(tokens, **order) as gate:
            yield stand.submit(tokens), gate

    def _while_streaming(self, point: Point, count: int, measured: dict[str, Any]) -> None:
        stand = self.stand()
        neighbours = Neighbours(stand)
        with self.ordered(stand) as (victim, gate):
            stand.allow_until(gate, victim, point, count)
            begun_s = time.monotonic()
            self.cancel(stand, victim, measured)
            stand.until(
                lambda: stand.counts("lanes")["free"] >= stand.num_lanes - neighbours.num_lanes,
                "the lane is free",
                self.free_within_s,
            )
            measured["lane_s"] = time.monotonic() - begun_s
            stand.until(self._slots_free(stand), "the slot is free", self.free_within_s)
            measured["slot_s"] = time.monotonic() - begun_s
            gate.take_in()
            heard = gate.count("cancelled")
            require(heard == 1, f"{heard} calls of the sink said so, and 1 should have")
        neighbours.end()

    @property
    def cancelled_tokens(self) -> list[int]:
        """The prompt of whoever is cancelled, killed or stopped."""
        return self.pair.prompt(VICTIM_TOKENS, seed=51)

    def _slots_free(self, stand: Stand) -> Callable[[], bool]:
        return lambda: stand.counts("slots")["free"] == stand.num_slots

    def _until_free(self, stand: Stand, measured: dict[str, Any]) -> None:
        measured["all_free_s"] = stand.until_free()
        require(measured["all_free_s"] <= self.free_within_s, "lanes and slots came back late")

    def _while_another_runs(self, num_before: int, state: str, measured: dict[str, Any]) -> None:
        """One runs in the only slot, `num_before` hold storage, and then comes the victim."""
        stand = self.stand(num_slots=1)
        prompts = [self.pair.prompt(13, seed=60 + at) for at in range(num_before + 2)]
        for tokens in prompts:
            stand.reference(tokens)
        with stand.ordering(prompts[0]) as gate:
            others = [stand.submit(tokens) for tokens in prompts[:-1]]
            victim = stand.submit(self.cancelled_tokens)
            others.append(stand.submit(prompts[-1]))
            stand.until_at(gate, others[0], "begin")
            there = stand.counts("handoffs")
            require(there.get(state, 0) >= 1, f"nobody is {state}: {there}")
            self.cancel(stand, victim, measured)
            gate.open()
            stand.until_done(*others)
        for request, tokens in zip(others, prompts, strict=True):
            stand.check_exact(request, tokens, "whoever ran or waited")


def where(point: Point, count: int) -> str:
    """A moment of a source in words."""
    if point == "begin":
        return "before the first span"
    if point == "final":
        return "after all spans"
    return f"after {count - 1} spans"
