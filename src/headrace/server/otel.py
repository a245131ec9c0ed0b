"""Requests as OpenTelemetry spans: one per request, under it its hand-offs and their layer groups.

Spans are made when a request is over, in a thread of their own, from the same readings as its
figures. They say on which clock they were read, host, device or fake, and claim nothing about
kernels.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Final, TypeAlias

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from headrace.messages import Interval, Measured
from headrace.server import figures
from headrace.server.backlog import Backlog
from headrace.server.events import Answered, ChoiceEnded, Event
from headrace.server.label_words import ROUTES, outcome_of
from headrace.server.layer_groups import LayerGroup, layer_groups
from headrace.server.ongoing import ChoiceRecord, Ongoing, RequestRecord
from headrace.server.spans import epoch_offset_ns
from headrace.server.terminals import Terminal
from headrace.version import VERSION

_log = logging.getLogger("headrace.server")

Attributes: TypeAlias = dict[str, str | int | float | bool]

MAX_QUEUED: Final = 8192
"""Spans that wait to be sent; the oldest are dropped beyond it."""

MAX_RECORDS: Final = 1024
"""Requests whose spans are still to be made; those beyond it get none."""

MAX_INTERVALS: Final = 100_000
"""The same of their intervals, all together: some 30 MB."""

MAX_GROUPS: Final = 64
"""Layer groups of one hand-off that get a span; how many there were is an attribute."""

MAX_TEXT: Final = 256
EXPORT_TIMEOUT_S: Final = 5.0
_BATCH: Final = 512
_EVERY_MS: Final = 1000
_INTERRUPT_S: Final = 0.5  # of the time to close: for a sender that was told to give up
_SAY_EVERY_S: Final = 60.0

_OPERATIONS: Final = {"chat": "chat", "completions": "text_completion"}
_PATHS: Final = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


def otlp_exporter(url: str) -> SpanExporter:
    """What posts spans to `url`; OTEL_EXPORTER_OTLP_HEADERS and the like are heeded."""
    return OTLPSpanExporter(endpoint=url, timeout=EXPORT_TIMEOUT_S)


class _Sender(SpanExporter):
    """An exporter that may be told to give up while it sends, and says no more after that."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._over = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.FAILURE if self._over else self._exporter.export(spans)

    def shutdown(self) -> None:
        if not self._over:
            self._over = True
            self._exporter.shutdown()


class OtelSpans:
    """Listens to the server's events and sends spans from a thread of its own."""

    def __init__(self, service_name: str, exporter: SpanExporter) -> None:
        self._sender = _Sender(exporter)
        self._batches = BatchSpanProcessor(
            self._sender,
            max_queue_size=MAX_QUEUED,
            schedule_delay_millis=_EVERY_MS,
            max_export_batch_size=_BATCH,
        )
        resource = Resource.create({"service.name": service_name, "service.version": VERSION})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(self._batches)
        self._tracer = provider.get_tracer("headrace", VERSION)
        self._offset_ns = epoch_offset_ns()
        self._ongoing = Ongoing()
        self._closed = False
        self._said_s = -_SAY_EVERY_S
        self._backlog = Backlog(
            "spans", self._tell, max_items=MAX_RECORDS, max_weight=MAX_INTERVALS
        )

    @property
    def dropped(self) -> int:
        """Requests that got no spans, since too many waited for theirs."""
        return self._backlog.dropped

    def take(self, event: Event) -> None:
        """Hear one event; a listener of `Events`. None is heard once it is closed."""
        if not self._closed:
            self._offer(self._ongoing.take(event))

    def close(self, timeout_s: float = 2.0) -> None:
        """Send what is left, within `timeout_s`; the rest is dropped. Idempotent."""
        if self._closed:
            return
        self._closed = True
        until_s = time.monotonic() + max(0.0, timeout_s - _INTERRUPT_S)
        self._offer(self._ongoing.give_up())
        self._backlog.close(max(0.0, timeout_s - _INTERRUPT_S))
        if self.dropped:
            _log.warning("%d request(s) got no spans: too many waited for theirs", self.dropped)
        ending = threading.Thread(target=self._batches.shutdown, daemon=True)
        ending.start()
        ending.join(max(0.0, until_s - time.monotonic()))
        if ending.is_alive():  # it waits for a collector that does not answer
            self._sender.shutdown()
            ending.join(min(timeout_s, _INTERRUPT_S))

    def _offer(self, records: Sequence[RequestRecord]) -> None:
        for record in records:
            taken = self._backlog.offer(record, record.num_intervals)
            now_s = time.monotonic()
            if not taken and now_s - self._said_s >= _SAY_EVERY_S:
                self._said_s = now_s
                told = "spans are made too slowly: %d request(s) got none by now"
                _log.warning(told, self.dropped)

    # The spans of one request.

    def _tell(self, record: RequestRecord) -> None:
        arrived, answered = record.arrived, record.answered
        if answered is None:
            return
        operation = _OPERATIONS.get(arrived.endpoint, arrived.endpoint)
        carrier = {"traceparent": arrived.traceparent}
        span = self._tracer.start_span(
            f"{operation} {arrived.model[:MAX_TEXT]}",
            context=TraceContextTextMapPropagator().extract(carrier),
            kind=SpanKind.SERVER,
            attributes=_request_attributes(record, operation, answered),
            start_time=self._at(arrived.at_ns),
        )
        if answered.terminal is not Terminal.FINISHED and answered.status >= 500:
            span.set_status(Status(StatusCode.ERROR, answered.reason[:MAX_TEXT]))
        if span.is_recording():
            for index, choice in sorted(record.choices.items()):
                self._tell_choice(span, record, index, choice)
        span.end(self._at(max(answered.at_ns, arrived.at_ns)))

    def _tell_choice(
        self, parent: Span, record: RequestRecord, index: int, choice: ChoiceRecord
    ) -> None:
        arrived_ns, sent_ns = record.arrived.at_ns, choice.dispatched.at_ns
        self._child(parent, "queue", arrived_ns, sent_ns, {"headrace.choice": index})
        ended = choice.ended
        attributes: Attributes = {
            "headrace.choice": index,
            "headrace.decoder": choice.dispatched.decoder,
            "headrace.outcome": "lost" if ended is None else outcome_of(ended.ended),
        }
        answered_ns = sent_ns if record.answered is None else record.answered.at_ns
        ended_ns = max(choice.last_token_ns, answered_ns) if ended is None else ended.at_ns
        span = self._start(parent, "hand-off", sent_ns, attributes)
        if ended is not None:
            self._tell_handoff(span, record, choice, ended)
        span.end(self._at(max(ended_ns, sent_ns)))

    def _tell_handoff(
        self, span: Span, record: RequestRecord, choice: ChoiceRecord, event: ChoiceEnded
    ) -> None:
        ended, measured = event.ended, event.ended.measured
        span.set_attributes(_handoff_attributes(record, event))
        if ended.outcome == "failed":
            span.set_status(Status(StatusCode.ERROR, ended.reason[:MAX_TEXT]))
        for text in ended.attempts:
            span.add_event(
                "attempt failed",
                {"headrace.reason": text[:MAX_TEXT]},
                self._at(choice.dispatched.at_ns),
            )
        groups, comparable = layer_groups(event.source_intervals, event.owner_intervals)
        span.set_attribute("headrace.layer_groups", len(groups))
        if event.source_intervals:
            span.set_attribute("headrace.clocks_comparable", comparable)
        for group in groups[:MAX_GROUPS]:
            self._tell_group(span, group)
        for each in event.owner_intervals:
            if each.kind == "parked":
                self._child(span, "parked", each.begun_ns, each.ended_ns, _clock_of(each))
        if measured is not None:
            self._tell_measured(span, event, measured)
        if choice.first_token_ns:
            tokens: Attributes = {"gen_ai.usage.output_tokens": event.num_tokens}
            begun_ns = choice.first_token_ns
            self._child(span, "decode", begun_ns, choice.last_token_ns, tokens)

    def _tell_measured(self, span: Span, event: ChoiceEnded, measured: Measured) -> None:
        begun_ns, final_ns = measured.prefill_begun_ns, measured.source_final_ns
        host: Attributes = {"headrace.clock": "host"}
        if begun_ns and final_ns:
            self._child(span, "prefill", begun_ns, final_ns, host)
        if figures.tail_ns(event) is not None:
            tail_ns = measured.tail_begun_ns, measured.published_ns
            self._child(span, "transfer tail", *tail_ns, host)

    def _tell_group(self, parent: Span, group: LayerGroup) -> None:
        attributes: Attributes = {"headrace.cells": group.name[:MAX_TEXT]}
        attributes["headrace.nbytes"] = group.nbytes
        span = self._start(parent, "layer group", group.begun_ns, attributes)
        for each in group.intervals:
            told = _clock_of(each) | {"headrace.nbytes": each.nbytes}
            span.add_event(f"{each.kind} begun", told, self._at(each.begun_ns))
            span.add_event(f"{each.kind} ended", told, self._at(each.ended_ns))
        for side, clock in group.clocks.items():
            span.set_attribute(f"headrace.{side}.clock", clock)
        span.end(self._at(group.ended_ns))

    def _child(
        self, parent: Span, name: str, begun_ns: int, ended_ns: int, attributes: Attributes
    ) -> None:
        span = self._start(parent, name, begun_ns, attributes)
        span.end(self._at(max(begun_ns, ended_ns)))

    def _start(self, parent: Span, name: str, begun_ns: int, attributes: Attributes) -> Span:
        return self._tracer.start_span(
            name,
            context=set_span_in_context(parent),
            attributes=attributes,
            start_time=self._at(begun_ns),
        )

    def _at(self, monotonic_ns: int) -> int:
        return monotonic_ns + self._offset_ns


def _request_attributes(record: RequestRecord, operation: str, answered: Answered) -> Attributes:
    arrived = record.arrived
    found: Attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "headrace",
        "gen_ai.request.model": arrived.model[:MAX_TEXT],
        "gen_ai.request.max_tokens": arrived.max_tokens,
        "gen_ai.request.stream": arrived.stream,
        "gen_ai.usage.input_tokens": arrived.num_prompt_tokens,
        "gen_ai.usage.output_tokens": record.num_tokens,
        "http.response.status_code": answered.status,
        "http.route": _PATHS.get(arrived.endpoint, arrived.endpoint),
        "headrace.request": arrived.request,
        "headrace.route.asked": arrived.route,
        "headrace.terminal": answered.terminal.value,
        "headrace.in_stream": answered.in_stream,
    }
    if arrived.choices != 1:
        found["gen_ai.request.choice.count"] = arrived.choices
    if arrived.label:
        found["headrace.x_request_id"] = arrived.label[:MAX_TEXT]
    if answered.terminal is not Terminal.FINISHED:
        found["error.type"] = answered.terminal.value
        found["headrace.reason"] = answered.reason[:MAX_TEXT]
    if record.first_token_ns:
        ttft_ns = record.first_token_ns - arrived.at_ns
        found["headrace.time_to_first_token_s"] = ttft_ns / 1e9
        if arrived.stream:
            found["gen_ai.response.time_to_first_chunk"] = ttft_ns / 1e9
    return found


def _handoff_attributes(record: RequestRecord, event: ChoiceEnded) -> Attributes:
    ended, measured = event.ended, event.ended.measured
    found: Attributes = {"headrace.attempts": len(ended.attempts) + 1}
    route = record.arrived.route if ended.choice is None else ended.choice.route
    if route in ROUTES:  # `auto` that came to no choice took none
        found["headrace.route"] = route
    if ended.choice is not None:
        found["headrace.route.reason"] = ended.choice.reason[:MAX_TEXT]
    if ended.reuse is not None:
        found["gen_ai.usage.cache_read.input_tokens"] = ended.reuse.positions
    if measured is not None:
        found |= {
            "headrace.kv_bytes": measured.kv_nbytes,
            "headrace.parked_s": measured.parked_ns / 1e9,
        }
    moved, tail_ns = figures.moved(event), figures.tail_ns(event)
    if moved is not None:
        found["headrace.kv_bytes_before_prefill_end"] = moved.nbytes_before_final
        found["headrace.import_s"] = moved.import_ns / 1e9
    if tail_ns is not None:
        found["headrace.transfer_tail_s"] = tail_ns / 1e9
    return found


def _clock_of(interval: Interval) -> Attributes:
    found: Attributes = {"headrace.clock": interval.clock}
    if interval.error_ns:
        found["headrace.clock_error_s"] = interval.error_ns / 1e9
    return found
