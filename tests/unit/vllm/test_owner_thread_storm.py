"""Loads and aborts in any order, over blocks that are used again as soon as they are reported."""

from __future__ import annotations

import random
import time

import pytest
import torch

from headrace.backends.replay import open as open_replay
from headrace.plan import compile_plan
from headrace.runtime.config import SourceConfig
from headrace.testing.sinks import MemorySink, ask
from headrace.vllm.scheduling import Load, Orders, Prompt, Scheduling, Told
from headrace.vllm.settings import Settings
from tests.unit.vllm.test_owner_thread import (
    GEOMETRY,
    PATIENCE_S,
    Stand,
    load,
    settings_of,
    started,
)

pytestmark = pytest.mark.usefixtures("no_source_left", "one_thread")

NUM_LOADS = 50
ROUTES = ("whole", "chunked", "streamed", "auto")


def check_holds(stand: Stand, each: Load) -> None:
    """The blocks of a load hold, from its start on, what the source makes of its tokens."""
    engine, count = open_replay(GEOMETRY), len(each.tokens)
    plan = compile_plan(stand.cache.manifest(), "head_major", count, 40)
    sink = MemorySink(plan, ask(count))
    engine.prefill_stream(each.tokens, sink)
    table, positions = torch.tensor(each.block_ids[0]), torch.arange(each.start, count)
    for (layer, part), nbytes in sink.cells().items():
        made = torch.frombuffer(bytearray(nbytes), dtype=torch.int32).view(2, count, 4)
        rows = stand.cache.read(layer, part, table[positions // 4] * 4 + positions % 4)
        wanted = made[:, each.start :].permute(1, 0, 2)
        assert torch.equal(rows.view(torch.int32), wanted), each


def some_load(rng: random.Random, number: int, free: list[int]) -> Load:
    count = rng.choice((4, 8, 12))
    blocks = [free.pop(rng.randrange(len(free))) for _ in range(count // 4)]
    tokens = tuple(rng.randrange(32) for _ in range(count))
    start = rng.choice((0, count - 4))
    return load(f"r{number}", blocks, tokens=tokens, start=start, route=rng.choice(ROUTES))


@pytest.mark.parametrize("options", [{}, {"digest": True, "poison": True, "prefill_chunk": 3}])
def test_each_is_reported_once_and_what_is_loaded_is_right(options: dict[str, object]) -> None:
    """Every load's blocks are another's at once when it is reported, aborted or not."""
    rng, free = random.Random(5), list(range(1, 16))
    running: dict[str, Load] = {}
    aborted: set[str] = set()
    begun, until_s = 0, time.monotonic() + PATIENCE_S
    with started(settings_of(**options)) as stand:  # type: ignore[arg-type]
        while begun < NUM_LOADS or running:
            assert time.monotonic() < until_s
            loads: list[Load] = []
            while begun < NUM_LOADS and len(free) >= 3 and rng.random() < 0.7:
                loads.append(some_load(rng, begun, free))
                begun += 1
            ending = [name for name in running if name not in aborted and rng.random() < 0.3]
            running |= {each.request_id: each for each in loads}
            aborted |= set(ending)
            stand.thread.carry_out(Orders(tuple(loads), tuple(ending)))
            reports = stand.take(rng.choice((0.0, 0.001, 0.01)))
            assert reports.failed <= aborted
            for name in reports.loaded:
                check_holds(stand, running[name])
            for name in reports.loaded | reports.failed:
                free += running.pop(name).block_ids[0]
        assert sorted(stand.loaded + stand.failed) == sorted(f"r{at}" for at in range(NUM_LOADS))
        assert stand.loaded
        assert stand.failed
        assert sorted(free) == list(range(1, 16))
        assert not any(stand.paged.statistics().values())


def test_an_abort_is_of_what_was_begun_before() -> None:
    """A request is aborted in the step of its report, and its name is another's in the next."""
    halves = Scheduling(Settings(sources=(SourceConfig("replay"),)), 4)
    halves.hear(Told(64, starts_anywhere=True, num_slots=2))
    prompt = Prompt("a", tuple(range(9)), {"do_remote_prefill": True}, True)
    with started(settings_of()) as stand:
        for blocks in ((1, 2), (3, 4)):
            halves.allocated(prompt, (blocks,), halves.matched(prompt, 0) or 0)
            stand.thread.carry_out(halves.step())
            while "a" not in (reports := stand.take(PATIENCE_S)).loaded | reports.failed:
                pass
            halves.finished("a")
            halves.reported(["a"])
        assert stand.loaded == ["a", "a"]
