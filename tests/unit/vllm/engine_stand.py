"""vLLM's scheduler and worker as far as a connector sees them: which calls, in which order.

The order is that of `v1/core/sched/scheduler.py` and of the connector's mixin of the model runner,
and the assertions are those that would end vLLM's engine. A request that is computed is finished
after that step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from tests.unit.engine.vllm.made_up import BLOCK

PATIENCE_S = 10.0


@dataclass(eq=False)
class Asked:
    """A request of vLLM's. status: waiting, loading, running or finished."""

    request_id: str
    prompt_token_ids: list[int] | None
    kv_transfer_params: dict[str, Any] | None = None
    mm_features: list[Any] = field(default_factory=list)
    lora_request: Any = None
    prompt_embeds: Any = None
    skip_reading_prefix_cache: bool = False
    status: str = "waiting"
    num_computed_tokens: int = 0
    block_ids: tuple[list[int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids or ())


class Engine:
    """One scheduler and one worker with the two halves of the connector.

    recompute: `kv_load_failure_policy`. computed: by request, how much it had when it was computed.
    reports: by request, how often it was reported.
    """

    def __init__(
        self,
        module: Any,
        config: Any,
        cache_config: Any,
        tensors: Mapping[str, torch.Tensor],
        *,
        recompute: bool = True,
        local: int = 0,
    ) -> None:
        roles, make = module.KVConnectorRole, module.HeadraceConnector
        self.scheduler = make(config, roles.SCHEDULER, cache_config)
        self.worker = make(config, roles.WORKER, cache_config)
        self._num_groups = len(cache_config.kv_cache_groups)
        self._free = list(range(1, cache_config.num_blocks))
        self._recompute = recompute
        self._local = local  # positions of every prompt that are in vLLM's own prefix cache
        self._tensors = tensors
        self.requests: dict[str, Asked] = {}
        self.computed: dict[str, int] = {}
        self.errors: list[str] = []
        self.reports: dict[str, int] = {}
        self.stats: list[Any] = []
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._finished_ids: set[str] = set()

    def start(self) -> None:
        """The worker's caches are there."""
        self.worker.register_kv_caches(dict(self._tensors))

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def add(self, asked: Asked) -> Asked:
        assert asked.request_id not in self.requests
        self.requests[asked.request_id] = asked
        self.scheduler.on_new_request(asked)
        return asked

    def step(self) -> None:
        """One step of the engine core."""
        self.update(self.work(self.schedule()))

    def run(self, *request_ids: str) -> None:
        """Step until these requests are over and their blocks are free."""
        until_s = time.monotonic() + PATIENCE_S
        while any(request_id in self.requests for request_id in request_ids):
            assert time.monotonic() < until_s, self.requests
            self.step()

    # The scheduler.

    def schedule(self) -> Any:
        scheduled: dict[str, int] = {}
        for asked in self.requests.values():
            if asked.status == "loading" and asked.request_id in self._received:
                self._promote(asked)
            if asked.status != "waiting":
                continue
            external, is_async = 0, False  # None: ask again
            local = asked.num_computed_tokens
            if not local:
                local = self._local
                external, is_async = self.scheduler.get_num_new_matched_tokens(asked, local)
                if external is None:
                    continue
                assert is_async == (external > 0)
                assert external % BLOCK == 0
                assert local + external < asked.num_tokens
            end = local + external if is_async else asked.num_tokens
            if not self._allocate(asked, end):
                break
            view = SimpleNamespace(get_block_ids=lambda asked=asked: asked.block_ids)
            self.scheduler.update_state_after_alloc(asked, view, external)
            asked.num_computed_tokens = local + external
            asked.status = "loading" if is_async else "running"
            if not is_async:
                scheduled[asked.request_id] = asked.num_tokens - asked.num_computed_tokens
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            finished_req_ids=self._finished_ids,
            has_sync_kv_loads=False,
        )
        self._finished_ids = set()
        output.kv_connector_metadata = self.scheduler.build_connector_meta(output)
        return output

    def abort(self, request_id: str) -> None:
        """`finish_requests` with an abort."""
        asked = self.requests.get(request_id)
        if asked is None or asked.status == "finished":
            return
        delayed = False
        if asked.status == "loading":
            delayed = request_id not in self._received
            self._received.discard(request_id)
            self._failed.discard(request_id)
        self._finish(asked, delayed=delayed)

    def preempt(self, request_id: str) -> None:
        """A loaded request that is yet to be computed loses its blocks."""
        asked = self.requests[request_id]
        assert request_id in self._received
        self._promote(asked)
        self._give_back(asked)
        asked.num_computed_tokens = 0

    def _promote(self, asked: Asked) -> None:
        if asked.request_id in self._failed:
            self._failed.remove(asked.request_id)
            self._give_back(asked)
        self._received.remove(asked.request_id)
        asked.status = "waiting"

    def _allocate(self, asked: Asked, end: int) -> bool:
        had = len(asked.block_ids[0]) if asked.block_ids else 0
        more = -(-end // BLOCK) - had
        if more * self._num_groups > len(self._free):
            return False
        lists = asked.block_ids or tuple([] for _ in range(self._num_groups))
        asked.block_ids = tuple([*ids, *(self._free.pop(0) for _ in range(more))] for ids in lists)
        return True

    def _give_back(self, asked: Asked) -> None:
        self._free += [block for ids in asked.block_ids for block in ids]
        asked.block_ids = ()

    def _finish(self, asked: Asked, *, delayed: bool = False) -> None:
        asked.status = "finished"
        block_ids = asked.block_ids
        kept, params = self.scheduler.request_finished_all_groups(asked, block_ids)
        assert (kept, params) == (False, None)
        self._finished_ids.add(asked.request_id)
        if not delayed:
            self._free_blocks(asked)

    def _free_blocks(self, asked: Asked) -> None:
        self._give_back(asked)
        del self.requests[asked.request_id]

    def update(self, output: Any) -> None:
        """`update_from_output`."""
        for request_id in output.failed_recving:
            asked = self.requests.get(request_id)
            if asked is not None and asked.status == "loading":
                if self._recompute:
                    asked.num_computed_tokens = 0
                    self._failed.add(request_id)
                else:
                    self.errors.append(request_id)
        for request_id in output.scheduled:
            asked = self.requests.get(request_id)
            if asked is not None and asked.status == "running":
                self._finish(asked)
        if not self._recompute:
            for request_id in output.failed_recving:
                self.abort(request_id)
        self.scheduler.update_connector_output(output)
        for request_id in output.finished_recving:
            assert request_id in self.requests, f"{request_id} was reported, and nobody waits"
            asked = self.requests[request_id]
            if asked.status == "loading":
                self._received.add(request_id)
            else:
                assert asked.status == "finished"
                self._free_blocks(asked)
        stats = self.scheduler.get_kv_connector_stats()
        told = [each for each in (output.kv_connector_stats, stats) if each is not None]
        self.stats += [each for each in told if not each.is_empty()]

    # The worker.

    def work(self, output: Any) -> Any:
        worker = self.worker
        worker.bind_connector_metadata(output.kv_connector_metadata)
        for request_id, count in output.num_scheduled_tokens.items():
            self.computed[request_id] = self.requests[request_id].num_tokens - count
        if output.num_scheduled_tokens:
            for name, tensor in self._tensors.items():
                worker.wait_for_layer_load(name)
                worker.save_kv_layer(name, tensor, SimpleNamespace())
        worker.start_load_kv(SimpleNamespace())
        worker.wait_for_save()
        results = worker.get_transfer_results(output.finished_req_ids)
        assert not worker.get_block_ids_with_load_errors()
        assert results.failed_recving <= results.finished_recving
        for request_id in results.finished_recving:
            self.reports[request_id] = self.reports.get(request_id, 0) + 1
        told = SimpleNamespace(
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            scheduled=list(output.num_scheduled_tokens),
            kv_connector_stats=worker.get_kv_connector_stats(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        return told

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()


@contextmanager
def running(module: Any, *made: Any, **how: Any) -> Iterator[Engine]:
    """An engine, which is ended in any case."""
    engine = Engine(module, *made, **how)
    try:
        engine.start()
        engine.step()  # in which the scheduler half hears of the sources
        yield engine
    finally:
        engine.close()


def remote(request_id: str, tokens: Sequence[int], **params: Any) -> Asked:
    """A request whose prefill is asked of a source."""
    return Asked(request_id, list(tokens), {"do_remote_prefill": True, **params})
