"""Geometries of real models, and prompts whose KV has a size asked for."""

from __future__ import annotations

import pytest

from headrace.bench.geometries import GEOMETRIES, Geometry, tokens_for, transfer_nbytes
from headrace.errors import Refused
from headrace.geometry import Full, Sliding

GIB = 1 << 30


@pytest.mark.parametrize(
    ("name", "num_tokens", "gib"),
    [
        ("llama-3.1-8b", 8192, 1.0),
        ("llama-3.1-8b", 131_072, 16.0),
        ("qwen3-8b", 8192, 1.125),
        ("exaone-4.0-32b", 8192, 1.25),
        ("exaone-4.0-32b", 131_072, 8.75),
        ("gemma-3-12b", 8192, 0.8125),
        ("gemma-3-12b", 131_072, 8.3125),
    ],
)
def test_sizes_are_the_published_ones(name: str, num_tokens: int, gib: float) -> None:
    """Bytes per token of full layers, and the windows of sliding ones."""
    assert transfer_nbytes(GEOMETRIES[name], num_tokens) == gib * GIB


@pytest.mark.parametrize(
    ("name", "full", "sliding", "window"),
    [("exaone-4.0-32b", 16, 48, 4096), ("gemma-3-12b", 8, 40, 1024), ("qwen3-8b", 36, 0, 0)],
)
def test_layers_are_full_and_sliding_as_in_the_model(
    name: str, full: int, sliding: int, window: int
) -> None:
    kinds = [layer.kind for layer in GEOMETRIES[name].decoder().layers]
    assert sum(isinstance(kind, Full) for kind in kinds) == full
    assert kinds.count(Sliding(window, window)) == sliding
    assert isinstance(kinds[-1], Full)


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("size_gb", [0.1, 0.25, 0.5, 1, 2, 4])
def test_no_other_prompt_is_nearer(name: str, size_gb: float) -> None:
    geometry = GEOMETRIES[name]
    prompt = tokens_for(geometry, size_gb * 1e9)
    assert prompt.nbytes == transfer_nbytes(geometry, prompt.num_tokens)
    assert not prompt.beyond_model
    error = abs(prompt.nbytes - size_gb * 1e9)
    for other in (prompt.num_tokens - 1, prompt.num_tokens + 1):
        assert abs(transfer_nbytes(geometry, other) - size_gb * 1e9) >= error


def test_a_prompt_has_a_token_at_least_and_says_if_no_model_would_hold_it() -> None:
    small = Geometry("small", 2, 1, 64, longest=16)
    assert tokens_for(small, 1)[:2] == (1, transfer_nbytes(small, 1))
    assert not tokens_for(small, 16 * transfer_nbytes(small, 1)).beyond_model
    assert tokens_for(small, 17 * transfer_nbytes(small, 1)).beyond_model
    with pytest.raises(Refused, match="more than any prompt"):
        tokens_for(small, 1e18)
