"""Whatever becomes of a source while it loads a prompt, vLLM lives and its blocks are whole.

A load that failed ends its request with vLLM's own error, or is recomputed, as its policy says; and
afterwards all blocks are free, and the source that took the dead one's place serves.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.vllm.engines import Asked, Engine, engine_of, prompt_of, sources_of
from tests.vllm.seen import SEEN, same
from tests.vllm.stations import POINTS, replay_of, stand_at, station

PATIENCE_S = 2.0
NUM_BLOCKS = 48
ABORTS = {"fail": 1000, "recompute": 200}


class Lab(NamedTuple):
    engine: Engine
    control: Path
    policy: str

    def check_end(self, asked: Asked, own: list[int]) -> None:
        """A request whose load failed ended as the policy says."""
        if self.policy == "fail":
            assert (asked.reason, asked.tokens) == ("error", [])
        else:
            assert (asked.reason, asked.tokens) == ("length", own)

    def check_rest(self) -> None:
        """All blocks are free again, and a source serves."""
        self.engine.settle()
        assert self.engine.num_free == self.engine.all_free
        assert self.engine.generate(prompt_of(70, 77)).cached == 64
        assert self.engine.num_free == self.engine.all_free


@pytest.fixture(scope="module", params=["fail", "recompute"])
def lab(
    request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Lab]:
    control = tmp_path_factory.mktemp("control")
    extra = {"progress_timeout_s": PATIENCE_S, "drain_timeout_s": PATIENCE_S, "route": "streamed"}
    with engine_of(
        tiny / "tiny-llama",
        [replay_of(tiny / "tiny-llama", control)],
        extra=extra,
        policy=request.param,
        num_gpu_blocks_override=NUM_BLOCKS,
    ) as engine:
        yield Lab(engine, control, request.param)


def the_source() -> int:
    (pid,) = sources_of()
    return pid


@pytest.mark.parametrize("point", POINTS)
def test_a_source_is_killed_anywhere(lab: Lab, point: str) -> None:
    engine, prompt = lab.engine, prompt_of(100)
    own = engine.generate(prompt, route=None).tokens
    right = engine.generate(prompt)
    with station(lab.control, prompt) as here:
        asked = engine.ask(prompt)
        stand_at(engine, here, point)
        os.kill(the_source(), signal.SIGKILL)
        engine.run(asked)
    if point == "return" and asked.tokens == right.tokens:  # all had been told
        assert same(engine.imported(asked), engine.imported(right))
    else:
        lab.check_end(asked, own)
    lab.check_rest()


@pytest.mark.parametrize("point", ["begin", "commit 2", "final"])
def test_a_source_that_stalls_anywhere_is_ended(lab: Lab, point: str) -> None:
    engine, prompt = lab.engine, prompt_of(101)
    own = engine.generate(prompt, route=None).tokens
    with station(lab.control, prompt) as here:
        asked = engine.ask(prompt)
        stand_at(engine, here, point)
        stalled = the_source()
        os.kill(stalled, signal.SIGSTOP)
        engine.run(asked)
    lab.check_end(asked, own)
    lab.check_rest()
    assert stalled != the_source()


@pytest.mark.parametrize("fault", ["it raises", "it exits", "it hangs up", "no final"])
def test_a_source_that_fails_by_itself(lab: Lab, fault: str) -> None:
    engine, prompt = lab.engine, prompt_of(102)
    own = engine.generate(prompt, route=None).tokens
    point: dict[str, Any] = {"point": "commit", "number": 2}
    with station(lab.control, prompt, fault=fault, **point) as here:
        asked = engine.ask(prompt)
        here.open()
        engine.run(asked)
    if fault == "no final":  # which is told at the point `final` alone
        assert asked.cached == 96
    else:
        lab.check_end(asked, own)
    lab.check_rest()


@pytest.mark.parametrize("point", POINTS[:-1])
def test_an_aborted_load_keeps_its_blocks_until_nothing_comes_any_more(
    lab: Lab, point: str
) -> None:
    """The source hears of no cancel, and goes on when the request is long gone."""
    engine, prompt, other = lab.engine, prompt_of(200), prompt_of(900, 1)
    right = engine.imported(engine.generate(other))
    with station(lab.control, prompt, deaf=True) as here:
        asked = engine.ask(prompt)
        stand_at(engine, here, point)
        held = {block for ids in SEEN.loads[-1].block_ids for block in ids}
        canary = engine.ask(other)  # first, so that it is scheduled before the abort is reported
        engine.abort(asked)
        engine.until(lambda: SEEN.loads[-1].request_id == canary.internal, "the canary's load")
        taken = {block for ids in SEEN.loads[-1].block_ids for block in ids}
        assert not held & taken
        here.open()
        engine.run(canary)
        assert same(engine.imported(canary), right)
        assert same(SEEN.loaded_rows(SEEN.loads[-1]), right)
    lab.check_rest()


def test_blocks_that_are_used_again_are_their_new_owners(lab: Lab) -> None:
    """Loads are aborted at random points, and the next prompt takes all blocks there are."""
    engine, draw = lab.engine, random.Random(5)
    large = prompt_of((NUM_BLOCKS - 4) * 20, 2)
    right = engine.imported(engine.generate(large))
    for number in range(40):
        victim = prompt_of(draw.randrange(600, 900), number)
        with station(lab.control, victim, deaf=draw.random() < 0.5) as here:
            asked = engine.ask(victim)
            stand_at(engine, here, draw.choice(POINTS[:-1]))
            engine.abort(asked)
            canary = engine.ask(large)
            for _ in range(draw.randrange(4)):
                engine.step()
            here.open()
            engine.run(canary)
            load = SEEN.loads[-1]
            assert load.request_id == canary.internal
            assert same(engine.imported(canary), right), number
            assert same(SEEN.loaded_rows(load), right), number
    lab.check_rest()


def test_many_aborts_leave_all_blocks_free(lab: Lab) -> None:
    """At random steps, of several loads at once; those that are not aborted are exact."""
    engine, draw = lab.engine, random.Random(6)
    prompts = [prompt_of(draw.randrange(40, 300), seed) for seed in range(12)]
    right = [engine.generate(each) for each in prompts]
    rows = [engine.imported(each) for each in right]
    running: list[tuple[int, Asked]] = []
    aborted = 0
    while aborted < ABORTS[lab.policy]:
        while len(running) < 4:
            at = draw.randrange(len(prompts))
            route = draw.choice(["streamed", "chunked", "whole"])
            running.append((at, engine.ask(prompts[at], route=route)))
        for _ in range(draw.randrange(6)):
            engine.step()
        for at, done in [each for each in running if each[1].reason]:
            assert done.tokens == right[at].tokens
            assert same(SEEN.published.pop(done.internal), rows[at])
        running = [each for each in running if not each[1].reason]
        if running and draw.random() < 0.9:
            _, victim = running.pop(draw.randrange(len(running)))
            engine.abort(victim)
            SEEN.published.pop(victim.internal, None)
            aborted += 1
    engine.run(*(each for _, each in running))
    lab.check_rest()
