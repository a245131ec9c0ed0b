"""Tiny random checkpoints, made by the project's own Python: `-m tests.vllm.checkpoints DIRECTORY`.

Head sizes are those that vLLM's CPU backend takes. Weights are drawn with a spread at which greedy
tokens vary from step to step, and windows are shorter than the prompts of the tests.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

SEED: Final = 9
VOCAB: Final = 256
POSITIONS: Final = 1024
WINDOW: Final = 80
LAYERS: Final = 4

_SHAPE: Final[dict[str, Any]] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SLIDING, _FULL = "sliding_attention", "full_attention"

CONFIGS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "tiny-llama": ("LlamaConfig", {}),
    "tiny-qwen3": ("Qwen3Config", {"head_dim": 64}),
    "tiny-exaone4": (
        "Exaone4Config",
        {
            "sliding_window": WINDOW,
            "sliding_window_pattern": "LLLG",
            "layer_types": [_SLIDING, _SLIDING, _SLIDING, _FULL],
        },
    ),
}
"""Name to configuration class and what differs from the common shape."""


def make_all(directory: Path) -> None:
    """Make each checkpoint in a directory of its name."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    for name, (config_class, options) in CONFIGS.items():
        config = getattr(transformers, config_class)(**{**_SHAPE, **options})
        torch.manual_seed(SEED)
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.save_pretrained(directory / name)
        _tokenizer().save_pretrained(directory / name)


def _tokenizer() -> Any:
    """One whose words are the numbers of their tokens, for vLLM's server."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({str(at): at for at in range(VOCAB)}, unk_token="0")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="0", bos_token="1", eos_token="2"
    )


if __name__ == "__main__":
    make_all(Path(sys.argv[1]))
