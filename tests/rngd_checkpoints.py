"""Tiny random checkpoints of the families that FuriosaAI's prefill kernels are made for.

Their shapes are the smallest that the kernels take, and layers of two kinds follow each other in
every way that a published model has. One that the kernels take with 8 bit weights comes as two
directories: as its publisher would lay it out, and a twin with the same weights as bf16 tensors,
which the model's own library loads without further packages. Scales are powers of two, so that a
weight and its twin are equal to the last bit.
"""

from __future__ import annotations

import atexit
import functools
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

SEED: Final = 6
BLOCK: Final = 128
"""Rows and columns of a weight that share one scale."""

LARGEST: Final = 448.0
"""Of float8_e4m3fn."""

POSITIONS: Final = 512

_SHAPE: Final[dict[str, Any]] = {
    "vocab_size": 512,
    "num_hidden_layers": 4,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ONE_CHIP: Final[dict[str, Any]] = {
    **_SHAPE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_FOUR_CHIPS: Final[dict[str, Any]] = {
    **_SHAPE,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "sliding_window": 32,
}
_SLIDING, _FULL = "sliding_attention", "full_attention"

CONFIGS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "llama": ("LlamaConfig", {**_ONE_CHIP, "rms_norm_eps": 1e-5}),
    "qwen3": ("Qwen3Config", {**_ONE_CHIP, "head_dim": 128, "rms_norm_eps": 1e-6}),
    "exaone4": (
        "Exaone4Config",
        {
            **_FOUR_CHIPS,
            "rms_norm_eps": 1e-5,
            "sliding_window_pattern": "LLLG",
            "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING],
        },
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {
            **_FOUR_CHIPS,
            "num_hidden_layers": 5,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-6,
            "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING, _FULL],
            "global_head_dim": 256,
            "num_global_key_value_heads": 4,
            "attention_k_eq_v": True,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 30.0,
        },
    ),
}
"""Family to configuration class and options."""

FP8: Final = ("qwen3", "exaone4", "gemma4")
"""Families whose kernels take 8 bit weights."""


@dataclass(frozen=True)
class Checkpoint:
    """kernels: the directory for the kernels. plain: the twin with bf16 weights, which is the same
    directory where the kernels take bf16."""

    kernels: Path
    plain: Path


@functools.cache
def checkpoint_of(family: str) -> Checkpoint:
    """A family's checkpoint, made once per test process and removed at its end."""
    holder = tempfile.TemporaryDirectory(prefix="headrace-rngd-")
    atexit.register(holder.cleanup)
    return make_checkpoint(family, Path(holder.name))


def make_checkpoint(family: str, directory: Path) -> Checkpoint:
    """Make a family's checkpoint below `directory`, the same one at every call."""
    transformers.utils.logging.disable_progress_bar()
    config_class, options = CONFIGS[family]
    config = getattr(transformers, config_class)(**options)
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    config.dtype = torch.bfloat16
    _vary(model)
    scales = _round_weights(model) if family in FP8 else {}
    plain = directory / f"{family}-bf16"
    model.save_pretrained(plain)
    if not scales:
        return Checkpoint(plain, plain)
    kernels = directory / f"{family}-fp8"
    kernels.mkdir(parents=True, exist_ok=True)
    _save_fp8(family, model, scales, kernels)
    config_json = json.loads((plain / "config.json").read_text())
    (kernels / "config.json").write_text(json.dumps(_fp8_config(family, config_json), indent=2))
    return Checkpoint(kernels, plain)


def _vary(model: Any) -> None:
    """Make norms and layer scalars differ from one, each other and from layer to layer."""
    for name, tensor in model.state_dict().items():
        if name.endswith(("norm.weight", "layer_scalar")):
            tensor.copy_(0.75 + 0.5 * torch.rand(tensor.shape))
        if isinstance(model.config, transformers.Gemma4TextConfig) and "q_norm" in name:
            # This family's attention has no factor of its own: trained norms keep logits small.
            tensor.div_(tensor.shape[0] ** 0.5)


def _round_weights(model: Any) -> dict[str, torch.Tensor]:
    """Round the layers' linear weights to what 8 bits and a scale per block can hold.

    Returns the scales by the weight's name, float32 [rows / 128, columns / 128].
    """
    scales = {}
    for name, module in model.model.named_modules(prefix="model"):
        if isinstance(module, torch.nn.Linear):
            blocks = _blocks(module.weight.data.float())
            highest = blocks.abs().amax(dim=(1, 3), keepdim=True)
            scale = torch.exp2(torch.ceil(torch.log2(highest / LARGEST)))
            rounded = (blocks / scale).to(torch.float8_e4m3fn).float() * scale
            module.weight.data.copy_(rounded.reshape(module.weight.shape))
            scales[f"{name}.weight"] = scale[:, 0, :, 0]
    return scales


def _blocks(weight: torch.Tensor) -> torch.Tensor:
    rows, columns = weight.shape
    return weight.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)


def _save_fp8(family: str, model: Any, scales: dict[str, torch.Tensor], directory: Path) -> None:
    prefix = "model.language_model." if family == "gemma4" else "model."
    suffix = "weight_scale" if family == "gemma4" else "weight_scale_inv"
    tied = model.config.tie_word_embeddings
    tensors = {}
    for name, tensor in model.state_dict().items():
        kept = name.replace("model.", prefix, 1) if name.startswith("model.") else name
        if name in scales:
            scale = scales[name]
            quantised = _blocks(tensor.float()) / scale[:, None, :, None]
            tensors[kept] = quantised.reshape(tensor.shape).to(torch.float8_e4m3fn)
            tensors[kept.removesuffix("weight") + suffix] = scale.to(torch.bfloat16)
        elif not (tied and name == "lm_head.weight"):
            tensors[kept] = tensor.contiguous()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _fp8_config(family: str, plain: dict[str, Any]) -> dict[str, Any]:
    """The config of a quantised checkpoint, as its publisher writes it."""
    if family != "gemma4":
        fp8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        return {**plain, "quantization_config": {**fp8, "weight_block_size": [BLOCK, BLOCK]}}
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = {**number, "dynamic": False, "strategy": "block", "block_structure": [BLOCK, BLOCK]}
    activations = {**number, "dynamic": True, "strategy": "group", "group_size": BLOCK}
    scheme = {
        "format": "float-quantized",
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "dtype": "bfloat16",
        "text_config": _published_text(plain),
        "tie_word_embeddings": plain["tie_word_embeddings"],
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {"FP8_BLOCK": scheme},
            "ignore": ["re:.*vision.*", "lm_head", "re:.*embed_tokens.*"],
            "kv_cache_scheme": None,
        },
    }


def _published_text(plain: dict[str, Any]) -> dict[str, Any]:
    """Gemma 4's text config as published: kinds of layers differ by options, not layer by layer."""
    kept = {k: v for k, v in plain.items() if k not in ("architectures", "per_layer_config")}
    options = CONFIGS["gemma4"][1]
    return {**kept, **{k: options[k] for k in ("global_head_dim", "num_global_key_value_heads")}}
