"""A fake compiled directory: the vendor's metadata, and where the fake finds the weights.

Keys and values of `rbln_config.json` are those of the vendor as far as they are used here. The file
says that it is fake, and no compiler of the vendor's takes such a directory.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal

import torch

from headrace.engine.layers import geometry
from headrace.engine.loading import load_config
from headrace.engine.tensors import DTYPES
from headrace.geometry import Layer, Sliding

AttnImpl = Literal["eager", "flash_attn"]

CONFIG_NAME: Final = "rbln_config.json"
FAKE_NAME: Final = "fake.json"
PREFILL_CHUNK: Final = 128
"""Positions that an ATOM card computes at once, unless it is compiled otherwise."""

_MARK: Final = "headrace.testing.fake_rebellions: no vendor's compiler made this"
_MASKED: Final = ("gemma3", "gemma4")
"""Model types whose decoders take an attention mask and position ids."""


@dataclass(frozen=True)
class CacheMeta:
    """What a compiled model says of one of its cache tensors."""

    name: str
    layer_index: int
    shape: list[int]
    layer_type: Literal["full_attention", "sliding_attention"]
    is_auto: bool
    dtype: str

    @property
    def is_full(self) -> bool:
        """Whether it is of full attention; not one of the vendor's names."""
        return self.layer_type == "full_attention"


@dataclass
class CompiledConfig:
    """`rbln_config` of a loaded model: the attributes that are used, under the vendor's names."""

    batch_size: int
    max_seq_len: int
    attn_impl: AttnImpl
    kvcache_partition_len: int | None
    kvcache_block_size: int
    kvcache_num_blocks: int
    prefill_chunk_size: int
    decoder_batch_sizes: list[int]
    dtype: torch.dtype
    cache_impl: Literal["static", "sliding_window", "hybrid"] = "static"
    sliding_window: int | None = None
    sliding_window_layers: list[int] = field(default_factory=list)
    use_attention_mask: bool = False
    use_position_ids: bool = False
    cache_metas: list[CacheMeta] = field(default_factory=list)
    phases: list[str] = field(default_factory=lambda: ["prefill", "decode"])

    @property
    def use_global_attention(self) -> bool:
        return self.cache_impl in ("static", "hybrid")

    @property
    def use_local_attention(self) -> bool:
        return self.cache_impl in ("sliding_window", "hybrid")

    @property
    def max_blocks(self) -> int:
        """How many blocks of full attention a sequence can have; not one of the vendor's names."""
        return self.max_seq_len // self.kvcache_block_size


def compile_fake(
    checkpoint: Path,
    directory: Path,
    *,
    max_seq_len: int,
    attn_impl: AttnImpl = "eager",
    partition_len: int | None = None,
    batch_size: int = 1,
    dtype: str = "float32",
    num_blocks: int | None = None,
    prefill_chunk_size: int = PREFILL_CHUNK,
) -> None:
    """Make `directory` what a compiled model of `checkpoint` would be, for the fake to load.

    The checkpoint is not copied. A partition may be of any length here; the vendor's have at least
    1,024 positions, and its prefill chunks are multiples of 64.

    Raises:
        ValueError: the lengths do not go together, or layers share caches.
        Refused: the checkpoint is none, or its caches are not supported.
    """
    block_size = _block_size(attn_impl, partition_len, max_seq_len)
    compiled = CompiledConfig(
        batch_size=batch_size,
        max_seq_len=max_seq_len,
        attn_impl=attn_impl,
        kvcache_partition_len=partition_len,
        kvcache_block_size=block_size,
        kvcache_num_blocks=num_blocks or max_seq_len // block_size * batch_size,
        prefill_chunk_size=prefill_chunk_size,
        decoder_batch_sizes=sorted({1, batch_size}, reverse=True),
        dtype=DTYPES[dtype],
    )
    _describe(compiled, checkpoint, dtype, is_auto=num_blocks is None)
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(checkpoint / "config.json", directory / "config.json")
    told = {"cls_name": "FakeRebellionsConfig", "fake": _MARK, **asdict(compiled), "dtype": dtype}
    (directory / CONFIG_NAME).write_text(json.dumps(told, indent=2, sort_keys=True) + "\n")
    where = {"fake": _MARK, "checkpoint": str(checkpoint.resolve())}
    (directory / FAKE_NAME).write_text(json.dumps(where, indent=2) + "\n")


def read_compiled(directory: Path) -> tuple[CompiledConfig, Path]:
    """The configuration of a fake compiled directory, and where its checkpoint is.

    Raises:
        FileNotFoundError: it holds no compiled model.
        ValueError: what it holds is not the fake's.
    """
    told: dict[str, Any] = json.loads((directory / CONFIG_NAME).read_text())
    if told.get("fake") != _MARK:
        raise ValueError(f"{directory} was not made by compile_fake")
    where = json.loads((directory / FAKE_NAME).read_text())
    known = {each.name: told[each.name] for each in fields(CompiledConfig)}
    known["dtype"] = DTYPES[known["dtype"]]
    known["cache_metas"] = [CacheMeta(**meta) for meta in known["cache_metas"]]
    return CompiledConfig(**known), Path(where["checkpoint"])


def _describe(compiled: CompiledConfig, checkpoint: Path, dtype: str, *, is_auto: bool) -> None:
    """Fill in what the checkpoint decides: windows, masks and caches."""
    config = load_config(checkpoint)
    layers = geometry(config, "source", dtype, compiled.max_seq_len)
    if any(not layer.parts for layer in layers):
        raise ValueError("the fake has no layers that share another's cache")
    windows = {
        layer.index: layer.kind.window for layer in layers if isinstance(layer.kind, Sliding)
    }
    if windows:
        compiled.cache_impl = "sliding_window" if len(windows) == len(layers) else "hybrid"
        compiled.sliding_window = next(iter(windows.values()))
        compiled.sliding_window_layers = list(windows)
    masked = str(config.model_type).startswith(_MASKED)
    compiled.use_attention_mask = compiled.use_position_ids = masked
    compiled.cache_metas = [
        _meta(compiled, layer, part, dtype, is_auto=is_auto) for layer in layers for part in (0, 1)
    ]


def _block_size(attn_impl: AttnImpl, partition_len: int | None, max_seq_len: int) -> int:
    if attn_impl == "eager":
        if partition_len is not None:
            raise ValueError("eager attention has one block for all of max_seq_len")
        return max_seq_len
    if partition_len is None or max_seq_len % partition_len or max_seq_len < 2 * partition_len:
        raise ValueError(
            f"flash_attn needs a partition_len of which max_seq_len ({max_seq_len}) is a multiple, "
            f"at least twice; it is {partition_len}"
        )
    return partition_len


def _meta(
    compiled: CompiledConfig, layer: Layer, part: int, dtype: str, *, is_auto: bool
) -> CacheMeta:
    name, each = f"past_key_values_{2 * layer.index + part}", layer.parts[part]
    if isinstance(layer.kind, Sliding):
        shape = [compiled.batch_size, each.heads, layer.kind.window, each.head_dim]
        return CacheMeta(name, layer.index, shape, "sliding_attention", False, dtype)
    shape = [compiled.kvcache_num_blocks, each.heads, compiled.kvcache_block_size, each.head_dim]
    return CacheMeta(name, layer.index, shape, "full_attention", is_auto, dtype)
