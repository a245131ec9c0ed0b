"""Both halves of the connector, driven as vLLM's scheduler and worker drive them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.errors import LocalProtocolError, Refused
from headrace.telemetry.recording import read as read_trace
from tests.conftest import children
from tests.unit.engine.vllm.made_up import BLOCK, HEAD_DIM, HEADS, vllm_config
from tests.unit.vllm.engine_stand import Asked, Engine, remote, running
from tests.unit.vllm.gates import gate_at
from tests.unit.vllm.loads import Model

pytestmark = pytest.mark.usefixtures("no_source_left", "one_thread")

PROMPT = [3 + at % 20 for at in range(17)]  # four blocks and a token
LOADED = 16
KV_NBYTES = (LOADED + 2 * 2 * BLOCK) * 2 * HEADS * HEAD_DIM * 4
"""A full layer, and two of whose window the last two blocks have to do with, in float32."""


def parked(engine: Engine, request_id: str) -> tuple[list[int], ...]:
    """Step until the worker was told of the load; returns its blocks."""
    asked = engine.requests[request_id]
    engine.step()
    if asked.status == "waiting":  # the first after a rest: the worker is asked for its word
        engine.step()
    assert asked.status == "loading"
    return asked.block_ids


def test_a_load_fills_its_blocks_and_no_others(module: Any, tmp_path: Path) -> None:
    model = Model(tmp_path)
    with running(module, *model.made()) as engine:
        asked = engine.add(remote("a", PROMPT))
        blocks = parked(engine, "a")
        engine.run("a")
        assert engine.computed == {"a": LOADED}
        assert engine.reports == {"a": 1}
        assert not asked.block_ids
        assert engine.free_blocks == 23
        model.check_loaded(PROMPT[:LOADED], blocks)
        assert model.untouched(blocks)
        (stats,) = engine.stats
        assert stats.data["bytes"] == [KV_NBYTES]
        assert not stats.data["failed"]
        assert not stats.data["local"]


def test_many_loads_at_once(newest: Any, tmp_path: Path) -> None:
    model = Model(tmp_path, num_blocks=80)
    prompts = {f"r{at}": [1 + at, *PROMPT[at:]] for at in range(6)}
    with running(newest, *model.made()) as engine:
        for request_id, tokens in prompts.items():
            engine.add(remote(request_id, tokens))
        engine.run(*prompts)
        assert engine.reports == dict.fromkeys(prompts, 1)
        ends = {name: (len(tokens) - 1) // BLOCK * BLOCK for name, tokens in prompts.items()}
        assert engine.computed == ends
        assert engine.free_blocks == 79


def test_a_prefix_that_vllm_has_is_not_written(newest: Any, tmp_path: Path) -> None:
    """Its blocks keep their canaries; the source emits the rest."""
    model = Model(tmp_path)
    with running(newest, *model.made(), local=2 * BLOCK) as engine:
        engine.add(remote("a", PROMPT))
        blocks = parked(engine, "a")
        engine.run("a")
        assert engine.computed["a"] == LOADED
        model.check_loaded(PROMPT[:LOADED], blocks, start=2 * BLOCK)
        assert model.untouched(tuple(ids[2:] for ids in blocks))


def test_what_is_left_to_vllm(newest: Any, tmp_path: Path) -> None:
    model, do = Model(tmp_path, num_blocks=80), {"do_remote_prefill": True}
    with running(newest, *model.made()) as engine:
        for asked in (
            Asked("unasked", PROMPT),
            Asked("refused", PROMPT, {"do_remote_prefill": False}),
            Asked("image", PROMPT, do, mm_features=["image"]),
            Asked("lora", PROMPT, do, lora_request="lora"),
            Asked("embeds", PROMPT, do, prompt_embeds="of some positions, beside all ids"),
            Asked("short", PROMPT[:BLOCK], do),
            Asked("mistaken", PROMPT, {**do, "headrace_route": "swift"}),
        ):
            engine.add(asked)
        engine.step()
        assert list(engine.computed.values()) == [0] * 7
        assert engine.requests == {}
        assert engine.reports == {}
        (stats,) = engine.stats
        assert stats.data["local"] == {"not-text": 3, "short": 1, "mistaken": 1}


def test_an_abort_before_the_worker_heard(newest: Any, tmp_path: Path) -> None:
    """The blocks were reserved in a step whose orders do not reach the worker before the abort."""
    model = Model(tmp_path)
    with running(newest, *model.made()) as engine:
        engine.add(remote("a", PROMPT))
        engine.step()  # the first after a rest: the worker is asked for its word
        scheduling, step = engine.scheduler._scheduling, engine.scheduler.build_connector_meta

        def aborted_meanwhile(output: Any) -> Any:
            engine.abort("a")
            return step(output)

        engine.scheduler.build_connector_meta = aborted_meanwhile
        output = engine.schedule()
        del engine.scheduler.build_connector_meta
        assert output.kv_connector_metadata.orders.dropped == ("a",)
        engine.update(engine.work(output))
        assert engine.reports == {"a": 1}
        engine.run("a")
        engine.step()
        assert engine.reports == {"a": 1}
        assert scheduling.loading == 0
        assert engine.free_blocks == 23
        assert model.untouched()


def test_an_abort_while_it_is_loaded(newest: Any, tmp_path: Path) -> None:
    with gate_at(tmp_path / "gate") as gate:
        model = Model(tmp_path, gate=gate)
        with running(newest, *model.made()) as engine:
            engine.add(remote("a", PROMPT))
            blocks = parked(engine, "a")
            gate.let(1)
            engine.abort("a")
            assert "a" in engine.requests, "its blocks are not free before the report"
            engine.step()
            gate.open()
            engine.run("a")
            canary = engine.add(remote("b", PROMPT[::-1]))
            again = parked(engine, "b")
            assert canary.request_id in engine.requests
            engine.run("b")
            engine.step()
            assert engine.reports == {"a": 1, "b": 1}
            assert engine.computed == {"b": LOADED}
            model.check_loaded(PROMPT[::-1][:LOADED], again)
            assert model.untouched(blocks, again)
            (failed,) = [each.data["failed"] for each in engine.stats if each.data["failed"]]
            assert failed == {"cancelled": 1}


def test_an_abort_in_the_step_of_its_report(newest: Any, tmp_path: Path) -> None:
    """vLLM's engine would end if the id were reported again: nobody waits for it any more."""
    model = Model(tmp_path)
    with running(newest, *model.made()) as engine:
        engine.add(remote("a", PROMPT))
        told = engine.work(engine.schedule())
        while not told.finished_recving:
            engine.update(told)
            told = engine.work(engine.schedule())
        engine.abort("a")
        engine.update(told)
        assert "a" not in engine.requests
        for _ in range(3):
            engine.step()
        assert engine.reports == {"a": 1}
        assert engine.scheduler._scheduling.loading == 0
        assert engine.worker._owner.outstanding == 0


@pytest.mark.parametrize("recompute", [True, False])
def test_a_source_that_dies(newest: Any, tmp_path: Path, recompute: bool) -> None:
    """The load is reported as failed and as finished at once; asked again, nothing is loaded."""
    before = children()
    with gate_at(tmp_path / "gate") as gate:
        model = Model(tmp_path, gate=gate)
        with running(newest, *model.made(), recompute=recompute) as engine:
            engine.add(remote("a", PROMPT))
            blocks = parked(engine, "a")
            gate.let(1)
            (pid,) = children() - before
            os.kill(pid, signal.SIGKILL)
            engine.run("a")
            assert engine.reports == {"a": 1}
            assert engine.computed == ({"a": 0} if recompute else {})
            assert engine.errors == ([] if recompute else ["a"])
            assert model.untouched(blocks)
            engine.add(remote("b", PROMPT))
            engine.run("b")
            assert engine.reports == {"a": 1}, "no source is left, and the scheduler knows"
            assert engine.computed.get("b", 0) == 0
            assert engine.free_blocks == 23


def test_a_preempted_request_is_not_loaded_again(newest: Any, tmp_path: Path) -> None:
    model = Model(tmp_path)
    with running(newest, *model.made()) as engine:
        engine.add(remote("a", PROMPT))
        parked(engine, "a")
        while "a" not in engine.reports:
            engine.step()
        engine.preempt("a")
        engine.run("a")
        assert engine.computed == {"a": 0}
        assert engine.reports == {"a": 1}


def test_a_step_that_computes_nothing_sleeps(newest: Any, tmp_path: Path) -> None:
    """While a load is under way, and only then."""
    waits: list[float] = []
    with gate_at(tmp_path / "gate") as gate:
        model = Model(tmp_path, gate=gate, idle_wait_ms=2.0)
        with running(newest, *model.made()) as engine:
            owner = engine.worker._owner
            take = owner.take_reports

            def watched(wait_s: float = 0.0) -> Any:
                waits.append(wait_s)
                return take(wait_s)

            owner.take_reports = watched
            engine.add(remote("a", PROMPT))
            parked(engine, "a")
            engine.add(Asked("local", list(PROMPT)))
            engine.step()
            engine.step()
            assert waits == [2e-3, 2e-3, 0.0, 2e-3]
            gate.open()
            engine.run("a")


def test_an_owner_that_ended_leaves_prompts_to_vllm(newest: Any, tmp_path: Path) -> None:
    model = Model(tmp_path)
    with running(newest, *model.made()) as engine:
        engine.step()
        engine.worker._owner.close()
        engine.step()
        engine.add(remote("a", PROMPT))
        engine.run("a")
        assert engine.computed == {"a": 0}
        assert engine.reports == {}
        assert engine.stats[-1].data["local"] == {"out-of-service": 1}


def test_a_load_leaves_the_timeline_of_both_sides(newest: Any, tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    traces.mkdir()
    model = Model(tmp_path, trace_dir=str(traces))
    with running(newest, *model.made()) as engine:
        engine.add(remote("a/1", PROMPT))
        engine.run("a/1")
    (run,) = read_trace(traces / "a_1.json").runs
    assert (run.outcome, run.route, run.num_tokens) == ("finished", "streamed", LOADED)
    assert {each.kind for each in run.source} >= {"compute", "write", "final"}
    assert {each.kind for each in run.owner} >= {"granted", "import", "published"}


# What is refused, in one sentence.


def made_of(module: Any, config: Any, role: str = "SCHEDULER") -> Any:
    cache_config = SimpleNamespace(kv_cache_groups=[], num_blocks=4)
    return module.HeadraceConnector(config, module.KVConnectorRole[role], cache_config)


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.32.0", "dev"])
def test_another_vllm(
    module: Any, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.vllm, "__version__", version)
    with pytest.raises(Refused, match=rf"^this is vLLM {version}, .*0\.32 and 0\.33") as told:
        made_of(module, vllm_config(tmp_path, {}))
    assert told.value.field == "vllm"


def test_a_producer_outside_of_a_source(module: Any, tmp_path: Path) -> None:
    config = vllm_config(tmp_path, {}, is_kv_consumer=False, is_kv_producer=True)
    with pytest.raises(Refused, match="kv_role is kv_producer") as told:
        made_of(module, config)
    assert told.value.field == "kv_role"


def test_engines_that_it_was_not_made_for(module: Any, tmp_path: Path) -> None:
    for name, value in (("tensor_parallel_size", 2), ("data_parallel_size", 3)):
        config = vllm_config(tmp_path, {})
        setattr(config.parallel_config, name, value)
        with pytest.raises(Refused, match=f"vLLM runs with {name} {value}"):
            made_of(module, config)
    config = vllm_config(tmp_path, {})
    config.speculative_config = object()
    with pytest.raises(Refused, match="without speculative decoding"):
        made_of(module, config)


def test_a_cache_that_was_not_verified(module: Any, tmp_path: Path) -> None:
    """The worker half refuses it before any source is started."""
    model = Model(tmp_path)
    for each in model.modules.values():
        each.attn_backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN")
    engine = Engine(module, *model.made())
    with pytest.raises(Refused, match="FLASH_ATTN, whose cache was not verified"):
        engine.start()
    engine.close()


def test_a_second_engine_in_the_process(newest: Any, tmp_path: Path) -> None:
    """vLLM gives it the worker half of the first."""
    model = Model(tmp_path)
    with running(newest, *model.made()) as engine:
        with pytest.raises(Refused, match="VLLM_ENABLE_V1_MULTIPROCESSING at 1") as told:
            engine.start()
        assert told.value.field == "VLLM_ENABLE_V1_MULTIPROCESSING"
        engine.add(remote("a", PROMPT))
        engine.run("a")
        assert engine.computed == {"a": LOADED}


def test_metadata_of_another_connector(module: Any, tmp_path: Path) -> None:
    config = vllm_config(
        tmp_path, {}, kv_connector_extra_config={"sources": [{"source": "replay"}]}
    )
    worker = made_of(module, config, "WORKER")
    worker.bind_connector_metadata(object())
    with pytest.raises(LocalProtocolError, match="brought object, no step of headrace's"):
        worker.start_load_kv(None)
    with pytest.raises(LocalProtocolError, match="transfer results"):
        worker.get_finished(set())
