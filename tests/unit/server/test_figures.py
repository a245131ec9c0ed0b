"""What has a tail, by one rule for metrics, page and spans."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.messages import Reuse
from headrace.server import figures, page_requests
from headrace.server.otel import OtelSpans
from headrace.telemetry.recording import REMOTE_GRANT
from headrace.telemetry.report import TIMER_NOISE_NS
from tests.unit.server import happenings as on
from tests.unit.server.happenings import DECODER, MS
from tests.unit.telemetry.scenes import at

trace_export = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")

KEPT = on.measured(kv_nbytes=0, imports=0, import_ns=0, nbytes_before_final=0)

MOVED_NOTHING: list[dict[str, Any]] = [
    {"ended": on.ended(measured=None)},
    {"ended": on.ended(measured=KEPT, reuse=Reuse(100, "none", ""))},
    {"ended": on.ended(measured=on.measured(kv_nbytes=0))},
    {"ended": on.ended(measured=on.measured(imports=0))},
    {"ended": on.ended(local=True)},
    {"ended": on.ended(reuse=Reuse(30, "owner", ""))},
]


@pytest.mark.parametrize("facts", MOVED_NOTHING)
def test_what_moved_nothing_has_no_tail_in_metrics_page_or_spans(facts: dict[str, Any]) -> None:
    event = on.choice_ended(**facts)
    assert figures.moved(event) is None
    assert figures.tail_ns(event) is None
    assert figures.hidden_share(event) is None
    choice = page_requests.Choice()
    choice.end(on.arrived(), event, max_nbytes=0)
    shown = choice.result
    assert shown is not None
    assert shown.tail_s is shown.alone_s is shown.hidden_share is None
    assert shown.bytes_before_prefill_end is None
    metrics = on.metrics()
    exporter = trace_export.InMemorySpanExporter()
    spans = OtelSpans("tests", exporter)
    for each in on.finished(**facts):
        metrics.take(each)
        spans.take(each)
    spans.close()
    labels = {"decoder": DECODER, "route": "streamed"}
    for name in ("transfer_tail", "kv_import_time"):
        found = metrics._on.registry.get_sample_value(f"headrace_{name}_seconds_count", labels)
        assert found is None
    told = exporter.get_finished_spans()
    assert "transfer tail" not in [each.name for each in told]
    (handoff,) = [each for each in told if each.name == "hand-off"]
    of_transfer = {"headrace.transfer_tail_s", "headrace.import_s"}
    of_transfer.add("headrace.kv_bytes_before_prefill_end")
    assert not of_transfer & set(handoff.attributes or {})


def test_the_figures_of_what_was_moved() -> None:
    event = on.choice_ended(owner_intervals=(at("granted", 0, name=REMOTE_GRANT),))
    assert figures.moved(event) == on.measured()
    assert figures.tail_ns(event) == 10 * MS
    assert figures.hidden_share(event) == pytest.approx(0.9)
    noise = on.measured(import_ns=TIMER_NOISE_NS - 1)
    event = on.choice_ended(ended=on.ended(measured=noise))
    assert (figures.tail_ns(event), figures.hidden_share(event)) == (10 * MS, None)
    odd = on.choice_ended(ended=on.ended(measured=on.measured(published_ns=119 * MS)))
    assert figures.moved(odd) is not None
    assert figures.tail_ns(odd) is None
    assert not figures.computed_by_owner(odd)
