"""What `bench vllm` measures, how much of it, and where it finds what it runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from headrace.bench.families import random_prompt
from headrace.messages import Route

ROUTES: Final[tuple[Route, ...]] = ("whole", "chunked", "streamed")
MARGIN: Final = 64  # positions of the engine beyond the longest prompt
BLOCK: Final = 32  # positions of a block, of which vLLM's CPU build wants multiples
ENGINE_VARIABLES: Final = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True)
class Sizes:
    """How much of each case.

    rounds, short_rounds, long_rounds: of `tail`; the latter two of prompts of at most `short` and
    of more than `long` tokens. answer: tokens of an answer. wait_s: of each look at an engine's CPU
    time. pool: different prompts of `aborts`, of `least` to `most` tokens. peer_lengths,
    peer_rounds: of `peer`.
    """

    lengths: tuple[int, ...] = (300, 600, 1200, 2000)
    links_mb_s: tuple[float, ...] = (0.0, 250.0, 60.0, 30.0)
    rounds: int = 6
    short_rounds: int = 10
    long_rounds: int = 4
    short: int = 400
    long: int = 1000
    answer: int = 8
    wait_s: float = 20.0
    requests: int = 500
    at_once: int = 4
    pool: int = 60
    least: int = 34
    most: int = 260
    peer_lengths: tuple[int, ...] = (300, 1200)
    peer_rounds: int = 4


QUICK: Final = replace(
    Sizes(),
    lengths=(100,),
    links_mb_s=(0.0, 60.0),
    rounds=1,
    short_rounds=1,
    long_rounds=1,
    wait_s=1.0,
    requests=12,
    pool=4,
    most=100,
    peer_lengths=(100,),
    peer_rounds=1,
)


@dataclass(frozen=True)
class Place:
    """Where the engines run. python: of vLLM's environment. source_python: of torch sources."""

    directory: Path
    python: str
    source_python: str


@dataclass(frozen=True)
class Setting:
    """What is measured; `model` is its name. prefill_chunk: of all routes of `tail`."""

    model: str
    prefill_chunk: int = 256
    seed: int = 1
    sizes: Sizes = Sizes()

    def same(self) -> dict[str, Any]:
        """What rows depend on beside their key."""
        return {"model": self.model, "prefill_chunk": self.prefill_chunk, "seed": self.seed}

    def facts(self) -> dict[str, Any]:
        """The same with the sizes, for the row that ends a case."""
        return {**self.same(), "sizes": vars(self.sizes)}

    def rounds(self, num_tokens: int) -> int:
        """Of a prompt in `tail`."""
        sizes = self.sizes
        if num_tokens <= sizes.short:
            return sizes.short_rounds
        return sizes.rounds if num_tokens <= sizes.long else sizes.long_rounds

    def prompt(self, num_tokens: int, number: int = 0) -> list[int]:
        """A prompt of this length; others of it by their number."""
        return random_prompt(
            num_tokens, VOCABULARY, self.seed * 1_000_000 + number * 10_000 + num_tokens
        )

    def engine(self, place: Place, longest: int, **more: Any) -> dict[str, Any]:
        """What vLLM's `LLM` takes for prompts of up to `longest` tokens."""
        return {
            "model": str(place.directory),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": longest + MARGIN,
            "block_size": BLOCK,
            "enable_prefix_caching": False,
            "disable_log_stats": True,
            **more,
        }


def consumer(source: dict[str, Any], **extra: Any) -> dict[str, Any]:
    """vLLM's transfer config of a decoder with one source."""
    return {
        "kv_connector": "BenchConnector",
        "kv_connector_module_path": "headrace.bench.vllm.connector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"sources": [source], **extra},
    }


def torch_source(place: Place) -> dict[str, Any]:
    """A torch source in headrace's own environment."""
    return {"source": "torch", "python": place.source_python, "options": {"threads": 1}}


VOCABULARY: Final = 32_000
"""Ids that prompts are made of; those of every model that is measured go beyond."""
