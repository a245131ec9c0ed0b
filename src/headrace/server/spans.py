"""OpenTelemetry spans of requests, if they are asked for: an extra, and nothing without it."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from typing import Final, Protocol
from urllib.parse import urlsplit

from headrace.errors import Refused
from headrace.server.config import TelemetryConfig
from headrace.server.events import Event

TRACES_PATH: Final = "/v1/traces"
_EXTRA: Final = "pip install 'headrace[otel]'"


class SpanListener(Protocol):
    """What sends spans: `take` listens to the server's events, `close` ends it."""

    def take(self, event: Event) -> None:
        """Hear one event; never blocks."""

    def close(self, timeout_s: float = 2.0) -> None:
        """Send what is left, within `timeout_s`. Idempotent."""


def open_spans(config: TelemetryConfig) -> SpanListener | None:
    """What sends the spans of `config`, or None where it names no endpoint.

    Raises:
        Refused: the endpoint is no http URL, or the extra is not installed.
    """
    if config.otlp_endpoint is None:
        return None
    url = traces_url(config.otlp_endpoint)
    check_installed()
    from headrace.server.otel import OtelSpans, otlp_exporter

    return OtelSpans(config.service_name, otlp_exporter(url))


def check_installed() -> None:
    """Refuse an endpoint where nothing could send to it.

    Raises:
        Refused: the extra is not installed.
    """
    try:
        import_module("headrace.server.otel")
    except ImportError as exc:
        raise Refused(
            f"telemetry.otlp_endpoint needs OpenTelemetry ({exc}); {_EXTRA}, or remove it",
            field="telemetry.otlp_endpoint",
        ) from exc


def traces_url(endpoint: str) -> str:
    """Where spans are posted to: `endpoint`, and without a path OTLP's own path there.

    Raises:
        Refused: it is no http or https URL with a host.
    """
    try:
        parts = urlsplit(endpoint)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound:
        raise Refused(
            f"telemetry.otlp_endpoint is {endpoint!r}; it is a URL such as http://localhost:4318",
            field="telemetry.otlp_endpoint",
        )
    return endpoint if parts.path not in ("", "/") else endpoint.rstrip("/") + TRACES_PATH


def epoch_offset_ns(
    monotonic_ns: Callable[[], int] = time.monotonic_ns, epoch_ns: Callable[[], int] = time.time_ns
) -> int:
    """What to add to a reading of CLOCK_MONOTONIC for the time since 1970, in ns.

    Of a few readings the one that was interrupted least. A wall clock that is set later moves no
    span: all of them keep their distances.
    """
    best_ns = offset_ns = None
    for _ in range(5):
        before_ns, now_ns, after_ns = monotonic_ns(), epoch_ns(), monotonic_ns()
        if best_ns is None or after_ns - before_ns < best_ns:
            best_ns, offset_ns = after_ns - before_ns, now_ns - (before_ns + after_ns) // 2
    return offset_ns or 0
