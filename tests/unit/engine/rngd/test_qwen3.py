"""Which Qwen3s the kernels compute, and that every tensor of one is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from headrace.engine.checkpoint import tensor_entries
from headrace.engine.layers import geometry as library_layers
from headrace.engine.loading import load_config
from headrace.engine.rngd import geometry, qwen3
from headrace.engine.rngd.family import FULL, Family, Geometry
from headrace.engine.rngd.rope import inverse_frequencies
from headrace.errors import Refused
from tests.rngd_checkpoints import Checkpoint, checkpoint_of
from tests.unit.engine.rngd.wiring import tensors_read

FAMILIES = {"fp8": qwen3.FAMILY, "bf16": qwen3.FAMILY_BF16}
SHAPE = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 512,
    "intermediate_size": 512,
}


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return checkpoint_of("qwen3")


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> tuple[Family, dict[str, Any]]:
    directory = checkpoint.kernels if request.param == "fp8" else checkpoint.plain
    return FAMILIES[request.param], geometry.read_config(directory)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_tensor_of_a_checkpoint_is_read(name: str, checkpoint: Checkpoint) -> None:
    directory = checkpoint.kernels if name == "fp8" else checkpoint.plain
    there = {entry.name for entry in tensor_entries(directory)}
    assert tensors_read(FAMILIES[name], 4) == there


def test_a_checkpoint_passes_and_has_the_librarys_layers(
    case: tuple[Family, dict[str, Any]], checkpoint: Checkpoint
) -> None:
    family, config = case
    family.check(config)
    theirs = library_layers(load_config(checkpoint.plain), "source", "bfloat16", 300)
    assert geometry.layers(family, config, 300) == theirs
    assert family.geometry(config) == {FULL: Geometry(2, 128)}


def test_the_kernels_are_told_its_shape(case: tuple[Family, dict[str, Any]]) -> None:
    family, config = case
    told = {**SHAPE, "rms_norm_eps": 1e-6, "max_position_embeddings": 300}
    assert family.overrides(config, 300) == told


@pytest.mark.parametrize(
    "written",
    [
        {"rope_theta": 1000000, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
    ],
)
def test_frequencies_are_the_librarys_however_the_config_says_it(written: dict[str, Any]) -> None:
    theirs = Qwen3RotaryEmbedding(Qwen3Config(**SHAPE, rope_theta=1000000.0)).inv_freq
    assert torch.equal(inverse_frequencies(qwen3.rope({**SHAPE, **written})), theirs)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"head_dim": None}, "head_dim is None"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None"),
    ],
)
def test_what_they_would_compute_wrongly_is_refused(
    case: tuple[Family, dict[str, Any]], more: dict[str, Any], said: str
) -> None:
    family, config = case
    with pytest.raises(Refused, match=said):
        family.check({**config, **more})


def test_weights_of_the_other_kind_are_refused(checkpoint: Checkpoint) -> None:
    quantised, plain = (
        geometry.read_config(directory) for directory in (checkpoint.kernels, checkpoint.plain)
    )
    with pytest.raises(Refused, match="FP8 release"):
        qwen3.FAMILY.check(plain)
    with pytest.raises(Refused, match="bf16 weights"):
        qwen3.FAMILY_BF16.check(quantised)
