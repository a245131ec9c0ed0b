"""Which quantised checkpoints the kernels take, and where scales come from."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.engine.rngd.fp8 import check_blocks, with_scales
from headrace.errors import Refused

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 384}
FP8: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
WEIGHTS: dict[str, Any] = {"num_bits": 8, "type": "float", "block_structure": [128, 128]}


def compressed(*weights: dict[str, Any] | None) -> dict[str, Any]:
    groups = {f"group_{at}": {"weights": each} for at, each in enumerate(weights)}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


def test_scales_stand_beside_the_weights_of_linear_layers_only() -> None:
    weights = {
        "attn_q_proj_weight": "layers.{layer}.q_proj.weight",
        "mlp_up_weight": "layers.{ended}.up_proj.weight",
        "norm_weight": "layers.{layer}.norm.weight",
        "lm_head_weight": "lm_head.weight",
        "layer_scalar": "layers.{ended}.layer_scalar",
    }
    assert with_scales(weights, "weight_scale_inv") == {
        **weights,
        "attn_q_proj_weight_scale": "layers.{layer}.q_proj.weight_scale_inv",
        "mlp_up_weight_scale": "layers.{ended}.up_proj.weight_scale_inv",
    }


@pytest.mark.parametrize(
    "quantisation",
    [FP8, {**FP8, "weight_block_size": (128, 128), "fmt": "e4m3"}, compressed(WEIGHTS)],
)
def test_both_ways_to_say_blocks_of_128_pass(quantisation: dict[str, Any]) -> None:
    check_blocks({**SIZES, "quantization_config": quantisation})


@pytest.mark.parametrize(
    ("quantisation", "said"),
    [
        (None, "other weights"),
        ({"quant_method": "gptq"}, "other weights"),
        ({"quant_method": "fp8"}, "other weights"),
        ({**FP8, "weight_block_size": [64, 128]}, r"blocks of \[64, 128\]"),
        ({"quant_method": "compressed-tensors"}, "other weights"),
        (compressed(), "other weights"),
        (compressed(None), "other weights"),
        (compressed(WEIGHTS, WEIGHTS), "other weights"),
        (compressed({**WEIGHTS, "num_bits": 4}), "other weights"),
        (compressed({**WEIGHTS, "type": "int"}), "other weights"),
        (compressed({**WEIGHTS, "block_structure": None}), "other weights"),
        (compressed({**WEIGHTS, "block_structure": [128, 64]}), r"blocks of \[128, 64\]"),
    ],
)
def test_other_weights_are_refused(quantisation: dict[str, Any] | None, said: str) -> None:
    with pytest.raises(Refused, match=said) as caught:
        check_blocks({**SIZES, "quantization_config": quantisation})
    assert caught.value.field == "model"


@pytest.mark.parametrize("name", SIZES)
def test_a_size_that_is_no_whole_block_is_refused(name: str) -> None:
    with pytest.raises(Refused, match=f"{name} is 200"):
        check_blocks({**SIZES, name: 200, "quantization_config": FP8})
