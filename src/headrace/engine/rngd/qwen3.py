"""Qwen3-8B's kernels on one chip, and models shaped like it: with 8 bit weights, and with bf16.

The kernels with bf16 weights are made for embedding models: `last` ends with the final norm, and
the head is left to the host, which multiplies one row by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from headrace.engine.rngd.family import FULL, Config, Family, Geometry, Rope, number, require
from headrace.engine.rngd.fields import told
from headrace.engine.rngd.fp8 import check_blocks, with_scales
from headrace.engine.rngd.llama import LAYER_WEIGHTS, MODEL_WEIGHTS, kinds, rope_parameters
from headrace.errors import Refused

WEIGHTS: Final[dict[str, str]] = {
    **LAYER_WEIGHTS,
    **MODEL_WEIGHTS,
    "rms_norm_weight_q": "model.layers.{layer}.self_attn.q_norm.weight",
    "rms_norm_weight_k": "model.layers.{layer}.self_attn.k_norm.weight",
}
HEAD: Final = "lm_head.weight"
STAND_INS: Final = {HEAD: "model.embed_tokens.weight"}


def check(config: Config) -> None:
    """Raises Refused for a Qwen3 with 8 bit weights that these kernels would compute wrongly."""
    _check_shape(config)
    check_blocks(config)


def check_bf16(config: Config) -> None:
    """Raises Refused for a Qwen3 with bf16 weights that these kernels would compute wrongly."""
    _check_shape(config)
    if config.get("quantization_config"):
        raise Refused("these kernels take a Qwen3 with bf16 weights", field="model")


def _check_shape(config: Config) -> None:
    require(config, "hidden_act", "silu", absent="silu")
    require(config, "attention_bias", False, absent=False)
    require(config, "use_sliding_window", False, absent=False)
    told(config, 1)


def geometry(config: Config) -> Mapping[str, Geometry]:
    return {FULL: Geometry(number(config, "num_key_value_heads"), number(config, "head_dim"))}


def overrides(config: Config, max_positions: int) -> Mapping[str, Any]:
    """max_positions: how long a rope table the kernels take."""
    return told(config, max_positions)


def rope(config: Config) -> Rope:
    return Rope(number(config, "head_dim"), *rope_parameters(config))


FAMILY: Final = Family(
    model_type="qwen3",
    module="qwen3",
    variant="w8fa8fdkv16",
    chips=1,
    first="qwen3_8b_w8fa8fdkv16_first_tokenwise",
    last="qwen3_8b_w8fa8fdkv16_last_tokenwise_with_lm_head",
    mid={(FULL, FULL): "qwen3_8b_w8fa8fdkv16_mid_tokenwise"},
    attention={FULL: "qwen3_8b_w8fa8fdkv16_full_attention"},
    weights=with_scales(WEIGHTS, "weight_scale_inv"),
    tied=STAND_INS,
    quantised=True,
    ropes={"rope_table": rope},
    check=check,
    geometry=geometry,
    kinds=kinds,
    overrides=overrides,
)

FAMILY_BF16: Final = replace(
    FAMILY,
    variant="bf16",
    first="qwen3_embedding_8b_bf16_first_tokenwise",
    last="qwen3_embedding_8b_bf16_last_tokenwise_no_lm_head",
    mid={(FULL, FULL): "qwen3_embedding_8b_bf16_mid_tokenwise"},
    attention={FULL: "qwen3_embedding_8b_bf16_full_attention"},
    weights=WEIGHTS,
    quantised=False,
    head=HEAD,
    check=check_bf16,
)
