"""What the page's listener folds, and that it never grows without bound."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from headrace.cli import run_command
from headrace.messages import LaneHeld, Quarantined, Reuse, RouteChoice
from headrace.server import recent as module
from headrace.server.config import PageConfig
from headrace.server.events import (
    Answered,
    Arrived,
    ChoiceEnded,
    Decoded,
    DecoderChanged,
    Dispatched,
    Event,
    Events,
    QueueChanged,
    Rejected,
)
from headrace.server.page_decoders import MAX_REASONS, OTHER
from headrace.server.page_drawing import MAX_BARS
from headrace.server.page_requests import MAX_SHOWN_TEXT
from headrace.server.page_state import EndedRequest, OpenChoice, PageState
from headrace.server.recent import (
    MAX_CHOICES,
    MAX_DECODERS,
    MAX_DRAWN,
    MAX_OPEN,
    MAX_SHOWN_OPEN,
    Recent,
)
from headrace.server.terminals import Terminal
from headrace.telemetry.chrome import encode
from headrace.telemetry.recording import read
from tests.unit.server import page_lanes
from tests.unit.server import page_scenes as scenes
from tests.unit.server.page_lanes import MS
from tests.unit.server.page_scenes import SECOND, START
from tests.unit.telemetry.scenes import moved, on_devices


def listening(events: Iterable[Event], **more: Any) -> Recent:
    recent = Recent(PageConfig(), **more)
    told = Events()
    told.listen(recent)
    for event in events:
        told.tell(event)
    return recent


def shown(events: Iterable[Event], now_ns: int = START + 27 * SECOND, **more: Any) -> PageState:
    return listening(events, **more).snapshot(now_ns)


def only(state: PageState) -> EndedRequest:
    (found,) = state.ended
    return found


def phase(*events: Event) -> OpenChoice:
    (found,) = shown(events, START + SECOND).open
    return found.choices[0]


def counted(state: PageState, kind: str) -> dict[str, int]:
    return {fault.reason: fault.count for fault in state.faults if fault.kind == kind}


# What is there without any event, and as JSON.


def test_nothing_was_told() -> None:
    state = shown([])
    assert (state.up_s, state.num_open, state.open, state.ended) == (0, 0, (), ())
    assert (state.decoders, state.drawings, state.faults) == ((), (), ())
    assert state.rates.tokens_per_s == 0
    assert state.rates.ttft.p50_s is None
    assert "host clock" in state.clock


@pytest.mark.parametrize("scene", [scenes.empty, scenes.busy, scenes.quarantined])
def test_a_state_survives_its_encoding(scene: Any) -> None:
    state = shown(scene())
    assert msgspec.json.decode(msgspec.json.encode(state), type=PageState) == state


# Open requests.


def test_a_request_goes_through_its_phases() -> None:
    came, sent = scenes.arrived(1), Dispatched(START + MS, 1, 0, "cpu", 70)
    assert phase(came).phase == "queued"
    assert phase(came, sent).phase == "waiting"
    for told, word in (
        ("waiting", "waiting"),
        ("parked", "parked"),
        ("reserved", "prefill"),
        ("streaming", "prefill"),
        ("sealed", "prefill"),
        ("published", "decoding"),
        ("draining", "draining"),
        ("ended", "ended"),
    ):
        report = scenes.report(requests=(scenes.held_request(70, told, nbytes_imported=5),))
        found = phase(scenes.ready(), came, sent, scenes.looked(START, report))
        assert (found.phase, found.bytes_imported, found.bytes_total) == (word, 5, 8_000_000)
    report = scenes.report(requests=(scenes.held_request(70, "streaming", nbytes_imported=5),))
    looked = scenes.looked(START, report)  # and by now it is published, so all of it is there
    found = phase(came, sent, looked, Decoded(START + 9 * MS, 1, 0, 0))
    assert (found.phase, found.tokens, found.decoder) == ("decoding", 1, "cpu")
    assert found.bytes_imported == found.bytes_total == 8_000_000
    over = ChoiceEnded(START, 1, 0, "cpu", 4, scenes.ended(70, measured=scenes.measured()), (), ())
    found = phase(came, sent, over)
    assert (found.phase, found.tokens, found.tail_s) == ("ended", 4, 0.002)


def test_each_choice_is_shown_also_those_of_which_nothing_was_told() -> None:
    events: list[Event] = [
        scenes.arrived(1, choices=3),
        Dispatched(START, 1, 1, "cpu", 7),
        Decoded(START + 5 * MS, 1, 1, 0),
        Decoded(START + 9 * MS, 1, 7, 0),  # a choice that was never asked for
    ]
    (found,) = shown(events, START + SECOND).open
    assert [choice.phase for choice in found.choices] == ["queued", "decoding", "queued"]
    assert (found.ttft_s, found.age_s) == (0.005, 1.0)


def test_a_label_of_a_new_incarnation_is_not_the_old_one() -> None:
    """An owner that is started again counts its labels anew."""
    report = scenes.report(requests=(scenes.held_request(7, "streaming"),))
    again = replace(report, lanes=(LaneHeld(scenes.attempt(7), "reserved", "", 0),))
    events: list[Event] = [
        scenes.ready(),
        scenes.arrived(1),
        Dispatched(START, 1, 0, "cpu", 7),
        scenes.looked(START, report),
        DecoderChanged(START, "cpu", "waiting", "it died", 0, 0),
        scenes.arrived(2),
        Dispatched(START, 2, 0, "cpu", 7),
        Answered(START, 1, Terminal.OWNER_DIED, 503, False, "it died"),
        scenes.ready(incarnation=1),
    ]
    recent = listening(events)
    recent(ChoiceEnded(START, 1, 0, "cpu", 0, scenes.ended(7), (), ()))
    recent(scenes.looked(START, again, incarnation=1))
    assert recent.snapshot(START).decoders[0].lanes[0].request == 2


def test_a_choice_that_is_sent_elsewhere_is_known_there_only() -> None:
    lane = LaneHeld(scenes.attempt(7), "reserved", "", 0)
    report = scenes.report(lanes=(lane,), requests=(scenes.held_request(7, "streaming"),))
    events: list[Event] = [
        scenes.ready(),
        scenes.arrived(1),
        Dispatched(START, 1, 0, "cpu", 7),
        Dispatched(START, 1, 0, "gpu", 3),
        scenes.looked(START, report),
    ]
    state = shown(events)
    assert state.decoders[0].lanes[0].request is None
    assert state.open[0].choices[0].phase == "waiting"


# Requests that ended.


def test_what_a_request_came_to() -> None:
    found = only(shown(scenes.traced(1, tokens=4)))
    assert (found.terminal, found.status, found.tokens, found.prompt_tokens) == (
        "finished",
        200,
        4,
        512,
    )
    assert found.trace
    (choice,) = found.choices
    assert choice.tail_s == pytest.approx(0.00255)  # a message, an import, the publishing
    assert choice.alone_s == 0.036
    assert choice.hidden_share == pytest.approx(1 - 0.00255 / 0.036)
    total = 18 * page_lanes.LAYER_NBYTES
    assert (choice.bytes_before_prefill_end, choice.kv_bytes) == (total // 18 * 17, total)
    assert (choice.route, choice.why, choice.attempts, choice.traced) == ("streamed", "", 1, True)
    assert found.ttft_s is not None
    assert found.took_s > found.ttft_s


def test_a_route_that_was_chosen_is_told_with_its_reason() -> None:
    chosen = RouteChoice("chunked", 1, 64, "it saves most")
    (choice,) = only(shown(scenes.served(1, route="auto", choice=chosen))).choices
    assert (choice.route, choice.why) == ("chunked", "it saves most")


def ending(**more: Any) -> EndedRequest:
    """A request whose end says this."""
    owner = more.pop("owner", ())
    end = scenes.ended(1, **more)
    over = ChoiceEnded(START + SECOND, 1, 0, "cpu", 2, end, (), owner)
    answered = Answered(START + SECOND, 1, Terminal.FINISHED, 200, True, "")
    return only(shown([scenes.arrived(1), over, answered]))


def test_no_share_is_claimed_below_timer_noise_or_of_one_thread() -> None:
    below = ending(measured=scenes.measured(import_ns=99_999)).choices[0]
    assert (below.hidden_share, below.alone_s) == (None, 99_999e-9)
    at = ending(measured=scenes.measured(import_ns=100_000)).choices[0]
    assert at.hidden_share == pytest.approx(1 - 20)
    reuse = Reuse(500, "owner", "as much as was kept")
    local = ending(measured=scenes.measured(), reuse=reuse).choices[0]
    assert (local.local, local.hidden_share, local.cached_tokens) == (True, None, 500)
    assert (local.tail_s, local.alone_s, local.bytes_before_prefill_end) == (None, None, None)
    local = ending(measured=scenes.measured(), local=True).choices[0]
    assert (local.local, local.hidden_share) == (True, None)


def test_without_figures_there_are_none() -> None:
    choice = ending().choices[0]
    assert (choice.tail_s, choice.hidden_share, choice.kv_bytes) == (None, None, None)
    reversed_ = ending(measured=scenes.measured(published_ns=START)).choices[0]
    assert (reversed_.tail_s, reversed_.hidden_share) == (None, None)


def test_a_choice_may_end_after_its_request() -> None:
    """A client that leaves has its terminal before the owner has drained."""
    *before, over, answered = scenes.traced(1, terminal=Terminal.CLIENT_LEFT)
    recent = listening([*before, answered])
    assert only(recent.snapshot(START)).choices == ()
    recent(over)
    found = only(recent.snapshot(START))
    assert found.choices[0].traced
    assert found.trace


def test_the_latest_come_first() -> None:
    state = shown(scenes.busy())
    assert [each.request for each in state.ended] == [6, 5, 4, 3, 2, 1]
    assert [each.request for each in state.open] == [16, 15, 14, 13, 12, 11]


# Rates, medians, the queue, faults.


def test_rates_are_of_whole_seconds() -> None:
    events: list[Event] = [scenes.arrived(1)]
    events += [Decoded(START + n * SECOND // 4, 1, 0, n) for n in range(80)]  # for 20 s
    rates = shown(events, START + 20 * SECOND + MS).rates
    assert rates.tokens_per_s == 4
    assert rates.history == (0,) * 40 + (4,) * 20
    assert shown(events[:9], START + 2 * SECOND).rates.tokens_per_s == 4  # up for 2 s only
    assert shown(events, START + 25 * SECOND).rates.tokens_per_s == 2
    assert shown(events, START + 40 * SECOND).rates.tokens_per_s == 0


def test_what_comes_late_counts_for_the_latest_second() -> None:
    events: list[Event] = [Decoded(START + 2 * SECOND, 1, 0, 0), Decoded(START + SECOND, 1, 0, 1)]
    assert shown(events, START + 3 * SECOND).rates.history[-2:] == (0, 2)


def test_medians_are_of_the_last_minutes() -> None:
    events: list[Event] = []
    for number in range(1, 101):
        events += [scenes.arrived(number), Decoded(START + number * MS, number, 0, 0)]
    events.append(Decoded(START + 107 * MS, 100, 0, 1))
    rates = shown(events, START + SECOND).rates
    assert (rates.ttft.p50_s, rates.ttft.p99_s, rates.ttft.samples) == (0.05, 0.099, 100)
    assert (rates.token.p50_s, rates.token.samples) == (0.007, 1)
    rates = shown(events, START + 301 * SECOND).rates
    assert (rates.ttft.p50_s, rates.ttft.samples, rates.token.samples) == (None, 0, 0)


def test_requests_that_had_their_terminal_are_a_rate() -> None:
    events = [
        event
        for number in range(5)
        for event in (
            scenes.arrived(number),
            Answered(START + SECOND, number, Terminal.FINISHED, 200, True, ""),
        )
    ]
    assert shown(events, START + 11 * SECOND).rates.requests_per_s == 0.5


def test_the_queue_is_as_it_was_last() -> None:
    state = shown([QueueChanged(START, 9, 99), QueueChanged(START, 2, 64)])
    assert (state.queue.waiting, state.queue.nbytes) == (2, 64)


def test_faults_are_counted_by_reason() -> None:
    state = shown(scenes.busy())
    assert counted(state, "ended") == {"deadline": 1}
    assert counted(state, "rejected") == {"queue-full": 2}
    assert counted(state, "dropped") == {"late": 3}
    assert counted(state, "retries") == {"an attempt that another followed": 1}
    state = shown(scenes.quarantined())
    assert counted(state, "quarantined") == {scenes.LOST: 1}
    assert counted(shown(scenes.empty()), "restarts") == {}


def test_counts_go_on_over_incarnations_and_never_twice() -> None:
    dropped = scenes.report(statistics=(("dropped", "late", 2), ("restarts", "restarted", 1)))
    events: list[Event] = [scenes.ready()]
    events += [scenes.looked(START, dropped)] * 3
    events.append(scenes.ready(incarnation=1))
    assert counted(shown(events), "dropped") == {"late": 2}
    events += [scenes.looked(START, dropped, incarnation=1)] * 2
    late = scenes.report(statistics=(("dropped", "late", 99),), lanes_free=77)
    events.append(scenes.looked(START, late, incarnation=0))
    state = shown(events)
    assert counted(state, "dropped") == {"late": 4}
    assert state.decoders[0].lanes_free == 4
    assert counted(state, "restarts") == {
        "a source was started again": 2,
        "an owner was started again": 1,
    }


def test_an_owner_that_is_gone_holds_nothing() -> None:
    events = [*scenes.quarantined(), DecoderChanged(START, "cpu", "set aside", "it died", 0, 0)]
    (decoder,) = shown(events).decoders
    assert (decoder.state, decoder.reason) == ("set aside", "it died")
    assert (decoder.lanes, decoder.sources, decoder.lanes_free) == ((), (), 0)


# What a decoder holds.


def test_slots_are_told_with_their_source() -> None:
    (decoder,) = shown(scenes.busy(), notes={("cpu", "rngd"): "emulated"}).decoders
    torch, rngd = decoder.sources
    assert (torch.name, torch.note, rngd.note) == ("torch", "", "emulated")
    held = [(slot.slot, slot.state, slot.request) for slot in torch.slots]
    assert held == [(0, "reading", 12), (1, "ready", 14)]
    assert rngd.slots[0].tokens == ("write",)
    assert [(lane.state, lane.request) for lane in decoder.lanes] == [
        ("published", 11),
        ("reserved", 12),
        ("reserved", 13),
    ]
    assert decoder.looked_s == 1


def test_slots_of_a_source_that_is_not_named_are_told() -> None:
    events = [scenes.looked(START, scenes.report(sources=(scenes.source(0, "torch"),)))]
    (decoder,) = shown(events).decoders
    assert [(each.source, each.name, len(each.slots)) for each in decoder.sources] == [
        (0, "torch", 2),
        (1, "", 2),
    ]


def test_what_is_quarantined_is_still_known_by_its_request() -> None:
    (decoder,) = shown(scenes.quarantined()).decoders
    lane, slot = decoder.lanes[-1], decoder.sources[1].slots[1]
    assert (lane.state, lane.request, lane.for_s) == ("quarantined", 7, 41)
    assert (slot.state, slot.request, slot.holder) == ("quarantined", 7, str(scenes.attempt(7)))
    assert decoder.quarantined[0].reason == scenes.LOST


# Swimlanes and traces.


def test_a_drawing_has_the_groups_the_imports_and_the_marks() -> None:
    (drawing,) = shown(scenes.traced(1)).drawings
    assert (drawing.evidence, drawing.clocks, drawing.route) == ("host", "one", "streamed")
    kinds = [bar.kind for bar in drawing.source]
    assert (kinds.count("compute"), kinds.count("write")) == (18, 18)
    assert drawing.source[0].layers == "layer 0"
    assert [bar.kind for bar in drawing.owner].count("import") == 18
    marks = {mark.kind: mark.at_us for mark in drawing.marks}
    assert marks["granted"] == 0
    assert drawing.tail == (marks["final"], marks["published"])
    assert marks["published"] < marks["first_token"] < drawing.ended_us
    assert all(bar.ended_us <= drawing.ended_us for bar in (*drawing.source, *drawing.owner))


def test_a_drawing_of_clocks_that_contradict_each_other_leaves_the_source_out() -> None:
    *events, over, answered = scenes.traced(1)
    assert isinstance(over, ChoiceEnded)
    by = {"compute": -SECOND, "announced": SECOND}
    source = [moved((each,), by.get(each.kind, 0))[0] for each in over.source_intervals]
    (drawing,) = shown([*events, replace(over, source_intervals=tuple(source)), answered]).drawings
    assert drawing.clocks == "contradictory"
    assert drawing.source == ()
    assert drawing.tail is None
    assert "final" not in {mark.kind for mark in drawing.marks}


def test_what_was_parked_is_drawn_as_that_and_is_no_part_of_the_tail() -> None:
    state = shown(scenes.served(1, lanes=page_lanes.parked(START)))
    (drawing,), choice = state.drawings, only(state).choices[0]
    waited = next(bar for bar in drawing.owner if bar.kind == "parked")
    assert drawing.tail is not None
    begun_us, ended_us = drawing.tail
    assert begun_us == waited.ended_us
    assert choice.tail_s == pytest.approx((ended_us - begun_us) / 1e6)
    assert choice.bytes_before_prefill_end == 0


def test_a_drawing_begins_with_the_grant() -> None:
    """Steps of others may have been going on for long while it waited."""
    *events, over, answered = scenes.traced(1)
    assert isinstance(over, ChoiceEnded)
    step = next(each for each in over.owner_intervals if each.kind == "neighbour")
    granted_ns = over.owner_intervals[0].begun_ns
    before = replace(step, begun_ns=granted_ns - SECOND, ended_ns=granted_ns - MS)
    across = replace(step, begun_ns=granted_ns - MS, ended_ns=granted_ns + MS)
    owner = (*over.owner_intervals, before, across)
    (drawing,) = shown([*events, replace(over, owner_intervals=owner), answered]).drawings
    steps = [bar for bar in drawing.owner if bar.kind == "neighbour"]
    assert (drawing.begun_us, len(steps)) == (0, 7)
    assert (steps[0].begun_us, steps[0].ended_us) == (0, 1_000)


def test_a_drawing_says_what_it_was_read_from() -> None:
    *events, over, answered = scenes.traced(1)
    run = on_devices()
    both = {"source_intervals": run.source, "owner_intervals": run.owner}
    assert isinstance(over, ChoiceEnded)
    (drawing,) = shown([*events, replace(over, **both), answered]).drawings
    assert drawing.evidence == "device"


def test_what_published_nothing_is_drawn_to_its_end() -> None:
    lanes = page_lanes.streamed(START, until=11)
    (drawing,) = shown(scenes.served(1, lanes=lanes, terminal=Terminal.DEADLINE)).drawings
    assert drawing.tail is None
    assert {mark.kind for mark in drawing.marks} == {"granted", "ended"}


def test_a_drawing_has_few_bars_whatever_there_is() -> None:
    *events, over, answered = scenes.traced(1)
    assert isinstance(over, ChoiceEnded)
    step = next(each for each in over.owner_intervals if each.kind == "neighbour")
    at = range(step.begun_ns, step.begun_ns + 5_000_000, 1_000)
    steps = tuple(replace(step, begun_ns=each, ended_ns=each + 900) for each in at)
    many = replace(over, owner_intervals=(*over.owner_intervals, *steps))
    (drawing,) = shown([*events, many, answered]).drawings
    bars = [bar for bar in drawing.owner if bar.kind == "neighbour"]
    assert len(bars) <= MAX_BARS
    assert sum(bar.count for bar in bars) == 5_000 + 6


def test_a_trace_is_what_headrace_trace_reads(tmp_path: Path, capsys: Any) -> None:
    recent = listening(scenes.busy(), stamp={"pair": "torch to cpu"})
    kept = recent.recording_of(3)
    assert kept is not None
    file = tmp_path / "trace.json"
    file.write_bytes(encode(kept))
    recording = read(file)
    (run,) = recording.runs
    assert (run.name, run.route, run.num_tokens) == ("request 3", "whole", 96)
    assert recording.stamp == {"pair": "torch to cpu"}
    assert run_command(["trace", str(file)]) == 0
    assert "96 prompt tokens, finished" in capsys.readouterr().out
    assert recent.recording_of(4) != kept
    assert recent.recording_of(99) is None
    assert recent.recording_of(16) is None  # open, and nothing was traced


def test_each_choice_has_a_run() -> None:
    source, owner = page_lanes.streamed(START)
    events: list[Event] = [
        scenes.arrived(1, choices=2),
        *(ChoiceEnded(START, 1, n, "cpu", 1, scenes.ended(n), source, owner) for n in (1, 0)),
    ]
    kept = listening(events).recording_of(1)
    assert kept is not None
    assert [run.name for run in kept.runs] == ["request 1, choice 0", "request 1, choice 1"]


# Bounds.


def test_ten_thousand_requests_leave_no_more_than_a_few_hundred() -> None:
    """What is kept is as large after the second five thousand as after the first."""
    recent = Recent(PageConfig(recent=64), max_traced_nbytes=200_000)
    sizes = []
    for number in range(10_000):
        one = scenes.served if number % 50 else scenes.traced
        for event in one(number, START + number * MS, tokens=4):
            recent(event)
        if number in (4_999, 9_999):
            sizes.append(reached(recent))
    state = recent.snapshot(START + 10_000 * MS)
    assert (len(state.ended), state.num_open) == (64, 0)
    assert recent.traced_nbytes <= 200_000
    assert sizes[1] <= 1.05 * sizes[0]


def reached(root: object) -> int:
    """The bytes of all that can be reached from an object, but for types and modules."""
    seen: dict[int, object] = {}
    waiting: list[object] = [root]
    while waiting:
        each = waiting.pop()
        outside = callable(each) or isinstance(each, type(sys))
        if id(each) not in seen and (each is root or not outside):
            seen[id(each)] = each
            waiting += gc.get_referents(each)
    return sum(sys.getsizeof(each) for each in seen.values())


def test_requests_that_never_end_are_forgotten_in_the_end() -> None:
    recent = Recent(PageConfig())
    for number in range(MAX_OPEN + 100):
        recent(scenes.arrived(number))
        recent(Dispatched(START, number, 0, "cpu", number))
    state = recent.snapshot(START)
    assert state.num_open == MAX_OPEN
    assert len(state.open) == MAX_SHOWN_OPEN
    assert state.open[0].request == MAX_OPEN + 99
    report = scenes.report(
        lanes=(LaneHeld(scenes.attempt(5), "reserved", "", 0),),
        requests=(scenes.held_request(5, "streaming"),),
    )
    recent(scenes.ready())
    recent(scenes.looked(START, report))
    assert recent.snapshot(START).decoders[0].lanes[0].request is None
    recent(ChoiceEnded(START, 5, 0, "cpu", 0, scenes.ended(5), (), ()))  # forgotten: of no effect
    assert recent.snapshot(START).num_open == MAX_OPEN


def test_intervals_are_bounded_in_bytes_and_the_oldest_go_first() -> None:
    one = listening(scenes.traced(1)).traced_nbytes
    recent = Recent(PageConfig(), max_traced_nbytes=3 * one + one // 2)
    for number in range(1, 9):
        for event in scenes.traced(4 * number, START):
            recent(event)
    state = recent.snapshot(START)
    assert [each.trace for each in state.ended] == [True] * 3 + [False] * 5
    assert [each.choices[0].traced for each in state.ended] == [True] * 3 + [False] * 5
    assert (len(state.drawings), recent.traced_nbytes) == (3, 3 * one)
    assert recent.recording_of(4) is None
    assert recent.recording_of(32) is not None


def test_no_trace_is_larger_than_one_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a request with many choices those are kept that fit; the others are shown without."""
    one = listening(scenes.traced(1)).traced_nbytes
    monkeypatch.setattr(module, "MAX_TRACE_NBYTES", 2 * one + one // 2)
    arrived, *_ = scenes.traced(1)
    assert isinstance(arrived, Arrived)
    over = next(each for each in scenes.traced(1) if isinstance(each, ChoiceEnded))
    recent = listening([replace(arrived, choices=4)])
    for number in (0, 1, 2, 2, 3, 0):
        recent(replace(over, choice=number))
        assert recent.traced_nbytes <= 2 * one
    kept = recent.recording_of(1)
    assert kept is not None
    assert [run.name for run in kept.runs] == ["request 1, choice 0", "request 1, choice 1"]


def test_a_request_larger_than_all_may_be_is_shown_without_its_intervals() -> None:
    recent = listening(scenes.traced(1), max_traced_nbytes=100)
    found = only(recent.snapshot(START))
    assert (found.trace, recent.traced_nbytes) == (False, 0)
    assert found.choices[0].tail_s is not None


def test_what_goes_off_the_list_takes_its_bytes_along() -> None:
    recent = Recent(PageConfig(recent=2))
    for number in range(20):
        for event in scenes.traced(4 * number):
            recent(event)
    two = recent.traced_nbytes
    assert len(recent.snapshot(START).ended) == 2
    assert two == 2 * listening(scenes.traced(4)).traced_nbytes


def test_none_are_kept_where_none_are_asked_for() -> None:
    recent = Recent(PageConfig(recent=0))
    for event in scenes.traced(1):
        recent(event)
    state = recent.snapshot(START + 10 * SECOND)
    assert (state.ended, state.drawings, recent.traced_nbytes) == ((), (), 0)
    assert state.rates.requests_per_s > 0
    assert recent.recording_of(1) is None


def test_choices_are_bounded_too() -> None:
    recent = Recent(PageConfig(recent=1024))
    for number in range(MAX_CHOICES // 128 + 8):
        recent(scenes.arrived(number, choices=128))
        recent(Answered(START, number, Terminal.FINISHED, 200, True, ""))
    assert len(recent.snapshot(START).ended) == MAX_CHOICES // 128


def test_drawings_are_few() -> None:
    events = [event for number in range(MAX_DRAWN + 4) for event in scenes.traced(number)]
    drawings = shown(events).drawings
    assert [each.request for each in drawings] == list(range(MAX_DRAWN + 3, 3, -1))


def test_texts_are_cut() -> None:
    long = "x" * 10_000
    events = [
        *scenes.served(1, label=long, model=long, terminal=Terminal.BUG, reason=long),
        DecoderChanged(START, "cpu", "waiting", long, 0, 0),
    ]
    state = shown(events)
    texts = [only(state).label, only(state).model, only(state).reason, state.decoders[0].reason]
    texts.append(only(state).choices[0].reason)
    assert {len(text) for text in texts} == {MAX_SHOWN_TEXT}


def test_what_is_not_shown_of_a_request_is_not_kept() -> None:
    long = "".join(map(str, range(100_000)))
    recent = listening([scenes.arrived(1, client=long, traceparent=long[1:], label=long[2:])])
    assert reached(recent) < 100_000


def test_reasons_are_bounded_in_number() -> None:
    apart = tuple(Quarantined(scenes.attempt(n), f"reason {n}", 0) for n in range(100))
    found = counted(shown([scenes.looked(START, scenes.report(quarantined=apart))]), "quarantined")
    assert len(found) == MAX_REASONS + 1
    assert found[OTHER] == 100 - MAX_REASONS
    assert list(found)[-1] == OTHER


def test_decoders_are_bounded_in_number() -> None:
    events = [scenes.ready(name=f"decoder {n}") for n in range(MAX_DECODERS + 5)]
    assert len(shown(events).decoders) == MAX_DECODERS


def test_what_was_rejected_needs_no_request() -> None:
    events: list[Event] = [
        Rejected(START, "chat", Terminal.UNAUTHORIZED, 401, "no key"),
        Answered(START, 12, Terminal.BUG, 500, False, "never arrived"),
    ]
    state = shown(events)
    assert counted(state, "rejected") == {"unauthorized": 1}
    assert counted(state, "ended") == {"bug": 1}
    assert state.ended == ()
