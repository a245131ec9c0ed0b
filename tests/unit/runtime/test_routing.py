"""Route `auto`: the prediction, what is learned, and which candidates there are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec.structs import replace as changed

from headrace.backends.null import decoder_like
from headrace.backends.replay import ReplayEngine, ReplayOptions
from headrace.geometry import Emission, agree
from headrace.ids import SourceId
from headrace.messages import Measured, Route
from headrace.plan import Plan, compile_plan
from headrace.protocol.source import MOST_SPANS
from headrace.runtime.probe import Probe, probe
from headrace.runtime.requests import RequestOptions
from headrace.runtime.routing import (
    CHUNK_NBYTES,
    KEPT_PREFILLS,
    MOST_OFF,
    Candidate,
    Costs,
    Prefilled,
    RouteChooser,
    Step,
    _way_of,
    candidates,
)

SOURCE = SourceId(0)
AUTO = RequestOptions(route="auto")
BOTH: tuple[Emission, ...] = ("layers", "cache_groups")
MS = 1_000_000


def plan_of(num_tokens: int, *, layers: int = 8, window: int = 0, heads: int = 8) -> Plan:
    engine = ReplayEngine(ReplayOptions(layers=layers, heads=heads, window=window))
    decoder = decoder_like(engine.manifest())
    return compile_plan(decoder, agree(engine.manifest(), decoder), num_tokens, 1 << 20)


def chooser(copy_ns: float = 0.2, announce_ns: float = 20_000) -> RouteChooser:
    return RouteChooser(lambda: Probe(copy_ns, announce_ns))


def measured(
    plan: Plan,
    *,
    prefill_ms: float,
    tail_ms: float = 1.0,
    import_ms: float = 1.0,
    in_the_way_ms: float = 0.0,
    groups: int = 1,
) -> Measured:
    final_ns = int(prefill_ms * MS)
    zeros = Measured(*(0,) * len(Measured.__struct_fields__))
    return changed(
        zeros,
        source_final_ns=final_ns,
        published_ns=final_ns + int(tail_ms * MS),
        kv_nbytes=plan.nbytes,
        last_group_nbytes=plan.nbytes // groups,
        groups=groups,
        import_ns=int(import_ms * MS),
        decode_in_the_way_ns=int(in_the_way_ms * MS),
    )


def test_the_two_ends_overlap_on_paper() -> None:
    costs = Costs(write_ns_per_byte=0, import_ns_per_byte=1, announce_ns=0, piece_ns=0, fixed_ns=5)
    whole = [Step(1.0, 100)]
    assert costs.ideal_ns(1000, whole) == 1105
    assert costs.ideal_ns(1000, [Step(0.5, 50), Step(1.0, 50)]) == 1055
    slow_link = [Step(0.5, 500), Step(1.0, 500)]  # the second group waits for the first one
    assert costs.ideal_ns(100, slow_link) == 50 + 1000 + 5
    assert costs.ideal_ns(0, []) == 5


def test_writing_and_telling_hold_the_source_up() -> None:
    costs = Costs(write_ns_per_byte=2, import_ns_per_byte=0, announce_ns=10, piece_ns=0, fixed_ns=0)
    assert costs.ideal_ns(100, [Step(1.0, 7)]) == 100 + 14 + 10


def test_each_piece_costs_and_imports_wait_for_their_share() -> None:
    costs = Costs(0, import_ns_per_byte=1, announce_ns=0, piece_ns=10, fixed_ns=0)
    halves = [Step(0.5, 50), Step(1.0, 50)]
    assert costs.ideal_ns(1000, halves) == 1060
    assert costs.ideal_ns(1000, halves, slowdown=50) == 500 + 2 * 60 * 50
    large = [Step(1.0, 3 * CHUNK_NBYTES)]  # in one piece where nobody decodes
    assert costs.ideal_ns(0, large) == 3 * CHUNK_NBYTES + 10
    assert costs.ideal_ns(0, large, slowdown=2) == 2 * (3 * CHUNK_NBYTES + 3 * 10)


def test_where_entries_decode_it_moves_in_fewer_pieces() -> None:
    plan, alone, busy = plan_of(1000, layers=32), chooser(), chooser()
    fine = alone.choose(SOURCE, plan, AUTO, BOTH)
    coarse = busy.choose(SOURCE, plan, AUTO, BOTH, slowdown=50)
    assert fine.route == "streamed"
    assert coarse.route == "whole" or coarse.group_layers > fine.group_layers


def test_compute_is_taken_from_the_nearest_lengths() -> None:
    costs = Costs(0, 0, 0, 0, 0)
    assert costs.compute_ns(10) is None
    costs.prefills = [Prefilled(100, ns, True) for ns in (1000.0, 1200.0, 9000.0)]
    costs.prefills += [Prefilled(100, 5.0, False)] * 9  # streamed: writing may count in
    costs.prefills += [Prefilled(200, 3200.0, False)]
    assert costs.compute_ns(100) == 1200
    assert costs.compute_ns(150) == 2200
    assert costs.compute_ns(50) == 600
    assert costs.compute_ns(400) == 6400


def test_long_prompts_stream_and_short_ones_stay_whole() -> None:
    choose = chooser()
    long = choose.choose(SOURCE, plan_of(20_000, layers=32), AUTO, BOTH)
    assert (long.route, "no prefill measured" in long.reason) == ("streamed", True)
    short = choose.choose(SOURCE, plan_of(4), AUTO, BOTH)
    assert (short.route, "would gain less" in short.reason) == ("whole", True)
    assert choose.statistics() == {"streamed": 1, "whole": 1}


def test_a_gain_that_drowns_in_the_prefill_is_not_worth_it() -> None:
    choose, plan = chooser(), plan_of(1000)
    choose.prepare()
    assert choose.choose(SOURCE, plan, AUTO, BOTH).route == "streamed"
    choose.learn(SOURCE, plan, RequestOptions(), measured(plan, prefill_ms=60_000))
    choice = choose.choose(SOURCE, plan, AUTO, BOTH)
    assert (choice.route, "compute 60000.0 ms" in choice.reason) == ("whole", True)


def test_dear_messages_make_large_groups() -> None:
    plan = plan_of(640, layers=32)
    cheap = chooser(announce_ns=1_000).choose(SOURCE, plan, AUTO, BOTH)
    dear = chooser(announce_ns=MS // 2).choose(SOURCE, plan, AUTO, BOTH)
    assert cheap.route == "streamed"
    assert dear.route == "whole" or cheap.group_layers < dear.group_layers


def test_a_source_of_whole_results_and_an_empty_transfer_go_whole() -> None:
    choose = chooser()
    assert "whole results only" in choose.choose(SOURCE, plan_of(9000), AUTO, ()).reason
    empty = plan_of(100)
    empty.nbytes = 0
    assert "nothing to move" in choose.choose(SOURCE, empty, AUTO, BOTH).reason


def test_what_is_learned_of_a_whole_request() -> None:
    choose, plan = chooser(copy_ns=0.2), plan_of(20_000)
    choose.prepare()
    for _ in range(40):
        told = measured(plan, prefill_ms=500, tail_ms=900, import_ms=400, in_the_way_ms=100)
        choose.learn(SOURCE, plan, RequestOptions(), told)
    costs = choose._costs[SOURCE]
    assert costs.import_ns_per_byte == pytest.approx(400 * MS / plan.nbytes, rel=0.01)
    assert costs.write_ns_per_byte == pytest.approx(400 * MS / plan.nbytes, rel=0.01)
    assert costs.compute_ns(20_000) == 500 * MS


def test_what_is_learned_of_a_streamed_request() -> None:
    choose, plan = chooser(copy_ns=0.1, announce_ns=MS), plan_of(20_000)
    choose.prepare()
    options = RequestOptions(route="streamed")
    for _ in range(40):
        told = measured(plan, prefill_ms=500, tail_ms=9, import_ms=1e-6, groups=8)
        choose.learn(SOURCE, plan, options, told)
    costs = choose._costs[SOURCE]
    assert costs.fixed_ns == pytest.approx(9 * MS, rel=0.01)
    writing_ns = 0.1 * plan.nbytes + 8 * MS
    assert costs.compute_ns(20_000) == pytest.approx(500 * MS - writing_ns)


def test_what_is_not_learned() -> None:
    choose, plan = chooser(), plan_of(10)
    choose.learn(SOURCE, plan, RequestOptions(), measured(plan, prefill_ms=1))
    assert not choose._costs  # nobody asked for auto
    choose.prepare()
    for odd in (RequestOptions(digest=True), RequestOptions(poison=True)):
        choose.learn(SOURCE, plan, odd, measured(plan, prefill_ms=1))
    choose.learn(SOURCE, plan, RequestOptions(), measured(plan, prefill_ms=1, import_ms=0))
    assert not choose._costs
    sound = measured(plan, prefill_ms=1)
    for times in (
        {"prefill_begun_ns": 2 * MS},
        {"source_final_ns": 9 * MS},
        {"prefill_begun_ns": 2**64 - 1},
        {"submitted_ns": 1},
    ):
        choose.learn(SOURCE, plan, RequestOptions(), changed(sound, **times))
    assert not choose._costs
    options = RequestOptions(route="chunked")
    for _ in range(KEPT_PREFILLS + 5):
        choose.learn(SOURCE, plan, options, measured(plan, prefill_ms=1))
    costs = choose._costs[SOURCE]
    assert len(costs.prefills) == KEPT_PREFILLS
    assert (costs.write_ns_per_byte, costs.import_ns_per_byte) == (0.2, 0.2)  # too small to tell
    choose.keep({SOURCE})
    assert choose._costs
    choose.keep({SourceId(7)})
    assert not choose._costs


@pytest.mark.parametrize(
    ("route", "prefill_chunk"), [("whole", 0), ("streamed", 0), ("chunked", 100)]
)
def test_predictions_come_to_what_is_measured(route: Route, prefill_chunk: int) -> None:
    choose, plan = chooser(), plan_of(1000)
    choose.prepare()
    options = RequestOptions(route=route, prefill_chunk=prefill_chunk, group_layers=2)
    for _ in range(60):
        told = measured(plan, prefill_ms=40, tail_ms=10, groups=4)
        choose.learn(SOURCE, plan, options, told)
    costs = choose._costs[SOURCE]
    known_ns = costs.compute_ns(1000)
    assert known_ns is not None
    assert costs.predict_ns(known_ns, _way_of(plan, options)) == pytest.approx(50 * MS, rel=0.05)


def test_a_prediction_is_corrected_within_bounds() -> None:
    choose, plan = chooser(), plan_of(1000)
    choose.prepare()
    options = RequestOptions(route="chunked", prefill_chunk=100)
    for _ in range(60):
        choose.learn(SOURCE, plan, options, measured(plan, prefill_ms=10, tail_ms=4000))
    assert choose._costs[SOURCE].off == {"chunked": pytest.approx(MOST_OFF, rel=0.01)}


def test_copies_that_slow_each_other_down_send_requests_whole() -> None:
    choose, plan = chooser(copy_ns=0.05), plan_of(8000)
    assert choose.choose(SOURCE, plan, AUTO, BOTH).route == "streamed"
    streamed = RequestOptions(route="streamed", group_layers=1)
    for _ in range(10):
        told = measured(plan, prefill_ms=0.2, tail_ms=14, import_ms=7)
        choose.learn(SOURCE, plan, RequestOptions(), told)
        told = measured(plan, prefill_ms=12, tail_ms=8, import_ms=7, groups=8)
        choose.learn(SOURCE, plan, streamed, told)
    assert choose.choose(SOURCE, plan, AUTO, BOTH).route == "whole"


def steps_add_up(plan: Plan, candidate: Candidate) -> None:
    assert sum(step.nbytes for step in candidate.steps) == plan.nbytes
    shares = [step.computed for step in candidate.steps]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("prefill_chunk", [0, 256])
def test_each_candidate_carries_every_byte_once(window: int, prefill_chunk: int) -> None:
    plan = plan_of(1000, layers=12, window=window)
    options = replace(AUTO, prefill_chunk=prefill_chunk)
    found = list(candidates(plan, options, BOTH))
    for each in found:
        steps_add_up(plan, each)
    assert {each.route for each in found} == (
        {"chunked", "streamed"} if prefill_chunk else {"streamed"}
    )
    assert [e.group_layers for e in found if not e.chunk and e.route == "streamed"] == [1, 2, 4, 8]
    assert found[-1].name.startswith("streamed by 8 layers")


def test_large_groups_are_also_tried_in_chunks() -> None:
    plan = plan_of(40_000)
    found = list(candidates(plan, AUTO, BOTH))
    cut = next(each for each in found if each.chunk)
    steps_add_up(plan, cut)
    assert max(step.nbytes for step in cut.steps) <= CHUNK_NBYTES
    assert f"chunks of {cut.chunk}" in cut.name


def test_what_cannot_be_told_is_no_candidate() -> None:
    plan = plan_of(MOST_SPANS + 1, layers=2, heads=1)
    assert not list(candidates(plan, replace(AUTO, prefill_chunk=1), BOTH))
    assert not list(candidates(plan, replace(AUTO, emission="cache_groups"), ("layers",)))


def test_the_probe_measures_this_machine() -> None:
    found = probe()
    assert 0 < found.copy_ns_per_byte < 100
    assert 0 < found.announce_ns < 100 * MS
