"""Which Llamas the kernels compute, and what the kernels are told of one."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.engine.rngd import llama
from headrace.engine.rngd.family import FULL, Geometry, number
from headrace.errors import Refused

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "vocab_size": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "head_dim": 16},
        {"attention_bias": None, "head_dim": None, "quantization_config": None},
        {"rms_norm_eps": 9.999999747378752e-06},  # as it is written once it was a float32
    ],
)
def test_a_config_that_the_kernels_are_made_for_passes(more: dict[str, Any]) -> None:
    llama.check({**CONFIG, **more})


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"head_dim": 32}, "head_dim is 32"),
        ({"hidden_size": 66, "head_dim": 16}, "heads divide its hidden size"),
        ({"quantization_config": {"quant_method": "fp8"}}, "bf16 weights"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_attention_heads": "4"}, "num_attention_heads is '4'"),
        ({"hidden_size": None}, "hidden_size is None"),
    ],
)
def test_what_they_would_compute_wrongly_is_refused(more: dict[str, Any], named: str) -> None:
    with pytest.raises(Refused) as caught:
        llama.check({**CONFIG, **more})
    assert named in str(caught.value)


@pytest.mark.parametrize("value", [None, 0, -1, 1.5, True, "8", [8]])
def test_a_number_is_a_number_above_zero(value: object) -> None:
    with pytest.raises(Refused, match="layers is"):
        number({"layers": value}, "layers")
    assert number({"layers": 8}, "layers") == 8


def test_a_llama_without_grouped_queries_has_as_many_kv_heads() -> None:
    assert llama.geometry(CONFIG) == {FULL: Geometry(2, 16)}
    without = {**CONFIG, "num_key_value_heads": None}
    assert llama.geometry(without) == {FULL: Geometry(4, 16)}
    assert llama.overrides(without, 32)["num_key_value_heads"] == 4


def test_the_kernels_are_told_the_shapes_and_how_long_the_rope_table_is() -> None:
    assert llama.overrides(CONFIG, 512) == {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "intermediate_size": 96,
        "max_position_embeddings": 512,
    }
    assert llama.kinds(CONFIG) == (FULL,) * 3
