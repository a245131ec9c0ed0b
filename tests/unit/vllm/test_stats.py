"""What the connector counts, as vLLM takes it in, adds it up, logs it and exposes it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from headrace.ids import RequestId
from headrace.messages import Measured
from headrace.runtime.requests import Request, RequestOptions


@pytest.fixture
def stats(module: Any) -> Any:
    return module.LoadStats


def measured(**changed: int) -> Measured:
    """100 ms from submission to publication, 20 ms of that after the source was done."""
    given = dict.fromkeys(Measured.__struct_fields__, 0) | {
        "submitted_ns": 1_000_000_000,
        "prefill_begun_ns": 1_010_000_000,
        "source_final_ns": 1_080_000_000,
        "published_ns": 1_100_000_000,
        "kv_nbytes": 4096,
        "nbytes_before_final": 3072,
    }
    return Measured(**(given | changed))


def finished(**changed: int) -> Request:
    request = Request(RequestId(1, 1), 4, RequestOptions(max_tokens=0))
    request.outcome, request.measured = "finished", measured(**changed)
    return request


def failed(cause: str) -> Request:
    request = finished()
    request.outcome, request.cause = "failed", cause
    return request


def test_loads_that_ended_are_observed_one_by_one(stats: Any) -> None:
    ended = [finished(), failed("source-died"), finished(published_ns=1_070_000_000)]
    made = stats.of(ended, {"source-died": 1})
    assert made.data == {
        "xfer_time": [0.1, 0.07],
        "tail": [0.02, 0.0],
        "bytes": [4096, 4096],
        "early_bytes": [3072, 3072],
        "failed": {"source-died": 1},
        "local": {},
    }
    assert not made.is_empty()
    assert msgspec.json.decode(msgspec.json.encode(made.data)) == made.data


def test_nothing_is_empty(stats: Any) -> None:
    made = stats.of([], {})
    assert made.is_empty()
    assert made.reduce() == {"Num headrace loads": 0}
    assert not stats.of_local({"short": 1}).is_empty()
    assert not stats.of([], {"refused": 1}).is_empty()


def test_intervals_add_up(stats: Any) -> None:
    """The worker's and the scheduler's half of a step, and then steps."""
    made = stats.of([finished(), failed("cancelled")], {"cancelled": 1})
    total = made.aggregate(stats.of_local({"short": 2})).aggregate(
        stats.of([finished(kv_nbytes=2048)], {"cancelled": 1, "timeout": 1})
    )
    assert total is made
    assert total.data["bytes"] == [4096, 2048]
    assert total.data["failed"] == {"cancelled": 2, "timeout": 1}
    assert total.data["local"] == {"short": 2}
    total.reset()
    assert total.is_empty()


def test_what_is_logged(stats: Any) -> None:
    mib = 1 << 20
    several = [
        finished(kv_nbytes=mib, nbytes_before_final=mib),
        finished(kv_nbytes=3 * mib, nbytes_before_final=mib, published_ns=1_280_000_000),
        finished(kv_nbytes=2 * mib, nbytes_before_final=mib, published_ns=1_090_000_000),
        failed("cancelled"),
    ]
    assert stats.of(several, {"cancelled": 1}).aggregate(
        stats.of_local({"short": 2, "long": 1})
    ).reduce() == {
        "Num headrace loads": 3,
        "Avg load time (ms)": 156.667,
        "Median tail (ms)": 20.0,
        "Avg MB per load": 2.0,
        "Early share (%)": 50.0,
        "Num failed": 1,
        "Num local": 3,
    }


def test_loads_without_bytes_divide_by_nothing(stats: Any) -> None:
    reduced = stats.of([finished(kv_nbytes=0, nbytes_before_final=0)], {}).reduce()
    assert reduced["Early share (%)"] == 0.0


def test_what_came_from_the_other_process_is_taken_up(module: Any) -> None:
    connector = module.HeadraceConnector
    sent = module.LoadStats.of([finished()], {}).data
    taken = connector.build_kv_connector_stats(sent)
    assert taken.data == sent
    assert connector.build_kv_connector_stats().is_empty()
    assert connector.build_kv_connector_stats({}).is_empty()


@pytest.fixture
def exposed(module: Any) -> tuple[Any, CollectorRegistry]:
    """The metrics of two engines, in a registry of their own."""
    registry = CollectorRegistry()

    def of(kind: type[Any]) -> Any:
        return lambda **how: kind(registry=registry, **how)

    types = {kind: of(kind) for kind in (Counter, Gauge, Histogram)}
    metrics = module.HeadraceConnector.build_prom_metrics(
        SimpleNamespace(kv_transfer_config=None),
        types,
        ["model_name", "engine"],
        {0: ["it", "0"], 1: ["it", "1"]},
    )
    return metrics, registry


def test_metrics_stand_beside_vllms_by_engine(
    module: Any, exposed: tuple[Any, CollectorRegistry]
) -> None:
    metrics, registry = exposed
    one = module.LoadStats.of([finished(), finished(), failed("cancelled")], {"cancelled": 1})
    metrics.observe(one.data)
    metrics.observe(module.LoadStats.of_local({"short": 3}).data, engine_idx=1)
    metrics.observe(module.LoadStats.of_local({"short": 2}).data, engine_idx=1)
    metrics.observe({}, engine_idx=1)

    def value(name: str, engine: int = 0, **labels: str) -> float | None:
        given = {"model_name": "it", "engine": str(engine), **labels}
        return registry.get_sample_value(f"vllm:headrace_{name}", given)

    assert value("xfer_time_seconds_count") == 2
    assert value("xfer_time_seconds_sum") == pytest.approx(0.2)
    assert value("xfer_time_seconds_bucket", le="0.05") == 0
    assert value("xfer_time_seconds_bucket", le="0.1") == 2
    assert value("exposed_tail_seconds_sum") == pytest.approx(0.04)
    assert value("bytes_transferred_sum") == 8192
    assert value("early_bytes_sum") == 6144
    assert value("num_failed_loads_total", cause="cancelled") == 1
    assert value("num_local_prefills_total", reason="short") is None
    assert value("num_local_prefills_total", engine=1, reason="short") == 5
    assert value("bytes_transferred_count", engine=1) == 0
