"""Cases: slots and lanes are used again, parked hand-offs, and the end of an owner."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest import SkipTest

from headrace.runtime.requests import Request
from headrace.testing.conformance_engine import require
from headrace.testing.pair.exactness import Pace
from headrace.testing.pair.leftovers import nothing_more
from headrace.testing.pair.recovery import RecoveryCases
from headrace.testing.pair.stand import Stand
from headrace.testing.pair.suite import case

NUM_REUSES, QUICK_REUSES = 24, 8


class ReuseCases(RecoveryCases):
    """What was used before leaves no trace in what comes after."""

    @case
    def test_slot_reuse(self) -> None:
        """Many prompts by turns through one slot are exact; its generation rises each time."""
        with self.step("by turns through one slot") as measured:
            stand = self.stand(num_slots=1)
            generations: list[int] = []
            for at in range(QUICK_REUSES if self.quick else NUM_REUSES):
                tokens = self.pair.prompt((19, 3, 11)[at % 3], seed=70 + at % 4)
                stand.reference(tokens)
                with stand.ordering(tokens, gated=False) as gate:
                    request = stand.submit(tokens)
                    stand.until_done(request)
                    stand.until_free()
                generations.append(gate.events[0].generation)
                stand.check_exact(request, tokens, f"request {at}")
            measured["generations"] = generations
            rising = all(b > a for a, b in pairwise(generations))
            require(rising, f"the generations do not rise: {generations}")
        with self.step("the old generation is replayed in the new") as measured:
            stand = self.stand(num_slots=1)
            tokens = self.pair.prompt(16, seed=75)
            stand.reference(tokens)
            dropped = stand.num_dropped()
            order = {"fault": "of the previous lease", "point": "commit"}
            with stand.ordering(tokens, gated=False, **order):
                request = stand.submit(tokens)
                stand.until_done(request)
            measured["dropped"] = stand.num_dropped() - dropped
            stand.check_exact(request, tokens, "the request")
            require(measured["dropped"] == 4, f"{measured['dropped']} of 4 replays were dropped")

    @case
    def test_parked_import(self) -> None:
        """One lane: the next is prefetched beside the active one, and touches nothing of it."""
        for share in ("wholly", "partly", "not at all"):
            with self.step(f"prefetched {share} while the lane decodes") as measured:
                self._prefetch(share, measured)
        for share in ("wholly", "partly", "not at all"):
            with self.step(f"3 cancelled while parked, prefetched {share}") as measured:
                self._cancel_parked(share, measured)

    @case
    def test_drain(self) -> None:
        """An owner that closes with requests running ends each once, and leaves nothing behind."""
        self.bench.drop()
        with (
            self.step("closed with requests running") as measured,
            nothing_more("the owner") as left,
        ):
            measured["left"] = left
            stand = Stand(self.pair)
            try:
                gated_tokens = self.pair.prompt(12, seed=81)
                gate = stand.order(gated_tokens)
                running = []
                if self.pair.decodes:
                    tokens = self.pair.prompt(9, seed=80)
                    running.append(stand.submit(tokens, max_tokens=min(64, self.context // 2)))
                    stand.until(lambda: bool(running[0].tokens), "the first decodes")
                running += [stand.submit(gated_tokens)]
                running += [stand.submit(self.pair.prompt(8, seed=82 + at)) for at in range(4)]
                stand.allow_until(gate, running[-5], "commit")
                measured["before"] = stand.counts("handoffs")
            finally:
                stand.close()
            outcomes = [request.outcome for request in running]
            measured["outcomes"] = outcomes
            decoded, others = set(outcomes[:-5]), set(outcomes[-5:])  # a fast one may be through
            sound = others == {"cancelled"} and decoded <= {"cancelled", "finished"}
            require(sound, f"they ended as {outcomes}")

    def _one_lane(self) -> Stand:
        stand = self.stand(num_lanes=1)
        if stand.num_slots < 2:
            raise SkipTest("one slot: nothing is prefetched")
        return stand

    def _prefetch(self, share: str, measured: dict[str, Any]) -> None:
        stand = self._one_lane()
        first, second = self.pair.prompt(15, seed=91), self.pair.prompt(18, seed=92)
        asked = self.coarse()
        num_points = self.num_points(stand, second, **asked)
        wanted = {"wholly": num_points, "partly": num_points // 2, "not at all": 1}[share]
        num_decoded = self.num_decoded_beside(stand, wanted, len(first))
        # Where a lane is too short for that, its holder keeps the entry and decodes nothing.
        decodes = self.pair.decodes and num_decoded < self.context - len(first)
        stand.reference(first)
        stand.reference(first, num_decoded=num_decoded)
        stand.reference(second)
        with stand.ordering(second) as gate:
            pace = Pace(gate, wanted)
            if decodes:
                a = stand.submit(first, max_tokens=num_decoded, on_token=pace.on_token)
            else:
                a = stand.hold(first)
            b = stand.submit(second, **asked)
            stand.until(lambda: pace.at_end or self._step(pace, a), "the second is prefetched")
            measured["tokens_while_it_was_prefetched"] = pace.num_tokens
            stand.owner.turn(0.0)
            there = stand.counts("handoffs")
            require(there.get("parked") == 1 and not b.done, f"the second is not parked: {there}")
            if a.entry is not None:
                stand.check_held(a, first, "the active entry")
                stand.owner.release(a)
            stand.until_done(a)
            gate.open()
            stand.until_done(b)
        if decodes:
            stand.check_exact(a, first, "the active request")
        stand.check_exact(b, second, "the prefetched request")

    def _step(self, pace: Pace, a: Request) -> bool:
        """Go on where no token of the first does it; whether the first is at its end."""
        if a.entry is not None:
            pace.on_token(0)
            return False
        return a.done

    def _cancel_parked(self, share: str, measured: dict[str, Any]) -> None:
        stand = self._one_lane()
        first = self.pair.prompt(15, seed=91)
        stand.reference(first)
        a = stand.hold(first)
        with self.ordered(stand) as (victim, gate):
            match share:
                case "wholly":
                    stand.until_at(gate, victim, "begin")
                    gate.open()
                    stand.until(lambda: stand.counts("slots")["ready"] == 1, "it is all there")
                case "partly":
                    stand.allow_until(gate, victim, "commit")
                case _:
                    stand.until_at(gate, victim, "begin")
            there = stand.counts("handoffs")
            require(there.get("parked") == 1, f"it is not parked: {there}")
            self.cancel(stand, victim, measured)
            measured["slot_s"] = stand.until(
                self._slots_free(stand), "the slot is free", self.free_within_s
            )
        stand.check_held(a, first, "the active entry")
        stand.owner.release(a)
