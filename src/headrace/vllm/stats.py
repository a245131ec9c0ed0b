"""What the connector counts, by vLLM's own hooks for connectors' statistics.

The names stand beside vLLM's `nixl_*` and in their style: histograms of one observation per load,
and counters. A load's transfer time runs from its submission to its publication; its tail is what
of that came after the source was done, which is what the hand-off adds to the time to first token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

from headrace.runtime.requests import Request

LISTS: Final = ("xfer_time", "tail", "bytes", "early_bytes")
COUNTS: Final = ("failed", "local")

_TIMES: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_BYTES: Final = tuple(float(1 << at) for at in range(12, 37, 2))


@dataclass
class LoadStats(KVConnectorStats):  # type: ignore[misc]
    """Of one interval; plain lists and counts, since they travel between vLLM's processes.

    data: `xfer_time` and `tail` in seconds, `bytes` and `early_bytes` (imported before the source
    was done), an element for each load; `failed` by cause and `local`, prompts that were left to
    vLLM, by reason.
    """

    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    @classmethod
    def of(cls, ended: Iterable[Request], causes: Mapping[str, int]) -> LoadStats:
        """What loads that ended came to, and why those failed that did."""
        stats = cls()
        stats.data["failed"] = dict(causes)
        for request in ended:
            measured = request.measured
            if request.outcome != "finished" or measured is None:
                continue
            took_ns = measured.published_ns - measured.submitted_ns
            stats.data["xfer_time"].append(took_ns / 1e9)
            stats.data["tail"].append(max(0, measured.tail_ns) / 1e9)
            stats.data["bytes"].append(measured.kv_nbytes)
            stats.data["early_bytes"].append(measured.nbytes_before_final)
        return stats

    @classmethod
    def of_local(cls, counts: Mapping[str, int]) -> LoadStats:
        """Prompts that were left to vLLM, by the reason."""
        stats = cls()
        stats.data["local"] = dict(counts)
        return stats

    def reset(self) -> None:
        self.data = {**{name: [] for name in LISTS}, **{name: {} for name in COUNTS}}

    def aggregate(self, other: KVConnectorStats) -> LoadStats:
        for name in LISTS:
            self.data[name].extend(other.data[name])
        for name in COUNTS:
            for word, count in other.data[name].items():
                self.data[name][word] = self.data[name].get(word, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line."""
        loads = len(self.data["bytes"])
        reduced: dict[str, int | float] = {"Num headrace loads": loads}
        if loads:
            tails, early = sorted(self.data["tail"]), sum(self.data["early_bytes"])
            reduced |= {
                "Avg load time (ms)": round(1e3 * sum(self.data["xfer_time"]) / loads, 3),
                "Median tail (ms)": round(1e3 * tails[loads // 2], 3),
                "Avg MB per load": round(sum(self.data["bytes"]) / loads / 2**20, 3),
                "Early share (%)": round(100 * early / max(1, sum(self.data["bytes"])), 1),
            }
        for name in COUNTS:
            if self.data[name]:
                reduced[f"Num {name}"] = sum(self.data[name].values())
        return reduced

    def is_empty(self) -> bool:
        return not any(self.data.values())


class LoadMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """`vllm:headrace_*`, by engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._histograms = {
            "xfer_time": self._histogram(
                "xfer_time_seconds", "From a load's submission to its publication.", _TIMES
            ),
            "tail": self._histogram(
                "exposed_tail_seconds", "From the end of the prefill to the publication.", _TIMES
            ),
            "bytes": self._histogram("bytes_transferred", "Bytes of KV of a load.", _BYTES),
            "early_bytes": self._histogram(
                "early_bytes", "Bytes of a load imported before its prefill ended.", _BYTES
            ),
        }
        self._counters = {
            "failed": self._counter(
                "num_failed_loads", "Loads that failed or were cancelled, by cause.", "cause"
            ),
            "local": self._counter(
                "num_local_prefills", "Prompts that were left to vLLM, by reason.", "reason"
            ),
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, by_engine in self._histograms.items():
            for value in transfer_stats_data.get(name, ()):
                by_engine[engine_idx].observe(value)
        for name, counter in self._counters.items():
            for word, count in transfer_stats_data.get(name, {}).items():
                values = self.per_engine_labelvalues[engine_idx]
                counter.labels(*values, word).inc(count)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> dict[int, Any]:
        made = self._histogram_cls(
            name=f"vllm:headrace_{name}",
            documentation=text,
            buckets=list(buckets),
            labelnames=self._labelnames,
        )
        by_engine: dict[int, Any] = create_metric_per_engine(made, self.per_engine_labelvalues)
        return by_engine

    def _counter(self, name: str, text: str, label: str) -> Any:
        return self._counter_cls(
            name=f"vllm:headrace_{name}",
            documentation=text,
            labelnames=[*self._labelnames, label],
        )
