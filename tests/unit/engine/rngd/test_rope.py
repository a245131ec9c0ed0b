"""Rope tables against the model library's own rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from headrace.engine.rngd import llama
from headrace.engine.rngd.family import Rope
from headrace.engine.rngd.rope import inverse_frequencies, table
from headrace.errors import Refused

HEAD_DIM = 16
NUM_POSITIONS = 96

SCALINGS: dict[str, Mapping[str, Any]] = {
    "none": {},
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}

by_scaling = pytest.mark.parametrize("name", SCALINGS)
by_theta = pytest.mark.parametrize("theta", [100.0, 10000.0, 500000.0])


def config_of(theta: float, scaling: Mapping[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=NUM_POSITIONS,
        rope_parameters={"rope_type": "default", **scaling, "rope_theta": theta},
    )


@by_scaling
@by_theta
def test_frequencies_are_the_librarys(name: str, theta: float) -> None:
    theirs = LlamaRotaryEmbedding(config_of(theta, SCALINGS[name])).inv_freq
    ours = inverse_frequencies(Rope(HEAD_DIM, theta, SCALINGS[name]))
    assert ours.dtype == torch.float32
    assert torch.equal(ours, theirs)


@by_scaling
@by_theta
def test_a_table_is_the_librarys_cosines_and_sines_in_bf16(name: str, theta: float) -> None:
    positions = torch.arange(NUM_POSITIONS)[None]
    like = torch.zeros(1, dtype=torch.bfloat16)
    cos, sin = LlamaRotaryEmbedding(config_of(theta, SCALINGS[name]))(like, positions)
    made = table(Rope(HEAD_DIM, theta, SCALINGS[name]), NUM_POSITIONS)
    assert made.shape == (NUM_POSITIONS, HEAD_DIM // 2, 2, 2)
    assert made.dtype == torch.bfloat16
    half = HEAD_DIM // 2
    for columns in (slice(0, half), slice(half, HEAD_DIM)):
        assert torch.equal(made[..., 0, 0], cos[0, :, columns])
        assert torch.equal(made[..., 1, 1], cos[0, :, columns])
        assert torch.equal(made[..., 1, 0], sin[0, :, columns])
        assert torch.equal(made[..., 0, 1], -sin[0, :, columns])


def test_turning_the_halves_of_a_head_by_the_table_is_the_librarys_rotation() -> None:
    """Element i turns with element i + head_dim / 2, not with its neighbour."""
    rope = Rope(HEAD_DIM, 10000.0)
    keys = torch.randn(1, 2, NUM_POSITIONS, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    rotary = LlamaRotaryEmbedding(config_of(10000.0, {}))
    cos, sin = rotary(keys, torch.arange(NUM_POSITIONS)[None])
    _, theirs = apply_rotary_pos_emb(keys, keys, cos, sin)
    frequencies = inverse_frequencies(rope)
    angle = torch.arange(NUM_POSITIONS, dtype=torch.float32)[:, None] * frequencies[None]
    turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1)
    turn = turn.reshape(NUM_POSITIONS, HEAD_DIM // 2, 2, 2)
    halves = keys.reshape(1, 2, NUM_POSITIONS, 2, HEAD_DIM // 2)
    ours = torch.einsum("pior,bhpri->bhpoi", turn, halves)
    torch.testing.assert_close(ours.reshape(keys.shape), theirs, rtol=0, atol=1e-6)
    assert torch.equal(turn.to(torch.bfloat16), table(rope, NUM_POSITIONS))


def test_a_part_of_a_head_may_stay_as_it_is() -> None:
    whole = inverse_frequencies(Rope(HEAD_DIM, 10000.0, {"rope_type": "proportional"}, rotated=4))
    slow = {"rope_type": "proportional", "factor": 8.0}
    parts = inverse_frequencies(Rope(HEAD_DIM, 10000.0, slow, rotated=4))
    assert torch.equal(parts, whole / 8.0)
    made = table(Rope(HEAD_DIM, 10000.0, {"rope_type": "proportional"}, rotated=4), 32)
    still = made[:, 2:]
    assert torch.equal(still, torch.eye(2, dtype=torch.bfloat16).expand_as(still))
    whole = table(Rope(HEAD_DIM, 10000.0), 32)
    assert torch.equal(made[:, :2], whole[:, :2])


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_a_scaling_that_is_not_known_is_refused(kind: str, key: str) -> None:
    with pytest.raises(Refused, match=f"rope type '{kind}'") as caught:
        table(Rope(HEAD_DIM, 10000.0, {key: kind, "factor": 2.0}), 8)
    assert caught.value.field == "rope_scaling"


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({}, (10000.0, {})),
        ({"rope_theta": 7}, (7.0, {})),
        ({"rope_theta": 7, "rope_scaling": {"type": "linear"}}, (7.0, {"type": "linear"})),
        ({"rope_theta": 7, "rope_scaling": None}, (7.0, {})),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}},
            (9.0, {"rope_type": "default", "rope_theta": 9.0}),
        ),
    ],
)
def test_a_config_of_either_form_is_read(config: dict[str, Any], wanted: object) -> None:
    assert llama.rope_parameters(config) == wanted
