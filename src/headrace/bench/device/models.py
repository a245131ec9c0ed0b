"""Random models whose layers have the full size of a real model's, a few of each kind.

Heads, head size, windows, hidden and inner size are those of the model that is named; layers are
few and the vocabulary is small, and the weights are random, so that what such a model says is no
text. The dry run has the same kinds of layers, and everything small.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headrace.errors import Refused

SEED: Final = 5
VOCAB: Final = 4096
_SLIDING, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class FullSize:
    """`shape`: fields of the configuration. `kinds`: of the layers that are made."""

    config_class: str
    kinds: tuple[str, ...]
    shape: dict[str, int]

    @property
    def window(self) -> int:
        """Positions of a sliding layer's window, 0 without one."""
        return self.shape.get("sliding_window", 0)


MODELS: Final[dict[str, FullSize]] = {
    "llama-3.1-8b": FullSize(
        "LlamaConfig",
        (_FULL,) * 4,
        {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},
    ),
    "qwen3-8b": FullSize(
        "Qwen3Config",
        (_FULL,) * 2,
        {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32},
    ),
    "gemma-3-12b": FullSize(
        "Gemma3TextConfig",
        (_SLIDING, _SLIDING, _FULL),
        {
            "hidden_size": 3840,
            "intermediate_size": 15360,
            "num_attention_heads": 16,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 1024,
        },
    ),
    "exaone-4.0-32b": FullSize(
        "Exaone4Config",
        (_SLIDING, _FULL),
        {
            "hidden_size": 5120,
            "intermediate_size": 27392,
            "num_attention_heads": 40,
            "sliding_window": 4096,
        },
    ),
}
_LARGE: Final = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": VOCAB}
_SMALL: Final = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
}
_SMALL_WINDOW: Final = 16
MEASURED: Final = "llama-3.1-8b"
"""The one that times are measured on."""


def window_of(name: str, *, full_size: bool) -> int:
    """Positions of a sliding layer's window, 0 without one."""
    window = MODELS[name].window
    return window if full_size else min(window, _SMALL_WINDOW)


def make_model(name: str, directory: Path, *, full_size: bool, torch_device: str) -> int:
    """Write config.json and safetensors in bfloat16; returns the number of parameters.

    `torch_device`: where the weights are drawn; they are the same for the same device.

    Raises:
        Refused: this transformers does not know the model.
    """
    model = random_model(name, full_size=full_size, torch_device=torch_device)
    unfinished = directory.with_name(f"{directory.name}.new")
    model.save_pretrained(unfinished)
    os.replace(unfinished, directory)
    return int(sum(weights.numel() for weights in model.parameters()))


def random_model(name: str, *, full_size: bool, torch_device: str) -> Any:
    """The transformers model that `make_model` writes. Raises: Refused."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    wanted = MODELS[name]
    try:
        config = getattr(transformers, wanted.config_class)(**_shape(wanted, full_size=full_size))
    except AttributeError as exc:
        raise Refused(f"transformers {transformers.__version__} has no {name}: {exc}") from exc
    torch.manual_seed(SEED)
    with torch.device(torch_device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def _shape(wanted: FullSize, *, full_size: bool) -> dict[str, Any]:
    shape: dict[str, Any] = {**_LARGE, **wanted.shape}
    if not full_size:
        shape |= _SMALL | ({"sliding_window": _SMALL_WINDOW} if wanted.window else {})
        shape["initializer_range"] = 0.2  # or greedy tokens would not vary
    if wanted.window:
        shape["layer_types"] = list(wanted.kinds)
    return shape | {
        "num_hidden_layers": len(wanted.kinds),
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
