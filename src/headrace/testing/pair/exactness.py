"""Cases: the route changes only when bytes move."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import SkipTest

from headrace.runtime.requests import DIGEST, Request
from headrace.testing.conformance_engine import require
from headrace.testing.pair.gate import Gate
from headrace.testing.pair.stand import Stand
from headrace.testing.pair.suite import PairSuite, case

BLOCK = 16
LONG_TOKENS, QUICK_LONG_TOKENS = 200, 64
ALL_CUTS_UP_TO = 40  # tokens; a longer prompt is cut in fewer ways
CHUNKS = (1, 7)
STEP_WITHIN_S = 60.0
FEW_STEPS = 4
GRANTED_WITHIN_S = 0.2  # from a source's return to its next attempt, on a busy machine


@dataclass(frozen=True)
class Cut:
    """One way to hand a prompt over."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


class ExactnessCases(PairSuite):
    """Equal tokens, logits and KV on every route, alone and beside another."""

    @case
    def test_exactness(self) -> None:
        """Each prompt gives the same tokens, logits and KV bytes on every route, in every cut."""
        for num_tokens in self.lengths:
            with self.step(f"{num_tokens} tokens") as measured:
                self._compare(num_tokens, measured)

    @case
    def test_exactness_with_digests(self) -> None:
        """The same with every span's bytes verified as landed: what the source wrote is there."""
        for num_tokens in self.lengths if not self.quick else self.lengths[:3]:
            with self.step(f"{num_tokens} tokens") as measured:
                self.require_digests()
                self._compare(num_tokens, measured, digest=True)

    @case
    def test_prefill_chunks(self) -> None:
        """With the prompt computed in chunks, too, all routes are equal among themselves."""
        for num_tokens, prefill_chunk in ((17, 5), (33, 16)):
            with self.step(f"{num_tokens} tokens by {prefill_chunk}") as measured:
                stand = self.stand()
                tokens = self.pair.prompt(num_tokens)
                probe = stand.submit(tokens, route="whole", prefill_chunk=prefill_chunk)
                stand.until_done(probe)
                if probe.outcome == "failed" and "Refused" in probe.reason:
                    raise SkipTest(f"the engine refuses a prefill chunk: {probe.reason}")
                self._compare(num_tokens, measured, prefill_chunk=prefill_chunk)

    @case
    def test_two_at_once(self) -> None:
        """Two requests, taken by turns step by step, are each what they are alone."""
        with self.step("one decodes while the other is streamed") as measured:
            self._interleave(measured)
        with self.step("both are submitted at once, on different routes"):
            stand = self.stand()
            prompts = [self.pair.prompt(9 + at, seed=40 + at) for at in range(4)]
            for tokens in prompts:
                stand.reference(tokens)
            cuts = list(self.cuts(9))
            running = [
                stand.submit(tokens, **cuts[at * 3 % len(cuts)].options)
                for at, tokens in enumerate(prompts)
            ]
            stand.until_done(*running)
            for at, request in enumerate(running):
                stand.check_exact(request, prompts[at], f"request {at}")

    def require_digests(self) -> None:
        """Raises: SkipTest: bytes as landed cannot be compared with those that were sent."""
        sides = {"source": self.pair.source_manifest, "decoder": self.pair.decoder_manifest}
        for side, manifest in sides.items():
            if DIGEST not in manifest.digests:
                raise SkipTest(f"{side} has no {DIGEST} digests")
        if not self.pair.decoder.caps.reads_back:
            raise SkipTest("the decoder keeps other numbers than were sent, so no digest can match")

    @property
    def lengths(self) -> list[int]:
        """Prompts of one token and two, at the edges of a block and of each window, and long."""
        edges = [edge + off for edge in (BLOCK, *self.pair.windows) for off in (-1, 0, 1)]
        longest = self.context - self.num_decoded
        wanted = {1, 2, *edges, min(longest, QUICK_LONG_TOKENS if self.quick else LONG_TOKENS)}
        return sorted(length for length in wanted if 1 <= length <= longest)

    def cuts(self, num_tokens: int) -> Iterator[Cut]:
        """The ways to hand a prompt over that its source offers, the whole route left out."""
        manifest = self.pair.source_manifest
        if not manifest.emits:
            return
        num_layers = len(manifest.layers)
        thorough = num_tokens <= ALL_CUTS_UP_TO and not self.quick
        chunks = CHUNKS if thorough else (max(CHUNKS[-1], num_tokens // 3),)
        for chunk in (0, *chunks):
            yield Cut(f"chunked {chunk}", {"route": "chunked", "chunk": chunk})
        for emission in manifest.emits:
            for size in sorted({1, 3, num_layers} if thorough else {max(1, num_layers // 5)}):
                for chunk in (0, chunks[-1]):
                    name = f"streamed {emission} {size}, chunk {chunk}"
                    asked = {"emission": emission, "group_layers": size, "chunk": chunk}
                    yield Cut(name, {"route": "streamed", **asked})

    def _compare(self, num_tokens: int, measured: dict[str, Any], **options: Any) -> None:
        stand = self.stand()
        tokens = self.pair.prompt(num_tokens)
        prefill_chunk = options.get("prefill_chunk", 0)
        alone = stand.reference(tokens, prefill_chunk=prefill_chunk)
        measured["hand_offs"] = rows = []
        differing = []
        for cut in (Cut("whole", {"route": "whole"}), *self.cuts(num_tokens)):
            request = stand.submit(tokens, **cut.options, **options)
            stand.until_done(request)
            difference = alone.difference(stand.result(request, tokens))
            rows.append({"cut": cut.name, "difference": difference, **told(request)})
            if difference:
                differing.append(f"{cut.name}: {difference}")
        measured["kv_digests"], measured["logits_digest"] = list(alone.kv), alone.logits
        require(not differing, f"{len(differing)} differ from the whole route: {differing[:3]}")

    def _interleave(self, measured: dict[str, Any]) -> None:
        stand = self.stand()
        first, second = self.pair.prompt(14, seed=31), self.pair.prompt(21, seed=32)
        asked = self.coarse()
        num_points = self.num_points(stand, second, **asked)
        num_decoded = self.num_decoded_beside(stand, num_points, len(first))
        stand.reference(first, num_decoded=num_decoded)
        stand.reference(second)
        with stand.ordering(second) as gate:
            pace = Pace(gate, num_points)
            if self.pair.decodes:
                a = stand.submit(first, max_tokens=num_decoded, on_token=pace.on_token)
            else:
                a = stand.hold(first)
            b = stand.submit(second, **asked)
            stand.until(lambda: a.done or pace.at_end, "the first has decoded")
            measured["tokens_while_the_other_was_streamed"] = pace.num_tokens
            gate.open()
            if not self.pair.decodes and stand.num_lanes == 1:
                stand.owner.release(a)
            stand.until_done(a, b)
        stand.check_exact(b, second, "the second")
        if a.entry is not None:
            stand.check_held(a, first, "the first")
            stand.owner.release(a)
        elif self.pair.decodes:
            stand.check_exact(a, first, "the first")

    def coarse(self) -> dict[str, Any]:
        """Options that cut a prompt into about four layer groups."""
        manifest = self.pair.source_manifest
        return {"group_layers": max(1, len(manifest.layers) // 4)} if manifest.emits else {}

    def num_decoded_beside(self, stand: Stand, num_points: int, num_tokens: int) -> int:
        """How many tokens to decode so that a source comes to `num_points` points meanwhile."""
        if not self.pair.decodes:
            return stand.num_decoded
        tokens = self.pair.prompt(5)
        request = stand.submit(tokens, max_tokens=FEW_STEPS + 1, audit=False)
        stand.until_done(request)
        figures = request.measured
        if figures is None:
            raise AssertionError(f"a request {request.outcome}: {request.reason}")
        step_s = max(1e-6, (figures.ended_ns - figures.first_token_ns) / FEW_STEPS / 1e9)
        wanted = num_points + FEW_STEPS + int(GRANTED_WITHIN_S / step_s)
        return min(wanted, self.context - num_tokens)

    def num_points(self, stand: Stand, tokens: list[int], **asked: Any) -> int:
        """How many points a prompt's prefill comes to."""
        with stand.ordering(tokens, gated=False) as gate:
            request = stand.submit(tokens, **asked)
            stand.until_done(request)
            stand.until(lambda: gate.count("return") == 1, "the source has returned")
            return len(gate.events)


class Pace:
    """Makes a gated source take one step for each token that another request decodes."""

    def __init__(self, gate: Gate, num_points: int) -> None:
        self.num_tokens = 0
        self._gate = gate
        self._num_points = num_points

    @property
    def at_end(self) -> bool:
        """Whether the source waits at its last point."""
        return len(self._gate.events) >= self._num_points

    def on_token(self, token: int) -> None:
        """One token, one step; what comes of it the owner takes in with its next turn."""
        self._gate.take_in()
        if self._gate.events and not self.at_end:  # else it was not granted yet
            self._gate.allow()
            if self._gate.wait(len(self._gate.events) + 1, STEP_WITHIN_S):
                self.num_tokens += 1


def told(request: Request) -> dict[str, Any]:
    """A request's figures by the host's clock, in ns and bytes; empty if it never published."""
    figures = request.measured
    if figures is None:
        return {}
    return {
        "prefill_ns": figures.source_final_ns - figures.prefill_begun_ns,
        "tail_ns": figures.tail_ns,
        "kv_nbytes": figures.kv_nbytes,
        "spans": figures.spans,
        "imports": figures.imports,
    }
