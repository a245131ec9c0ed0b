"""A name tells the cells that it is about, or that it leaves some out."""

from __future__ import annotations

import pytest

from headrace.ids import Span
from headrace.telemetry.spans import NAMED_SPANS, name_of, of_one_layer, spans_of

MANY = [Span(3, 4, 10 * n, 10 * n + 10) for n in range(NAMED_SPANS + 2)]


def test_names_are_read_back() -> None:
    for count in range(NAMED_SPANS + 1):
        assert spans_of(name_of(MANY[:count])) == MANY[:count]
    assert name_of(MANY).endswith("x positions [30, 40), and 2 more")
    assert spans_of(name_of(MANY)) == MANY[:NAMED_SPANS]
    assert spans_of("logits") == []


@pytest.mark.parametrize(
    ("spans", "alone"),
    [
        ([Span(3, 4, 0, 8)], True),
        (MANY[:NAMED_SPANS], True),
        (MANY, False),
        ([Span(3, 5, 0, 8)], False),
        ([Span(3, 4, 0, 8), Span(4, 5, 0, 8)], False),
    ],
)
def test_layers_of_a_name(spans: list[Span], alone: bool) -> None:
    assert of_one_layer(name_of(spans)) == alone


def test_a_name_of_no_span_is_of_one_layer() -> None:
    assert of_one_layer("logits")
