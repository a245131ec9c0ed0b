"""Spans: what a request becomes, at which times, under whose trace, and that nobody waits."""

from __future__ import annotations

import random
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import pytest
from msgspec.structs import replace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from headrace.errors import Refused
from headrace.ids import Span
from headrace.messages import Interval
from headrace.server import otel
from headrace.server.config import TelemetryConfig
from headrace.server.events import Arrived, ChoiceEnded, Event
from headrace.server.layer_groups import layer_groups
from headrace.server.otel import MAX_GROUPS, OtelSpans
from headrace.server.spans import epoch_offset_ns, open_spans, traces_url
from headrace.server.terminals import Terminal
from headrace.telemetry.spans import spans_of
from tests.unit.server import happenings as on
from tests.unit.server.happenings import DECODER, MODEL, MS
from tests.unit.telemetry import scenes
from tests.unit.telemetry.scenes import START_US, US, at

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
EPOCH_NS = 1_700_000_000_000_000_000


@pytest.fixture(autouse=True)
def _epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "epoch_offset_ns", lambda: EPOCH_NS)


def sent(events: Iterable[Event]) -> list[ReadableSpan]:
    exporter = InMemorySpanExporter()
    spans = OtelSpans("tests", exporter)
    for event in events:
        spans.take(event)
    spans.close()
    return list(exporter.get_finished_spans())


def named(spans: Iterable[ReadableSpan], name: str) -> list[ReadableSpan]:
    return [each for each in spans if each.name == name]


def only(spans: Iterable[ReadableSpan], name: str) -> ReadableSpan:
    (found,) = named(spans, name)
    return found


def of(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def times_ms(span: ReadableSpan) -> tuple[float, float]:
    """When it began and ended, on the monotonic clock."""
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.start_time - EPOCH_NS) / MS, (span.end_time - EPOCH_NS) / MS


def test_a_request_is_one_span_with_its_facts() -> None:
    spans = sent(on.finished())
    request = only(spans, f"chat {MODEL}")
    assert request.kind is SpanKind.SERVER
    assert request.parent is None
    assert times_ms(request) == (0, 200)
    assert request.resource.attributes["service.name"] == "tests"
    assert request.status.status_code is StatusCode.UNSET
    facts = of(request)
    assert facts["gen_ai.operation.name"] == "chat"
    assert facts["gen_ai.request.model"] == MODEL
    assert facts["gen_ai.usage.input_tokens"] == 100
    assert facts["gen_ai.usage.output_tokens"] == 3
    assert facts["http.response.status_code"] == 200
    assert facts["headrace.terminal"] == "finished"
    assert facts["headrace.time_to_first_token_s"] == 0.14
    assert "error.type" not in facts
    assert "gen_ai.request.choice.count" not in facts


def test_a_hand_off_has_its_queue_prefill_tail_and_decode() -> None:
    spans = sent(on.finished())
    request, handoff = only(spans, f"chat {MODEL}"), only(spans, "hand-off")
    found = {each.name: times_ms(each) for each in spans if each is not request}
    assert found == {
        "queue": (0, 10),
        "hand-off": (10, 200),
        "prefill": (12, 120),
        "transfer tail": (120, 130),
        "decode": (140, 190),
    }
    parents = {each.name: each.parent.span_id for each in spans if each.parent is not None}
    above, under = request.context.span_id, handoff.context.span_id
    assert parents == {
        "queue": above,
        "hand-off": above,
        "prefill": under,
        "transfer tail": under,
        "decode": under,
    }
    assert {each.context.trace_id for each in spans} == {request.context.trace_id}
    assert of(handoff)["headrace.decoder"] == DECODER
    assert of(handoff)["headrace.transfer_tail_s"] == 0.01
    assert of(handoff)["headrace.kv_bytes"] == 10 << 20


def test_each_layer_group_of_a_traced_request_is_a_span_from_its_readings() -> None:
    spans = sent(on.traced())
    handoff, groups = only(spans, "hand-off"), named(spans, "layer group")
    assert [of(each)["headrace.cells"] for each in groups] == [
        str(Span(number, number + 1, 0, 8)) for number in range(3)
    ]
    since = START_US / 1000
    assert [times_ms(each) for each in groups] == [
        (since + 0.1, since + 1.25),
        (since + 1.0, since + 2.3),
        (since + 2.0, since + 3.84),
    ]
    first = groups[0]
    moments_us = {each.name: (each.timestamp - EPOCH_NS) // US - START_US for each in first.events}
    assert moments_us == {
        "compute begun": 100,
        "compute ended": 900,
        "write begun": 900,
        "write ended": 1_000,
        "import begun": 1_050,
        "import ended": 1_250,
    }
    assert of(first)["headrace.nbytes"] == 1_000
    assert of(first)["headrace.source.clock"] == of(first)["headrace.owner.clock"] == "host"
    assert all(each.parent == handoff.context for each in groups)
    assert of(handoff)["headrace.layer_groups"] == 3
    assert of(handoff)["headrace.clocks_comparable"] is True
    assert of(handoff)["headrace.route"] == "streamed"
    assert of(handoff)["gen_ai.usage.cache_read.input_tokens"] == 20
    assert not any("kernel" in key for each in spans for key in of(each))


def test_the_clock_of_each_side_is_told_with_its_error() -> None:
    run = scenes.streamed()
    source = tuple(
        replace(each, clock="device", error_ns=2_000) if each.kind == "compute" else each
        for each in run.source
    )
    owner = tuple(
        replace(each, clock="fake") if each.kind == "import" else each for each in run.owner
    )
    events: list[Event] = [
        replace(each, source_intervals=source, owner_intervals=owner)
        if isinstance(each, ChoiceEnded)
        else each
        for each in on.traced()
    ]
    group = named(sent(events), "layer group")[0]
    assert of(group)["headrace.source.clock"] == "device, host"
    assert of(group)["headrace.owner.clock"] == "fake"
    first = dict(group.events[0].attributes or {})
    assert first["headrace.clock"] == "device"
    assert first["headrace.clock_error_s"] == pytest.approx(2e-6)


def test_imports_in_pieces_belong_to_the_group_whose_cells_they_are() -> None:
    whole, other = str(Span(0, 4, 0, 8)), str(Span(4, 8, 0, 8))
    source = [
        at("compute", 100, 200, name=whole),
        at("write", 200, 250, name=whole, nbytes=400),
        at("compute", 250, 400, name=other),
        at("write", 400, 450, name=other, nbytes=400),
    ]
    owner = [
        at("import", 300, 350, name=str(Span(0, 2, 0, 8)), nbytes=200),
        at("import", 500, 550, name=str(Span(4, 8, 0, 4)), nbytes=200),
        at("import", 550, 600, name=str(Span(2, 4, 0, 8)), nbytes=200),
        at("import", 600, 650, name=str(Span(9, 10, 0, 8)), nbytes=999),
        at("import", 600, 650, name=str(Span(0, 1, 0, 9)), nbytes=999),
        at("import", 600, 650, name="what has no cells", nbytes=999),
    ]
    groups, comparable = layer_groups(source, owner)
    assert comparable
    found = [(group.name, group.nbytes, group.ended_ns) for group in groups]
    assert found == [
        (whole, 400, (START_US + 600) * US),
        (other, 200, (START_US + 550) * US),
    ]


def test_pieces_are_found_as_by_trying_each_group() -> None:
    draw = random.Random(9)

    def cells() -> str:
        layer, begun = draw.randrange(5), draw.randrange(5)
        return str(Span(layer, layer + draw.randrange(1, 3), begun, begun + draw.randrange(1, 4)))

    for _ in range(100):
        names = [", ".join(cells() for _ in range(draw.randrange(1, 4))) for _ in range(8)]
        source = [at("compute", 10 * n, 10 * n + 5, name=name) for n, name in enumerate(names)]
        owner = [at("import", 200, 300, name=cells(), nbytes=1) for _ in range(20)]
        groups, _ = layer_groups(source, owner)
        first = list({each.name: each for each in groups}.values())
        for piece in owner:
            whose = [each.name for each in groups if piece in each.intervals]
            named = [each.name for each in first if each.name == piece.name]
            held = [each.name for each in first if each.holds(spans_of(piece.name))]
            assert whose == (named or held)[:1]


def moved(intervals: Iterable[Interval], by_ns: int) -> list[Interval]:
    return [
        replace(each, begun_ns=each.begun_ns + by_ns, ended_ns=each.ended_ns + by_ns)
        for each in intervals
    ]


def test_a_source_with_another_clock_is_brought_to_the_owners() -> None:
    run = scenes.streamed()
    straight, _ = layer_groups(run.source, run.owner)
    ahead, comparable = layer_groups(moved(run.source, 10**12), run.owner)
    assert comparable
    for one, other in zip(straight, ahead, strict=True):
        assert abs(one.begun_ns - other.begun_ns) < MS  # within what the messages tell


def test_clocks_that_contradict_each_other_leave_the_imports_out() -> None:
    run = scenes.streamed()
    late = [each for each in run.source if each.kind != "announced"]
    late += moved((each for each in run.source if each.kind == "announced"), 10**10)
    groups, comparable = layer_groups(late, run.owner)
    assert not comparable
    assert {each.kind for group in groups for each in group.intervals} == {"compute", "write"}


def test_no_hand_off_has_more_groups_than_are_sent() -> None:
    source = [at("compute", n, n + 1, name=str(Span(n, n + 1, 0, 8))) for n in range(100)]
    ended = on.choice_ended(source_intervals=tuple(source))
    spans = sent([on.arrived(), on.dispatched(), ended, on.answered()])
    assert len(named(spans, "layer group")) == MAX_GROUPS
    assert of(only(spans, "hand-off"))["headrace.layer_groups"] == 100


def test_a_parked_hand_off_and_one_that_follows_another_say_so() -> None:
    owner = (at("parked", 0, 30, name="storage"),)
    ended = on.ended(attempts=("source torch died",))
    spans = sent(on.finished(ended=ended, owner_intervals=owner))
    assert times_ms(only(spans, "parked")) == (START_US / 1000, START_US / 1000 + 0.03)
    handoff = only(spans, "hand-off")
    (failed,) = handoff.events
    assert failed.attributes == {"headrace.reason": "source torch died"}
    assert of(handoff)["headrace.attempts"] == 2


def test_a_request_of_several_choices_has_a_hand_off_of_each() -> None:
    events: list[Event] = [
        on.arrived(choices=2, label="abc", endpoint="completions", stream=False),
        on.dispatched(),
        on.dispatched(choice=1),
        on.choice_ended(),
        on.answered(terminal=Terminal.OWNER_DIED),
    ]
    spans = sent([*events, on.decoder_changed("waiting")])
    outcomes = {of(each)["headrace.choice"]: of(each) for each in named(spans, "hand-off")}
    assert outcomes[0]["headrace.outcome"] == "finished"
    assert outcomes[1]["headrace.outcome"] == "lost"
    request = only(spans, f"text_completion {MODEL}")
    assert request.status.status_code is StatusCode.ERROR
    assert of(request)["error.type"] == "owner-died"
    assert of(request)["headrace.reason"] == "owner-died"
    assert of(request)["gen_ai.request.choice.count"] == 2
    assert of(request)["headrace.x_request_id"] == "abc"


@pytest.mark.parametrize(
    ("terminal", "status"),
    [
        (Terminal.CLIENT_LEFT, StatusCode.UNSET),
        (Terminal.DEADLINE, StatusCode.UNSET),
        (Terminal.BUG, StatusCode.ERROR),
    ],
)
def test_what_is_the_servers_fault_is_an_error(terminal: Terminal, status: StatusCode) -> None:
    ended = on.ended(outcome="failed", measured=None, cause="stalled", reason="it stood still")
    events: list[Event] = [on.arrived(), on.dispatched(), on.choice_ended(ended=ended)]
    spans = sent([*events, on.answered(terminal=terminal)])
    assert only(spans, f"chat {MODEL}").status.status_code is status
    handoff = only(spans, "hand-off")
    assert handoff.status.description == "it stood still"
    assert of(handoff)["headrace.outcome"] == "stalled"
    assert named(spans, "prefill") == named(spans, "transfer tail") == []


def from_client(**facts: str) -> list[Event]:
    return [replace(each, **facts) if isinstance(each, Arrived) else each for each in on.finished()]


@pytest.mark.parametrize("flags", ["01", "00"])
def test_a_request_is_part_of_the_trace_that_it_came_with(flags: str) -> None:
    header = f"00-{TRACE}-{PARENT}-{flags}"
    spans = sent(from_client(traceparent=header))
    if flags == "00":
        assert spans == []  # whoever began the trace does not record it
        return
    request = only(spans, f"chat {MODEL}")
    assert request.parent is not None
    assert request.parent.span_id == int(PARENT, 16)
    assert {each.context.trace_id for each in spans} == {int(TRACE, 16)}


@pytest.mark.parametrize(
    "header",
    [
        "",
        "nonsense",
        f"00-{TRACE}-{PARENT}",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{PARENT}-01-" + "x" * 10_000,
        f"00-{TRACE.upper()}-{PARENT}-01",
        "\x00\xff\u20ac",
    ],
)
def test_what_is_no_traceparent_begins_a_trace_of_its_own(header: str) -> None:
    request = only(sent(from_client(traceparent=header)), f"chat {MODEL}")
    assert request.parent is None
    assert request.context.trace_id != int(TRACE, 16)


def test_long_texts_of_clients_are_cut() -> None:
    for each in sent(from_client(label="x" * 9_000, model="y" * 9_000)):
        assert len(each.name) < 300
        assert all(len(str(found)) <= 256 for found in of(each).values())


def test_who_left_is_told_once_its_hand_off_ended() -> None:
    exporter = InMemorySpanExporter()
    spans = OtelSpans("tests", exporter)
    for event in (on.arrived(), on.dispatched(), on.answered(terminal=Terminal.CLIENT_LEFT)):
        spans.take(event)
    spans.take(on.choice_ended(at_ms=230, ended=on.ended(outcome="cancelled", measured=None)))
    spans.take(on.arrived(2))
    spans.take(on.dispatched(2))
    spans.take(on.answered(2))  # its hand-off never ends
    spans.take(on.arrived(3))  # never answered
    spans.close()
    spans.close()
    spans.take(on.arrived(4))
    assert len(spans._ongoing) == 0
    found = exporter.get_finished_spans()
    assert len(named(found, f"chat {MODEL}")) == 2
    outcomes = [of(each)["headrace.outcome"] for each in named(found, "hand-off")]
    assert outcomes == ["other", "lost"]
    assert times_ms(named(found, "hand-off")[0])[1] == 230


class Stuck(SpanExporter):
    """A collector that takes a batch and never answers."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.taken = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.begun.set()
        self.go_on.wait()
        self.taken += len(spans)
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        pass


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    exporter = Stuck()
    yield exporter
    exporter.go_on.set()


def test_a_collector_that_does_not_answer_holds_up_neither_requests_nor_the_end(
    stuck: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otel, "MAX_QUEUED", 64)
    monkeypatch.setattr(otel, "_BATCH", 8)
    spans = OtelSpans("tests", stuck)
    for number in range(10):
        for event in on.finished(number):
            spans.take(event)
    assert stuck.begun.wait(10)
    begun = time.monotonic()
    for number in range(200):
        for event in on.finished(number):
            spans.take(event)
    took_s = time.monotonic() - begun
    begun = time.monotonic()
    spans.close(timeout_s=0.6)
    assert time.monotonic() - begun < 2
    assert took_s < 5  # 1,200 spans while nothing is taken: it would be for ever


def test_what_nobody_takes_is_bounded(stuck: Stuck, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "MAX_QUEUED", 64)
    monkeypatch.setattr(otel, "_BATCH", 8)
    spans = OtelSpans("tests", stuck)
    for number in range(50):
        for event in on.finished(number):
            spans.take(event)
    assert spans._backlog.wait(20)
    stuck.go_on.set()
    spans.close()
    assert 64 <= stuck.taken <= 64 + 8  # those that waited, and the batch that was taken


def test_readings_that_contradict_each_other_give_no_tail() -> None:
    early = on.ended(measured=on.measured(published_ns=119 * MS))
    spans = sent(on.finished(ended=early))
    assert named(spans, "transfer tail") == []
    assert "headrace.transfer_tail_s" not in of(only(spans, "hand-off"))


def test_spans_are_made_apart_from_whoever_tells_what_happened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = set[int]()

    def told(*intervals: Any) -> Any:
        threads.add(threading.get_ident())
        return layer_groups(*intervals)

    monkeypatch.setattr(otel, "layer_groups", told)
    assert named(sent(on.traced()), "layer group")
    assert threads
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("bound", ["MAX_RECORDS", "MAX_INTERVALS"])
def test_requests_whose_spans_wait_are_bounded_and_those_beyond_are_told(
    bound: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever takes long, making spans is not waited for, and its memory does not grow."""
    go_on, begun = threading.Event(), threading.Event()

    def slow(*intervals: Any) -> Any:
        begun.set()
        assert go_on.wait(20)
        return layer_groups(*intervals)

    monkeypatch.setattr(otel, "layer_groups", slow)
    run = scenes.streamed()
    num_intervals = len(run.source) + len(run.owner)
    monkeypatch.setattr(otel, bound, 4 if bound == "MAX_RECORDS" else 5 * num_intervals - 1)
    exporter = InMemorySpanExporter()
    spans = OtelSpans("tests", exporter)
    for number in range(10):
        for event in on.traced(number):
            spans.take(event)
    assert begun.wait(20)
    assert spans.dropped == 6
    assert caplog.text.count("got none by now") == 1
    go_on.set()
    spans.close(20)
    assert len(named(exporter.get_finished_spans(), "chat " + MODEL)) == 4
    assert "6 request(s) got no spans" in caplog.text


def test_a_hand_off_tells_its_route_asked_for_or_chosen() -> None:
    asked = only(sent(on.finished()), "hand-off")
    assert of(asked)["headrace.route"] == "streamed"
    assert "headrace.route.reason" not in of(asked)
    chosen = only(sent(on.traced()), "hand-off")
    assert of(chosen)["headrace.route.reason"] == on.PREDICTED
    failed = on.ended(outcome="failed", cause="no-source", measured=None)
    events: list[Event] = [on.arrived(route="auto"), on.dispatched()]
    events.append(on.choice_ended(ended=failed))
    assert "headrace.route" not in of(only(sent([*events, on.answered()]), "hand-off"))


# What is configured.


def test_without_an_endpoint_nothing_is_loaded() -> None:
    assert open_spans(TelemetryConfig()) is None


def test_without_the_extra_an_endpoint_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "headrace.server.otel")
    with pytest.raises(Refused, match=r"pip install 'headrace\[otel\]', or remove it") as caught:
        open_spans(TelemetryConfig(otlp_endpoint="http://localhost:4318"))
    assert caught.value.field == "telemetry.otlp_endpoint"


@pytest.mark.parametrize(
    "endpoint", ["", "localhost:4318", "ftp://x", "http://", "http://[", "http://x:99999"]
)
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(Refused, match="it is a URL such as"):
        open_spans(TelemetryConfig(otlp_endpoint=endpoint))


def test_an_endpoint_without_a_path_gets_the_usual_one() -> None:
    assert traces_url("http://collector:4318") == "http://collector:4318/v1/traces"
    assert traces_url("https://collector/") == "https://collector/v1/traces"
    assert traces_url("http://collector/mine?key=1") == "http://collector/mine?key=1"


class Collector(BaseHTTPRequestHandler):
    got: ClassVar[list[tuple[str, bytes]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.got.append((self.path, body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_spans_are_posted_to_the_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Collector, "got", [])
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        opened = open_spans(TelemetryConfig(otlp_endpoint=f"http://127.0.0.1:{server.server_port}"))
        assert opened is not None
        for event in on.traced():
            opened.take(event)
        opened.close()
        server.shutdown()
        serving.join()
    ((path, body),) = Collector.got
    assert path == "/v1/traces"
    assert b"layer group" in body


def test_a_collector_that_is_not_there_holds_up_the_end_no_longer_than_it_may(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.socket() as taken:  # bound, and does not listen: every connection is refused
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        opened = open_spans(TelemetryConfig(otlp_endpoint=url))
        assert opened is not None
        for event in on.finished():
            opened.take(event)
        begun = time.monotonic()
        opened.close(timeout_s=0.6)
        assert time.monotonic() - begun < 2
    assert "already shutdown" not in caplog.text


def test_the_epoch_is_read_between_the_two_closest_readings() -> None:
    monotonic = iter([0, 100, 200, 210, 300, 390, 400, 480, 500, 590])
    epoch = iter([1_800, 1_205, 1_900, 1_901, 1_902])
    assert epoch_offset_ns(lambda: next(monotonic), lambda: next(epoch)) == 1_000
    assert abs(epoch_offset_ns() - (time.time_ns() - time.monotonic_ns())) < 10**9
