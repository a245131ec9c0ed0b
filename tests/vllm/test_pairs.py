"""Prompts prefilled by a source are decoded by vLLM as its own, whatever the route.

Of each pair: the routes have the same tokens and the same bytes in the blocks; these are close to
what vLLM computes into its blocks by itself, and its tokens are the same.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.vllm.conftest import directory_of
from tests.vllm.engines import BLOCK, Engine, engine_of, prompt_of
from tests.vllm.seen import SEEN, distance, same

ROUTES = ("whole", "chunked", "streamed")
BOUND = 1e-3
"""Of the largest cell: float32, by two implementations."""


class Case(NamedTuple):
    """One engine and its source. chunk: positions that the source computes at once."""

    model: str
    source: str
    hybrid: bool = True
    block: int = BLOCK
    chunk: int = 0

    def __str__(self) -> str:
        hybrid = "" if self.hybrid else "-flat"
        return f"{self.source}-{self.model}{hybrid}-{self.block}-{self.chunk}"


CASES = (
    Case("tiny-qwen3", "torch", chunk=100),
    Case("tiny-exaone4", "torch"),
    Case("tiny-exaone4", "torch", hybrid=False, block=64),
    Case("tiny-exaone4", "vllm", chunk=64),
    Case("smollm2-135m", "torch"),
    Case("smollm2-135m", "vllm", block=64, chunk=128),
    Case("gemma3-270m", "torch"),
    Case("gemma3-270m", "torch", hybrid=False),
    Case("gemma3-270m", "vllm", chunk=512),
)


class Pair(NamedTuple):
    case: Case
    engine: Engine
    lengths: tuple[int, ...]

    def prompt(self, num_tokens: int, seed: int = 0) -> list[int]:
        real = not self.case.model.startswith("tiny")
        return prompt_of(num_tokens, seed, 40_000 if real else 256)


@pytest.fixture(scope="module", params=CASES, ids=str)
def pair(request: pytest.FixtureRequest, tiny: Path, torch_python: str) -> Iterator[Pair]:
    case: Case = request.param
    model = directory_of(case.model, tiny)
    source: dict[str, Any] = {"source": case.source}
    if case.source == "torch":
        source["python"] = torch_python
    else:
        source["options"] = {"engine": {"skip_tokenizer_init": True}, "block_size": case.block}
        source["python"] = sys.executable
    lengths = (33, 200, 700) if "gemma" in case.model else (33, 65, 300)
    with engine_of(
        model,
        [source],
        extra={"prefill_chunk": case.chunk, "context": 768, "chunk": 0},
        block_size=case.block,
        enable_prefix_caching=True,
        disable_hybrid_kv_cache_manager=not case.hybrid,
    ) as engine:
        yield Pair(case, engine, lengths)


def test_routes_are_equal_and_are_what_vllm_computes(pair: Pair) -> None:
    engine = pair.engine
    for num_tokens in pair.lengths:
        prompt = pair.prompt(num_tokens)
        end = (num_tokens - 1) // pair.case.block * pair.case.block
        own = engine.generate(prompt, route=None)
        computed = SEEN.rows(SEEN.blocks[own.internal], end)
        engine.reset()
        first = None
        for route in ROUTES:
            got = engine.generate(prompt, route=route)
            engine.reset()
            assert got.tokens == own.tokens, (num_tokens, route)
            if not end:
                continue
            assert got.cached == end, (num_tokens, route)
            imported = engine.imported(got)
            first = first or imported
            assert same(imported, first), (num_tokens, route)
            assert distance(imported, computed) < BOUND, (num_tokens, route)
        assert engine.num_free == engine.all_free


def test_several_prompts_at_once(pair: Pair) -> None:
    engine = pair.engine
    lengths = (70, 97, 161, 290, 129)
    prompts = [pair.prompt(num_tokens, seed=1) for num_tokens in lengths]
    alone = [engine.generate(each, route=None).tokens for each in prompts]
    engine.reset()
    single = [engine.generate(each, route="streamed") for each in prompts]
    rows = [engine.imported(each) for each in single]
    engine.reset()
    routes = ("streamed", "chunked", "whole", "streamed", None)
    asked = [engine.ask(each, route=route) for each, route in zip(prompts, routes, strict=True)]
    engine.run(*asked)
    engine.settle()
    assert [each.tokens for each in asked] == alone
    for each, right in zip(asked[:-1], rows, strict=False):
        assert same(engine.imported(each), right), len(each.prompt)
    engine.reset()
    assert engine.num_free == engine.all_free


def test_a_prefix_that_vllm_has_is_left_alone(pair: Pair) -> None:
    """A source that can begin anywhere brings the rest; of another one nothing is taken."""
    engine, block = pair.engine, pair.case.block
    prompt = pair.prompt(290, seed=2)
    own = engine.generate(prompt, route=None)
    computed = SEEN.rows(SEEN.blocks[own.internal], 288 // block * block)
    engine.reset()
    count = len(SEEN.loads)
    engine.generate(prompt[: 2 * block + 1], route=None)
    got = engine.generate(prompt, route="streamed")
    assert got.tokens == own.tokens
    begun = SEEN.loads[count:]
    if pair.case.source == "torch":
        assert [load.start for load in begun] == [2 * block]
        assert distance(engine.imported(got), computed) < BOUND
    else:
        assert begun == []
    engine.reset()
    assert engine.num_free == engine.all_free
