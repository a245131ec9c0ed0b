"""A tail is cut into parts: nothing twice, nothing left over."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.messages import Interval
from headrace.telemetry.clocks import align
from headrace.telemetry.tail import LABELS, PARTS, length_of, pieces
from tests.unit.telemetry.scenes import US, at, cancelled, streamed, whole


def test_the_parts_of_a_tail() -> None:
    found = pieces(align(streamed()))
    assert {part: length_of(part, found) // US for part in PARTS} == {
        "importing": 200,
        "neighbours": 300,
        "source": 10,
        "messages": 30,
        "rest": 260,
    }
    assert [piece.part for piece in found] == [
        "source",
        "messages",
        "rest",
        "neighbours",
        "rest",
        "importing",
        "rest",
    ]
    assert set(LABELS) == set(PARTS)


def test_a_final_under_way_is_a_message() -> None:
    run = whole()
    found = pieces(align(replace(run, owner=(*run.owner, at("validated", 4_900, name="logits")))))
    assert length_of("source", found) == 500 * US
    assert length_of("importing", found) == 1_200 * US
    assert length_of("messages", found) == (50 + 50 + 100) * US  # the span's, then the final's
    assert length_of("rest", found) == 100 * US


def test_no_tail_no_parts() -> None:
    assert pieces(align(cancelled())) == []


times = st.tuples(st.integers(0, 60), st.integers(-2, 30))
source_kinds = st.sampled_from(["compute", "write", "announced"])
owner_kinds = st.sampled_from(["import", "neighbour", "validated"])


def lane(drawn: list[tuple[str, tuple[int, int]]]) -> tuple[Interval, ...]:
    return tuple(
        at(kind, begun, begun + took, name="one message")  # type: ignore[arg-type]
        for kind, (begun, took) in drawn
    )


@settings(deadline=None, database=None)
@given(
    st.lists(st.tuples(source_kinds, times), max_size=8),
    st.lists(st.tuples(owner_kinds, times), max_size=8),
    st.integers(0, 40),
    st.integers(0, 50),
)
def test_the_parts_add_up_to_the_tail(
    source: list[tuple[str, tuple[int, int]]],
    owner: list[tuple[str, tuple[int, int]]],
    final: int,
    took: int,
) -> None:
    """Whatever else overlaps whatever, without a grant so that the clocks are taken for one."""
    run = align(
        streamed(
            source=(*lane(source), at("final", final)),
            owner=(*lane(owner), at("published", final + took)),
        )
    )
    assert run.tail is not None
    found = pieces(run)
    assert sum(length_of(part, found) for part in PARTS) == took * US
    at_ns = run.tail[0]
    for piece in found:
        assert at_ns == piece.begun_ns < piece.ended_ns
        at_ns = piece.ended_ns
    assert at_ns == run.tail[1]
