"""vLLM's view of headrace: a `KVConnectorBase_V1` with two halves and, by its role, two duties.

As a consumer the scheduler half decides which prompts are loaded (`scheduling`), and the worker
half runs the owner that fills the blocks (`owner_thread`). As a producer the worker half tells the
engine of a headrace source what is being computed (`engine.vllm.producing`). Everything that is
decided is decided there; this module translates.

vLLM lets the connector's worker half run within its steps, and steps as long as loads are
outstanding. A step that computes nothing sleeps here for a moment, so that waiting costs no core.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from headrace.backends.base import Decoder
from headrace.backends.paged import PagedDecoder
from headrace.backends.vllm import ROLE
from headrace.engine.vllm.caches import VllmCache
from headrace.engine.vllm.producing import HERE
from headrace.engine.vllm.versions import check_version
from headrace.errors import LocalProtocolError, Refused
from headrace.vllm.owner_thread import OwnerThread, Reports
from headrace.vllm.scheduling import Orders, Prompt, Scheduling, Told
from headrace.vllm.settings import Settings, check_engine, read_settings, with_model
from headrace.vllm.stats import LoadMetrics, LoadStats
from headrace.vllm.traces import Traces

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


@dataclass
class Step(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler half tells the worker half in one step.

    idle: nothing is computed. asks: the worker half is to tell of its sources. piece: of a
    producer, the positions that are computed.
    """

    orders: Orders = field(default_factory=Orders)
    idle: bool = False
    asks: bool = False
    piece: tuple[int, int] | None = None


@dataclass
class Word(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What the worker half tells of its sources."""

    told: Told

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        return other  # there is one worker


class HeadraceConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See the module; made by vLLM, once for its scheduler and once for its worker."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Raises Refused for a vLLM, a configuration or a role that it was not made for."""
        check_version(vllm.__version__)
        super().__init__(vllm_config, role, kv_cache_config)
        check_engine(vllm_config)
        transfer = self._kv_transfer_config
        self._settings = _settings_of(transfer)
        self._produces = transfer.is_kv_producer and ROLE in os.environ
        self._scheduling: Scheduling | None = None
        self._owner: OwnerThread | None = None
        self._told: Told | None = None  # what the scheduler half was told last
        self._reports = Reports()
        self._registered = False
        if self._settings is not None and role is KVConnectorRole.SCHEDULER:
            self._scheduling = Scheduling(self._settings, _block_size(kv_cache_config))

    @property
    def requires_kv_delivery(self) -> bool:
        """A source's one prompt is not preempted, and a decoder hands nothing off."""
        return False

    # The scheduler half.

    def on_new_request(self, request: Request) -> None:
        if self._scheduling is not None:
            self._scheduling.arrived()

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._scheduling is None:
            return 0, False
        count = self._scheduling.matched(_prompt(request), num_computed_tokens)
        return count, bool(count)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if self._scheduling is not None:
            block_ids = blocks.get_block_ids()
            self._scheduling.allocated(_prompt(request), block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Step:
        if self._scheduling is not None:
            idle = not scheduler_output.total_num_scheduled_tokens
            return Step(self._scheduling.step(), idle, self._scheduling.take_asks())
        return Step(piece=_piece(scheduler_output) if self._produces else None)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self._scheduling is None:
            return
        word = connector_output.kv_connector_worker_meta
        if isinstance(word, Word):
            self._scheduling.hear(word.told)
        self._scheduling.reported(connector_output.finished_recving or ())

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """vLLM itself keeps the blocks of a load that was not reported; none are kept for more."""
        if self._scheduling is not None:
            self._scheduling.finished(request.request_id)
        return False, None

    # The worker half.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Raises Refused for a cache that was not verified, a source that does not fit it, or a
        second engine in this process, which vLLM gives the connector of the first.
        """
        if not self._produces and self._settings is None:
            return
        if self._registered:
            raise Refused(
                "a vLLM engine of this process has headrace's connector already, and vLLM knows "
                "one for each process; leave VLLM_ENABLE_V1_MULTIPROCESSING at 1, so that each "
                "engine has a process of its own",
                field="VLLM_ENABLE_V1_MULTIPROCESSING",
            )
        self._registered = True
        cache = VllmCache(self._vllm_config, self._kv_cache_config, kv_caches)
        if self._produces:
            HERE.cache = cache
        if self._settings is None:
            return
        paged = PagedDecoder(cache)
        shared = str(cache.model_directory), cache.dtype, self._settings.prefill_chunk
        self._owner = OwnerThread(
            paged,
            self._settings,
            [with_model(each, *shared) for each in self._settings.sources],
            decoder=self._driven(paged),
            told_ended=Traces(self._settings.trace_dir).write,
        )
        self._owner.start()

    def _driven(self, paged: PagedDecoder) -> Decoder:
        """What the owner drives: `paged`, or what stands in front of it."""
        return paged

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        step = self._step()
        if step.asks:
            self._told = None
        if self._owner is not None:
            self._owner.carry_out(step.orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A request is computed only after its load was reported."""
        step = self._step()
        if self._produces and step.piece is not None:
            HERE.scheduled(*step.piece)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        if self._produces and HERE.at_work:
            HERE.saved(layer_name, attn_metadata.block_table[0])

    def wait_for_save(self) -> None:
        """What was saved was copied when it was saved."""
        if self._produces:
            HERE.stepped()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._owner is None or self._settings is None:
            return KVConnectorTransferResults()
        wait_s = self._settings.idle_wait_ms / 1e3 if self._step().idle else 0.0
        self._reports = self._owner.take_reports(wait_s)
        failed = self._reports.failed
        return KVConnectorTransferResults(
            finished_recving=self._reports.loaded | failed, failed_recving=set(failed)
        )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        raise LocalProtocolError("vLLM asks for transfer results, which tell failures too")

    def build_connector_worker_meta(self) -> Word | None:
        """What is new of the sources."""
        told = None if self._owner is None else self._owner.told
        if told is None or told == self._told:
            return None
        self._told = told
        return Word(told)

    def shutdown(self) -> None:
        """End all loads and all sources. Idempotent."""
        if self._owner is not None:
            self._owner.close()

    def _step(self) -> Step:
        step = self._get_connector_metadata()
        if not isinstance(step, Step):
            raise LocalProtocolError(f"vLLM brought {type(step).__name__}, no step of headrace's")
        return step

    # What vLLM asks of either half, or of the class.

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Sleeping unmaps the blocks, and a load may be under way."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """A producer's layers are told one by one; what is loaded is there before a forward."""
        return ROLE in os.environ

    def get_kv_connector_stats(self) -> LoadStats | None:
        if self._scheduling is not None:
            local = self._scheduling.take_local()
            return LoadStats.of_local(local) if local else None
        reports, self._reports = self._reports, Reports()
        if not (reports.ended or reports.causes):
            return None
        return LoadStats.of(reports.ended, reports.causes)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> LoadStats | None:
        return LoadStats(data=data) if data else LoadStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> LoadMetrics:
        return LoadMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _settings_of(transfer: Any) -> Settings | None:
    """The settings of a consumer; None of a producer.

    Raises:
        Refused: they are wrong, or nobody would take what a producer computes.
    """
    if ROLE in os.environ:  # in a source, whatever else it may be
        return None
    if not transfer.is_kv_consumer:
        raise Refused(
            "kv_role is kv_producer, and headrace's producers are started by the decoder that they "
            'feed: run the decoder with kv_role kv_consumer and a source {"source": "vllm"}',
            field="kv_role",
        )
    return read_settings(transfer.kv_connector_extra_config)


def _block_size(kv_cache_config: KVCacheConfig) -> int:
    """What every cache group's blocks fit into."""
    return math.lcm(*(group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups))


def _prompt(request: Request) -> Prompt:
    embeds = getattr(request, "prompt_embeds", None)  # of some positions, beside all token ids
    plain = not request.mm_features and request.lora_request is None and embeds is None
    params = request.kv_transfer_params
    reads_cache = not request.skip_reading_prefix_cache
    return Prompt(request.request_id, request.prompt_token_ids, params, plain, reads_cache)


def _piece(output: SchedulerOutput) -> tuple[int, int] | None:
    """The positions that a source's one request computes in this step."""
    for request_id, count in output.num_scheduled_tokens.items():
        for new in output.scheduled_new_reqs:
            if new.req_id == request_id:
                return new.num_computed_tokens, new.num_computed_tokens + count
        cached = output.scheduled_cached_reqs
        start = cached.num_computed_tokens[cached.req_ids.index(request_id)]
        return start, start + count
    return None
