"""Llama-3.1-8B's kernels with bf16 weights and cache, on one chip, and models shaped like it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from headrace.engine.rngd.family import FULL, Config, Family, Geometry, Rope, number, require
from headrace.errors import Refused

RMS_NORM_EPS: Final = 1e-05
"""It is a constant of these kernels."""

LAYER_WEIGHTS: Final[dict[str, str]] = {
    "input_norm_weight": "model.layers.{layer}.input_layernorm.weight",
    "attn_q_proj_weight": "model.layers.{layer}.self_attn.q_proj.weight",
    "attn_k_proj_weight": "model.layers.{layer}.self_attn.k_proj.weight",
    "attn_v_proj_weight": "model.layers.{layer}.self_attn.v_proj.weight",
    "attn_o_proj_weight": "model.layers.{ended}.self_attn.o_proj.weight",
    "post_attention_norm_weight": "model.layers.{ended}.post_attention_layernorm.weight",
    "mlp_gate_proj_weight": "model.layers.{ended}.mlp.gate_proj.weight",
    "mlp_up_proj_weight": "model.layers.{ended}.mlp.up_proj.weight",
    "mlp_down_proj_weight": "model.layers.{ended}.mlp.down_proj.weight",
}
MODEL_WEIGHTS: Final[dict[str, str]] = {
    "embedding_table": "model.embed_tokens.weight",
    "final_norm_weight": "model.norm.weight",
    "lm_head_weight": "lm_head.weight",
}


def check(config: Config) -> None:
    """Raises Refused for a Llama that these kernels would compute wrongly."""
    require(config, "rms_norm_eps", RMS_NORM_EPS)
    require(config, "hidden_act", "silu", absent="silu")
    require(config, "attention_bias", False, absent=False)
    require(config, "mlp_bias", False, absent=False)
    heads, hidden = number(config, "num_attention_heads"), number(config, "hidden_size")
    require(config, "head_dim", hidden // heads, absent=hidden // heads)
    if hidden % heads or config.get("quantization_config"):
        raise Refused(
            "these kernels take a Llama with bf16 weights whose heads divide its hidden size; name "
            "a release that is not quantised",
            field="model",
        )


def geometry(config: Config) -> Mapping[str, Geometry]:
    heads = config.get("num_key_value_heads") or number(config, "num_attention_heads")
    return {FULL: Geometry(heads, number(config, "hidden_size") // config["num_attention_heads"])}


def kinds(config: Config) -> tuple[str, ...]:
    return (FULL,) * number(config, "num_hidden_layers")


def overrides(config: Config, max_positions: int) -> Mapping[str, Any]:
    """max_positions: how long a rope table the kernels take."""
    names = ("hidden_size", "num_attention_heads", "vocab_size", "intermediate_size")
    return {
        **{name: number(config, name) for name in names},
        "num_key_value_heads": geometry(config)[FULL].heads,
        "max_position_embeddings": max_positions,
    }


def rope(config: Config) -> Rope:
    return Rope(geometry(config)[FULL].head_dim, *rope_parameters(config))


def rope_parameters(config: Config) -> tuple[float, Mapping[str, Any]]:
    """The base and the scaling, of a config of either form."""
    parameters: Mapping[str, Any] = config.get("rope_parameters") or {}
    scaling = parameters or config.get("rope_scaling") or {}
    theta = parameters.get("rope_theta") or config.get("rope_theta") or 10000.0
    return float(theta), scaling


FAMILY: Final = Family(
    model_type="llama",
    module="llama",
    variant="w16a16",
    chips=1,
    first="llama3_1_8b_w16a16_first_tokenwise",
    last="llama3_1_8b_w16a16_last_tokenwise_with_lm_head",
    mid={(FULL, FULL): "llama3_1_8b_w16a16_mid_tokenwise"},
    attention={FULL: "llama3_1_8b_w16a16_full_attention"},
    weights={**LAYER_WEIGHTS, **MODEL_WEIGHTS},
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    ropes={"rope_table": rope},
    check=check,
    geometry=geometry,
    kinds=kinds,
    overrides=overrides,
)
