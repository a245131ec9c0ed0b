"""Objects as vLLM makes them, as far as headrace looks at them: its configs, modules and caches.

The cache is [blocks, heads, block_size, 2 * head_dim] in which a block holds all keys and then all
values, and the positions of both backwards: an order that nobody would guess.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

from headrace.engine.checkpoint import fingerprint

BLOCK = 4
HEADS = 2
HEAD_DIM = 4
VOCAB = 32


class FullAttentionSpec:
    """The cache of one layer; the name is what is looked at."""

    def __init__(self, **changed: Any) -> None:
        given: dict[str, Any] = {
            "block_size": BLOCK,
            "num_kv_heads": HEADS,
            "head_size": HEAD_DIM,
            "head_size_v": HEAD_DIM,
            "dtype": torch.float32,
            "kv_quant_mode": 0,
            "sliding_window": None,
            "attention_chunk_size": None,
        }
        vars(self).update(given | changed)


class SlidingWindowSpec(FullAttentionSpec):
    pass


class MLAAttentionSpec(FullAttentionSpec):
    pass


class UniformTypeKVCacheSpecs:
    """Of a group of layers that differ in size."""

    def __init__(self, specs: Mapping[str, Any]) -> None:
        self.block_size = BLOCK
        self.kv_cache_specs = dict(specs)


def place_of(size: int, head_dim: int) -> torch.Tensor:
    """Where the elements of a block lie, by part and position: [2, size, head_dim]."""
    order = torch.arange(2 * size * head_dim).view(2, size, head_dim)
    return order.flip(1)


def write_cells(
    keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, cells: torch.Tensor
) -> None:
    """The op of the backend `CPU_ATTN` here."""
    size, head_dim = cache.shape[2], cache.shape[3] // 2
    places = place_of(size, head_dim)
    flat = cache.view(cache.shape[0], cache.shape[1], -1)
    for part, states in enumerate((keys, values)):
        for row, cell in enumerate(cells.tolist()):
            flat[cell // size][:, places[part, cell % size]] = states[row]


class Impl:
    """What an attention module writes with; `fails` raises in its place."""

    def __init__(self) -> None:
        self.fails: Exception | None = None
        self.calls = 0

    def do_kv_cache_update(
        self,
        layer: Any,
        keys: torch.Tensor,
        values: torch.Tensor,
        cache: torch.Tensor,
        cells: torch.Tensor,
    ) -> None:
        self.calls += 1
        if self.fails is not None:
            raise self.fails
        write_cells(keys, values, cache, cells)


def name_of(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.attn"


def attention(**changed: Any) -> SimpleNamespace:
    """An attention module of vLLM's."""
    given: dict[str, Any] = {
        "attn_type": "decoder",
        "kv_sharing_target_layer_name": None,
        "attn_backend": SimpleNamespace(get_name=lambda: "CPU_ATTN"),
        "kv_cache_dtype": "auto",
        "sliding_window": None,
        "impl": Impl(),
    }
    return SimpleNamespace(**(given | changed))


def group(names: Sequence[str], spec: Any) -> SimpleNamespace:
    return SimpleNamespace(layer_names=list(names), kv_cache_spec=spec)


def cache_config(*groups: Any, num_blocks: int = 16) -> SimpleNamespace:
    return SimpleNamespace(num_blocks=num_blocks, kv_cache_groups=list(groups))


def model_in(directory: Path) -> Path:
    """A model with a fingerprint."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({"w": torch.arange(8.0)}, directory / "model.safetensors")
    return directory


def vllm_config(
    directory: Path, modules: Mapping[str, Any], *, max_model_len: int = 48, **transfer: Any
) -> SimpleNamespace:
    """What vLLM gives to a connector; `transfer` is its `kv_transfer_config`."""
    given: dict[str, Any] = {
        "is_kv_consumer": True,
        "is_kv_producer": False,
        "kv_connector_extra_config": {},
    }
    sizes = ("tensor", "pipeline", "data", "decode_context", "prefill_context")
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(directory),
            dtype=torch.float32,
            max_model_len=max_model_len,
            hf_text_config=SimpleNamespace(vocab_size=VOCAB),
            is_encoder_decoder=False,
            revision=None,
            model_arch_config=SimpleNamespace(quantization_config=None),
            hf_overrides={},
            hf_config_path=None,
            quantization=None,
            quantization_config=None,
            enable_sleep_mode=False,
        ),
        compilation_config=SimpleNamespace(static_forward_context=dict(modules)),
        parallel_config=SimpleNamespace(**{f"{size}_parallel_size": 1 for size in sizes}),
        load_config=SimpleNamespace(load_format="auto"),
        speculative_config=None,
        kv_transfer_config=SimpleNamespace(**(given | transfer)),
    )


def empty_cache(
    num_blocks: int = 16, *, heads: int = HEADS, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return torch.zeros((num_blocks, heads, BLOCK, 2 * HEAD_DIM), dtype=dtype)


def replay_options(directory: Path, layers: int, **more: Any) -> dict[str, Any]:
    """A `replay` source that fits the model that `vllm_config` was given."""
    return {
        "model": fingerprint(directory),
        "layers": layers,
        "heads": HEADS,
        "head_dim": HEAD_DIM,
        "dtype": "float32",
        "vocab_size": VOCAB,
        "max_positions": 64,
    } | more
