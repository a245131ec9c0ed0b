"""vLLM's caches in our words, and which of them are refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.engine.checkpoint import fingerprint
from headrace.engine.vllm.caches import VllmCache, layer_number, model_directory
from headrace.errors import LocalProtocolError, Refused
from headrace.geometry import Full, Layer, Manifest, Part, Shared, Sliding, check_manifest
from tests.unit.engine.vllm.made_up import (
    BLOCK,
    HEAD_DIM,
    HEADS,
    VOCAB,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    attention,
    cache_config,
    empty_cache,
    group,
    model_in,
    name_of,
    vllm_config,
)

pytestmark = pytest.mark.usefixtures("one_thread")

PARTS = tuple(Part(name, HEADS, HEAD_DIM, "float32") for name in "kv")
MAX_LEN = 48


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return model_in(tmp_path / "model")


def cache_of(directory: Path, modules: dict[str, Any], *groups: Any, **how: Any) -> VllmCache:
    """A worker's cache of 16 blocks; tensors: those that are not as all others."""
    tensors = {name: empty_cache() for each in groups for name in each.layer_names}
    tensors |= how.get("tensors", {})
    config = vllm_config(directory, modules, max_model_len=MAX_LEN)
    return VllmCache(config, cache_config(*groups), tensors)


def one_layer(directory: Path, module: Any = None, spec: Any = None, **how: Any) -> VllmCache:
    modules = {name_of(0): module or attention()}
    return cache_of(directory, modules, group([name_of(0)], spec or FullAttentionSpec()), **how)


# What a manifest says.


def test_full_attention(directory: Path) -> None:
    modules = {name_of(at): attention() for at in (1, 0)}
    cache = cache_of(directory, modules, group(list(modules), FullAttentionSpec()))
    manifest = cache.manifest()
    assert manifest == Manifest(
        role="decoder",
        model=fingerprint(directory),
        layers=tuple(Layer(at, f"layers.{at}", Full(), PARTS) for at in (0, 1)),
        layouts=("token_major", "head_major"),
        vocab_size=VOCAB,
        logits_dtype="float32",
        max_positions=MAX_LEN,
    )
    check_manifest(manifest, "decoder")
    assert (cache.dtype, cache.num_blocks, cache.model_directory) == ("float32", 16, directory)
    assert [cache.cache_group(at) for at in (0, 1)] == [0, 0]
    assert cache.block_size(0) == BLOCK


@pytest.mark.parametrize(
    ("window", "tail"), [(1, 0), (2, BLOCK), (5, BLOCK), (6, 2 * BLOCK), (9, 8), (10, 12)]
)
def test_sliding_in_a_cache_group_of_its_own(directory: Path, window: int, tail: int) -> None:
    """What lies in the blocks that vLLM keeps: the window's last rows but one, in whole blocks."""
    spec = SlidingWindowSpec(sliding_window=window)
    modules = {name_of(0): attention(sliding_window=window), name_of(1): attention()}
    groups = group([name_of(0)], spec), group([name_of(1)], FullAttentionSpec())
    cache = cache_of(directory, modules, *groups)
    assert [each.kind for each in cache.manifest().layers] == [Sliding(window, tail), Full()]
    assert [cache.cache_group(at) for at in (0, 1)] == [0, 1]


def test_sliding_with_the_hybrid_manager_off(directory: Path) -> None:
    """All blocks are kept, and any may serve a later prompt."""
    cache = one_layer(directory, attention(sliding_window=6), FullAttentionSpec(sliding_window=6))
    assert cache.manifest().layers[0].kind == Sliding(6, MAX_LEN)


def test_windows_that_contradict_each_other(directory: Path) -> None:
    with pytest.raises(LocalProtocolError, match="windows of 6 and 8 in one layer"):
        one_layer(directory, attention(sliding_window=6), SlidingWindowSpec(sliding_window=8))


def test_a_layer_that_shares_anothers(directory: Path) -> None:
    shares = attention(kv_sharing_target_layer_name=name_of(0))
    modules = {name_of(0): attention(), name_of(1): shares}
    spec = FullAttentionSpec()
    for names in ([name_of(0)], list(modules)):  # vLLM may add it to the group of its target
        cache = cache_of(directory, modules, group(names, spec))
        layer = cache.manifest().layers[1]
        assert layer == Layer(1, "layers.1", Shared("layers.0"), ())
        assert [cache.layer_of(name_of(at)) for at in (0, 1)] == [0, None]
        check_manifest(cache.manifest(), "decoder")


def test_layers_that_differ_in_size(directory: Path) -> None:
    modules = {name_of(at): attention() for at in range(2)}
    specs = {name_of(0): FullAttentionSpec(), name_of(1): FullAttentionSpec(num_kv_heads=3)}
    wide = {name_of(1): empty_cache(heads=3)}
    mixed = group(list(modules), UniformTypeKVCacheSpecs(specs))
    cache = cache_of(directory, modules, mixed, tensors=wide)
    assert [layer.parts[0].heads for layer in cache.manifest().layers] == [HEADS, 3]


def test_modules_that_are_no_attention_are_passed_over(directory: Path) -> None:
    modules = {"model.norm": SimpleNamespace(), name_of(0): attention()}
    cache = cache_of(directory, modules, group([name_of(0)], FullAttentionSpec()))
    assert len(cache.manifest().layers) == 1


# What is written is read.


def test_cells_are_read_as_they_were_written(directory: Path) -> None:
    cache = one_layer(directory)
    cells = torch.tensor([9, 2, 61])
    keys, values = torch.randn(2, 3, HEADS, HEAD_DIM)
    cache.write(0, (keys, values), cells)
    assert torch.equal(cache.read(0, 0, cells), keys)
    assert torch.equal(cache.read(0, 1, cells), values)
    assert not cache.read(0, 0, torch.tensor([8, 3, 60])).any()


def test_blocks_that_the_kernel_splits(directory: Path) -> None:
    """vLLM's block of 8 positions is two of the tensor's."""
    tensors = {name_of(0): torch.zeros((32, HEADS, BLOCK, 2 * HEAD_DIM))}
    cache = one_layer(directory, spec=FullAttentionSpec(block_size=8), tensors=tensors)
    assert (cache.block_size(0), cache.kernel_block_size(0)) == (8, BLOCK)
    cells = torch.tensor([15 * 8 + 7])
    keys = torch.randn(1, HEADS, HEAD_DIM)
    cache.write(0, (keys, keys), cells)
    assert torch.equal(cache.read(0, 1, cells), keys)
    assert tensors[name_of(0)][31].any()


def test_the_order_is_learned_once_for_layers_of_one_shape(directory: Path) -> None:
    modules = {name_of(at): attention() for at in range(3)}
    cache_of(directory, modules, group(list(modules), FullAttentionSpec()))
    assert [module.impl.calls for module in modules.values()] == [2, 0, 0]


# What is refused.


def test_another_backend(directory: Path) -> None:
    module = attention(attn_backend=SimpleNamespace(get_name=lambda: "FLASH_ATTN"))
    with pytest.raises(Refused, match=r"FLASH_ATTN, .*; verified are CPU_ATTN") as told:
        one_layer(directory, module)
    assert told.value.field == "attention backend"
    assert module.impl.calls == 0


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (MLAAttentionSpec(), "keeps MLAAttentionSpec, which is not supported yet"),
        (FullAttentionSpec(kv_quant_mode=1), "only plain keys and values"),
        (FullAttentionSpec(dtype=torch.uint8), r"keeps torch\.uint8"),
        (FullAttentionSpec(head_size_v=2), "4 and 2 wide"),
        (FullAttentionSpec(attention_chunk_size=8), "attends by chunks"),
    ],
)
def test_caches_that_are_no_plain_keys_and_values(directory: Path, spec: Any, says: str) -> None:
    with pytest.raises(Refused, match=says) as told:
        one_layer(directory, spec=spec)
    assert told.value.field == "layers.0"


def test_a_value_width_that_is_left_out_is_the_keys(directory: Path) -> None:
    cache = one_layer(directory, spec=FullAttentionSpec(head_size_v=None))
    assert cache.manifest().layers[0].parts == PARTS


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros((15, HEADS, BLOCK, 2 * HEAD_DIM)),
        torch.zeros((16, BLOCK, HEADS, 2 * HEAD_DIM)),
        torch.zeros((16, HEADS, BLOCK, HEAD_DIM)),
        torch.zeros((16, HEADS, BLOCK, 2 * HEAD_DIM), dtype=torch.float16),
        torch.zeros((2, 16, BLOCK, HEADS, HEAD_DIM)),
        torch.zeros((16, HEADS, 0, 2 * HEAD_DIM)),
    ],
)
def test_tensors_of_another_shape(directory: Path, tensor: torch.Tensor) -> None:
    with pytest.raises(Refused, match=r"layers\.0: its cache is .* was expected") as told:
        one_layer(directory, tensors={name_of(0): tensor})
    assert told.value.field == "layers.0"


def test_a_backend_whose_order_cannot_be_learned(directory: Path) -> None:
    module = attention(impl=SimpleNamespace(do_kv_cache_update=lambda *given: None))
    with pytest.raises(Refused, match="keeps no plain order"):
        one_layer(directory, module)


def test_attention_that_is_no_decoders(directory: Path) -> None:
    for kind in ("encoder", SimpleNamespace(value="encoder_decoder")):
        with pytest.raises(Refused, match="attention, which is not supported yet"):
            one_layer(directory, attention(attn_type=kind))
    one_layer(directory, attention(attn_type=SimpleNamespace(value="decoder")))


def test_a_cache_that_is_no_attentions(directory: Path) -> None:
    """A state space layer has a cache group, and no attention module."""
    modules = {name_of(0): attention(), "model.layers.1.mixer": SimpleNamespace()}
    groups = (
        group([name_of(0)], FullAttentionSpec()),
        group(["model.layers.1.mixer"], SimpleNamespace(block_size=BLOCK)),
    )
    with pytest.raises(Refused, match=r"model\.layers\.1\.mixer keeps SimpleNamespace"):
        cache_of(directory, modules, *groups)


def test_layers_that_are_missing_or_twice(directory: Path) -> None:
    spec = FullAttentionSpec()
    with pytest.raises(Refused, match=r"attention layers are \[1\]"):
        cache_of(directory, {name_of(1): attention()}, group([name_of(1)], spec))
    twice = {name_of(0): attention(), "mtp.layers.0.attn": attention()}
    with pytest.raises(Refused, match=r"mtp\.layers\.0\.attn and .* are one layer"):
        cache_of(directory, twice, group(list(twice), spec))
    modules = {name_of(0): attention(), name_of(1): attention()}
    with pytest.raises(Refused, match="is in none of vLLM's cache groups"):
        cache_of(directory, modules, group([name_of(0)], spec))


# Names.


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("model.layers.0.self_attn.attn", 0),
        ("language_model.model.layers.17.self_attn.attn", 17),
        ("transformer.h.3", 3),
        ("11.attn", 11),
    ],
)
def test_the_layer_that_a_name_tells(name: str, number: int) -> None:
    assert layer_number(name) == number


@pytest.mark.parametrize("name", ["", "model.attn", "model.layers2.attn", "a.1.b.2.attn"])
def test_names_that_tell_none_or_several(name: str) -> None:
    with pytest.raises(Refused, match="which layer is the attention module"):
        layer_number(name)


def test_where_a_model_is(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert model_directory(str(directory)) == directory
    import huggingface_hub

    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda name, revision, local_files_only: f"/hub/{name}/{revision}",
    )
    assert model_directory("some/model") == Path("/hub/some/model/None")
    assert model_directory("some/model", "v2") == Path("/hub/some/model/v2")


@pytest.mark.parametrize("name", ["nobody/has-this", "/no/such/directory"])
def test_a_model_that_is_not_here(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(Refused, match="give vLLM the model's directory") as told:
        model_directory(name)
    assert told.value.field == "model"
