"""Gemma-4-31B's kernels with 8 bit weights on four chips, and models shaped like its text decoder.

The two kinds of layers differ in heads and their size. A full layer makes K and V from one
projection, and turns a part of each head. The kernels take rows of the embedding, not ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Final

import torch

from headrace.engine.rngd.family import (
    FULL,
    SLIDING,
    Config,
    Family,
    Geometry,
    Rope,
    TensorsByName,
    number,
    require,
)
from headrace.engine.rngd.fields import check_parts, listed_kinds, told
from headrace.engine.rngd.fp8 import BLOCK, check_blocks, with_scales
from headrace.errors import Refused

CHIPS: Final = 4
MIN_TOKENS: Final = 32
"""With fewer, the kernels cannot be made."""

_TEXT: Final = "model.language_model."
_LAYER: Final = _TEXT + "layers.{layer}."
_ENDED: Final = _TEXT + "layers.{ended}."
EMBEDDING: Final = _TEXT + "embed_tokens.weight"

WEIGHTS: Final[dict[str, str]] = {
    "input_norm_weight": _LAYER + "input_layernorm.weight",
    "attn_q_proj_weight": _LAYER + "self_attn.q_proj.weight",
    "attn_k_proj_weight": _LAYER + "self_attn.k_proj.weight",
    "attn_v_proj_weight": _LAYER + "self_attn.v_proj.weight",
    "q_norm_weight": _LAYER + "self_attn.q_norm.weight",
    "k_norm_weight": _LAYER + "self_attn.k_norm.weight",
    "attn_o_proj_weight": _ENDED + "self_attn.o_proj.weight",
    "post_attention_norm_weight": _ENDED + "post_attention_layernorm.weight",
    "pre_feedforward_norm_weight": _ENDED + "pre_feedforward_layernorm.weight",
    "post_feedforward_norm_weight": _ENDED + "post_feedforward_layernorm.weight",
    "mlp_gate_proj_weight": _ENDED + "mlp.gate_proj.weight",
    "mlp_up_proj_weight": _ENDED + "mlp.up_proj.weight",
    "mlp_down_proj_weight": _ENDED + "mlp.down_proj.weight",
    "layer_scalar": _ENDED + "layer_scalar",
    "final_norm_weight": _TEXT + "norm.weight",
    "lm_head_weight": "lm_head.weight",
}


def text(config: Config) -> Config:
    """The text decoder's part; how weights are quantised is said beside it.

    Raises:
        Refused: there is no such part.
    """
    part = config.get("text_config")
    if not isinstance(part, Mapping):
        raise Refused("config.json has no text_config", field="model")
    return {**part, "quantization_config": config.get("quantization_config")}


def check(config: Config) -> None:
    """Raises Refused for a text decoder that these kernels would compute wrongly.

    config: of the text decoder.
    """
    require(config, "hidden_activation", "gelu_pytorch_tanh")
    require(config, "attention_bias", False, absent=False)
    require(config, "attention_k_eq_v", True)
    require(config, "enable_moe_block", False, absent=False)
    require(config, "use_double_wide_mlp", False, absent=False)
    require(config, "hidden_size_per_layer_input", 0)
    require(config, "num_kv_shared_layers", 0, absent=0)
    # "vision" lets parts of an image see each other; a prompt of text alone is causal.
    require(config, "use_bidirectional_attention", "vision", None)
    if not config.get("final_logit_softcapping"):
        raise Refused(
            "config.json has no final_logit_softcapping, and these kernels cap logits",
            field="final_logit_softcapping",
        )
    check_blocks(config)
    overrides(config, 1)
    for name in ("num_key_value_heads", "num_global_key_value_heads"):
        check_parts({name: config[name]}, CHIPS)
    for name in ("head_dim", "global_head_dim"):
        check_parts({name: config[name]}, BLOCK)
    order = listed_kinds(config)
    if (order[0], order[-1]) != (SLIDING, FULL) or (FULL, FULL) in pairwise(order):
        raise Refused(
            "these kernels begin with a sliding layer, end with a full one, and have no two full "
            "ones in a row",
            field="layer_types",
        )


def geometry(config: Config) -> Mapping[str, Geometry]:
    return {
        SLIDING: Geometry(
            number(config, "num_key_value_heads"),
            number(config, "head_dim"),
            number(config, "sliding_window"),
        ),
        FULL: Geometry(
            number(config, "num_global_key_value_heads"), number(config, "global_head_dim")
        ),
    }


def overrides(config: Config, max_positions: int) -> Mapping[str, Any]:
    """max_positions: how long the rope tables are that the kernels take."""
    shape = told(
        config, max_positions, "sliding_window", "num_global_key_value_heads", "global_head_dim"
    )
    capping = float(config["final_logit_softcapping"])
    return {"text_config": {**shape, "final_logit_softcapping": capping}}


def embed(config: Config, weights: TensorsByName, ids: torch.Tensor) -> torch.Tensor:
    """The rows for `ids` [n], bf16 [n, hidden_size], times the root of that size in bf16."""
    hidden = number(config, "hidden_size")
    table = weights.tensor(EMBEDDING, (number(config, "vocab_size"), hidden), "bfloat16")
    return table[ids.long()] * torch.tensor(hidden**0.5).to(torch.bfloat16)


def sliding_rope(config: Config) -> Rope:
    parameters = _rope(config, SLIDING)
    return Rope(number(config, "head_dim"), float(parameters["rope_theta"]), parameters)


def full_rope(config: Config) -> Rope:
    """A part of each head turns, at the frequencies that it would turn at in a whole one."""
    parameters, head_dim = _rope(config, FULL), number(config, "global_head_dim")
    turned = 2 * int(parameters.get("partial_rotary_factor", 1.0) * head_dim // 2)
    return Rope(head_dim, float(parameters["rope_theta"]), parameters, turned)


def _rope(config: Config, kind: str) -> Mapping[str, Any]:
    parameters = (config.get("rope_parameters") or {}).get(kind) or {}
    if "rope_theta" not in parameters:
        raise Refused(
            f"config.json: rope_parameters have no rope_theta for {kind}", field="rope_parameters"
        )
    found: Mapping[str, Any] = parameters
    return found


_PREFIX: Final = "gemma4_31b_w8fa8fdkv16_txt_"

FAMILY: Final = Family(
    model_type="gemma4",
    module="gemma4",
    variant="w8fa8fdkv16",
    chips=CHIPS,
    only_emulated=True,
    first=f"{_PREFIX}text_pre",
    last=f"{_PREFIX}last_tokenwise_with_lm_head",
    mid={
        (SLIDING, SLIDING): f"{_PREFIX}mid_tokenwise_sliding_to_sliding",
        (SLIDING, FULL): f"{_PREFIX}mid_tokenwise_sliding_to_full",
        (FULL, SLIDING): f"{_PREFIX}mid_tokenwise_full_to_sliding",
    },
    attention={
        SLIDING: f"{_PREFIX}sliding_window_attention",
        FULL: f"{_PREFIX}full_attention",
    },
    weights=with_scales(WEIGHTS, "weight_scale"),
    ties=True,
    tied={"lm_head.weight": EMBEDDING},
    ropes={"rope_table_sliding": sliding_rope, "rope_table_full": full_rope},
    check=check,
    geometry=geometry,
    kinds=listed_kinds,
    overrides=overrides,
    text=text,
    embed=embed,
    min_tokens=MIN_TOKENS,
    token_unit=CHIPS,
)
