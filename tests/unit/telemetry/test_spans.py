"""A name tells the cells that it is about, or that it leaves some out."""

from __future__ import annotations

import random

import pytest

from headrace.ids import Span
from headrace.telemetry.spans import NAMED_SPANS, Starts, name_of, of_one_layer, spans_of, within

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


def test_those_that_lie_in_another_are_found_as_by_trying_each() -> None:
    draw = random.Random(5)

    def some(count: int) -> list[Span]:
        edges = [(draw.randrange(6), draw.randrange(1, 4)) for _ in range(2 * count)]
        pairs = zip(edges[::2], edges[1::2], strict=True)
        return [Span(a, a + b, c, c + d) for (a, b), (c, d) in pairs]

    for _ in range(50):
        spans = some(20)
        starts = Starts(spans)
        for outer in (*some(10), *spans):
            tried = [number for number, span in enumerate(spans) if within(span, outer)]
            assert starts.inside(outer) == tried
    assert Starts([]).inside(Span(0, 1, 0, 8)) == []
    assert Starts([Span(3, 4, 0, 8)]).inside(Span(0, 10**15, 0, 10**15)) == [0]


@pytest.mark.parametrize(
    "outside", [Span(2, 4, 1, 7), Span(3, 6, 1, 7), Span(3, 4, 0, 7), Span(3, 4, 1, 9)]
)
def test_a_span_is_within_another_if_all_its_cells_are(outside: Span) -> None:
    assert within(Span(3, 4, 1, 7), Span(3, 5, 1, 8))
    assert not within(outside, Span(3, 5, 1, 8))
