"""Which Gemmas the kernels compute, that every tensor of one is read, and what the host adds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.gemma4.modeling_gemma4 import (
    Gemma4TextRotaryEmbedding,
    Gemma4TextScaledWordEmbedding,
)

from headrace.engine.checkpoint import tensor_entries
from headrace.engine.layers import geometry as library_layers
from headrace.engine.loading import load_config
from headrace.engine.rngd import gemma4, geometry
from headrace.engine.rngd.family import FULL, SLIDING, Geometry
from headrace.engine.rngd.model import read_model
from headrace.engine.rngd.rope import inverse_frequencies
from headrace.engine.rngd.weights import Weights
from headrace.errors import Refused
from tests.rngd_checkpoints import Checkpoint, checkpoint_of
from tests.unit.engine.rngd.wiring import tensors_read

KINDS = (SLIDING, SLIDING, FULL, SLIDING, FULL)
SHAPE = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_global_key_value_heads": 4,
    "head_dim": 128,
    "global_head_dim": 256,
    "vocab_size": 512,
    "intermediate_size": 512,
    "sliding_window": 32,
}


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return checkpoint_of("gemma4")


@pytest.fixture(scope="module")
def text(checkpoint: Checkpoint) -> Any:
    return gemma4.text(geometry.read_config(checkpoint.kernels))


def test_every_tensor_of_a_checkpoint_is_read(checkpoint: Checkpoint) -> None:
    there = {entry.name for entry in tensor_entries(checkpoint.kernels)}
    read = tensors_read(gemma4.FAMILY, len(KINDS))
    stand_ins = gemma4.FAMILY.tied
    assert {stand_ins.get(name, name) for name in read if name not in _of_full_values()} == there


def _of_full_values() -> set[str]:
    """V of a full layer is made from K's projection: its kernels take no such argument."""
    prefix = "model.language_model.layers."
    values = [f"{prefix}{i}.self_attn.v_proj." for i, kind in enumerate(KINDS) if kind == FULL]
    return {value + tensor for value in values for tensor in ("weight", "weight_scale")}


def test_a_checkpoint_passes_and_has_the_librarys_layers(text: Any, checkpoint: Checkpoint) -> None:
    gemma4.check(text)
    config = geometry.read_config(checkpoint.kernels)
    theirs = library_layers(load_config(checkpoint.plain), "source", "bfloat16", 300)
    assert geometry.layers(gemma4.FAMILY, config, 300) == theirs
    assert gemma4.geometry(text) == {SLIDING: Geometry(4, 128, 32), FULL: Geometry(4, 256)}


def test_the_kernels_are_told_its_shape(text: Any) -> None:
    told = {"rms_norm_eps": 1e-6, "max_position_embeddings": 300, "final_logit_softcapping": 30.0}
    assert gemma4.overrides(text, 300) == {"text_config": {**SHAPE, **told}}


@pytest.mark.parametrize("kind", [SLIDING, FULL])
def test_frequencies_are_the_librarys(kind: str, text: Any, checkpoint: Checkpoint) -> None:
    library = Gemma4TextRotaryEmbedding(load_config(checkpoint.plain))
    rope = {SLIDING: gemma4.sliding_rope, FULL: gemma4.full_rope}[kind](text)
    assert torch.equal(inverse_frequencies(rope), getattr(library, f"{kind}_inv_freq"))


def test_rows_of_the_embedding_are_the_librarys(text: Any, checkpoint: Checkpoint) -> None:
    weights = Weights(checkpoint.kernels, gemma4.FAMILY.tied)
    library = Gemma4TextScaledWordEmbedding(512, 512, 0, embed_scale=512**0.5).to(torch.bfloat16)
    library.weight.data.copy_(weights.tensor(gemma4.EMBEDDING, (512, 512), "bfloat16"))
    ids = torch.tensor([0, 511, 7, 7], dtype=torch.int32)
    made = gemma4.embed(text, weights, ids)
    assert made.dtype == torch.bfloat16
    assert torch.equal(made, library(ids))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"attention_k_eq_v": False}, "attention_k_eq_v is False"),
        ({"enable_moe_block": True}, "enable_moe_block is True"),
        ({"use_double_wide_mlp": True}, "use_double_wide_mlp is True"),
        ({"hidden_size_per_layer_input": None}, "hidden_size_per_layer_input is None"),
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input is 256"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers is 2"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ({"final_logit_softcapping": None}, "no final_logit_softcapping"),
        ({"quantization_config": None}, "FP8 release"),
        ({"sliding_window": None}, "sliding_window is None"),
        ({"global_head_dim": None}, "global_head_dim is None"),
        ({"head_dim": 64}, "head_dim is 64, these kernels take multiples of 128"),
        ({"num_global_key_value_heads": 2}, "num_global_key_value_heads is 2"),
        ({"layer_types": [*KINDS[:-1], SLIDING]}, "begin with a sliding layer, end with a full"),
        ({"layer_types": [FULL, *KINDS[1:]]}, "begin with a sliding layer, end with a full"),
        ({"layer_types": [*KINDS[:3], FULL, FULL]}, "no two full ones in a row"),
    ],
)
def test_what_they_would_compute_wrongly_is_refused(
    text: Any, more: dict[str, Any], said: str
) -> None:
    with pytest.raises(Refused, match=said):
        gemma4.check({**text, **more})


def test_buckets_that_its_kernels_cannot_be_made_for_are_left_out(checkpoint: Checkpoint) -> None:
    model = read_model(checkpoint.kernels, token_buckets=(31, 32, 33))
    assert model.buckets.tokens == (32,)
    with pytest.raises(Refused, match=r"\[16\]: this model's kernels take 32 to 32 tokens"):
        read_model(checkpoint.kernels, token_buckets=(16,))


@pytest.mark.parametrize("config", [{}, {"text_config": None}, {"text_config": [1]}])
def test_a_config_without_a_text_decoder_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="no text_config"):
        gemma4.text(config)


@pytest.mark.parametrize("parameters", [None, {}, {SLIDING: None}, {SLIDING: {"rope_type": "x"}}])
def test_a_rope_without_a_base_is_refused(text: Any, parameters: Any) -> None:
    with pytest.raises(Refused, match="no rope_theta for sliding_attention"):
        gemma4.sliding_rope({**text, "rope_parameters": parameters})
