"""What happened in a server as Prometheus metrics: a fold over its events, and nothing else.

It listens, so it cannot change what becomes of a request. Counters never fall: what an owner counts
begins anew with each of its incarnations, and only what is new since the last look is added.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, Gauge, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from headrace.messages import Measured
from headrace.runtime.roster import OWN_ENGINE
from headrace.server import figures
from headrace.server import label_words as words
from headrace.server.events import (
    Answered,
    Arrived,
    ChoiceEnded,
    Decoded,
    DecoderChanged,
    Dispatched,
    Event,
    Looked,
    QueueChanged,
    Rejected,
    Served,
)
from headrace.server.holdings import Holdings, holdings_of, nothing
from headrace.server.instruments import Instruments
from headrace.server.label_words import OTHER, one_of
from headrace.server.ongoing import Ongoing, RequestRecord
from headrace.server.terminals import STATUS, Terminal
from headrace.version import VERSION

_S: Final = 1e-9  # seconds of a ns
_STATUSES: Final = frozenset({*STATUS.values(), 200})
_OPENMETRICS: Final = "application/openmetrics-text"


class _Seen(NamedTuple):
    """A count of an owner as it was last looked at."""

    incarnation: int
    amount: int


class Metrics:
    """Counts what it is told of; `take` is the listener, `exposition` what is scraped."""

    def __init__(self, models: Collection[str], decoders: Mapping[str, Collection[str]]) -> None:
        """`models`: all names that requests ask for. `decoders`: names, each with its sources'.

        What is told under any other name is counted as `other`.
        """
        self._on = Instruments()
        self._models = frozenset(models)
        self._decoders = {name: frozenset({*of, OWN_ENGINE}) for name, of in decoders.items()}
        self._ongoing = Ongoing()
        self._states: dict[str, str] = {}
        self._incarnations: dict[str, int] = {}
        self._seen: dict[tuple[str, ...], _Seen] = {}
        self._each: dict[type[Any], Callable[[Any], None]] = {
            Arrived: self._arrived,
            Dispatched: self._dispatched,
            Decoded: self._decoded,
            ChoiceEnded: self._choice_ended,
            Answered: self._answered,
            Served: self._served,
            Rejected: self._rejected,
            DecoderChanged: self._decoder_changed,
            Looked: self._looked,
            QueueChanged: self._queue_changed,
        }
        self._begin()

    def take(self, event: Event) -> None:
        """Count one event; a listener of `Events`."""
        self._each[type(event)](event)
        self._ongoing.take(event)

    def exposition(self, accept: str = "") -> tuple[str, bytes]:
        """All metrics: (content type, body), as OpenMetrics if `accept` names it, else as text."""
        if _OPENMETRICS in accept.lower():
            rendered: bytes = openmetrics.generate_latest(self._on.registry)  # type: ignore[no-untyped-call]
            return openmetrics.CONTENT_TYPE_LATEST, rendered
        return CONTENT_TYPE_PLAIN_0_0_4, generate_latest(self._on.registry)

    def _begin(self) -> None:
        """Series of closed sets begin at 0: one that appears with its first count has no rate."""
        on = self._on
        on.build_info.labels(VERSION).set(1)
        for endpoint in ("completions", "chat"):
            for terminal, status in STATUS.items():
                on.requests.labels(endpoint, terminal.value, str(status))
        for endpoint in ("tokenize", "models"):
            on.requests.labels(endpoint, Terminal.FINISHED.value, "200")
        for model in self._models:
            for gauge in (on.running, on.waiting):
                gauge.labels(model)
            for reason in words.FINISHED_REASONS:
                on.success.labels(model, reason)
            for source in words.TOKEN_SOURCES:
                on.prompt_tokens.labels(model, source)
            on.generation_tokens.labels(model)
        for decoder, sources in self._decoders.items():
            on.up.labels(decoder)
            on.owner_restarts.labels(decoder)
            on.start_failures.labels(decoder)
            on.imported.labels(decoder)
            on.imported_early.labels(decoder)
            for reason in words.REJECTS:
                on.rejects.labels(decoder, reason)
            for reason in words.FALLBACKS:
                on.fallbacks.labels(decoder, reason)
            for outcome in words.OUTCOMES:
                on.handoffs.labels(decoder, outcome)
            for source in sources - {OWN_ENGINE}:
                on.source_restarts.labels(decoder, source)
            self._hold(decoder, nothing(sources))

    # Requests.

    def _model(self, record: RequestRecord | None) -> str:
        return OTHER if record is None else one_of(record.arrived.model, self._models)

    def _arrived(self, event: Arrived) -> None:
        model = one_of(event.model, self._models)
        self._on.waiting.labels(model).inc()
        self._on.prompt_length.labels(model).observe(event.num_prompt_tokens)

    def _dispatched(self, event: Dispatched) -> None:
        record = self._ongoing.of(event.request)
        if record is None:
            return
        model = self._model(record)
        if not record.choices:
            self._on.waiting.labels(model).dec()
            self._on.running.labels(model).inc()
        waited_ns = event.at_ns - record.arrived.at_ns
        self._on.queue_time.labels(model).observe(waited_ns * _S)

    def _decoded(self, event: Decoded) -> None:
        record = self._ongoing.of(event.request)
        choice = None if record is None else record.choices.get(event.choice)
        model = self._model(record)
        self._on.generation_tokens.labels(model).inc()
        if record is None or choice is None:
            return
        if not record.first_token_ns:
            self._on.ttft.labels(model).observe((event.at_ns - record.arrived.at_ns) * _S)
        if choice.last_token_ns:
            self._on.inter_token.labels(model).observe((event.at_ns - choice.last_token_ns) * _S)
        else:
            prefill_ns = event.at_ns - choice.dispatched.at_ns
            self._on.prefill_time.labels(model).observe(prefill_ns * _S)

    def _answered(self, event: Answered) -> None:
        record = self._ongoing.of(event.request)
        endpoint = OTHER if record is None else record.arrived.endpoint
        self._count_request(endpoint, event.terminal, event.status)
        if record is None or record.answered is not None:
            return
        model = self._model(record)
        (self._on.running if record.choices else self._on.waiting).labels(model).dec()
        self._on.success.labels(model, _finished_reason(record, event.terminal)).inc()
        if event.terminal is not Terminal.FINISHED:
            return
        self._on.e2e.labels(model).observe((event.at_ns - record.arrived.at_ns) * _S)
        self._on.generated_length.labels(model).observe(record.num_tokens)

    def _served(self, event: Served) -> None:
        self._count_request(event.endpoint, Terminal.FINISHED, event.status)

    def _rejected(self, event: Rejected) -> None:
        self._count_request(event.endpoint, event.terminal, event.status)

    def _count_request(self, endpoint: str, terminal: Terminal, status: int) -> None:
        endpoint = one_of(endpoint, words.ENDPOINTS)
        told = str(status) if status in _STATUSES else OTHER
        self._on.requests.labels(endpoint, terminal.value, told).inc()

    def _queue_changed(self, event: QueueChanged) -> None:
        self._on.queue_choices.set(event.waiting)
        self._on.queue_bytes.set(event.nbytes)

    # Hand-offs.

    def _choice_ended(self, event: ChoiceEnded) -> None:
        on, ended = self._on, event.ended
        decoder, record = one_of(event.decoder, self._decoders), self._ongoing.of(event.request)
        on.handoffs.labels(decoder, words.outcome_of(ended)).inc()
        local = event.ended.local
        self._count_fallbacks(decoder, len(ended.attempts), local=local)
        asked = OTHER if record is None else record.arrived.route
        route = one_of(asked if ended.choice is None else ended.choice.route, words.ROUTES)
        reason = words.ASKED if ended.choice is None else ended.choice.kind
        if not ended.mistake and (ended.choice is not None or asked in words.ROUTES):
            on.routes.labels(decoder, route, reason).inc()
        if ended.measured is not None:
            self._measured(decoder, route, event, ended.measured)
            self._count_prompt(event, record)
        choice = None if record is None else record.choices.get(event.choice)
        if choice is not None and choice.num_tokens > 1:
            took_s = (choice.last_token_ns - choice.first_token_ns) * _S
            model = self._model(record)
            on.decode_time.labels(model).observe(took_s)
            on.time_per_token.labels(model).observe(took_s / (choice.num_tokens - 1))

    def _count_fallbacks(self, decoder: str, followed: int, *, local: bool) -> None:
        retries = followed
        if local:
            self._on.fallbacks.labels(decoder, "local").inc()
            retries = max(0, followed - 1)
        self._on.fallbacks.labels(decoder, "retry").inc(retries)

    def _measured(self, decoder: str, route: str, event: ChoiceEnded, measured: Measured) -> None:
        """What a published hand-off took; one that moved nothing, or in one thread, has no tail."""
        on = self._on
        if measured.parked_ns:
            on.parked.labels(decoder).observe(measured.parked_ns * _S)
        if figures.moved(event) is None:
            return
        on.transfer_bytes.labels(decoder).observe(measured.kv_nbytes)
        on.imported.labels(decoder).inc(measured.kv_nbytes)
        early = min(measured.nbytes_before_final, measured.kv_nbytes)
        on.imported_early.labels(decoder).inc(early)
        on.import_time.labels(decoder, route).observe(measured.import_ns * _S)
        tail_ns, share = figures.tail_ns(event), figures.hidden_share(event)
        if tail_ns is not None:
            on.tail.labels(decoder, route).observe(tail_ns * _S)
        if share is not None:
            on.hidden.labels(decoder, route).observe(share)

    def _count_prompt(self, event: ChoiceEnded, record: RequestRecord | None) -> None:
        model, total = self._model(record), event.num_prompt_tokens
        reuse = event.ended.reuse
        cached = 0 if reuse is None else min(reuse.positions, total)
        rest = "computed" if figures.computed_by_owner(event) else "transferred"
        self._on.prompt_tokens.labels(model, "cached").inc(cached)
        self._on.prompt_tokens.labels(model, rest).inc(total - cached)
        if reuse is not None:
            self._on.prefix_queries.labels(model).inc(total)
            self._on.prefix_hits.labels(model).inc(cached)

    # Owners.

    def _decoder_changed(self, event: DecoderChanged) -> None:
        decoder = one_of(event.decoder, self._decoders)
        self._states[decoder] = event.state
        before = self._incarnations.get(decoder, 0)
        if event.incarnation > before:
            self._incarnations[decoder] = event.incarnation
            self._on.owner_restarts.labels(decoder).inc(event.incarnation - before)
        self._on.up.labels(decoder).set(event.state == "ready")
        for state in words.DECODER_STATES:
            self._on.decoder_state.labels(decoder, state).set(state == event.state)
        if event.state != "ready":
            self._hold(decoder, nothing(self._sources(decoder)))

    def _looked(self, event: Looked) -> None:
        decoder = one_of(event.decoder, self._decoders)
        incarnation, report = event.incarnation, event.report
        rejects, restarts, failures = Counts[str](), Counts[str](), 0
        for section, name, count in report.statistics:
            if section == "dropped":
                rejects[one_of(name, words.REJECTS)] += count
            elif (section, name) == ("restarts", "start_failed"):
                failures += count
        for source in report.sources:
            if source.name != OWN_ENGINE:  # it is in the owner's own process
                restarts[one_of(source.name, self._sources(decoder))] += source.restarts
        for reason, count in rejects.items():
            new = self._new(incarnation, count, "rejects", decoder, reason)
            self._on.rejects.labels(decoder, reason).inc(new)
        for name, count in restarts.items():
            new = self._new(incarnation, count, "restarts", decoder, name)
            self._on.source_restarts.labels(decoder, name).inc(new)
        new = self._new(incarnation, failures, "start failures", decoder)
        self._on.start_failures.labels(decoder).inc(new)
        current = incarnation >= self._incarnations.get(decoder, 0)
        if current and self._states.get(decoder, "ready") == "ready":
            self._hold(decoder, holdings_of(report, self._sources(decoder)))

    def _sources(self, decoder: str) -> Collection[str]:
        """Whose slots are told: its sources and the owner's own engine."""
        return self._decoders.get(decoder, ())

    def _new(self, incarnation: int, count: int, *key: str) -> int:
        """How much of an owner's count is new since it was last looked at."""
        seen = self._seen.get(key, _Seen(-1, 0))
        if incarnation < seen.incarnation:
            return 0
        before = seen.amount if incarnation == seen.incarnation else 0
        self._seen[key] = _Seen(incarnation, max(count, before))
        return max(0, count - before)

    def _hold(self, decoder: str, held: Holdings) -> None:
        """What the owner holds now; what is not known has no series."""
        for state in words.LANE_STATES:
            _set(self._on.lanes, held.lanes.get(state), decoder, state)
        for state in words.SOURCE_STATES:
            _set(self._on.sources, held.sources.get(state), decoder, state)
        for source in (*self._sources(decoder), OTHER):
            for state in words.SLOT_STATES:
                _set(self._on.slots, held.slots.get((source, state)), decoder, source, state)
        self._on.quarantined_lanes.labels(decoder).set(held.apart_lanes)
        self._on.quarantined_slots.labels(decoder).set(held.apart_slots)


def _set(gauge: Gauge, count: int | None, *labels: str) -> None:
    if count is None:
        gauge.remove(*labels)
    else:
        gauge.labels(*labels).set(count)


def _finished_reason(record: RequestRecord, terminal: Terminal) -> str:
    if terminal is Terminal.CLIENT_LEFT:
        return "abort"
    if terminal is not Terminal.FINISHED:
        return "error"
    most = record.arrived.max_tokens
    long = any(choice.num_tokens >= most for choice in record.choices.values())
    return "length" if long else "stop"
