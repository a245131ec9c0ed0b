"""Metrics: what each event adds, that counters never fall, and that the series stay few."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, get_args

import pytest
from msgspec.structs import replace
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as text_format
from starlette.applications import Starlette
from starlette.testclient import TestClient

from headrace.messages import ChoiceKind, Reuse, RouteChoice, SlotHeld, SourceHeld
from headrace.runtime.roster import OWN_ENGINE
from headrace.server import label_words
from headrace.server.events import Arrived, Event, Events, QueueChanged, Rejected, Served
from headrace.server.label_words import OTHER, ROUTE_REASONS
from headrace.server.metrics import Metrics
from headrace.server.metrics_route import metrics_route
from headrace.server.ongoing import MAX_LINGERING, Ongoing
from headrace.server.terminals import STATUS, Terminal
from tests.unit.server import happenings as on
from tests.unit.server.happenings import DECODER, MODEL, MS, SOURCE

DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"


def told(events: Iterable[Event]) -> Metrics:
    metrics = on.metrics()
    for event in events:
        metrics.take(event)
    return metrics


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics._on.registry.get_sample_value(f"headrace_{name}", labels)


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    _, body = metrics.exposition()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_format(body.decode())
        for sample in family.samples
    }


# Requests.


def test_the_times_of_a_request() -> None:
    metrics = told(on.finished())
    for name, count, total_s in (
        ("time_to_first_token_seconds", 1, 0.140),
        ("request_queue_time_seconds", 1, 0.010),
        ("request_prefill_time_seconds", 1, 0.130),
        ("request_decode_time_seconds", 1, 0.050),
        ("inter_token_latency_seconds", 2, 0.050),
        ("request_time_per_output_token_seconds", 1, 0.025),
        ("e2e_request_latency_seconds", 1, 0.200),
        ("request_prompt_tokens", 1, 100),
        ("request_generation_tokens", 1, 3),
    ):
        assert value(metrics, f"{name}_count", model_name=MODEL) == count, name
        assert value(metrics, f"{name}_sum", model_name=MODEL) == pytest.approx(total_s), name
    assert value(metrics, "generation_tokens_total", model_name=MODEL) == 3
    found = value(metrics, "requests_total", endpoint="chat", terminal="finished", status="200")
    assert found == 1


def test_of_several_choices_the_first_token_of_any_counts_and_each_has_its_own_token_times() -> (
    None
):
    metrics = told(
        [
            on.arrived(choices=2),
            on.dispatched(choice=0),
            on.dispatched(at_ms=30, choice=1),
            on.decoded(100, choice=1),
            on.decoded(110, choice=0),
            on.decoded(130, 1, choice=1),
            on.decoded(150, 1, choice=0),
        ]
    )
    assert value(metrics, "time_to_first_token_seconds_sum", model_name=MODEL) == 0.1
    assert value(metrics, "inter_token_latency_seconds_sum", model_name=MODEL) == 0.07
    assert value(metrics, "request_queue_time_seconds_count", model_name=MODEL) == 2


def test_a_request_waits_then_runs_then_is_gone() -> None:
    metrics = on.metrics()

    def now() -> tuple[float | None, float | None]:
        waiting = value(metrics, "num_requests_waiting", model_name=MODEL)
        return waiting, value(metrics, "num_requests_running", model_name=MODEL)

    assert now() == (0, 0)
    metrics.take(on.arrived(choices=2))
    metrics.take(on.arrived(2))
    assert now() == (2, 0)
    metrics.take(on.dispatched(choice=0))
    metrics.take(on.dispatched(choice=1))
    assert now() == (1, 1)
    metrics.take(on.answered(2, terminal=Terminal.DEADLINE))
    assert now() == (0, 1)
    metrics.take(on.answered(1, terminal=Terminal.CLIENT_LEFT))
    assert now() == (0, 0)
    metrics.take(on.choice_ended(1))
    metrics.take(on.answered(1))
    assert now() == (0, 0)


@pytest.mark.parametrize(
    ("terminal", "num_tokens", "reason"),
    [
        (Terminal.FINISHED, 3, "length"),
        (Terminal.FINISHED, 2, "stop"),
        (Terminal.CLIENT_LEFT, 3, "abort"),
        (Terminal.SOURCE_DIED, 3, "error"),
    ],
)
def test_why_a_request_ended(terminal: Terminal, num_tokens: int, reason: str) -> None:
    tokens = [on.decoded(140 + index, index) for index in range(num_tokens)]
    answered = on.answered(terminal=terminal)  # before the owner heard that a stop text was found
    metrics = told([on.arrived(), on.dispatched(), *tokens, answered, on.choice_ended()])
    for each in label_words.FINISHED_REASONS:
        found = value(metrics, "request_success_total", model_name=MODEL, finished_reason=each)
        assert found == (each == reason)
    tokens_told = value(metrics, "request_generation_tokens_sum", model_name=MODEL)
    assert tokens_told == (num_tokens if terminal is Terminal.FINISHED else None)
    count = value(metrics, "e2e_request_latency_seconds_count", model_name=MODEL)
    assert count == (1 if terminal is Terminal.FINISHED else None)


def test_a_refused_request_is_counted_by_its_terminal_and_the_queue_is_told() -> None:
    metrics = told(
        [
            Rejected(0, "completions", Terminal.QUEUE_FULL, 429, "full"),
            QueueChanged(0, 7, 4_000),
        ]
    )
    labels = {"endpoint": "completions", "terminal": "queue-full", "status": "429"}
    assert value(metrics, "requests_total", **labels) == 1
    assert value(metrics, "queue_choices") == 7
    assert value(metrics, "queue_bytes") == 4_000


@pytest.mark.parametrize("endpoint", ["tokenize", "models"])
def test_what_is_answered_without_an_owner_is_counted_too(endpoint: Any) -> None:
    metrics = told([Served(0, endpoint, 200), Served(0, endpoint, 200)])
    labels = {"endpoint": endpoint, "terminal": "finished", "status": "200"}
    assert value(metrics, "requests_total", **labels) == 2


def test_each_end_of_a_completion_is_there_before_it_first_happens() -> None:
    """A series that begins with its first count has no rate, and raises no alarm."""
    metrics = on.metrics()
    for endpoint in ("completions", "chat"):
        for terminal, status in STATUS.items():
            labels = {"terminal": terminal.value, "status": str(status)}
            assert value(metrics, "requests_total", endpoint=endpoint, **labels) == 0
    before = samples(metrics)
    answers = [on.answered(1, terminal=terminal) for terminal in Terminal]
    metrics.take(on.arrived())
    for answer in answers:
        metrics.take(answer)
    ended = {key for key in samples(metrics) if key[0] == "headrace_requests_total"}
    assert {dict(labels)["endpoint"] for _, labels in ended - set(before)} == {OTHER}


# Hand-offs.


def test_the_exposed_tail_is_told_apart_from_waiting_for_a_lane() -> None:
    figures = on.measured(storage_ns=125 * MS, parked_ns=60 * MS)
    metrics = told(on.finished(ended=on.ended(measured=figures)))
    labels = {"decoder": DECODER, "route": "streamed"}
    assert value(metrics, "transfer_tail_seconds_sum", **labels) == pytest.approx(0.005)
    assert shares(metrics) == {"0.95": 1, "0.99": 1, "1.0": 1, "+Inf": 1}  # it is 0.95
    assert value(metrics, "parked_seconds_sum", decoder=DECODER) == pytest.approx(0.06)


def shares(metrics: Metrics) -> dict[str, float]:
    """How many were hidden by no more than each bound, of the streamed route."""
    return {
        dict(labels)["le"]: count
        for (name, labels), count in samples(metrics).items()
        if name == "headrace_transfer_hidden_ratio_bucket" and count
    }


def test_a_rate_of_bytes_is_over_the_time_of_all_imports_not_of_the_last() -> None:
    """10 x 1 MiB in 10 ms each, of which one lies in the tail: 105 MB/s, and not ten times it."""
    metrics = told(on.finished())
    nbytes = value(metrics, "kv_bytes_imported_total", decoder=DECODER)
    seconds = value(metrics, "kv_import_time_seconds_sum", decoder=DECODER, route="streamed")
    assert nbytes is not None
    assert seconds is not None
    assert nbytes / seconds == pytest.approx(104.9e6, rel=0.1)
    early = value(metrics, "kv_bytes_imported_before_prefill_end_total", decoder=DECODER)
    assert early == 9 << 20
    assert value(metrics, "kv_transfer_bytes_sum", decoder=DECODER) == 10 << 20
    more = on.measured(nbytes_before_final=11 << 20)  # than there were
    metrics = told(on.finished(ended=on.ended(measured=more)))
    early = value(metrics, "kv_bytes_imported_before_prefill_end_total", decoder=DECODER)
    assert early == 10 << 20


@pytest.mark.parametrize(
    ("figures", "tails", "num_shares"),
    [
        ({"import_ns": 50_000}, 1, 0),  # T below timer noise
        ({"published_ns": 119 * MS}, 0, 0),  # readings that contradict each other
        ({"source_final_ns": 0, "storage_ns": 1}, 0, 0),  # nobody told when the prefill ended
        ({"imports": 0, "import_ns": 0}, 0, 0),  # all of it was kept
        ({"kv_nbytes": 0}, 0, 0),  # a prompt of which nothing is to be moved
        ({"published_ns": 420 * MS}, 1, 1),  # a share below zero is told as it is
    ],
)
def test_what_is_no_figure_is_not_observed(
    figures: dict[str, int], tails: int, num_shares: int
) -> None:
    metrics = told(on.finished(ended=on.ended(measured=on.measured(**figures))))
    labels = {"decoder": DECODER, "route": "streamed"}
    assert (value(metrics, "transfer_tail_seconds_count", **labels) or 0) == tails
    assert shares(metrics).get("+Inf", 0) == num_shares
    if figures == {"published_ns": 420 * MS}:
        assert shares(metrics)["-1.0"] == 1
        assert "-10.0" not in shares(metrics)


@pytest.mark.parametrize(
    ("reuse", "local", "tokens"),
    [
        (None, False, {"transferred": 100}),
        (None, True, {"computed": 100}),
        (Reuse(0, "source", ""), False, {"transferred": 100}),
        (Reuse(30, "source", ""), False, {"cached": 30, "transferred": 70}),
        (Reuse(30, "owner", ""), False, {"cached": 30, "computed": 70}),
        (Reuse(100, "none", ""), False, {"cached": 100}),
    ],
)
def test_the_sources_of_prompt_tokens_sum_to_the_prompt(
    reuse: Reuse | None, local: bool, tokens: dict[str, int]
) -> None:
    metrics = told(on.finished(ended=on.ended(reuse=reuse, local=local)))
    found = {
        source: value(metrics, "prompt_tokens_total", model_name=MODEL, source=source)
        for source in label_words.TOKEN_SOURCES
    }
    assert {source: count for source, count in found.items() if count} == tokens
    asked = value(metrics, "prefix_cache_queries_total", model_name=MODEL)
    assert asked == (None if reuse is None else 100)
    hits = value(metrics, "prefix_cache_hits_total", model_name=MODEL)
    assert hits == (None if reuse is None else reuse.positions)


def test_each_choice_counts_its_own_prompt_where_a_request_has_several() -> None:
    metrics = told(
        [
            on.arrived(num_prompt_tokens=150, choices=2),
            on.choice_ended(num_prompt_tokens=100),
            on.choice_ended(choice=1, num_prompt_tokens=50),
        ]
    )
    found = value(metrics, "prompt_tokens_total", model_name=MODEL, source="transferred")
    assert found == 150


def test_only_what_was_published_counts_as_prompt_tokens() -> None:
    failed = on.ended(outcome="failed", cause="source-died", measured=None)
    metrics = told([on.arrived(), on.dispatched(), on.choice_ended(ended=failed)])
    for source in label_words.TOKEN_SOURCES:
        assert value(metrics, "prompt_tokens_total", model_name=MODEL, source=source) == 0
    assert value(metrics, "handoffs_total", decoder=DECODER, outcome="source-died") == 1


@pytest.mark.parametrize(
    ("attempts", "retries", "local"),
    [
        ((), 0, False),
        (("it died", "it died again"), 2, False),
        (("it died",), 0, True),
        ((), 0, True),  # no source was in service
    ],
)
def test_attempts_that_followed_others(
    attempts: tuple[str, ...], retries: int, local: bool
) -> None:
    metrics = told(on.finished(ended=on.ended(attempts=attempts, local=local)))
    assert value(metrics, "fallback_total", decoder=DECODER, reason="retry") == retries
    assert value(metrics, "fallback_total", decoder=DECODER, reason="local") == local
    tails = value(metrics, "transfer_tail_seconds_count", decoder=DECODER, route="streamed")
    assert tails == (None if local else 1)


def test_routes_that_were_asked_for_and_those_that_auto_took() -> None:
    chosen = on.ended(choice=RouteChoice("streamed", 2, 0, on.PREDICTED))
    refused = on.ended(outcome="failed", mistake="route", measured=None)
    metrics = told(
        [
            *on.finished(1),
            on.arrived(2, route="auto"),
            on.choice_ended(2, ended=chosen),
            on.arrived(3, route="auto"),
            on.choice_ended(3, ended=on.ended(outcome="failed", measured=None)),
            on.arrived(4),
            on.choice_ended(4, ended=refused),
        ]
    )
    counted = {
        tuple(sample.labels[name] for name in ("decoder", "route", "reason")): sample.value
        for family in metrics._on.registry.collect()
        for sample in family.samples
        if sample.name == "headrace_route_total"
    }
    assert counted == {(DECODER, "streamed", "asked"): 1, (DECODER, "streamed", "predicted"): 1}
    assert value(metrics, "handoffs_total", decoder=DECODER, outcome="refused") == 1
    assert value(metrics, "handoffs_total", decoder=DECODER, outcome=OTHER) == 1


@pytest.mark.parametrize("kind", get_args(ChoiceKind))
def test_why_auto_took_a_route_is_a_word_whatever_it_tells_a_reader(kind: Any) -> None:
    chosen = on.ended(choice=RouteChoice("whole", 1, 0, "as it were", kind))
    metrics = told([on.arrived(route="auto"), on.choice_ended(ended=chosen)])
    assert value(metrics, "route_total", decoder=DECODER, route="whole", reason=kind) == 1
    assert kind in ROUTE_REASONS


# Owners.


def test_what_an_owner_holds() -> None:
    metrics = told([on.decoder_changed("ready"), on.looked()])
    held = {key: count for key, count in samples(metrics).items() if count}

    def held_of(name: str) -> dict[tuple[str, ...], float]:
        return {
            tuple(text for _, text in labels): count
            for (found, labels), count in held.items()
            if found == f"headrace_{name}"
        }

    assert held_of("lanes") == {
        (DECODER, "free"): 2,
        (DECODER, "published"): 1,
        (DECODER, "quarantined"): 1,
    }
    assert held_of("slots") == {
        (DECODER, SOURCE, "reading"): 1,
        (DECODER, SOURCE, "free"): 1,
        (DECODER, "torch-2", "quarantined"): 1,
    }
    assert held_of("sources") == {(DECODER, "in service"): 1, (DECODER, "waiting to restart"): 1}
    assert held_of("progress_rejects_total") == {(DECODER, "stale"): 2, (DECODER, "late"): 1}
    assert held_of("source_restarts_total") == {(DECODER, SOURCE): 1}
    assert held_of("quarantined_lanes") == held_of("quarantined_slots") == {(DECODER,): 1}
    assert held_of("decoder_up") == {(DECODER,): 1}
    assert held_of("decoder_state") == {(DECODER, "ready"): 1}


def test_the_owners_own_engine_is_none_of_its_sources() -> None:
    """Else an owner that computes by itself would look as if it had one in service."""
    for state in ("in service", "set aside"):
        own = SourceHeld(9, OWN_ENGINE, state, "", 0, 0)
        slot = SlotHeld(9, 0, 1, "free", None, (), 0)
        gone = [replace(each, state="set aside") for each in on.report().sources]
        metrics = told([on.looked(sources=(*gone, own), slots=(slot,))])
        counts = {
            each: value(metrics, "sources", decoder=DECODER, state=each)
            for each in label_words.SOURCE_STATES
        }
        assert {each: count for each, count in counts.items() if count} == {"set aside": 2}
        assert value(metrics, "slots", decoder=DECODER, source=OWN_ENGINE, state="free") == 1
    assert value(metrics, "source_restarts_total", decoder=DECODER, source=OWN_ENGINE) is None


def test_starts_that_failed_are_counted_though_nothing_took_a_place() -> None:
    metrics = on.metrics()
    assert value(metrics, "source_start_failures_total", decoder=DECODER) == 0
    for incarnation, count, total in ((0, 1, 1), (0, 4, 4), (1, 2, 6)):
        metrics.take(on.looked(incarnation, statistics=(("restarts", "start_failed", count),)))
        assert value(metrics, "source_start_failures_total", decoder=DECODER) == total


def slots_of(metrics: Metrics) -> dict[tuple[str, str], float]:
    return {
        (dict(labels)["source"], dict(labels)["state"]): count
        for (name, labels), count in samples(metrics).items()
        if name == "headrace_slots" and dict(labels)["decoder"] == DECODER
    }


@pytest.mark.parametrize("num_listed", [0, 1, 2])
def test_slots_whose_lines_did_not_fit_are_counted_under_no_source(num_listed: int) -> None:
    counted = {"free": 4_000, "reading": 96}
    statistics = tuple(("slots", state, counted.get(state, 0)) for state in label_words.SLOT_STATES)
    listed = on.report().slots[:num_listed]
    short = on.looked(statistics=statistics, slots=listed, truncated=True)
    metrics = told([on.decoder_changed("ready"), on.looked(), short])
    found = slots_of(metrics)
    assert {source for source, _ in found} == {OTHER}
    assert {state: count for (_, state), count in found.items() if count} == counted
    metrics.take(on.looked())
    assert {source for source, _ in slots_of(metrics)} == {SOURCE, "torch-2", OWN_ENGINE}
    metrics.take(on.looked(statistics=(), slots=listed, truncated=True))
    assert slots_of(metrics) == {}  # nobody counted them


def test_lanes_whose_lines_may_not_have_fitted_have_no_series() -> None:
    def lanes(metrics: Metrics) -> set[str]:
        return {
            dict(labels)["state"]
            for name, labels in samples(metrics)
            if name == "headrace_lanes" and dict(labels)["decoder"] == DECODER
        }

    metrics = told([on.looked(truncated=True)])
    assert lanes(metrics) == set(label_words.LANE_STATES)  # slots are left out before lanes
    metrics.take(on.looked(truncated=True, slots=(), lanes=()))
    assert lanes(metrics) == {"free", "quarantined"}
    metrics.take(on.looked(truncated=True, slots=(), lanes=(), statistics=()))
    assert lanes(metrics) == {"free"}
    metrics.take(on.decoder_changed("waiting"))
    assert lanes(metrics) == set(label_words.LANE_STATES)


def test_what_is_quarantined_is_told_though_its_lines_did_not_fit_the_message() -> None:
    metrics = told([on.looked(lanes=(), slots=(), requests=(), truncated=True)])
    assert value(metrics, "quarantined_lanes", decoder=DECODER) == 1
    assert value(metrics, "quarantined_slots", decoder=DECODER) == 1
    uncounted = told([on.looked(statistics=(), truncated=True)])
    assert value(uncounted, "quarantined_lanes", decoder=DECODER) == 1
    assert value(uncounted, "quarantined_slots", decoder=DECODER) == 1


def test_an_owner_that_is_gone_holds_nothing_whatever_is_heard_of_it_late() -> None:
    metrics = told([on.decoder_changed("ready"), on.looked()])
    for late in (on.decoder_changed("waiting"), on.looked()):
        metrics.take(late)
        for name in ("decoder_up", "quarantined_lanes", "quarantined_slots"):
            assert value(metrics, name, decoder=DECODER) == 0
        assert value(metrics, "lanes", decoder=DECODER, state="free") == 0
        slots = value(metrics, "slots", decoder=DECODER, source=SOURCE, state="reading")
        assert slots == 0
    metrics.take(on.decoder_changed("starting", 1))
    metrics.take(on.decoder_changed("ready", 1))
    metrics.take(on.looked(0))
    assert value(metrics, "lanes", decoder=DECODER, state="free") == 0
    metrics.take(on.looked(1))
    assert value(metrics, "lanes", decoder=DECODER, state="free") == 2


def test_owners_that_are_started_again_are_counted_once_each() -> None:
    metrics = told(
        on.decoder_changed(state, incarnation)
        for incarnation in (-1, 0, 1, 1, 3)
        for state in ("starting", "ready", "waiting")
    )
    assert value(metrics, "owner_restarts_total", decoder=DECODER) == 3
    assert value(metrics, "owner_restarts_total", decoder="right") == 0


def rejects(metrics: Metrics) -> float | None:
    return value(metrics, "progress_rejects_total", decoder=DECODER, reason="late")


def test_what_an_owner_counts_is_added_as_it_grows_and_begins_anew_with_each_owner() -> None:
    metrics = on.metrics()
    for incarnation, count, total in (
        (0, 4, 4),
        (0, 4, 4),
        (0, 6, 6),
        (0, 2, 6),  # it fell: no change
        (0, 7, 7),
        (1, 3, 10),
        (0, 9, 10),  # of an owner that is gone
        (1, 5, 12),
        (4, 0, 12),
        (4, 1, 13),
    ):
        metrics.take(on.looked(incarnation, statistics=(("dropped", "late", count),)))
        assert rejects(metrics) == total


def test_counters_never_fall_whatever_happens() -> None:
    draw = random.Random(8)
    metrics, before = on.metrics(), dict[tuple[str, tuple[tuple[str, str], ...]], float]()
    makers: list[Callable[[int], Event]] = [
        lambda n: on.arrived(n, at_ms=draw.uniform(0, 300), route=draw.choice(["auto", "whole"])),
        lambda n: on.dispatched(n, choice=draw.randrange(2)),
        lambda n: on.decoded(draw.uniform(0, 300), 0, n, draw.randrange(2)),
        lambda n: on.choice_ended(n, choice=draw.randrange(2), ended=draw.choice(ends)),
        lambda n: on.answered(n, terminal=draw.choice(list(Terminal))),
        lambda n: on.decoder_changed(draw.choice(label_words.DECODER_STATES), draw.randrange(5)),
        lambda n: on.looked(
            draw.randrange(5), statistics=(("dropped", "late", draw.randrange(9)),)
        ),
    ]
    ends = [
        on.ended(),
        on.ended(measured=None, outcome="failed", cause="stalled", attempts=("a", "b")),
        on.ended(reuse=Reuse(1_000, "source", "")),  # more than there is
        on.ended(measured=on.measured(nbytes_before_final=1 << 40)),
    ]
    for _ in range(40):
        for _ in range(25):
            metrics.take(draw.choice(makers)(draw.randrange(6)))
        now = samples(metrics)
        for key, count in before.items():
            if re.search(r"_(total|count|bucket)$", key[0]):
                assert now[key] >= count, key
        before = now


# Bounds.


def test_nothing_that_a_client_writes_becomes_a_label() -> None:
    metrics = told(on.one_of_each())
    strange = '?"\n{}'
    metrics.take(on.arrived(99, model=strange))
    metrics.take(on.choice_ended(99, decoder=strange))
    odd_ended = on.ended(
        outcome="failed", cause=strange, choice=RouteChoice("whole", 1, 0, strange)
    )
    draw, before = random.Random(1), None
    for number in range(10_000):
        odd = f"{strange}{draw.getrandbits(64)}"
        arrived = on.arrived(number, model=odd, label=odd, traceparent=odd, client=odd, route=odd)
        metrics.take(replace(arrived, endpoint=odd))
        metrics.take(replace(on.dispatched(number), decoder=odd))
        metrics.take(on.decoded(140, 0, number))
        metrics.take(on.choice_ended(number, decoder=odd, ended=replace(odd_ended, cause=odd)))
        metrics.take(replace(on.answered(number), status=number))
        if number % 100 == 0:
            metrics.take(on.looked(statistics=(("dropped", odd, 1),)))
        if number == 600:
            before = len(samples(metrics))
    assert len(samples(metrics)) == before
    assert odd not in metrics.exposition()[1].decode()
    assert len(metrics._ongoing) <= 2  # 3 and 99 were never answered
    assert len(metrics._seen) < 50


def test_requests_whose_owner_never_ends_them_do_not_pile_up() -> None:
    ongoing = Ongoing()
    over = []
    for number in range(3 * MAX_LINGERING):
        for event in (on.arrived(number), on.dispatched(number), on.answered(number)):
            over += ongoing.take(event)
    assert len(ongoing) == MAX_LINGERING
    assert [record.arrived.request for record in over] == list(range(2 * MAX_LINGERING))
    over = ongoing.take(on.decoder_changed("waiting"))
    assert len(over) == MAX_LINGERING
    assert len(ongoing) == 0


def test_a_request_is_over_once_it_was_answered_and_all_its_choices_ended() -> None:
    ongoing = Ongoing()
    for event in (on.arrived(), on.dispatched(), on.dispatched(choice=1), on.choice_ended()):
        assert ongoing.take(event) == []
    assert ongoing.take(on.answered()) == []
    assert ongoing.take(on.decoder_changed("ready")) == []
    assert ongoing.take(replace(on.decoder_changed("waiting"), decoder="right")) == []
    (record,) = ongoing.take(on.choice_ended(choice=1))
    assert sorted(record.choices) == [0, 1]
    assert ongoing.take(on.answered()) == []
    ongoing.take(on.arrived(5))
    ongoing.take(on.arrived(6))
    ongoing.take(on.dispatched(6))
    ongoing.take(on.answered(6))
    assert [record.arrived.request for record in ongoing.give_up()] == [6]
    assert len(ongoing) == 0


def test_metrics_that_fail_change_nothing_and_are_complained_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metrics, heard = on.metrics(), list[Event]()
    events = Events()
    events.listen(metrics.take)
    events.listen(heard.append)

    def fail(event: Arrived) -> None:
        raise OSError("no space left")

    metrics._each = {**metrics._each, Arrived: fail}
    with caplog.at_level(logging.ERROR, "headrace.server"):
        for event in on.finished(1) + on.finished(2):
            events.tell(event)
    assert len(heard) == len(on.finished(1) + on.finished(2))
    assert len(caplog.records) == 1
    found = value(metrics, "requests_total", endpoint=OTHER, terminal="finished", status="200")
    assert found == 2


def test_two_servers_share_nothing() -> None:
    one, other = told(on.finished()), on.metrics()
    assert value(one, "generation_tokens_total", model_name=MODEL) == 3
    assert value(other, "generation_tokens_total", model_name=MODEL) == 0


# Exposition.


def test_the_exposition_is_sound_in_both_formats() -> None:
    metrics = told(on.one_of_each())
    kind, body = metrics.exposition("text/plain;version=0.0.4")
    assert kind.startswith("text/plain; version=0.0.4")
    plain = {family.name for family in text_format(body.decode())}
    accept = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3"
    kind, body = metrics.exposition(accept)
    assert kind.startswith("application/openmetrics-text; version=1.0.0")
    families = openmetrics(body.decode())  # type: ignore[no-untyped-call]
    assert plain == {family.name for family in families}
    assert b"_created" not in body
    for odd in ("", "*/*", "text/html", "a;;;q=x,,", "text/plain;version=x", "\u00fc"):
        assert metrics.exposition(odd)[0].startswith("text/plain")
    odd = "application/openmetrics-text;version=x"
    assert metrics.exposition(odd)[0].startswith("application/openmetrics-text; version=1.0.0")


def test_names_have_base_units_and_every_metric_a_help_text() -> None:
    for family in told(on.one_of_each())._on.registry.collect():
        assert family.name.startswith(("headrace_", "process_")), family.name
        assert not re.search(r"(_ms|_us|_ns|_mb|_percent|milli|_total)$", family.name), family.name
        assert family.documentation.endswith("."), family.name


def test_the_route_serves_what_is_asked_for() -> None:
    app = Starlette(routes=[metrics_route(told(on.finished()))])
    with TestClient(app) as client:
        plain = client.get("/metrics")
        accept = {"accept": "application/openmetrics-text"}
        other = client.get("/metrics", headers=accept)
        assert client.post("/metrics").status_code == 405
    assert plain.status_code == other.status_code == 200
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "headrace_generation_tokens_total" in plain.text
    assert other.headers["content-type"].startswith("application/openmetrics-text")
    assert other.text.endswith("# EOF\n")


def test_every_terminal_and_cause_is_a_label_value() -> None:
    metrics = on.metrics()
    for terminal in Terminal:
        metrics.take(Rejected(0, "chat", terminal, STATUS[terminal], ""))
    told_terminals = {
        dict(labels)["terminal"] for name, labels in samples(metrics) if "requests_total" in name
    }
    assert told_terminals == {terminal.value for terminal in Terminal}
    statuses = {
        dict(labels)["status"] for name, labels in samples(metrics) if "requests_total" in name
    }
    assert OTHER not in statuses


def test_the_table_in_the_docs_is_what_is_exposed() -> None:
    rows = re.findall(r"^\| `(headrace_\w+)` \| (\w+) \| ([^|]*) \|", DOCS.read_text(), re.M)
    written = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    exposed = {}
    for family in told(on.one_of_each())._on.registry.collect():
        if family.name.startswith("headrace_"):
            name = family.name + ("_total" if family.type == "counter" else "")
            labels = {label for sample in family.samples for label in sample.labels} - {"le"}
            exposed[name] = family.type, labels
    assert written == exposed
    assert len(rows) == len(written)
