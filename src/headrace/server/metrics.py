"""What happened in a server as Prometheus metrics: a fold over its events, and nothing else.

It listens, so it cannot change what becomes of a request. Counters never fall: what an owner counts
begins anew with each of its incarnations, and only what is new since the last look is added.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from headrace.messages import Inspected, Measured
from headrace.runtime.roster import OWN_ENGINE
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
)
from headrace.server.instruments import Instruments
from headrace.server.label_words import OTHER, one_of
from headrace.server.ongoing import Ongoing, RequestRecord
from headrace.server.terminals import STATUS, Terminal
from headrace.telemetry.report import TIMER_NOISE_NS
from headrace.version import VERSION

_S: Final = 1e-9  # seconds of a ns
_STATUSES: Final = frozenset({*STATUS.values(), 200})
_ENDPOINTS: Final = ("completions", "chat", "tokenize", "models", "other")
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
            on.imported.labels(decoder)
            on.imported_early.labels(decoder)
            for reason in words.REJECTS:
                on.rejects.labels(decoder, reason)
            for reason in words.FALLBACKS:
                on.fallbacks.labels(decoder, reason)
            for outcome in words.OUTCOMES:
                on.handoffs.labels(decoder, outcome)
            for source in sources:
                on.source_restarts.labels(decoder, source)
            self._clear(decoder)

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

    def _rejected(self, event: Rejected) -> None:
        self._count_request(event.endpoint, event.terminal, event.status)

    def _count_request(self, endpoint: str, terminal: Terminal, status: int) -> None:
        endpoint = one_of(endpoint, _ENDPOINTS)
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
        local = words.is_local(event)
        self._count_fallbacks(decoder, len(ended.attempts), local=local)
        asked = OTHER if record is None else record.arrived.route
        route = one_of(asked if ended.choice is None else ended.choice.route, words.ROUTES)
        reason = words.ASKED if ended.choice is None else words.route_reason(ended.choice.reason)
        if not ended.mistake and (ended.choice is not None or asked in words.ROUTES):
            on.routes.labels(decoder, route, reason).inc()
        if ended.measured is not None:
            self._measured(decoder, route, ended.measured, local=local)
            self._count_prompt(event, record, local=local)
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

    def _measured(self, decoder: str, route: str, measured: Measured, *, local: bool) -> None:
        """What a published hand-off took; one that moved nothing, or in one thread, has no tail."""
        on = self._on
        if measured.parked_ns:
            on.parked.labels(decoder).observe(measured.parked_ns * _S)
        if local or not measured.imports or not measured.kv_nbytes:
            return
        on.transfer_bytes.labels(decoder).observe(measured.kv_nbytes)
        on.imported.labels(decoder).inc(measured.kv_nbytes)
        early = min(measured.nbytes_before_final, measured.kv_nbytes)
        on.imported_early.labels(decoder).inc(early)
        on.import_time.labels(decoder, route).observe(measured.import_ns * _S)
        if not measured.source_final_ns or measured.tail_ns < 0:
            return
        on.tail.labels(decoder, route).observe(measured.tail_ns * _S)
        if measured.import_ns >= TIMER_NOISE_NS:
            share = 1 - measured.tail_ns / measured.import_ns
            on.hidden.labels(decoder, route).observe(share)

    def _count_prompt(
        self, event: ChoiceEnded, record: RequestRecord | None, *, local: bool
    ) -> None:
        model, total = self._model(record), event.num_prompt_tokens
        reuse = event.ended.reuse
        cached = 0 if reuse is None else min(reuse.positions, total)
        computed = local or (reuse is not None and reuse.remainder == "owner")
        rest = "computed" if computed else "transferred"
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
            self._clear(decoder)

    def _looked(self, event: Looked) -> None:
        decoder = one_of(event.decoder, self._decoders)
        incarnation, report = event.incarnation, event.report
        rejects, restarts = Counts[str](), Counts[str]()
        for section, name, count in report.statistics:
            if section == "dropped":
                rejects[one_of(name, words.REJECTS)] += count
        for source in report.sources:
            restarts[self._source(decoder, source.name)] += source.restarts
        for reason, count in rejects.items():
            new = self._new(incarnation, count, "rejects", decoder, reason)
            self._on.rejects.labels(decoder, reason).inc(new)
        for name, count in restarts.items():
            new = self._new(incarnation, count, "restarts", decoder, name)
            self._on.source_restarts.labels(decoder, name).inc(new)
        current = incarnation >= self._incarnations.get(decoder, 0)
        if current and self._states.get(decoder, "ready") == "ready":
            self._hold(decoder, report)

    def _source(self, decoder: str, name: str) -> str:
        return one_of(name, self._decoders.get(decoder, ()))

    def _new(self, incarnation: int, count: int, *key: str) -> int:
        """How much of an owner's count is new since it was last looked at."""
        seen = self._seen.get(key, _Seen(-1, 0))
        if incarnation < seen.incarnation:
            return 0
        before = seen.amount if incarnation == seen.incarnation else 0
        self._seen[key] = _Seen(incarnation, max(count, before))
        return max(0, count - before)

    def _hold(self, decoder: str, report: Inspected) -> None:
        """What the owner holds now; closed sets are told whole, zeros included."""
        lanes = Counts(one_of(lane.state, words.LANE_STATES) for lane in report.lanes)
        lanes["free"] = report.lanes_free
        names = {each.source: self._source(decoder, each.name) for each in report.sources}
        slots = Counts(
            (names.get(slot.source, OTHER), one_of(slot.state, words.SLOT_STATES))
            for slot in report.slots
        )
        sources = Counts(one_of(each.state, words.SOURCE_STATES) for each in report.sources)
        self._set(decoder, lanes, slots, sources)
        # Said twice by an owner: its counts are there even if the lines did not fit its message.
        counted = {(section, name): count for section, name, count in report.statistics}
        apart = counted.get(("lanes", "quarantined"), lanes["quarantined"])
        self._on.quarantined_lanes.labels(decoder).set(apart)
        listed = sum(count for (_, state), count in slots.items() if state == "quarantined")
        apart = counted.get(("slots", "quarantined"), listed)
        self._on.quarantined_slots.labels(decoder).set(apart)

    def _clear(self, decoder: str) -> None:
        """An owner that is not ready holds nothing; what it had apart went with its process."""
        self._set(decoder, Counts(), Counts(), Counts())
        self._on.quarantined_lanes.labels(decoder).set(0)
        self._on.quarantined_slots.labels(decoder).set(0)

    def _set(
        self,
        decoder: str,
        lanes: Counts[str],
        slots: Counts[tuple[str, str]],
        sources: Counts[str],
    ) -> None:
        for state in words.LANE_STATES:
            self._on.lanes.labels(decoder, state).set(lanes[state])
        for state in words.SOURCE_STATES:
            self._on.sources.labels(decoder, state).set(sources[state])
        for source in self._decoders.get(decoder, ()):
            for state in words.SLOT_STATES:
                self._on.slots.labels(decoder, source, state).set(slots[source, state])


def _finished_reason(record: RequestRecord, terminal: Terminal) -> str:
    if terminal is Terminal.CLIENT_LEFT:
        return "abort"
    if terminal is not Terminal.FINISHED:
        return "error"
    most = record.arrived.max_tokens
    long = any(choice.num_tokens >= most for choice in record.choices.values())
    return "length" if long else "stop"
