"""What a source says: attempts, spans and their number, and the largest manifest."""

from __future__ import annotations

import pytest

from headrace import messages as wire
from headrace.geometry import MAX_LAYERS, Layer, Part, Sliding
from headrace.messages import MAX_SPANS, Hello, Progress, encode
from tests.unit.messages.examples import CONTROL_NBYTES, SPAN, U64, A, raw, refused
from tests.unit.protocol.builders import decoder_manifest


@pytest.mark.parametrize(
    "bad", [[1, 2], [1, 2, 3, 4], [1, 2, True], [1, 2, 3.0], [1, 2, "3"], [1, 2, None], 7, {}]
)
def test_an_attempt_that_is_not_three_integers_is_refused(bad: object) -> None:
    assert refused(wire.decode_from_source, ["released", bad, 0, 0])


@pytest.mark.parametrize(
    "bad", [[0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 2, True], [0, 1, 2, 3.0], 7, {}]
)
def test_a_span_that_is_not_four_integers_is_refused(bad: object) -> None:
    array = raw(Progress(A, 0, 0, (SPAN,), (), 0, 0, 0))
    array[4] = [list(SPAN), bad]
    assert refused(wire.decode_from_source, array)


def test_a_progress_message_holds_1_to_max_spans() -> None:
    for count, legal in ((0, False), (1, True), (MAX_SPANS, True), (MAX_SPANS + 1, False)):
        spans = [list(SPAN)] * count
        assert refused(wire.decode_from_source, ["progress", A, 0, 0, spans, [], 0, 0, 0]) != legal
    digests = [0] * (MAX_SPANS + 1)
    assert refused(wire.decode_from_source, ["progress", A, 0, 0, [list(SPAN)], digests, 0, 0])


def long_named(count: int) -> tuple[Layer, ...]:
    parts = (Part("k", 128, 65_536, "bfloat16"), Part("v", 128, 65_536, "bfloat16"))
    return tuple(
        Layer(i, f"model.language_model.layers.{i}.self_attn", Sliding(131_072, 131_071), parts)
        for i in range(count)
    )


def test_the_largest_manifest_stays_under_64_kib() -> None:
    listed = long_named(MAX_LAYERS)
    hello = Hello(U64, decoder_manifest(layers=listed, model="f" * 64), U64, U64, U64)
    assert len(encode(hello)) < CONTROL_NBYTES - 512
