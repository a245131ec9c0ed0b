"""A model's directory as small as a check needs it: a config and a file of weights without data."""

from __future__ import annotations

import json
from pathlib import Path

LAYERS, KV_HEADS, HEAD_DIM, VOCABULARY, POSITIONS = 2, 2, 8, 96, 512
ELEMENTS = 8 * 4


def model_directory(path: Path, *, positions: int = POSITIONS) -> Path:
    """Write the model to `path`."""
    path.mkdir(parents=True)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": positions,
    }
    (path / "config.json").write_text(json.dumps(config))
    nbytes = 2 * ELEMENTS
    header = json.dumps({"w": {"dtype": "BF16", "shape": [8, 4], "data_offsets": [0, nbytes]}})
    length = len(header).to_bytes(8, "little")
    (path / "model.safetensors").write_bytes(length + header.encode() + bytes(nbytes))
    return path
