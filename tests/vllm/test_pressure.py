"""Loads beside requests that decode, with fewer blocks than all of them need.

vLLM takes the blocks of running requests away and computes them again later; a load keeps its own.
The source computes the model, so that every request has the tokens that it has alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.engines import Asked, Engine, engine_of, prompt_of
from tests.vllm.seen import SEEN, distance, same
from tests.vllm.stations import stand_at, station, torch_of

NUM_BLOCKS = 25  # of which vLLM keeps one for itself
DECODED = 100


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("control")


@pytest.fixture(scope="module")
def engine(tiny: Path, torch_python: str, control: Path) -> Iterator[Engine]:
    model = tiny / "tiny-llama"
    source = torch_of(model, control, torch_python)
    with engine_of(
        model, [source], num_gpu_blocks_override=NUM_BLOCKS, max_model_len=512
    ) as engine:
        yield engine


@pytest.fixture
def preempted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests that vLLM preempted."""
    names: list[str] = []
    preempt = engine.scheduler._preempt_request

    def told(request: object, *args: object, **kwargs: object) -> object:
        names.append(request.request_id)  # type: ignore[attr-defined]
        return preempt(request, *args, **kwargs)

    monkeypatch.setattr(engine.scheduler, "_preempt_request", told)
    return names


def test_requests_are_preempted_while_a_load_is_under_way(
    engine: Engine, control: Path, preempted: list[str]
) -> None:
    prompts = [prompt_of(130, seed) for seed in range(4)]
    slow = prompt_of(200, 9)
    own = [engine.generate(each, route=None, max_tokens=DECODED) for each in prompts]
    last = engine.generate(slow, route=None)
    computed = engine.computed(last)
    with station(control, slow) as here:
        loading = engine.ask(slow)
        stand_at(engine, here, "commit 2")
        load = SEEN.loads[-1]
        asked = [engine.ask(each, route=None, max_tokens=DECODED) for each in prompts]
        engine.until(lambda: bool(preempted), "a preemption")
        assert loading.internal not in preempted
        here.open()
        engine.run(loading, *asked)
    assert loading.tokens == last.tokens
    assert distance(engine.imported(loading), computed) < 1e-3
    assert SEEN.loads.count(load) == 1
    assert [each.tokens for each in asked] == [each.tokens for each in own]
    engine.settle()
    assert engine.num_free == engine.all_free


def test_aborts_beside_preemptions_change_nobodys_tokens(
    engine: Engine, preempted: list[str]
) -> None:
    draw = random.Random(8)
    prompts = [prompt_of(draw.randrange(40, 260), seed) for seed in range(6)]
    own = [engine.generate(each, route=None, max_tokens=40).tokens for each in prompts]
    rows = [engine.imported(engine.generate(each)) for each in prompts]
    running: list[tuple[int, Asked]] = []
    ended = 0
    while ended < 60:
        while len(running) < 5:
            at = draw.randrange(len(prompts))
            route = draw.choice(["streamed", "chunked", "whole", None])
            running.append((at, engine.ask(prompts[at], route=route, max_tokens=40)))
        for _ in range(draw.randrange(12)):
            engine.step()
        for at, done in [each for each in running if each[1].reason]:
            assert done.tokens == own[at]
            if done.internal in SEEN.published:
                assert same(engine.imported(done), rows[at])
            running.remove((at, done))
            ended += 1
        if running and draw.random() < 0.2:
            engine.abort(running.pop(draw.randrange(len(running)))[1])
    for _, each in running:
        engine.abort(each)
    engine.settle()
    assert preempted
    loaded = [each.request_id for each in SEEN.loads]
    assert len(set(loaded)) == len(loaded), "a prompt was loaded twice"
    assert engine.num_free == engine.all_free
