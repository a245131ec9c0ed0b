"""A checkpoint as kernels are made for it: how long its prompts are, and in which buckets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.rngd import exaone4, geometry, llama
from headrace.engine.rngd.model import MAX_POSITIONS, read_model
from headrace.engine.rngd.tiny import TINY_LLAMA
from headrace.errors import BackendUnavailable, Refused

WINDOW = 32
EXAONE: dict[str, Any] = {
    "model_type": "exaone4",
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 512,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def write(directory: Path, config: Mapping[str, Any] = TINY_LLAMA, **more: Any) -> Path:
    """A model of which nothing is there but its config."""
    (directory / "config.json").write_text(json.dumps({**config, **more}))
    return directory


@pytest.mark.parametrize(
    ("longest", "asked", "wanted"),
    [
        (256, None, 256),
        (MAX_POSITIONS, None, MAX_POSITIONS),
        (16 * MAX_POSITIONS, None, MAX_POSITIONS),
        (16 * MAX_POSITIONS, 2 * MAX_POSITIONS, 2 * MAX_POSITIONS),
        (256, 256, 256),
        (256, 1, 1),
    ],
)
def test_the_longest_prompt_is_the_models_or_the_one_asked_for(
    tmp_path: Path, longest: int, asked: int | None, wanted: int
) -> None:
    model = read_model(write(tmp_path, max_position_embeddings=longest), max_positions=asked)
    assert model.max_positions == model.buckets.max_positions == wanted
    assert model.directory == tmp_path
    assert model.config["max_position_embeddings"] == longest


@pytest.mark.parametrize("asked", [-1, 0, 257])
def test_a_longest_prompt_that_cannot_be_is_refused(tmp_path: Path, asked: int) -> None:
    directory = write(tmp_path, max_position_embeddings=256)
    with pytest.raises(Refused, match=f"max_positions is {asked}, ") as told:
        read_model(directory, max_positions=asked)
    assert told.value.field == "max_positions"


def test_buckets_follow_from_a_familys_windows_and_its_smallest(tmp_path: Path) -> None:
    asked = (64, 1, 16, WINDOW, 2)
    assert read_model(write(tmp_path), token_buckets=asked).buckets.tokens == (1, 2, 16, 32, 64)
    assert exaone4.FAMILY.min_tokens == 2
    model = read_model(write(tmp_path, EXAONE), token_buckets=asked)
    assert (model.family, model.buckets.tokens) == (exaone4.FAMILY, (2, 16, WINDOW))
    with pytest.raises(Refused, match="take 2 to 32 tokens; add a bucket of such a size"):
        read_model(tmp_path)


def test_buckets_follow_from_a_familys_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = replace(llama.FAMILY, token_unit=4)
    monkeypatch.setattr(geometry, "FAMILIES", (family,))
    model = read_model(write(tmp_path), token_buckets=(1, 4, 6, 8))
    assert model.buckets.tokens == (4, 8)


def test_kernels_that_were_not_seen_to_compile_are_refused_for_a_card(tmp_path: Path) -> None:
    read_model(write(tmp_path)).check_for_card()
    model = read_model(write(tmp_path, EXAONE), token_buckets=(16,))
    with pytest.raises(BackendUnavailable, match="They run with --emulate") as told:
        model.check_for_card()
    assert (told.value.stage, told.value.probe) == ("api_missing", "kernels for exaone4")


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"holds no config\.json"):
        read_model(tmp_path / "nowhere")
    with pytest.raises(Refused, match="model_type is 'none'"):
        read_model(write(tmp_path, model_type="none"))
