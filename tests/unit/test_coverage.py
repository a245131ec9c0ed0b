"""Coverage is a set of cells and never a count; a batch counts whole or leaves no trace."""

from __future__ import annotations

import random
from copy import deepcopy
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.coverage import Coverage, Window
from headrace.errors import RemoteProtocolError
from headrace.ids import Span
from tests.unit.protocol.builders import FEW, spans_in

N = 8
WINDOWS: tuple[Window, ...] = ((0, 8), (5, 8), (8, 8), (0, 8))  # full, tail of 3, shared, full


def fresh() -> Coverage:
    return Coverage(WINDOWS, N)


def missing_cells(coverage: Coverage) -> set[tuple[int, int]]:
    """What is missing, told run by run by completing a copy."""
    cells: set[tuple[int, int]] = set()
    probe = deepcopy(coverage)
    while (span := probe.first_missing()) is not None:
        cells |= {(span.layer_start, at) for at in range(span.start, span.stop)}
        probe.add([span])
    return cells


def test_the_whole_rectangle_completes_every_window() -> None:
    coverage = fresh()
    assert not coverage.complete
    coverage.add([Span(0, 4, 0, N)])
    assert coverage.complete
    assert coverage.first_missing() is None


def test_nothing_to_carry_is_complete_at_once() -> None:
    assert Coverage((), N).complete
    assert Coverage(((8, 8), (8, 8)), N).complete


@pytest.mark.parametrize(
    ("told", "again"),
    [
        (Span(0, 1, 2, 4), Span(0, 1, 2, 4)),  # the same
        (Span(0, 1, 2, 4), Span(0, 1, 0, 3)),  # its head
        (Span(0, 1, 2, 4), Span(0, 1, 3, 6)),  # its tail
        (Span(0, 1, 2, 4), Span(0, 1, 0, 8)),  # around it
        (Span(0, 1, 2, 6), Span(0, 1, 3, 5)),  # inside it
        (Span(0, 2, 0, 8), Span(1, 2, 7, 8)),  # one layer of several
    ],
)
@pytest.mark.parametrize("together", [True, False], ids=["one message", "two messages"])
def test_a_cell_told_twice_is_refused_and_leaves_no_trace(
    told: Span, again: Span, together: bool
) -> None:
    coverage = fresh()
    if not together:
        coverage.add([told])
    before = missing_cells(coverage)
    batch = [Span(3, 4, 0, 1), told, again] if together else [Span(3, 4, 0, 1), again]
    for bring in (coverage.check, coverage.add):
        with pytest.raises(RemoteProtocolError, match=r"layer \d positions .* a cell told before"):
            bring(batch)
    assert missing_cells(coverage) == before


@pytest.mark.parametrize(
    "bad",
    [
        Span(-1, 1, 0, 1),
        Span(0, 5, 0, 1),
        Span(4, 5, 0, 1),
        Span(2, 2, 0, 1),
        Span(2, 1, 0, 1),
        Span(0, 1, -1, 1),
        Span(0, 1, 0, 9),
        Span(0, 1, 3, 3),
        Span(0, 1, 3, 2),
        Span(0, 1 << 64, 0, 1),
        Span(0, 1, 0, 1 << 64),
    ],
)
def test_a_malformed_span_in_the_middle_of_a_message_leaves_no_trace(bad: Span) -> None:
    coverage = fresh()
    before = missing_cells(coverage)
    for bring in (coverage.check, coverage.add):
        with pytest.raises(RemoteProtocolError, match="outside the"):
            bring([Span(0, 1, 0, 8), bad, Span(1, 2, 0, 8)])
    assert missing_cells(coverage) == before


def test_a_check_accepts_nothing() -> None:
    coverage = fresh()
    for _ in range(2):
        coverage.check([Span(0, 4, 0, N)])
    assert missing_cells(coverage) == missing_cells(fresh())


def test_a_span_that_holds_no_cell_moves_nothing_and_may_be_told_again() -> None:
    coverage = fresh()
    for _ in range(2):
        coverage.add([Span(1, 2, 0, 5), Span(2, 3, 0, 8)])
    assert missing_cells(coverage) == missing_cells(fresh())


def test_neighbours_merge_on_either_side_and_in_any_order() -> None:
    at_once = Coverage(((0, 8),), N)
    at_once.add([Span(0, 1, 0, 8)])
    for order in permutations([(0, 2), (2, 5), (5, 8)]):
        coverage = Coverage(((0, 8),), N)
        for start, stop in order:
            coverage.add([Span(0, 1, start, stop)])
        assert coverage.complete
        assert vars(coverage) == vars(at_once)


@pytest.mark.parametrize(
    ("told", "missing"),
    [
        ([], Span(0, 1, 0, 8)),
        ([Span(0, 1, 2, 4)], Span(0, 1, 0, 2)),
        ([Span(0, 1, 0, 4)], Span(0, 1, 4, 8)),
        ([Span(0, 1, 0, 4), Span(0, 1, 6, 7)], Span(0, 1, 4, 6)),
        ([Span(0, 1, 0, 8)], Span(1, 2, 5, 8)),
        ([Span(0, 3, 0, 8)], Span(3, 4, 0, 8)),
    ],
)
def test_the_first_missing_run_is_named(told: list[Span], missing: Span) -> None:
    coverage = fresh()
    coverage.add(told)
    assert coverage.first_missing() == missing


def test_a_span_told_twice_cannot_stand_in_for_one_that_is_missing() -> None:
    coverage = fresh()
    coverage.add([Span(0, 2, 0, 8)])
    with pytest.raises(RemoteProtocolError):
        coverage.add([Span(0, 2, 0, 8)])
    assert not coverage.complete


@FEW
@given(st.lists(st.lists(spans_in(len(WINDOWS), N), min_size=1, max_size=3), max_size=8))
def test_it_agrees_with_a_set_of_cells(messages: list[list[Span]]) -> None:
    coverage, want = fresh(), missing_cells(fresh())
    have: set[tuple[int, int]] = set()
    for spans in messages:
        told = [
            (layer, at)
            for span in spans
            for layer in range(span.layer_start, span.layer_stop)
            for at in range(span.start, span.stop)
            if (layer, at) in want
        ]
        if len(set(told)) == len(told) and not have & set(told):
            coverage.add(spans)
            have |= set(told)
        else:
            with pytest.raises(RemoteProtocolError):
                coverage.add(spans)
        assert missing_cells(coverage) == want - have
        assert coverage.complete == (have == want)


def test_every_single_cell_in_random_order_completes_exactly_at_the_last() -> None:
    cells = sorted(missing_cells(fresh()))
    random.Random(0).shuffle(cells)
    coverage = fresh()
    for layer, at in cells:
        assert not coverage.complete
        coverage.add([Span(layer, layer + 1, at, at + 1)])
    assert coverage.complete
