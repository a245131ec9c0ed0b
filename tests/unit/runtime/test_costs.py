"""What hand-offs cost, on paper and as learned."""

from __future__ import annotations

import pytest

from headrace.messages import Route
from headrace.runtime.costs import (
    FADES_AFTER,
    GUESSES,
    KEPT,
    KEPT_PREFILLS,
    MOST_OFF,
    Costs,
    Figure,
    Prefilled,
    Sample,
    Step,
)
from headrace.runtime.importing import SHARED_CHUNK_NBYTES
from headrace.runtime.requests import RequestOptions
from tests.unit.runtime.test_routing import MS, measured, plan_of, sample_of


def costs_of(
    write: float = 0, load: float = 0, announce: float = 0, piece: float = 0, fixed: float = 0
) -> Costs:
    costs = Costs(0, 0)
    costs.write_ns_per_byte, costs.import_ns_per_byte = Figure(write), Figure(load)
    costs.announce_ns, costs.piece_ns, costs.fixed_ns = announce, piece, fixed
    return costs


def test_the_two_ends_overlap_on_paper() -> None:
    costs = costs_of(load=1, fixed=5)
    assert costs.ideal_ns(1000, [Step(1.0, 100)]) == 1105
    assert costs.ideal_ns(1000, [Step(0.5, 50), Step(1.0, 50)]) == 1055
    slow_link = [Step(0.5, 500), Step(1.0, 500)]  # the second group waits for the first one
    assert costs.ideal_ns(100, slow_link) == 50 + 1000 + 5
    assert costs.ideal_ns(0, []) == 5


def test_writing_and_telling_hold_the_source_up() -> None:
    assert costs_of(write=2, announce=10).ideal_ns(100, [Step(1.0, 7)]) == 100 + 14 + 10


def test_each_piece_costs_and_imports_wait_for_their_share() -> None:
    costs = costs_of(load=1, piece=10)
    halves = [Step(0.5, 50), Step(1.0, 50)]
    assert costs.ideal_ns(1000, halves) == 1060
    assert costs.ideal_ns(1000, halves, slowdown=50) == 500 + 2 * 60 * 50
    large = [Step(1.0, 3 * SHARED_CHUNK_NBYTES)]  # in one piece where nobody decodes
    assert costs.ideal_ns(0, large) == 3 * SHARED_CHUNK_NBYTES + 10
    assert costs.ideal_ns(0, large, slowdown=2) == 2 * (3 * SHARED_CHUNK_NBYTES + 3 * 10)


def test_a_figure_is_a_median_that_its_guess_begins() -> None:
    assert Figure(7.0).value == 7.0
    quick = Figure(7.0)
    quick.add(2.0)
    assert quick.value == 2.0
    figure = Figure(1.0, GUESSES)
    for _ in range(GUESSES - 1):
        figure.add(50.0)
    assert figure.value == 1.0  # two that are far off change nothing
    for _ in range(KEPT):
        figure.add(2.0)
    assert figure.value == 2.0
    for _ in range(KEPT):
        figure.fade()
    assert figure.value == 1.0


def test_compute_is_taken_from_the_nearest_lengths() -> None:
    costs = costs_of()
    assert costs.compute_ns(10, 0) is None
    costs.prefills.extend(Prefilled(100, 0, ns, True) for ns in (1000.0, 1200.0, 9000.0))
    costs.prefills.extend([Prefilled(100, 0, 5.0, False)] * 9)  # streamed: writing may count in
    costs.prefills.append(Prefilled(200, 0, 3200.0, False))
    costs.prefills.append(Prefilled(100, 16, 7.0, True))
    assert costs.compute_ns(100, 0) == 1200
    assert costs.compute_ns(150, 0) == 2200
    assert costs.compute_ns(50, 0) == 600
    assert costs.compute_ns(400, 0) == 6400
    assert costs.compute_ns(100, 16) == 7
    assert costs.compute_ns(100, 32) is None


def test_what_is_learned_of_a_whole_request() -> None:
    costs, plan = Costs(0.2, 1000), plan_of(20_000)
    told = measured(plan, prefill_ms=500, tail_ms=800, import_ms=400)
    for _ in range(KEPT):
        costs.learn(sample_of(plan, told))
    assert costs.import_ns_per_byte.value == pytest.approx(400 * MS / plan.nbytes, rel=0.01)
    assert costs.write_ns_per_byte.value == pytest.approx(400 * MS / plan.nbytes, rel=0.01)
    assert costs.compute_ns(20_000, 0) == 500 * MS
    assert costs.knows_whole


@pytest.mark.parametrize("route", ["streamed", "chunked"])
def test_writing_is_no_compute_where_it_lies_in_the_prefill(route: Route) -> None:
    costs, plan = Costs(0.1, MS), plan_of(20_000)
    told = measured(plan, prefill_ms=500, tail_ms=9, import_ms=70, groups=8)
    costs.learn(sample_of(plan, told, RequestOptions(route=route)))
    assert not costs.knows_whole
    writing_ns = 0.1 * plan.nbytes + 8 * MS
    assert costs.compute_ns(20_000, 0) == pytest.approx(500 * MS - writing_ns)
    costs.learn(sample_of(plan, measured(plan, prefill_ms=1), RequestOptions(route=route)))
    assert min(each.ns for each in costs.prefills) == 0


def test_what_shared_its_owner_teaches_compute_and_imports_only() -> None:
    costs, plan = Costs(0.2, 1000), plan_of(20_000)
    told = measured(plan, prefill_ms=500, tail_ms=90_000, import_ms=400)
    for _ in range(KEPT):
        costs.learn(Sample(plan, RequestOptions(), told, 1.0, alone=False))
    assert costs.write_ns_per_byte.value == 0.2
    assert costs.off["whole"].value == 1.0
    assert costs.import_ns_per_byte.value > 0.2
    assert costs.compute_ns(20_000, 0) == 500 * MS


def test_small_hand_offs_teach_no_speed() -> None:
    costs, plan = Costs(0.2, 1000), plan_of(10)
    for _ in range(KEPT_PREFILLS + 5):
        costs.learn(sample_of(plan, measured(plan, prefill_ms=1)))
    assert len(costs.prefills) == KEPT_PREFILLS
    assert (costs.write_ns_per_byte.value, costs.import_ns_per_byte.value) == (0.2, 0.2)


def test_predictions_are_corrected_within_bounds_and_fade() -> None:
    costs, plan = Costs(0.2, 1000), plan_of(1000)
    streamed, whole = RequestOptions(route="streamed"), RequestOptions()
    told = measured(plan, prefill_ms=10, tail_ms=400)
    for _ in range(KEPT):
        costs.learn(Sample(plan, streamed, told, 1.0 * MS, alone=True))
    assert costs.off["streamed"].value == MOST_OFF
    assert costs.predict_ns(10, "streamed", [Step(1.0, 0)]) == 2 * costs.ideal_ns(
        10, [Step(1.0, 0)]
    )
    for _ in range(KEPT * FADES_AFTER):
        costs.learn(Sample(plan, whole, told, 410.0 * MS, alone=True))
    assert costs.off["streamed"].value == 1.0
    assert costs.off["whole"].value == pytest.approx(1.0)
