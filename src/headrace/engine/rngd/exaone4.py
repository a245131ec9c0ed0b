"""EXAONE-4.0-32B's kernels with 8 bit weights on four chips, and models shaped like it.

Sliding layers turn their queries and keys, full ones do not. Norms follow what they norm, so there
is none before the first layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from headrace.engine.rngd.family import (
    FULL,
    SLIDING,
    Config,
    Family,
    Geometry,
    Rope,
    number,
    require,
)
from headrace.engine.rngd.fields import check_parts, listed_kinds, told
from headrace.engine.rngd.fp8 import BLOCK, check_blocks, with_scales
from headrace.engine.rngd.llama import rope_parameters
from headrace.errors import Refused

CHIPS: Final = 4
MIN_TOKENS: Final = 2
"""A kernel for one token fails in the vendor's own code."""

WEIGHTS: Final[dict[str, str]] = {
    "embedding_table": "model.embed_tokens.weight",
    "attn_q_proj_weight": "model.layers.{layer}.self_attn.q_proj.weight",
    "attn_k_proj_weight": "model.layers.{layer}.self_attn.k_proj.weight",
    "attn_v_proj_weight": "model.layers.{layer}.self_attn.v_proj.weight",
    "rms_norm_weight_q": "model.layers.{layer}.self_attn.q_norm.weight",
    "rms_norm_weight_k": "model.layers.{layer}.self_attn.k_norm.weight",
    "attn_o_proj_weight": "model.layers.{ended}.self_attn.o_proj.weight",
    "post_attention_norm_weight": "model.layers.{ended}.post_attention_layernorm.weight",
    "post_feedforward_norm_weight": "model.layers.{ended}.post_feedforward_layernorm.weight",
    "mlp_gate_weight": "model.layers.{ended}.mlp.gate_proj.weight",
    "mlp_up_weight": "model.layers.{ended}.mlp.up_proj.weight",
    "mlp_down_weight": "model.layers.{ended}.mlp.down_proj.weight",
    "final_norm_weight": "model.norm.weight",
    "lm_head_weight": "lm_head.weight",
}


def check(config: Config) -> None:
    """Raises Refused for an EXAONE 4 that these kernels would compute wrongly."""
    require(config, "hidden_act", "silu", absent="silu")
    # Without a window, full layers would turn their keys, which these do not.
    told(config, 1, "sliding_window")
    check_blocks(config)
    check_parts({"hidden_size": config["hidden_size"]}, CHIPS * BLOCK)
    check_parts({"num_key_value_heads": config["num_key_value_heads"]}, CHIPS)
    if listed_kinds(config)[0] != SLIDING:
        raise Refused("these kernels begin with a sliding layer", field="layer_types")


def geometry(config: Config) -> Mapping[str, Geometry]:
    heads, head_dim = number(config, "num_key_value_heads"), number(config, "head_dim")
    return {
        SLIDING: Geometry(heads, head_dim, number(config, "sliding_window")),
        FULL: Geometry(heads, head_dim),
    }


def overrides(config: Config, max_positions: int) -> Mapping[str, Any]:
    """max_positions: how long a rope table the kernels take."""
    return told(config, max_positions, "sliding_window")


def rope(config: Config) -> Rope:
    return Rope(number(config, "head_dim"), *rope_parameters(config))


_PREFIX: Final = "exaone4_32b_w8fa8fdkv16_"

FAMILY: Final = Family(
    model_type="exaone4",
    module="exaone4",
    variant="w8fa8fdkv16",
    chips=CHIPS,
    only_emulated=True,
    first=f"{_PREFIX}first_tokenwise",
    last=f"{_PREFIX}last_tokenwise_with_lm_head",
    mid={
        (SLIDING, SLIDING): f"{_PREFIX}mid_tokenwise_rope",
        (FULL, SLIDING): f"{_PREFIX}mid_tokenwise_rope",
        (SLIDING, FULL): f"{_PREFIX}mid_tokenwise_nope",
        (FULL, FULL): f"{_PREFIX}mid_tokenwise_nope",
    },
    attention={
        SLIDING: f"{_PREFIX}sliding_window_attention",
        FULL: f"{_PREFIX}full_attention",
    },
    weights=with_scales(WEIGHTS, "weight_scale_inv"),
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    ropes={"rope_table": rope},
    check=check,
    geometry=geometry,
    kinds=listed_kinds,
    overrides=overrides,
    min_tokens=MIN_TOKENS,
)
