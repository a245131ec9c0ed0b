"""A tiny Llama of random weights, which a card's arithmetic is tried with."""

from __future__ import annotations

import zlib
from typing import Any, Final

import torch

TINY_LLAMA: Final[dict[str, Any]] = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


class RandomWeights:
    """Weights by name, the same in each process; stands in for `weights.Weights`."""

    def tensor(self, name: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """Normal numbers of deviation 0.05, and ones for what norms are scaled with."""
        wanted: torch.dtype = getattr(torch, dtype)
        if len(shape) == 1:
            return torch.ones(shape, dtype=wanted)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return (torch.randn(shape, generator=generator) * 0.05).to(wanted)
