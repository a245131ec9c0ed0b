"""Random-weight models of real per-layer KV geometry, small enough for a few CPU cores.

What a hand-off moves depends on KV heads, head size, layer kinds and windows: these are those of
the model that is named. Fewer layers and a narrower inside make it computable here; the weights are
random, so what such a model says is no text.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.engine.checkpoint import tensor_entries
from headrace.errors import Refused

DEFAULT_LAYERS = 8
DEFAULT_WINDOW = 512
SEED = 4
KV_HEADS, HEAD_DIM = 8, 128

_FLOPS_PER_S = 60e9  # of one core's float32 matrix products, to estimate times with
_ATTENTION_DOUBLES_AT = 8000  # positions at which a prefill's attention costs as much as the rest


@dataclass(frozen=True)
class Family:
    """`after`: the model whose KV geometry it has. `hybrid`: three sliding layers to one full."""

    config_class: str
    after: str
    hybrid: bool = False


FAMILIES = {
    "qwen3": Family("Qwen3Config", "Qwen3-8B"),
    "exaone4": Family("Exaone4Config", "EXAONE-4.0-32B", hybrid=True),
}


def make_model(
    name: str, directory: Path, *, layers: int = DEFAULT_LAYERS, window: int = DEFAULT_WINDOW
) -> Path:
    """Write config.json and safetensors of a family into `directory`; the same each time.

    `window`: positions of a sliding layer's window; 4096 in the real EXAONE 4, which no prompt
    would exceed that a few cores can prefill.

    Raises:
        Refused: no such family, or a hybrid of fewer than four layers.
    """
    import torch
    import transformers

    if name not in FAMILIES:
        raise Refused(f"no random-weight family {name!r}; there are {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    if family.hybrid and layers < 4:
        raise Refused(f"{name} has one full layer in four; give at least 4 layers")
    transformers.utils.logging.disable_progress_bar()
    config = getattr(transformers, family.config_class)(**_shape(family, layers, window))
    torch.manual_seed(SEED)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(directory)
    return directory


def _shape(family: Family, layers: int, window: int) -> dict[str, Any]:
    shape: dict[str, Any] = {
        "vocab_size": 4096,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": layers,
        "num_attention_heads": 2 * KV_HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if family.hybrid:
        kinds = [*["sliding_attention"] * 3, "full_attention"]
        shape |= {"sliding_window": window, "layer_types": (kinds * layers)[:layers]}
    return shape


def random_prompt(num_tokens: int, vocab_size: int, seed: int | None = None) -> list[int]:
    """Token ids that are the same for the same seed, by default the length; what they are changes
    no time.
    """
    rng = random.Random(num_tokens if seed is None else seed)
    return [rng.randrange(vocab_size) for _ in range(num_tokens)]


def prefill_s(directory: Path, num_tokens: int) -> float:
    """About how long one core takes to prefill a prompt, in seconds."""
    weights = sum(
        math.prod(entry.shape) for entry in tensor_entries(directory) if ".layers." in entry.name
    )
    longer = 1 + num_tokens / _ATTENTION_DOUBLES_AT
    return 2 * weights * num_tokens * longer / _FLOPS_PER_S
