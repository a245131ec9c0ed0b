"""The KV geometries that benchmarks of the path itself imitate, and prompts of a given KV size.

Per layer as in the models' own configurations; bytes are counted by the plan, so that sliding
layers count with their live window only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from headrace.backends.null import decoder_like
from headrace.backends.replay import ReplayEngine, ReplayOptions
from headrace.errors import Refused
from headrace.geometry import MAX_POSITIONS, Manifest
from headrace.plan import compile_plan


@dataclass(frozen=True, slots=True)
class Geometry:
    """One model's cache: layers of `heads` x `head_dim` items of 16 bits, K and V.

    window: 0 for full attention in every layer, else sliding layers of this window except every
    `full_every`-th. longest: the model's own context, in positions.
    """

    name: str
    layers: int
    heads: int
    head_dim: int
    longest: int
    window: int = 0
    full_every: int = 1

    def options(self, **more: Any) -> dict[str, Any]:
        """Options of `--source replay` for this geometry, with `more` of them."""
        return {
            "layers": self.layers,
            "heads": self.heads,
            "head_dim": self.head_dim,
            "dtype": "bfloat16",
            "window": self.window,
            "full_every": self.full_every,
            "max_positions": self.longest,
            "model": self.name,
            **more,
        }

    def decoder(self) -> Manifest:
        """The manifest of a memory-only decoder of this geometry."""
        return _decoder_of(self)


GEOMETRIES = {
    each.name: each
    for each in (
        Geometry("llama-3.1-8b", 32, 8, 128, longest=131_072),
        Geometry("qwen3-8b", 36, 8, 128, longest=40_960),
        Geometry("exaone-4.0-32b", 64, 8, 128, longest=131_072, window=4096, full_every=4),
        Geometry("gemma-3-12b", 48, 8, 256, longest=131_072, window=1024, full_every=6),
    )
}


class Prompt(NamedTuple):
    """A prompt's length in tokens, the bytes of its transfer set, and whether the model could not
    hold it.
    """

    num_tokens: int
    nbytes: int
    beyond_model: bool


def tokens_for(geometry: Geometry, nbytes: float) -> Prompt:
    """The prompt whose transfer set is nearest to `nbytes`; it has at least one token.

    Raises:
        Refused: no prompt that can be numbered is that large.
    """
    low, high = 1, 2
    while transfer_nbytes(geometry, high) < nbytes:
        low, high = high, high * 2
        if high >= MAX_POSITIONS:
            raise Refused(f"{nbytes:g} bytes of KV are more than any prompt of {geometry.name} has")
    while high - low > 1:
        middle = (low + high) // 2
        if transfer_nbytes(geometry, middle) < nbytes:
            low = middle
        else:
            high = middle
    nearest = min(low, high, key=lambda n: abs(transfer_nbytes(geometry, n) - nbytes))
    return Prompt(nearest, transfer_nbytes(geometry, nearest), nearest > geometry.longest)


def transfer_nbytes(geometry: Geometry, num_tokens: int) -> int:
    """Bytes that a hand-off of `num_tokens` carries."""
    return compile_plan(geometry.decoder(), "head_major", num_tokens, num_tokens).nbytes


@lru_cache
def _decoder_of(geometry: Geometry) -> Manifest:
    return decoder_like(ReplayEngine(ReplayOptions(**geometry.options())).manifest())
