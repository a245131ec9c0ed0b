"""Route `auto`: the prediction, what is learned, and which candidates there are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec.structs import replace as changed

from headrace.backends.null import decoder_like
from headrace.backends.replay import ReplayEngine, ReplayOptions
from headrace.errors import DeviceError
from headrace.geometry import Emission, agree
from headrace.ids import SourceId
from headrace.messages import Measured, RouteChoice
from headrace.plan import Plan, compile_plan
from headrace.protocol.source import MOST_SPANS
from headrace.runtime.costs import WHOLE_TRIES, Sample
from headrace.runtime.probe import Probe, probe
from headrace.runtime.requests import RequestOptions
from headrace.runtime.routing import (
    CHUNK_NBYTES,
    MOST_PREFILL_CHUNKS,
    Candidate,
    RouteChooser,
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


def sample_of(
    plan: Plan, told: Measured, options: RequestOptions | None = None, *, alone: bool = True
) -> Sample:
    return Sample(plan, options or RequestOptions(), told, 0.0, alone)


def test_long_prompts_stream_and_short_ones_stay_whole() -> None:
    choose = chooser()
    long = choose.choose(SOURCE, plan_of(20_000, layers=32), AUTO, BOTH).choice
    assert (long.route, "no prefill measured" in long.reason) == ("streamed", True)
    short = choose.choose(SOURCE, plan_of(4), AUTO, BOTH).choice
    assert (short.route, "would gain less" in short.reason) == ("whole", True)
    assert (long.kind, short.kind) == ("predicted", "small-gain")
    kinds = {"predicted": 1, "small-gain": 1}
    assert choose.statistics() == {"auto": {"streamed": 1, "whole": 1}, "auto_kinds": kinds}


def test_a_gain_that_drowns_in_the_prefill_is_not_worth_it() -> None:
    choose, plan = chooser(), plan_of(1000)
    choose.prepare()
    assert choose.choose(SOURCE, plan, AUTO, BOTH).choice.route == "streamed"
    choose.learn(SOURCE, sample_of(plan, measured(plan, prefill_ms=60_000)))
    choice = choose.choose(SOURCE, plan, AUTO, BOTH).choice
    assert (choice.route, "compute 60000.0 ms" in choice.reason) == ("whole", True)


def test_dear_messages_make_large_groups() -> None:
    plan = plan_of(640, layers=32)
    cheap = chooser(announce_ns=1_000).choose(SOURCE, plan, AUTO, BOTH).choice
    dear = chooser(announce_ns=MS // 2).choose(SOURCE, plan, AUTO, BOTH).choice
    assert cheap.route == "streamed"
    assert dear.route == "whole" or cheap.group_layers < dear.group_layers


def test_a_source_of_whole_results_and_an_empty_transfer_go_whole() -> None:
    choose = chooser()
    choice = choose.choose(SOURCE, plan_of(9000), AUTO, ()).choice
    assert ("whole results only" in choice.reason, choice.kind) == (True, "whole-only")
    empty = plan_of(100)
    empty.nbytes = 0
    choice = choose.choose(SOURCE, empty, AUTO, BOTH).choice
    assert ("nothing to move" in choice.reason, choice.kind) == (True, "nothing-to-move")


def test_nothing_is_learned_before_somebody_asks_nor_from_odd_requests() -> None:
    choose, plan = chooser(), plan_of(10)
    sound = measured(plan, prefill_ms=1)
    choose.learn(SOURCE, sample_of(plan, sound))
    assert not choose._costs
    choose.prepare()
    for odd in (RequestOptions(digest=True), RequestOptions(poison=True)):
        choose.learn(SOURCE, sample_of(plan, sound, odd))
    for times in (
        {"import_ns": 0},
        {"prefill_begun_ns": 2 * MS},
        {"source_final_ns": 9 * MS},
        {"prefill_begun_ns": 2**64 - 1},
        {"submitted_ns": 1},
    ):
        choose.learn(SOURCE, sample_of(plan, changed(sound, **times)))
    assert not choose._costs
    choose.learn(SOURCE, sample_of(plan, sound))
    choose.keep({SOURCE})
    assert choose._costs
    choose.keep({SourceId(7)})
    assert not choose._costs


def test_a_machine_that_cannot_be_measured_sends_requests_whole() -> None:
    def fail() -> Probe:
        raise DeviceError("no memory")

    choose = RouteChooser(fail)
    choice, expected_ns = choose.choose(SOURCE, plan_of(9000), AUTO, BOTH)
    assert (choice.route, expected_ns) == ("whole", 0.0)
    assert "could not be measured: no memory" in choice.reason
    assert choice.kind == "not-measured"


def serve_by_auto(
    choose: RouteChooser, plan: Plan, late_ms: float = 0.0, *, alone: bool = True
) -> RouteChoice:
    """One request of a source that computes 100 ms; copies take what they are predicted to."""
    decision = choose.choose(SOURCE, plan, AUTO, BOTH)
    choice = decision.choice
    options = replace(AUTO, route=choice.route, group_layers=choice.group_layers)
    writing_ms = 0.2 * plan.nbytes / MS
    if choice.route == "whole":
        told = measured(
            plan, prefill_ms=100, tail_ms=2 * writing_ms + late_ms, import_ms=writing_ms
        )
    else:
        last_ms = writing_ms / 8 + late_ms
        told = measured(
            plan, prefill_ms=100 + writing_ms, tail_ms=last_ms, import_ms=writing_ms, groups=8
        )
    choose.learn(SOURCE, Sample(plan, options, told, decision.expected_ns, alone))
    return choice


def test_the_whole_route_is_tried_once_to_be_measured() -> None:
    choose, plan = chooser(), plan_of(4000)
    taken = [serve_by_auto(choose, plan) for _ in range(10)]
    assert [choice.route for choice in taken] == ["streamed", "whole", *["streamed"] * 8]
    assert ("to be measured" in taken[1].reason, taken[1].kind) == (True, "trial")


def test_an_owner_that_is_never_alone_does_not_try_for_ever() -> None:
    choose, plan = chooser(), plan_of(4000)
    taken = [serve_by_auto(choose, plan, alone=False).route for _ in range(30)]
    assert taken.count("whole") == WHOLE_TRIES
    assert taken[-20:] == ["streamed"] * 20


def test_what_would_cost_much_is_not_tried() -> None:
    choose, plan = chooser(copy_ns=5.0), plan_of(8000)
    choose.choose(SOURCE, plan, AUTO, BOTH)
    told = measured(plan, prefill_ms=2000, tail_ms=10, import_ms=1300, groups=8)
    choose.learn(SOURCE, sample_of(plan, told, RequestOptions(route="streamed", group_layers=1)))
    assert choose.choose(SOURCE, plan, AUTO, BOTH).choice.route == "streamed"


@pytest.mark.parametrize("late", [[0], [1], [0, 1], [0, 5], [3, 4, 5]])
def test_requests_that_were_held_up_do_not_decide_over_the_others(late: list[int]) -> None:
    choose, plan = chooser(), plan_of(8000)
    taken = [
        serve_by_auto(choose, plan, late_ms=2000.0 if number in late else 0.0).route
        for number in range(100)
    ]
    assert taken[-50:] == ["streamed"] * 50


def test_a_route_that_was_slow_for_long_is_tried_again() -> None:
    choose, plan = chooser(), plan_of(8000)
    for _ in range(20):
        serve_by_auto(choose, plan, late_ms=2000.0)
    assert "streamed" in [serve_by_auto(choose, plan).route for _ in range(60)]


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


def test_very_many_prefill_chunks_are_taken_together_but_for_the_last() -> None:
    plan = plan_of(50_000)
    (chunked, *_) = candidates(plan, replace(AUTO, prefill_chunk=16), BOTH)
    steps_add_up(plan, chunked)
    assert len(chunked.steps) <= MOST_PREFILL_CHUNKS + 2
    assert chunked.steps[-2].nbytes == plan.nbytes // 50_000 * 16
