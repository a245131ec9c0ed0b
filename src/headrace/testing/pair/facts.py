"""Cases: what the two sides say of themselves, and each of them alone."""

from __future__ import annotations

from unittest import SkipTest

from headrace.backends.base import Decoder
from headrace.geometry import agree, check_manifest
from headrace.testing.conformance_decoder import DecoderConformance
from headrace.testing.conformance_engine import PrefillEngineConformance, require
from headrace.testing.pair.subject import Lent
from headrace.testing.pair.suite import PairSuite, case

ALONE_CONTEXT = 64
PATIENCE = 10  # times as long as one request may take: a check prefills many times
FEW_PREFILLS = {"lengths": (9,), "group_sizes": (99,), "chunks": (0,)}
"""For checks that prefill once for each call of the sink."""

PREFILLS_OFTEN = (
    "test_it_stops_when_it_is_withdrawn",
    "test_it_says_in_each_layer_that_it_is_at_work",
    "test_it_can_start_late",
)

NEEDS_LANES = "test_neighbours_do_not_touch_each_other"
NEEDS_BATCH = "test_a_batch_keeps_its_rows_apart"
NEED_STEPS = ("test_a_step_is_taken_by_published_entries_only",)
"""Checks of a decoder that show nothing where it has no second lane, no batch, or no steps."""


class FactsCases(PairSuite):
    """Facts and each side alone."""

    @case
    def test_facts(self) -> None:
        """Manifests and caps are sound, agree field by field, and stay the same after a request."""
        with self.step("the source's manifest"):
            check_manifest(self.pair.source_manifest, "source")
        with self.step("the decoder's manifest"):
            check_manifest(self.pair.decoder_manifest, "decoder")
        with self.step("they agree") as measured:
            measured["layout"] = agree(self.pair.source_manifest, self.pair.decoder_manifest)
            measured["windows"] = self.pair.windows
        with self.step("the decoder's caps") as measured:
            caps = self.pair.decoder.caps
            measured |= {"max_lanes": caps.max_lanes, "device_events": caps.device_events}
            require(caps.ordered_copy, "no ordered copy: an owner refuses to start on it")
            require(caps.max_lanes >= 1, f"{caps.max_lanes} lanes")
            counts = self.pair.decoder.statistics()
            whole = all(type(value) is int for value in counts.values())
            require(whole, f"statistics that are no counts: {dict(counts)}")
        with self.step("they stay the same"):
            stand = self.stand()
            stand.serve(self.pair.prompt(5))
            same = self.pair.decoder.manifest() == self.pair.decoder_manifest
            require(same, "the decoder's manifest changed after a request")

    @case
    def test_decoder_alone(self) -> None:
        """The decoder keeps its own suite: cells land exactly, stale holders are refused."""
        self.bench.drop()
        for check in checks_of(DecoderConformance):
            with self.step(words(check)):
                self._skip_what_needs_more(check)
                getattr(self._decoder_suite(), check)()

    @case
    def test_engine_alone(self) -> None:
        """The engine keeps its own suite, in its own process and on its own device."""
        for at, check in enumerate(checks_of(PrefillEngineConformance)):
            with self.step(words(check)):
                stand = self.stand()
                tokens = self.pair.prompt(3, seed=5000 + at)
                order = {"gated": False, "alone": check, "limits": self._limits(check)}
                with stand.ordering(tokens, **order):
                    request = stand.submit(tokens)
                    stand.until_done(request, within_s=PATIENCE * self.within_s)
                stand.result(request, tokens)

    def _skip_what_needs_more(self, check: str) -> None:
        caps = self.pair.decoder.caps
        if check == NEEDS_LANES and caps.max_lanes < 2:
            raise SkipTest("the decoder has one lane")
        if check == NEEDS_BATCH and caps.decode_batch < 2:
            raise SkipTest("the decoder decodes one sequence at a time")
        if check in NEED_STEPS and not caps.decodes:
            raise SkipTest("the decoder decodes nothing")

    def _decoder_suite(self) -> DecoderConformance:
        decoder, settings = self.pair.decoder, self.settings

        class Alone(DecoderConformance):
            context = settings.context
            lengths = (1, 17) if settings.quick else (1, 16, 17, 40)
            lanes = decoder.caps.max_lanes

            def make_decoder(self, lanes: int) -> Decoder:
                return Lent(decoder, lanes)

        return Alone()

    def _limits(self, check: str) -> dict[str, object]:
        limits: dict[str, object] = {"context": ALONE_CONTEXT, "prefill_chunks": (0,)}
        if check in PREFILLS_OFTEN:
            return limits | FEW_PREFILLS
        lengths = (1, 9) if self.quick else (1, 2, 17, 40)
        return limits | {"lengths": lengths, "group_sizes": (1, 99), "chunks": (0, 7)}


def checks_of(suite: type) -> list[str]:
    """The names of a suite's checks."""
    return [name for name in vars(suite) if name.startswith("test_")]


def words(check: str) -> str:
    """A check's name as words."""
    return check.removeprefix("test_").replace("_", " ")
