"""Layers out of config.json alone, against what the model library's own config gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from headrace.engine import layers as library
from headrace.engine.rngd import geometry
from headrace.engine.rngd.family import FULL, SLIDING, Family, Geometry
from headrace.errors import Refused
from headrace.geometry import Layer, Sliding

MAX_POSITIONS = 256

COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 2048,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"rms_norm_eps": 1e-5}),
    "llama without grouped queries": (
        "LlamaConfig",
        {"rms_norm_eps": 1e-5, "num_key_value_heads": 4},
    ),
    "llama with llama3's rope": (
        "LlamaConfig",
        {
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 1024,
            },
        },
    ),
}


def config_of(name: str) -> Any:
    kind, more = CASES[name]
    return getattr(transformers, kind)(**{**COMMON, **more})


def as_written(config: Any, directory: Path) -> dict[str, Any]:
    """The config as it is read from a checkpoint."""
    config.save_pretrained(directory)
    return geometry.read_config(directory)


@pytest.mark.parametrize("name", CASES)
def test_layers_are_those_of_the_model_library(name: str, tmp_path: Path) -> None:
    config = config_of(name)
    written = as_written(config, tmp_path)
    family = geometry.family_of(written)
    made = geometry.layers(family, written, MAX_POSITIONS)
    assert made == library.geometry(config, "source", "bfloat16", MAX_POSITIONS)
    assert geometry.longest(family, written) == COMMON["max_position_embeddings"]


def small(kinds: tuple[str, ...]) -> Family:
    """A family of two kinds of layers, to which nothing is refused."""
    shapes = {FULL: Geometry(2, 16), SLIDING: Geometry(4, 8, window=32)}
    return Family(
        "small",
        "small",
        "w16a16",
        1,
        "first",
        "last",
        {},
        {},
        {},
        {},
        check=lambda config: None,
        geometry=lambda config: shapes,
        kinds=lambda config: kinds,
        overrides=lambda config, max_positions: {},
        text=lambda config: config["text_config"],
    )


def test_a_sliding_layer_has_every_row_and_its_own_shape() -> None:
    family = small(("sliding_attention", "full_attention"))
    config = {"text_config": {"max_position_embeddings": 77}}
    sliding, full = geometry.layers(family, config, MAX_POSITIONS)
    assert sliding.kind == Sliding(32, MAX_POSITIONS)
    assert [(part.name, part.heads, part.head_dim) for part in sliding.parts] == [
        ("k", 4, 8),
        ("v", 4, 8),
    ]
    assert (full.index, full.name, full.parts[0].head_dim) == (1, "layers.1", 16)
    assert {part.dtype for layer in (sliding, full) for part in layer.parts} == {"bfloat16"}
    assert geometry.longest(family, config) == 77
    assert all(isinstance(layer, Layer) for layer in (sliding, full))


def test_each_family_stands_once_for_each_kind_of_weights() -> None:
    named = [(family.model_type, family.quantised) for family in geometry.FAMILIES]
    assert len(set(named)) == len(named)


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "holds no config.json"), (b"{", "is not JSON"), (b"[]", "is not a JSON object")],
)
def test_a_config_that_cannot_be_read_is_refused(
    content: bytes | None, said: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(Refused, match=said) as caught:
        geometry.read_config(tmp_path)
    assert caught.value.field == "model"


@pytest.mark.parametrize("config", [{}, {"model_type": "gpt2"}, {"model_type": None}])
def test_a_model_without_kernels_is_refused_with_those_that_have_some(
    config: dict[str, Any],
) -> None:
    with pytest.raises(Refused, match="prefill kernels for") as caught:
        geometry.family_of(config)
    for family in geometry.FAMILIES:
        assert family.model_type in str(caught.value)


def test_what_a_familys_kernels_cannot_do_is_refused(tmp_path: Path) -> None:
    config = as_written(config_of("llama"), tmp_path)
    with pytest.raises(Refused, match="rms_norm_eps"):
        geometry.family_of({**config, "rms_norm_eps": 1e-6})
