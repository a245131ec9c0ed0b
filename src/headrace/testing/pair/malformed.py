"""Cases: a source that says or does what no correct source does."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from typing import Any

from headrace.geometry import agree
from headrace.plan import compile_plan
from headrace.runtime.requests import Request
from headrace.testing.conformance_engine import require
from headrace.testing.faulty import WORD
from headrace.testing.malformed import Case, cases
from headrace.testing.pair.exactness import ExactnessCases
from headrace.testing.pair.gate import Gate
from headrace.testing.pair.neighbours import Neighbours
from headrace.testing.pair.stand import Stand
from headrace.testing.pair.strays import HARMFUL, HARMLESS, LATE, UNQUIET
from headrace.testing.pair.suite import case
from headrace.testing.sinks import ask

VICTIM_TOKENS, NEXT_TOKENS = 12, 10
QUICK = (
    "a layer outside the model",
    "a position beyond the prompt",
    "a negative position",
    "a cell twice",
    "another slot",
    "the next generation",
    "a final with cells missing",
    "positions up to 2^31",
    "positions up to 2^32",
    "positions up to 2^63",
    "a slot of 2^63",
    "a bool for a position",
    "truncated bytes",
    "random bytes",
    "descriptors",
)
WORDS_FOR_S, QUICK_WORDS_FOR_S = 60.0, 5.0
LOOK_EVERY = 20  # words, between two looks at the neighbours and at the next request
NOT_SAID = ("corrupt",)  # kinds of words that need more than to be said
ENGINE_FAULTS = ("it raises", "a span that is never told", "no final")
CAUSES = ("malformed", "source-failed")
ENDS_THE_SOURCE = ("it exits", "it hangs up")


class MalformedCases(ExactnessCases):
    """One attempt goes wrong; the process, its neighbours and the next request do not."""

    @case
    def test_malformed_progress(self) -> None:
        """Wrong, torn or random messages fail their own attempt, and nothing beside or after it."""
        self._each_fails(QUICK if self.quick else tuple(HARMFUL))
        for fault in UNQUIET:
            with self.step(fault) as measured:
                self._unquiet(fault, measured, grant=False)
            with self.step(f"{fault}, and another granted meanwhile") as measured:
                self._unquiet(fault, measured, grant=True)

    @case
    def test_malformed_words(self) -> None:
        """Of 1,000 and more wrong messages, as many as there is time for, each is refused alone."""
        said, wrong = 0, list[str]()
        with self.step("said by a source before its first span") as measured:
            stand = self.stand()
            neighbours = Neighbours(stand)
            words = self._words(stand)
            until_s = time.monotonic() + (QUICK_WORDS_FOR_S if self.quick else WORDS_FOR_S)
            for said, word in enumerate(words, 1):
                wrong += self._say(stand, word)
                if said % LOOK_EVERY == 0 or said == len(words):
                    neighbours.check()
                    stand.check_exact_now()
                if time.monotonic() > until_s:
                    break
            neighbours.end()
            measured |= {"said": said, "of": len(words), "wrong": wrong}
            require(not wrong, f"{len(wrong)} of {said} came out wrong: {wrong[:5]}")

    @case
    def test_engine_faults(self) -> None:
        """An engine that raises or leaves cells or its final out fails its own attempt only."""
        self._each_fails(ENGINE_FAULTS)
        for fault in ENDS_THE_SOURCE:
            with self.step(fault) as measured:
                stand = self.stand()
                neighbours = Neighbours(stand)
                victim = self._ordered(stand, fault)
                seconds = self.refused_within(victim, stand, self.death_within_s)
                stand.until(stand.source.died, "the source is gone", self.death_within_s)
                measured |= {"error_s": seconds, "reason": victim.reason}
                stand.attach()
                neighbours.end()
                stand.check_next()

    @case
    def test_strays_are_dropped(self) -> None:
        """What is said of an attempt that is over, unknown or another's is dropped and counted."""
        for stray in HARMLESS:
            with self.step(stray) as measured:
                stand = self.stand()
                tokens = self._faulty_tokens(stray)
                stand.reference(tokens)  # so that the source has had a lease before
                dropped = stand.num_dropped()
                victim = self._ordered(stand, stray)
                stand.until_done(victim)
                stand.check_exact(victim, tokens, "the attempt that they came out of")
                stand.settle()
                measured["dropped"] = stand.num_dropped() - dropped
                require(measured["dropped"] > 0, "nothing was counted as dropped")

    @case
    def test_late_words(self) -> None:
        """What a source says after its entry was published changes nothing."""
        for stray in LATE:
            with self.step(stray) as measured:
                self._after_publishing(stray, measured)

    def _each_fails(self, faults: Iterable[str]) -> None:
        neighbours: Neighbours | None = None
        for fault in faults:
            with self.step(fault) as measured:
                before, neighbours = neighbours, None  # a step that fails ends its stand
                if before is None:
                    before = Neighbours(self._stand_in_use())
                self._one_fails(fault, before, measured)
                neighbours = before
        if neighbours is not None:
            with self.step("the neighbours end"):
                neighbours.end()

    def _one_fails(self, fault: str, neighbours: Neighbours, measured: dict[str, Any]) -> None:
        stand = self._stand_in_use()
        after_tokens = self.pair.prompt(NEXT_TOKENS, seed=7)
        stand.reference(after_tokens)
        refused = stand.num_dropped()
        victim = self._ordered(stand, fault)
        after = stand.submit(after_tokens)
        measured["error_s"] = self.refused_within(victim, stand, stand.pair.settings.within_s)
        measured |= {"reason": victim.reason, "cause": victim.cause}
        require(victim.cause in CAUSES, f"its cause is {victim.cause}")
        stand.until_done(after)
        stand.check_exact(after, after_tokens, "the next request")
        measured["refused_messages"] = stand.num_dropped() - refused
        neighbours.check()
        require(not victim.tokens and not victim.kv_digests, "something of it was published")
        require(not stand.source.died(), "the source died of it")
        stand.owner.check_integrity()

    def _after_publishing(self, stray: str, measured: dict[str, Any]) -> None:
        stand = self.stand()
        tokens = self._faulty_tokens(stray)
        stand.reference(tokens)
        dropped = stand.num_dropped()
        with stand.ordering(tokens, fault=stray, point="return") as gate:
            request = stand.submit(tokens, hold=True, audit=False)
            stand.allow_until(gate, request, "return")
            stand.until_done(request)
            stand.check_held(request, tokens, "the published entry")
            gate.open()
            stand.until(lambda: stand.num_dropped() >= dropped + 3, "3 dropped messages")
        measured["dropped"] = stand.num_dropped() - dropped
        stand.check_held(request, tokens, "the published entry")
        stand.owner.release(request)

    def _words(self, stand: Stand) -> list[Case]:
        """All that is wrong to say of a short prompt, in an order that the seed decides."""
        pair, num_tokens = self.pair, len(self._faulty_tokens(""))
        layout = agree(pair.source_manifest, pair.decoder_manifest)
        plan = compile_plan(pair.decoder_manifest, layout, num_tokens, self.context)
        first = pair.source_manifest.first
        words = [c for c in cases(plan, ask(num_tokens), first=first) if c.kind not in NOT_SAID]
        random.Random(self.seed).shuffle(words)
        return words

    def _say(self, stand: Stand, word: Case) -> list[str]:
        """Have the source say it, all at once; what came of it that should not have."""
        tokens = self._faulty_tokens(word.name)
        refused = stand.num_dropped()
        with stand.ordering(tokens, fault=WORD + word.name) as gate:
            victim = stand.submit(tokens, max_tokens=0, audit=False)
            stand.until_at(gate, victim, "begin")
            gate.allow()
            gate.wait(2, self.within_s)  # and the owner has no turn meanwhile
            gate.open()
            stand.until_done(victim)
            self._until_returned(stand, gate)
        wanted = "failed" if word.verdict == "fails" else "finished"
        counted = word.verdict != "dropped" or stand.num_dropped() > refused
        if victim.outcome == wanted and counted and "StopIteration" not in victim.reason:
            return []
        return [f"{word.name}: {victim.outcome} {victim.reason}"]

    def _unquiet(self, fault: str, measured: dict[str, Any], *, grant: bool) -> None:
        """The lease is given back by an engine that computes on; `grant`: and is granted another.

        Only its end makes true that its slot is quiet: the source may end itself, and take the one
        that it was granted with it.
        """
        stand = self.stand()
        after_tokens = self.pair.prompt(NEXT_TOKENS, seed=7)
        stand.reference(after_tokens)
        tokens, at = self._faulty_tokens(fault), self._second
        order: dict[str, Any] = {"fault": fault, "point": "commit", "number": at}
        with stand.ordering(tokens, deaf=True, **order) as gate:
            victim = stand.submit(tokens)
            stand.allow_until(gate, victim, "commit", at)
            gate.allow()
            measured["error_s"] = self.refused_within(victim, stand, self.within_s)
            if grant:
                after = stand.submit(after_tokens)
                stand.owner.turn(0.0)
            gate.open()
            self._until_returned(stand, gate)
            if not grant:
                after = stand.submit(after_tokens)
            stand.until_done(after)
        measured |= {"next": after.outcome, "cause": after.cause}
        if grant and after.cause == "source-died":
            stand.attach()
            stand.check_next()
        else:
            stand.check_exact(after, after_tokens, "the next request")

    def _until_returned(self, stand: Stand, gate: Gate) -> None:
        """The engine is through with an ordered prompt, or its process has ended."""
        source = stand.source
        stand.until(
            lambda: gate.count("return") + gate.count("cancelled") > 0 or source.died(),
            "the engine returns",
        )

    def _stand_in_use(self) -> Stand:
        """The stand with its neighbours on it, which is not at rest."""
        return self.bench.in_use() or self.stand()

    def _ordered(self, stand: Stand, fault: str) -> Request:
        """A request that goes wrong at its second span, or at its only one."""
        tokens = self._faulty_tokens(fault)
        order: dict[str, Any] = {"fault": fault, "point": "final"}
        if fault != "no final":
            order |= {"point": "commit", "number": self._second}
        with stand.ordering(tokens, gated=False, seed=self.seed, **order) as gate:
            request = stand.submit(tokens)
            stand.until(lambda: request.done or bool(gate.events), "it began")
        return request

    def _faulty_tokens(self, fault: str) -> list[int]:
        return self.pair.prompt(VICTIM_TOKENS, seed=2000 + sum(fault.encode()))

    @property
    def _second(self) -> int:
        """The second span, or the only one."""
        manifest = self.pair.source_manifest
        return min(2, len(manifest.layers)) if manifest.emits else 1
