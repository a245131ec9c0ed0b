"""Every metric that a server exposes: its name, labels, buckets and help, in a registry of its own.

Names: where vLLM's server has a metric of the same meaning, ours is called the same behind our
prefix, so that a dashboard or an alarm for vLLM becomes one for headrace by replacing `vllm:` by
`headrace_`. The prefix ends in an underscore: Prometheus keeps colons for recording rules. Base
units throughout: seconds, bytes, tokens, shares of 1. Labels have closed sets of values, see
`headrace.server.label_words`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, ProcessCollector

PREFIX: Final = "headrace_"

_LATENCY: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
_TOKEN_TIME: Final = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1,
    5,
)
_TAIL: Final = (1e-4, 2.5e-4, 5e-4, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
_SHARE: Final = (-10.0, -1.0, -0.5, 0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
_TOKENS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 1e5)
_BYTES: Final = tuple(float(1 << shift) for shift in range(14, 35, 2))


class _Registry(CollectorRegistry):
    """A registry that does not tell when each series was begun: it would double their number.

    A histogram of what may be below 0 has no sum, which could fall; then OpenMetrics wants no count
    beside its last bucket either.
    """

    def collect(self) -> Iterator[Metric]:
        for metric in super().collect():
            names = {sample.name for sample in metric.samples}
            left_out = {f"{metric.name}_created"}
            if f"{metric.name}_sum" not in names:
                left_out.add(f"{metric.name}_count")
            metric.samples = [each for each in metric.samples if each.name not in left_out]
            yield metric


class Instruments:
    """One object per metric, all in `registry`; nothing is shared between two of these."""

    def __init__(self) -> None:
        self.registry = _Registry()
        ProcessCollector(registry=self.registry)  # of the server: its memory, files and CPU time
        self._requests()
        self._latencies()
        self._tokens()
        self._transfer()
        self._bytes()
        self._owners()
        self.build_info = self._gauge("build_info", "Always 1; which headrace this is.", "version")

    def _requests(self) -> None:
        model = "model_name"
        self.requests = self._counter(
            "requests",
            "Requests by the terminal that they had and its HTTP status, refused ones included.",
            *("endpoint", "terminal", "status"),
        )
        self.success = self._counter(
            "request_success",
            "Admitted requests by how they ended: stop, length, abort (the client left), error.",
            *(model, "finished_reason"),
        )
        self.running = self._gauge(
            "num_requests_running", "Requests of which an owner has a choice.", model
        )
        self.waiting = self._gauge(
            "num_requests_waiting", "Admitted requests of which no owner has a choice yet.", model
        )
        self.queue_choices = self._gauge("queue_choices", "Choices that wait for an owner.")
        self.queue_bytes = self._gauge(
            "queue_bytes", "Bytes of these choices as max_bytes bounds them: prompts, and 512 each."
        )

    def _latencies(self) -> None:
        self.ttft = self._latency(
            "time_to_first_token_seconds",
            "From a request's arrival to the first token of any of its choices.",
        )
        self.e2e = self._latency(
            "e2e_request_latency_seconds", "From arrival to terminal, of finished requests."
        )
        self.queue_time = self._latency(
            "request_queue_time_seconds", "From arrival until an owner had the choice."
        )
        self.prefill_time = self._latency(
            "request_prefill_time_seconds",
            "From when an owner had a choice to its first token.",
        )
        self.decode_time = self._latency(
            "request_decode_time_seconds", "From a choice's first token to its last."
        )

    def _tokens(self) -> None:
        model = "model_name"
        self.inter_token = self._histogram(
            "inter_token_latency_seconds",
            "Between two tokens of a choice, as they reach the server.",
            _TOKEN_TIME,
            model,
        )
        self.time_per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time per token after the first, of each choice that an owner ended.",
            _TOKEN_TIME,
            model,
        )
        self.prompt_length = self._histogram(
            "request_prompt_tokens", "Prompt tokens of each admitted request.", _TOKENS, model
        )
        self.generated_length = self._histogram(
            "request_generation_tokens",
            "Tokens of each finished request, all choices together.",
            _TOKENS,
            model,
        )
        self.prompt_tokens = self._counter(
            "prompt_tokens",
            "Prompt tokens of published choices, by where their KV came from: transferred from a "
            "source, cached in the decoder, or computed by the owner itself. Sums to all of them.",
            *(model, "source"),
        )
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.", model)
        self.prefix_queries = self._counter(
            "prefix_cache_queries", "Prompt tokens that were looked up in kept prompts.", model
        )
        self.prefix_hits = self._counter(
            "prefix_cache_hits", "Prompt tokens that were found in kept prompts.", model
        )

    def _transfer(self) -> None:
        decoder, route = "decoder", "route"
        self.handoffs = self._counter(
            "handoffs", "Choices that an owner ended, by what became of them.", decoder, "outcome"
        )
        self.tail = self._histogram(
            "transfer_tail_seconds",
            "Exposed transfer tail: from the later of the end of the prefill and having storage "
            "to publishing. What a hand-off adds to the time to first token.",
            _TAIL,
            *(decoder, route),
        )
        self.hidden = self._histogram(
            "transfer_hidden_ratio",
            "1 - tail / T, T being the time in which imports of the same hand-off were under way. "
            "Not observed where T is below timer noise. May be below 0, so it has no sum.",
            _SHARE,
            *(decoder, route),
        )
        self.parked = self._histogram(
            "parked_seconds",
            "For how long hand-offs that were parked held a slot without storage; no part of the "
            "transfer tail.",
            _LATENCY,
            decoder,
        )
        self.routes = self._counter(
            "route",
            "Hand-offs by the route that they took, and why: asked for, or what `auto` found.",
            *(decoder, route, "reason"),
        )
        self.fallbacks = self._counter(
            "fallback",
            "Attempts that followed one that a source failed: by another source, or by the owner.",
            *(decoder, "reason"),
        )

    def _bytes(self) -> None:
        decoder = "decoder"
        self.import_time = self._histogram(
            "kv_import_time_seconds",
            "Time in which imports of a published hand-off were under way.",
            _TAIL,
            *(decoder, "route"),
        )
        self.transfer_bytes = self._histogram(
            "kv_transfer_bytes", "KV bytes of each hand-off that moved some.", _BYTES, decoder
        )
        self.imported = self._counter(
            "kv_bytes_imported", "KV bytes imported by published hand-offs.", decoder
        )
        self.imported_early = self._counter(
            "kv_bytes_imported_before_prefill_end",
            "Those of them that were imported before the prefill of their prompt ended.",
            decoder,
        )

    def _owners(self) -> None:
        decoder = "decoder"
        self.up = self._gauge("decoder_up", "Whether the owner of a decoder is ready.", decoder)
        self.decoder_state = self._gauge(
            "decoder_state", "1 for the state that the owner is in, 0 for others.", decoder, "state"
        )
        self.lanes = self._gauge("lanes", "Lanes by state.", decoder, "state")
        self.slots = self._gauge("slots", "Slots by state.", decoder, "source", "state")
        self.sources = self._gauge("sources", "Sources by state.", decoder, "state")
        self.quarantined_lanes = self._gauge(
            "quarantined_lanes", "Lanes that are not known to be quiet.", decoder
        )
        self.quarantined_slots = self._gauge(
            "quarantined_slots", "Slots that are not known to be quiet.", decoder
        )
        self.rejects = self._counter(
            "progress_rejects",
            "Messages of sources that an owner did not accept, by reason.",
            *(decoder, "reason"),
        )
        self.source_restarts = self._counter(
            "source_restarts", "How often another took the place of a source.", decoder, "source"
        )
        self.start_failures = self._counter(
            "source_start_failures", "Starts of a decoder's sources that failed.", decoder
        )
        self.owner_restarts = self._counter(
            "owner_restarts", "How often the owner of a decoder was started again.", decoder
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(PREFIX + name, text, labels, registry=self.registry)

    def _latency(self, name: str, text: str) -> Histogram:
        return self._histogram(name, text, _LATENCY, "model_name")

    def _histogram(self, name: str, text: str, buckets: Iterable[float], *labels: str) -> Histogram:
        return Histogram(
            PREFIX + name, text, labels, buckets=tuple(buckets), registry=self.registry
        )
