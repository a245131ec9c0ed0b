"""Times as sets of instants: no instant counts twice, none is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.telemetry.times import Stretch, length_ns, overlap, union, union_of, without
from tests.unit.telemetry.scenes import US, at

stretches = st.lists(
    st.tuples(st.integers(0, 30), st.integers(-3, 10)).map(lambda t: (t[0], t[0] + t[1])),
    max_size=6,
)


def instants(of: list[Stretch]) -> set[int]:
    return {instant for begun, ended in of for instant in range(begun, ended)}


@pytest.mark.parametrize(
    ("given", "merged"),
    [
        ([], []),
        ([(3, 3)], []),
        ([(5, 2)], []),
        ([(4, 8), (0, 4)], [(0, 8)]),
        ([(0, 9), (2, 3), (8, 12)], [(0, 12)]),
        ([(0, 1), (2, 3)], [(0, 1), (2, 3)]),
    ],
)
def test_union(given: list[Stretch], merged: list[Stretch]) -> None:
    assert union(given) == merged


def test_union_of_intervals() -> None:
    (stretch,) = union_of([at("import", 0, 2), at("import", 1, 3), at("published", 9)])
    assert stretch[1] - stretch[0] == 3 * US


@settings(deadline=None, database=None)
@given(stretches, stretches)
def test_they_are_sets_of_instants(one: list[Stretch], other: list[Stretch]) -> None:
    mine, theirs = union(one), union(other)
    for result, wanted in (
        (mine, instants(one)),
        (overlap(mine, theirs), instants(one) & instants(other)),
        (without(mine, theirs), instants(one) - instants(other)),
    ):
        assert instants(result) == wanted
        assert length_ns(result) == len(wanted)
        assert union(result) == result
