"""Cases: a source that is killed, or stopped, at any moment."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from headrace.runtime.requests import Request
from headrace.testing.conformance_engine import require
from headrace.testing.pair.cancel import CancelCases, where
from headrace.testing.pair.gate import Gate
from headrace.testing.pair.neighbours import Neighbours
from headrace.testing.pair.stand import Stand
from headrace.testing.pair.strays import LATE
from headrace.testing.pair.suite import case

LEAST_STALL_S = 1.0
SLOWER = 5  # a source that is at work may be this much slower than it was
DRAIN_S = 3.0


class DeathCases(CancelCases):
    """Requests end in time, nothing is reused without proof, a new source serves exactly."""

    @case
    def test_source_death(self) -> None:
        """SIGKILL at any moment: an error in time, all free, neighbours and a new source exact."""
        with self.step("idle") as measured:
            stand = self.stand()
            neighbours = Neighbours(stand)
            stand.kill()
            measured["buried_s"] = stand.until(stand.source.died, "it is dead", self.death_within_s)
            self._replace(stand, neighbours, measured)
        for _, point, count in self.moments():
            with self.step(f"{where(point, count)}") as measured:
                stand = self.stand()
                neighbours = Neighbours(stand)
                with self.ordered(stand) as (victim, gate):
                    stand.allow_until(gate, victim, point, count)
                    begun_s = time.monotonic()
                    stand.kill()
                    self.refused_within(victim, stand, self.death_within_s)
                    measured["error_s"] = time.monotonic() - begun_s
                    measured["reason"] = victim.reason
                    require(victim.cause == "source-died", f"its cause is {victim.cause}")
                    stand.until(self._none_leased(stand), "its slot is free", self.free_within_s)
                    measured["slot_s"] = time.monotonic() - begun_s
                require(not victim.tokens, "something of it was published")
                self._replace(stand, neighbours, measured)

    @case
    def test_source_death_after_its_final(self) -> None:
        """All was told before it died: the request is served, exactly."""
        with self.step("after its final") as measured:
            stand = self.stand()
            neighbours = Neighbours(stand)
            tokens = self.cancelled_tokens
            stand.reference(tokens)
            with self.ordered(stand) as (victim, gate):
                stand.allow_until(gate, victim, "return")
                begun_s = time.monotonic()
                stand.kill()
                stand.until_done(victim)
                stand.until(self._none_leased(stand), "its slot is free", self.free_within_s)
                measured["slot_s"] = time.monotonic() - begun_s
            if victim.options.audit:  # else its cells cannot be read any more
                stand.check_exact(victim, tokens, "the request")
            require(victim.outcome == "finished", f"it {victim.outcome}: {victim.reason}")
            self._replace(stand, neighbours, measured)

    @case
    def test_stall(self) -> None:
        """A stopped source fails its request in time; what it says later is dropped, or it ends."""
        stall_s = self._stall_s()
        how = {"progress_timeout_s": stall_s, "drain_timeout_s": DRAIN_S}
        with self.step("stopped past the progress deadline, then continued") as measured:
            stand = self.stand(**how)
            self._stop(stand, stall_s, measured)
            stand.settle()
            require(not stand.source.died(), "the source died")
            stand.check_next()
        with self.step("stopped past the drain deadline: its death is the proof") as measured:
            stand = self.stand(**how)
            neighbours = Neighbours(stand)
            with self.ordered(stand, deaf=True) as (victim, gate):
                self._stop_at_work(stand, victim, gate, stall_s, measured)
                begun_s = time.monotonic()
                bound_s = DRAIN_S + self.death_within_s
                stand.until(stand.source.died, "it is ended", bound_s)
                measured["ended_s"] = time.monotonic() - begun_s
            self._replace(stand, neighbours, measured)

    def _stop(self, stand: Stand, stall_s: float, measured: dict[str, Any]) -> None:
        neighbours = Neighbours(stand)
        (late,) = LATE
        order = {"fault": late, "point": "commit", "number": 1, "deaf": True}
        with self.ordered(stand, **order) as (victim, gate):
            self._stop_at_work(stand, victim, gate, stall_s, measured)
            draining = stand.counts("slots")["draining"]
            require(draining == 1, "its slot was reused while the source may write")
            dropped = stand.num_dropped()
            gate.open()
            stand.resume()
            begun_s = time.monotonic()
            stand.until(self._none_leased(stand), "its slot is free", self.free_within_s)
            measured["slot_after_continuing_s"] = time.monotonic() - begun_s
            measured["dropped"] = stand.num_dropped() - dropped
            require(measured["dropped"] >= 3, f"{measured['dropped']} late words were dropped")
        neighbours.end()

    def _stop_at_work(
        self, stand: Stand, victim: Request, gate: Gate, stall_s: float, measured: dict[str, Any]
    ) -> None:
        stand.allow_until(gate, victim, "commit")
        stand.stop()
        begun_s = time.monotonic()
        self.refused_within(victim, stand, stall_s + self.death_within_s)
        measured |= {"error_s": time.monotonic() - begun_s, "reason": victim.reason}
        measured["progress_timeout_s"] = stall_s
        require(victim.cause == "stalled", f"its cause is {victim.cause}")
        silent_s = time.monotonic() - gate.events[0].at_ns / 1e9  # at least: it began before that
        require(silent_s > stall_s / 2, f"it failed after {silent_s:.2f} s of {stall_s:.2f}")
        stand.owner.check_integrity()

    def _stall_s(self) -> float:
        """A progress deadline that this source keeps when it is at work."""
        stand = self.bench.current()
        begun_s = time.monotonic()
        stand.serve(self.cancelled_tokens, max_tokens=0, audit=False)
        return max(LEAST_STALL_S, SLOWER * (time.monotonic() - begun_s))

    def _replace(self, stand: Stand, neighbours: Neighbours, measured: dict[str, Any]) -> None:
        """Take a new source; the neighbours never noticed, and the next request is exact."""
        begun_s = time.monotonic()
        stand.attach()
        measured["new_source_s"] = time.monotonic() - begun_s
        neighbours.end()
        stand.check_next()

    def _none_leased(self, stand: Stand) -> Callable[[], bool]:
        """Whether every slot that is left is free."""

        def free() -> bool:
            slots = stand.counts("slots")
            return slots.get("free", 0) == sum(slots.values())

        return free
