"""A fake compiled directory says what the vendor's would, and that it is fake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import Refused
from headrace.testing.fake_rebellions import FakeRebellions, compile_fake
from tests.e2e import families
from tests.unit.testing.fake_rebellions import driving


def config_of(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "rbln_config.json").read_text())
    return found


def test_a_static_model(tmp_path: Path) -> None:
    checkpoint = families.directory_of("llama")
    compile_fake(checkpoint, tmp_path, max_seq_len=64, dtype="bfloat16")
    assert (tmp_path / "config.json").read_bytes() == (checkpoint / "config.json").read_bytes()
    config = config_of(tmp_path)
    assert "fake" in config
    assert config["cls_name"] == "FakeRebellionsConfig"
    assert (config["attn_impl"], config["cache_impl"]) == ("eager", "static")
    assert (config["kvcache_block_size"], config["kvcache_num_blocks"]) == (64, 1)
    assert (config["kvcache_partition_len"], config["prefill_chunk_size"]) == (None, 128)
    assert not config["use_attention_mask"]
    assert not config["use_position_ids"]
    assert [meta["name"] for meta in config["cache_metas"]] == [
        f"past_key_values_{at}" for at in range(8)
    ]
    assert config["cache_metas"][3] == {
        "name": "past_key_values_3",
        "layer_index": 1,
        "shape": [1, 2, 64, 16],
        "layer_type": "full_attention",
        "is_auto": True,
        "dtype": "bfloat16",
    }


def test_a_model_whose_layers_differ(tmp_path: Path) -> None:
    compile_fake(
        families.directory_of("gemma4_k_eq_v"),
        tmp_path,
        max_seq_len=64,
        attn_impl="flash_attn",
        partition_len=16,
        batch_size=2,
        num_blocks=5,
    )
    config = config_of(tmp_path)
    assert config["cache_impl"] == "hybrid"
    assert (config["sliding_window"], config["sliding_window_layers"]) == (16, [0, 1, 3, 4])
    assert config["use_attention_mask"]
    assert config["use_position_ids"]
    assert config["decoder_batch_sizes"] == [2, 1]
    shapes = [meta["shape"] for meta in config["cache_metas"]]
    assert shapes == ([[2, 2, 16, 16]] * 4 + [[5, 1, 16, 32]] * 2) * 2
    assert not any(meta["is_auto"] for meta in config["cache_metas"])


def test_a_model_of_windows_only() -> None:
    config = driving.load(family="mistral").config
    assert config.cache_impl == "sliding_window"
    assert (config.use_global_attention, config.use_local_attention) == (False, True)
    assert not config.use_attention_mask


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"partition_len": 16}, "eager"),
        ({"attn_impl": "flash_attn"}, "needs a partition_len"),
        ({"attn_impl": "flash_attn", "partition_len": 24}, "multiple"),
        ({"attn_impl": "flash_attn", "partition_len": 64}, "at least twice"),
    ],
)
def test_lengths_go_together(tmp_path: Path, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        compile_fake(families.directory_of("llama"), tmp_path, max_seq_len=64, **options)


def test_what_cannot_be_compiled_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="share"):
        compile_fake(families.directory_of("gemma4_shared"), tmp_path, max_seq_len=64)
    with pytest.raises(Refused, match="not supported"):
        compile_fake(families.directory_of("lfm2"), tmp_path, max_seq_len=64)


def test_only_its_own_directories_are_loaded(tmp_path: Path) -> None:
    load = FakeRebellions().sdk().load
    with pytest.raises(FileNotFoundError):
        load(str(tmp_path), 0)
    (tmp_path / "rbln_config.json").write_text("{}")
    with pytest.raises(ValueError, match="not made by compile_fake"):
        load(str(tmp_path), 0)
    with pytest.raises(RuntimeError, match="no device 1"):
        load(driving.compiled("llama"), 1)
