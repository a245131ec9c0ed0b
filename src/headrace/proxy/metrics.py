"""What `/metrics` of the proxy says, in a registry of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from prometheus_client import (
    CONTENT_TYPE_PLAIN_0_0_4,
    CollectorRegistry,
    Counter,
    Histogram,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from headrace.proxy.pool import Pool
from headrace.server import events

PREFIX: Final = "headrace_proxy_"
NOBODY: Final = "none"
"""The decoder of a request that went to none."""

WHERES: Final = ("remote", "local", "client")
FAULTS: Final = ("refused", "died", "late")
"""It could not be reached; the connection broke; nothing came within --first-byte-timeout."""

_SECONDS: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)


class Metrics:
    """Counts; whoever passes a request on tells what becomes of it."""

    def __init__(self, pool: Pool) -> None:
        self._registry = CollectorRegistry()
        self.requests = self._counter(
            "requests",
            "Requests by what they asked, the decoder that had them, and the HTTP status.",
            *("endpoint", "decoder", "status"),
        )
        self.prefills = self._counter(
            "prefills",
            "Completions by where they are asked to be prefilled: remote (a source), local (vLLM), "
            "or as the client's own kv_transfer_params say.",
            "where",
        )
        self.failures = self._counter(
            "upstream_failures",
            "Decoders that a request failed at: refused, died or late.",
            *("decoder", "reason"),
        )
        self.disconnects = self._counter(
            "client_disconnects", "Requests whose client left before their end."
        )
        self.first_byte = Histogram(
            "first_byte_seconds",
            "From when a decoder was asked for a completion to the first byte of its answer; one "
            "that is no stream comes whole.",
            ("decoder", "stream"),
            namespace=PREFIX.rstrip("_"),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._registry.register(_Now(pool))
        for where in WHERES:
            self.prefills.labels(where)
        for decoder in pool.decoders:
            for reason in FAULTS:
                self.failures.labels(decoder.address, reason)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        namespace = PREFIX.rstrip("_")
        return Counter(name, text, labels, namespace=namespace, registry=self._registry)

    def ended(self, endpoint: str, decoder: str, status: int) -> None:
        """Count a request."""
        self.requests.labels(endpoint, decoder, str(status)).inc()

    def take(self, event: events.Event, endpoint: str = "") -> None:
        """Count what was refused before it could be passed on; a listener of `Events`.

        endpoint: its name here; "": as the event says.
        """
        if isinstance(event, events.Rejected):
            self.ended(endpoint or event.endpoint, NOBODY, event.status)
            if event.status == 499:
                self.disconnects.inc()

    def exposition(self) -> bytes:
        """All metrics, as Prometheus reads them."""
        return generate_latest(self._registry)

    def scrape(self, request: Request) -> Response:
        """The endpoint of `/metrics`."""
        return Response(self.exposition(), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})


class _Now(Collector):
    """What the pool holds at the moment of a scrape."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def collect(self) -> Iterable[GaugeMetricFamily]:
        up = GaugeMetricFamily(
            f"{PREFIX}decoder_up", "Whether a decoder is up.", labels=["decoder"]
        )
        in_flight = GaugeMetricFamily(
            f"{PREFIX}requests_in_flight", "Requests that a decoder has.", labels=["decoder"]
        )
        for decoder in self._pool.decoders:
            up.add_metric([decoder.address], float(decoder.up))
            in_flight.add_metric([decoder.address], decoder.in_flight)
        return (up, in_flight)
