"""Geometry comes from the config, kind by kind, and is confirmed by the first real tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from headrace.engine.layers import check_states, geometry, manifest
from headrace.engine.loading import load_config
from headrace.errors import LocalProtocolError, Refused
from headrace.geometry import Full, Layer, Part, Shared, Sliding, agree
from tests.e2e.families import WINDOW, directory_of

POSITIONS = 200


def layers_of(family: str, role: Any = "decoder") -> tuple[Layer, ...]:
    return geometry(load_config(directory_of(family)), role, "float32", POSITIONS)


def test_full_layers() -> None:
    parts = (Part("k", 2, 16, "float32"), Part("v", 2, 16, "float32"))
    assert layers_of("llama") == tuple(
        Layer(index, f"layers.{index}", Full(), parts) for index in range(4)
    )


def test_sliding_tail_is_what_each_side_has() -> None:
    """A decoder's cache keeps window - 1 rows; a source sees them all."""
    for role, tail in (("decoder", WINDOW - 1), ("source", POSITIONS)):
        kinds = [layer.kind for layer in layers_of("exaone4", role)]
        assert kinds == [*[Sliding(WINDOW, tail)] * 3, Full()]


def test_head_sizes_differ_within_a_model() -> None:
    shapes = [
        {(part.heads, part.head_dim) for part in layer.parts} for layer in layers_of("gemma4")
    ]
    assert shapes == [{(2, 16)}, {(2, 16)}, {(2, 32)}] * 2
    last = layers_of("gemma4_k_eq_v")[-1]
    assert {(part.heads, part.head_dim) for part in last.parts} == {(1, 32)}


@pytest.mark.parametrize("family", ["gemma4_shared", "gemma3n"])
def test_shared_layers_name_their_owner(family: str) -> None:
    layers = layers_of(family)
    assert [layer.kind for layer in layers[3:]] == [
        Shared("layers.1"),
        Shared("layers.1"),
        Shared("layers.2"),
    ]
    assert all(layer.parts == () for layer in layers[3:])


def test_manifests_of_one_model_agree() -> None:
    directory = directory_of("gemma3")
    config = load_config(directory)
    source = manifest(config, directory, "source", "float32", POSITIONS)
    decoder = manifest(config, directory, "decoder", "float32", 64)
    assert agree(source, decoder) == "head_major"
    assert decoder.layouts == ("head_major", "token_major")
    assert (source.max_positions, decoder.max_positions) == (POSITIONS, 64)
    assert source.model == decoder.model


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"layer_types": ["chunked_attention"]}, r"layers\.0 is chunked_attention"),
        ({"layer_types": ["linear_attention"]}, r"layers\.0 is state"),
        ({"layer_types": ["hybrid"]}, r"layers\.0 is state"),
        ({"layer_types": ["moe"]}, r"layers\.0 is no attention"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 1}, r"a window of 1\b"),
        ({"layer_types": ["sliding_attention"], "sliding_window": None}, "a window of None"),
        ({"kv_lora_rank": 8}, r"layers\.0 is latent"),
        ({"layer_types": ["dummy"], "kv_sharing_modes": ["reuse"]}, "shares 0 layers"),
        ({"num_key_value_heads": None, "num_attention_heads": None}, "no KV heads"),
    ],
)
def test_unsupported_kinds_are_refused_by_name(changes: dict[str, Any], text: str) -> None:
    config = transformers.LlamaConfig(num_hidden_layers=1)
    if changes.get("layer_types") == ["chunked_attention"]:
        config.attention_chunk_size = 8
    for name, value in changes.items():
        # Not through `setattr`, which validates: a config of another version may hold anything.
        vars(config)[name] = value
    with pytest.raises(Refused, match=text) as caught:
        geometry(config, "decoder", "float32", POSITIONS)
    assert caught.value.field == "layers.0"


def test_head_dim_falls_back_to_the_hidden_size() -> None:
    config = transformers.LlamaConfig(
        num_hidden_layers=1, hidden_size=48, num_attention_heads=4, num_key_value_heads=2
    )
    vars(config)["head_dim"] = None
    assert geometry(config, "decoder", "bfloat16", POSITIONS)[0].parts == (
        Part("k", 2, 12, "bfloat16"),
        Part("v", 2, 12, "bfloat16"),
    )


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 3, 5, 16), torch.float32),
        ((1, 2, 5, 8), torch.float32),
        ((1, 2, 4, 16), torch.float32),
        ((2, 2, 5, 16), torch.float32),
        ((1, 2, 5, 16), torch.bfloat16),
    ],
)
def test_a_real_tensor_that_differs_is_named(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    layer = layers_of("llama")[2]
    good = torch.zeros(1, 2, 5, 16)
    check_states(layer, good, good, 5)
    with pytest.raises(LocalProtocolError, match=r"layers\.2\.v: .*\(1, 2, 5, 16\)"):
        check_states(layer, good, torch.zeros(shape, dtype=dtype), 5)


def test_unknown_directories_are_refused(tmp_path: Any) -> None:
    with pytest.raises(Refused, match="no usable config"):
        load_config(tmp_path)
