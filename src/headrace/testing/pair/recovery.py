"""Cases: what a request is told of a fault that others can mend, and what comes after it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from unittest import SkipTest

from headrace.errors import Refused
from headrace.runtime.requests import Request
from headrace.runtime.supervisor import RestartPolicy
from headrace.testing.conformance_engine import require
from headrace.testing.faulty import BENT_SPANS, Point
from headrace.testing.pair.cancel import where
from headrace.testing.pair.death import DRAIN_S, DeathCases
from headrace.testing.pair.gate import Gate
from headrace.testing.pair.neighbours import Neighbours
from headrace.testing.pair.stand import Stand
from headrace.testing.pair.subject import PairGone
from headrace.testing.pair.suite import case

AT_ONCE = RestartPolicy(first_delay_s=0.0, max_failures=1000)
ANOTHER_TIME = "a cell twice"


class RecoveryCases(DeathCases):
    """A retried request is exact; a span that is not what was told is found and located."""

    @case
    def test_retry(self) -> None:
        """What fails in its first attempt is exact in its second, on whatever source that runs."""
        for _, point, count in self.moments():
            with self.step(f"killed {where(point, count)}, then a restarted source") as measured:
                self._killed(point, count, measured)
        with self.step("malformed, then the same source") as measured:
            stand = self.stand()
            order: dict[str, Any] = {"gated": False, "attempt": 1, "fault": ANOTHER_TIME}
            with stand.ordering(self.cancelled_tokens, point="commit", **order) as gate:
                self._retried(stand, self._submit_retried(stand), gate, measured)
        with self.step("stopped, then a restarted source") as measured:
            self._stopped(measured)
        with self.step("killed, then another source") as measured:
            self._on_another(measured)

    @case
    def test_spans_not_as_told(self) -> None:
        """With digests a span told before it was written, or torn, is found and located."""
        for fault, number in self._bent():
            with self.step(f"{fault}, number {number}") as measured:
                self.require_digests()
                self._bend(fault, number, measured)

    def _killed(self, point: Point, count: int, measured: dict[str, Any]) -> None:
        stand = self.stand(restart=AT_ONCE)
        neighbours = Neighbours(stand)
        stand.reference(self.cancelled_tokens)
        with stand.ordering(self.cancelled_tokens) as gate:
            victim = self._submit_retried(stand)
            stand.allow_until(gate, victim, point, count)
            stand.kill()
            self._retried(stand, victim, gate, measured)
        neighbours.end()

    def _stopped(self, measured: dict[str, Any]) -> None:
        """Its slot is quiet only once the stopped source was ended at the drain deadline."""
        stall_s = self._stall_s()
        limits = {"progress_timeout_s": stall_s, "drain_timeout_s": DRAIN_S}
        stand = self.stand(restart=AT_ONCE, **limits)
        stand.reference(self.cancelled_tokens)
        with stand.ordering(self.cancelled_tokens, deaf=True) as gate:
            victim = self._submit_retried(stand)
            stand.allow_until(gate, victim, "commit")
            stand.stop()
            self._retried(stand, victim, gate, measured)

    def _on_another(self, measured: dict[str, Any]) -> None:
        stand = self.stand()
        stand.reference(self.cancelled_tokens)
        try:
            stand.attach()
        except (PairGone, Refused) as exc:
            self.bench.drop()
            raise SkipTest(f"two sources cannot be had at once: {exc}") from exc
        gates = [stand.order(self.cancelled_tokens, source=at) for at in range(2)]
        victim = self._submit_retried(stand)
        stand.until(lambda: any(gate.events for gate in gates), "one of the two begins")
        first = 0 if gates[0].events else 1
        stand.allow_until(gates[first], victim, "commit")
        stand.kill(stand.sources[first].handle)
        stand.withdraw(gates[first])
        self._retried(stand, victim, gates[1 - first], measured)
        require(gates[1 - first].count("begin") == 1, "the other source served nothing")
        self.bench.drop()

    def _submit_retried(self, stand: Stand, **options: Any) -> Request:
        policy: dict[str, Any] = {"on_failure": "retry", "max_attempts": 2}
        return stand.submit(self.cancelled_tokens, **policy, **options)

    def _retried(self, stand: Stand, victim: Request, gate: Gate, measured: dict[str, Any]) -> None:
        """Its second attempt is let go, and is exact; takes the order back."""
        begun_s = time.monotonic()
        gate.open()
        stand.until_done(victim)
        stand.withdraw(gate)
        measured |= {"end_s": time.monotonic() - begun_s, "first_attempt": list(victim.attempts)}
        stand.check_exact(victim, self.cancelled_tokens, "the second attempt")
        require(len(victim.attempts) == 1, f"{len(victim.attempts)} attempts failed")
        stand.owner.check_integrity()

    def _bent(self) -> Iterator[tuple[str, int]]:
        told = max(count for _, point, count in self.moments() if point == "commit") - 1
        for fault in BENT_SPANS:
            yield from ((fault, number) for number in sorted({1, told}))

    def _bend(self, fault: str, number: int, measured: dict[str, Any]) -> None:
        stand = self.stand()
        neighbours = Neighbours(stand)
        tokens = self.cancelled_tokens
        stand.reference(tokens)
        order: dict[str, Any] = {"fault": fault, "point": "commit", "number": number}
        with stand.ordering(tokens, gated=False, attempt=1, **order):
            victim = stand.submit(tokens, digest=True)
            self.refused_within(victim, stand, self.within_s)
            measured |= {"cause": victim.cause, "reason": victim.reason}
            require(victim.cause == "corrupt", f"its cause is {victim.cause}: {victim.reason}")
            located = all(word in victim.reason for word in ("layer", "position"))
            require(located, f"it is not located: {victim.reason}")
            stand.until(
                lambda: stand.counts("slots")["free"] == stand.num_slots, "its slot is free"
            )
        with stand.ordering(tokens, gated=False, attempt=1, **order) as gate:
            victim = self._submit_retried(stand, digest=True)
            self._retried(stand, victim, gate, measured)
        neighbours.end()
