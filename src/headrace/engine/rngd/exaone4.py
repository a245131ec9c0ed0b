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
from headrace.engine.rngd.fp8 import BLOCK, check_blocks, with_scales
from headrace.engine.rngd.llama import rope_parameters
from headrace.errors import Refused

CHIPS: Final = 4

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
    number(config, "head_dim")
    check_blocks(config, config)
    for name, unit in (("hidden_size", CHIPS * BLOCK), ("num_key_value_heads", CHIPS)):
        if number(config, name) % unit:
            raise Refused(
                f"config.json: {name} is {config[name]}, and {CHIPS} chips take equal parts of "
                f"multiples of {unit}",
                field=name,
            )
    number(config, "sliding_window")  # without one, full layers would turn their keys
    if kinds(config)[0] != SLIDING:
        raise Refused("these kernels begin with a sliding layer", field="layer_types")


def kinds(config: Config) -> tuple[str, ...]:
    """The config's own list.

    Raises:
        Refused: there is none, or not of as many kinds as layers.
    """
    listed = tuple(config.get("layer_types") or ())
    if len(listed) != number(config, "num_hidden_layers") or set(listed) - {FULL, SLIDING}:
        raise Refused(
            f"config.json: layer_types must name {SLIDING!r} or {FULL!r} for every layer",
            field="layer_types",
        )
    return listed


def geometry(config: Config) -> Mapping[str, Geometry]:
    heads, head_dim = number(config, "num_key_value_heads"), number(config, "head_dim")
    return {
        SLIDING: Geometry(heads, head_dim, number(config, "sliding_window")),
        FULL: Geometry(heads, head_dim),
    }


def overrides(config: Config, max_positions: int) -> Mapping[str, Any]:
    """max_positions: how long a rope table the kernels take."""
    names = (
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "intermediate_size",
        "sliding_window",
    )
    return {
        **{name: number(config, name) for name in names},
        "rms_norm_eps": float(config["rms_norm_eps"]),
        "max_position_embeddings": max_positions,
    }


def rope(config: Config) -> Rope:
    return Rope(number(config, "head_dim"), *rope_parameters(config))


_PREFIX: Final = "exaone4_32b_w8fa8fdkv16_"

FAMILY: Final = Family(
    model_type="exaone4",
    module="exaone4",
    variant="w8fa8fdkv16",
    chips=CHIPS,
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
    optional={"lm_head.weight": "model.embed_tokens.weight"},
    ropes={"rope_table": rope},
    check=check,
    geometry=geometry,
    kinds=kinds,
    overrides=overrides,
)
