"""Which EXAONEs the kernels compute, and that every tensor of one is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Exaone4Config
from transformers.models.exaone4.modeling_exaone4 import Exaone4RotaryEmbedding

from headrace.engine.checkpoint import tensor_entries
from headrace.engine.layers import geometry as library_layers
from headrace.engine.loading import load_config
from headrace.engine.rngd import exaone4, geometry
from headrace.engine.rngd.family import FULL, SLIDING, Geometry
from headrace.engine.rngd.model import read_model
from headrace.engine.rngd.rope import inverse_frequencies
from headrace.errors import Refused
from tests.rngd_checkpoints import Checkpoint, checkpoint_of
from tests.unit.engine.rngd.wiring import tensors_read

SHAPE = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 512,
    "intermediate_size": 512,
    "sliding_window": 32,
}


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return checkpoint_of("exaone4")


@pytest.fixture(scope="module")
def config(checkpoint: Checkpoint) -> dict[str, Any]:
    return geometry.read_config(checkpoint.kernels)


def test_every_tensor_of_a_checkpoint_is_read(checkpoint: Checkpoint) -> None:
    there = {entry.name for entry in tensor_entries(checkpoint.kernels)}
    assert tensors_read(exaone4.FAMILY, 4) == there


def test_a_checkpoint_passes_and_has_the_librarys_layers(
    config: dict[str, Any], checkpoint: Checkpoint
) -> None:
    exaone4.check(config)
    theirs = library_layers(load_config(checkpoint.plain), "source", "bfloat16", 300)
    assert geometry.layers(exaone4.FAMILY, config, 300) == theirs
    assert exaone4.geometry(config) == {SLIDING: Geometry(4, 128, 32), FULL: Geometry(4, 128)}


def test_the_kernels_are_told_its_shape(config: dict[str, Any]) -> None:
    told = {**SHAPE, "rms_norm_eps": 1e-5, "max_position_embeddings": 300}
    assert exaone4.overrides(config, 300) == told


def test_only_kernels_that_begin_a_sliding_layer_turn_keys() -> None:
    for (_, begun), name in exaone4.FAMILY.mid.items():
        assert name.endswith("rope" if begun == SLIDING else "nope")


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    "written",
    [
        {"rope_theta": 1000000, "rope_scaling": LLAMA3},
        {"rope_parameters": {**LLAMA3, "rope_theta": 1000000}},
    ],
)
def test_frequencies_are_the_librarys_however_the_config_says_it(
    config: dict[str, Any], written: dict[str, Any]
) -> None:
    old = {name: config[name] for name in config if name != "rope_parameters"}
    library = Exaone4Config(**{**SHAPE, "rope_parameters": {**LLAMA3, "rope_theta": 1000000}})
    theirs = Exaone4RotaryEmbedding(library).inv_freq
    assert torch.equal(inverse_frequencies(exaone4.rope({**old, **written})), theirs)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"sliding_window": None}, "sliding_window is None"),
        ({"head_dim": None}, "head_dim is None"),
        ({"quantization_config": None}, "FP8 release"),
        ({"hidden_size": 640}, "hidden_size is 640, these kernels take multiples of 512"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2, these kernels take multiples of 4"),
        ({"layer_types": None}, "layer_types must name"),
        ({"layer_types": [FULL, *[SLIDING] * 3]}, "begin with a sliding layer"),
    ],
)
def test_what_they_would_compute_wrongly_is_refused(
    config: dict[str, Any], more: dict[str, Any], said: str
) -> None:
    with pytest.raises(Refused, match=said):
        exaone4.check({**config, **more})


def test_a_bucket_of_one_token_is_left_out(checkpoint: Checkpoint) -> None:
    model = read_model(checkpoint.kernels, token_buckets=(1, 2, 32, 33))
    assert model.buckets.tokens == (2, 32)
