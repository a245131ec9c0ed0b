"""The connector in a source process: what vLLM computes there is told to the source's engine."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.backends.vllm import ROLE
from headrace.engine.vllm.producing import HERE
from tests.unit.engine.vllm.made_up import (
    HEAD_DIM,
    HEADS,
    FullAttentionSpec,
    attention,
    cache_config,
    empty_cache,
    group,
    model_in,
    name_of,
    vllm_config,
    write_cells,
)

pytestmark = pytest.mark.usefixtures("_in_a_source", "one_thread")
BLOCKS = torch.tensor([5, 2, 9], dtype=torch.int32)


@pytest.fixture
def _in_a_source(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(ROLE, "1")
    before = HERE.cache
    yield
    HERE.cache, HERE.failure = before, None
    HERE.end()


class Taken:
    """A taker that keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.rows: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.piece = (0, 0)

    def begin(self, start: int, stop: int) -> None:
        self.piece = start, stop
        self.told.append(("begin", start, stop))

    def take(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.told.append(("take", layer))
        self.rows[layer, self.piece[0]] = keys, values

    def end(self, start: int, stop: int, cache: Any) -> None:
        self.told.append(("end", start, stop))


class Source:
    """Both halves of the connector of a vLLM of two layers."""

    def __init__(self, module: Any, directory: Path, **transfer: Any) -> None:
        modules = {name_of(at): attention() for at in range(2)}
        given = {"is_kv_consumer": False, "is_kv_producer": True, **transfer}
        config = vllm_config(model_in(directory / "model"), modules, **given)
        caches = cache_config(group(list(modules), FullAttentionSpec()))
        self.tensors = {name: empty_cache() for name in modules}
        roles = module.KVConnectorRole
        self.scheduler = module.HeadraceConnector(config, roles.SCHEDULER, caches)
        self.worker = module.HeadraceConnector(config, roles.WORKER, caches)

    def compute(self, output: Any, states: dict[tuple[int, str], torch.Tensor]) -> None:
        """One step of vLLM's, which computes `states` [positions, heads, head_dim]."""
        worker = self.worker
        worker.bind_connector_metadata(self.scheduler.build_connector_meta(output))
        if output.total_num_scheduled_tokens:
            start = output.start
            for layer, (name, tensor) in enumerate(self.tensors.items()):
                worker.wait_for_layer_load(name)
                rows = states[layer, "k"][start:], states[layer, "v"][start:]
                positions = torch.arange(start, start + output.total_num_scheduled_tokens)
                cells = BLOCKS[positions // 4].long() * 4 + positions % 4
                write_cells(rows[0][: len(cells)], rows[1][: len(cells)], tensor, cells)
                worker.save_kv_layer(name, tensor, SimpleNamespace(block_table=BLOCKS[None]))
        worker.start_load_kv(None)
        worker.wait_for_save()
        assert not worker.get_transfer_results(set()).finished_recving
        assert worker.build_connector_worker_meta() is None
        worker.clear_connector_metadata()


def new(request_id: str, start: int, count: int) -> SimpleNamespace:
    """The first step of a request."""
    return SimpleNamespace(
        num_scheduled_tokens={request_id: count},
        total_num_scheduled_tokens=count,
        scheduled_new_reqs=[SimpleNamespace(req_id=request_id, num_computed_tokens=start)],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        start=start,
    )


def later(request_id: str, start: int, count: int) -> SimpleNamespace:
    """A further one."""
    output = new("another", 0, 0)
    output.num_scheduled_tokens = {request_id: count}
    output.total_num_scheduled_tokens, output.start = count, start
    output.scheduled_cached_reqs = SimpleNamespace(
        req_ids=["another", request_id], num_computed_tokens=[77, start]
    )
    return output


def nothing() -> SimpleNamespace:
    output = new("a", 0, 0)
    output.num_scheduled_tokens = {}
    return output


def random_states(count: int) -> dict[tuple[int, str], torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        (layer, part): torch.randn(count, HEADS, HEAD_DIM, generator=generator)
        for layer in range(2)
        for part in "kv"
    }


def test_what_is_computed_is_taken_layer_by_layer(module: Any, tmp_path: Path) -> None:
    source, states, taken = Source(module, tmp_path), random_states(11), Taken()
    for worker in (source.scheduler, source.worker):
        worker.register_kv_caches(source.tensors)
    HERE.begin(taken)
    source.compute(new("a", 0, 8), states)
    source.compute(later("a", 8, 3), states)
    assert HERE.failure is None
    assert HERE.end() == 11
    assert taken.told == [
        *(("begin", 0, 8), ("take", 0), ("take", 1), ("end", 0, 8)),
        *(("begin", 8, 11), ("take", 0), ("take", 1), ("end", 8, 11)),
    ]
    for (layer, start), rows in taken.rows.items():
        stop = 8 if start == 0 else 11
        for part, landed in zip("kv", rows, strict=True):
            assert torch.equal(landed, states[layer, part][start:stop].permute(1, 0, 2))


def test_nothing_is_taken_of_what_nobody_asked_for(module: Any, tmp_path: Path) -> None:
    """vLLM's own warm-up, a step without work, and a source that takes no part in loads."""
    source, states = Source(module, tmp_path), random_states(4)
    source.worker.register_kv_caches(source.tensors)
    source.compute(new("warm-up", 0, 4), states)
    source.compute(nothing(), states)
    assert not HERE.at_work
    request = SimpleNamespace(request_id="a")
    assert source.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    source.scheduler.update_state_after_alloc(request, None, 0)
    source.scheduler.update_connector_output(SimpleNamespace())
    assert source.scheduler.request_finished(request, []) == (False, None)
    assert source.worker.get_kv_connector_stats() is None
    source.worker.shutdown()


def test_a_consumer_in_a_source_loads_nothing(newest: Any, tmp_path: Path) -> None:
    """kv_both of a source: its own sources are nobody's, and are not even read."""
    wrong = {"kv_connector_extra_config": {"sources": "none"}}
    source = Source(newest, tmp_path, is_kv_consumer=True, **wrong)
    source.worker.register_kv_caches(source.tensors)
    assert source.scheduler._scheduling is None
    assert source.worker._owner is None
    assert HERE.cache is not None


def test_a_mere_consumer_in_a_source_takes_no_part(newest: Any, tmp_path: Path) -> None:
    HERE.cache = None
    source = Source(newest, tmp_path, is_kv_consumer=True, is_kv_producer=False)
    source.worker.register_kv_caches(source.tensors)
    assert source.worker._owner is None
    assert HERE.cache is None


def test_it_is_found_where_vllm_looks(module: Any) -> None:
    package = import_module("headrace.vllm")
    assert package.HeadraceConnector is module.HeadraceConnector
    with pytest.raises(AttributeError, match="has no attribute 'Connector'"):
        _ = package.Connector


def test_what_a_class_is_asked(module: Any) -> None:
    connector = module.HeadraceConnector
    assert connector.supports_sleep_mode(None) is False
    assert connector.requires_piecewise_for_cudagraph({}) is True, "in a source"
    word = module.Word(None)
    assert word.aggregate(module.Word(None)) == word
