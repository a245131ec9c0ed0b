"""All cases of a pair, in the order in which they are run: those of one stand after another."""

from __future__ import annotations

from headrace.testing.pair.facts import FactsCases
from headrace.testing.pair.malformed import MalformedCases
from headrace.testing.pair.reuse import ReuseCases


class PairConformance(FactsCases, MalformedCases, ReuseCases):
    """Checks of a source and a decoder together.

    Subclass it in a test module, name the two, and pytest runs the cases:

        class TestMyPair(PairConformance):
            source = "my_backend:open_engine"
            source_options = {"model": "..."}
            decoder = "my_backend:open_decoder"
            decoder_options = {"model": "..."}
    """


CASES = (
    "test_decoder_alone",
    "test_facts",
    "test_engine_alone",
    "test_exactness",
    "test_exactness_with_digests",
    "test_prefill_chunks",
    "test_two_at_once",
    "test_malformed_progress",
    "test_malformed_words",
    "test_spans_not_as_told",
    "test_strays_are_dropped",
    "test_late_words",
    "test_engine_faults",
    "test_cancel_while_streaming",
    "test_cancel_while_decoding",
    "test_cancel_at_every_turn",
    "test_source_death",
    "test_source_death_after_its_final",
    "test_retry",
    "test_cancel_while_it_waits",
    "test_slot_reuse",
    "test_parked_import",
    "test_cancel_when_sealed",
    "test_stall",
    "test_drain",
)
