"""A vLLM worker's KV cache: its geometry in our words, and its blocks.

Geometry is read layer by layer from the attention modules and the cache groups that vLLM made, and
checked against the tensors that it allocated. A sliding layer's tail depends on who keeps its
blocks. In a cache group of its own, blocks wholly before the window are not kept, and the tail is
what lies in those that are: whole blocks, since vLLM's prefix cache takes a block as a whole. With
vLLM's hybrid cache manager off, all blocks are kept and may serve any later prompt, so that the
tail is all positions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from headrace.engine.checkpoint import fingerprint
from headrace.engine.tensors import DTYPES
from headrace.engine.vllm.layout import BlockOrder, learn
from headrace.errors import LocalProtocolError, Refused
from headrace.geometry import Full, Kind, Layer, Manifest, Part, Shared, Sliding

VERIFIED_BACKENDS: Final = ("CPU_ATTN",)
"""The attention backends whose writes and blocks were looked at."""

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_KINDS: Final = ("FullAttentionSpec", "SlidingWindowSpec")


@dataclass(frozen=True)
class _Place:
    """One attention module: its layer, its blocks' cache group and its tensor."""

    name: str
    module: Any
    cache_group: int
    spec: Any


class VllmCache:
    """The cache of one worker; implements `backends.paged.PagedCache`.

    vllm_config, kv_cache_config: vLLM's own, of the worker. tensors: by module name, as it gives
    them to `register_kv_caches`: [blocks, kv_heads, block_size, 2 * head_dim].

    Raises:
        Refused: a layer's cache is of a kind, dtype or backend that was not verified.
    """

    def __init__(
        self, vllm_config: Any, kv_cache_config: Any, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        self.model_directory = model_directory(
            vllm_config.model_config.model, vllm_config.model_config.revision
        )
        self.dtype = _DTYPE_NAMES.get(vllm_config.model_config.dtype, "")
        self.num_blocks = int(kv_cache_config.num_blocks)
        modules = vllm_config.compilation_config.static_forward_context
        self._sizes = [
            int(group.kv_cache_spec.block_size) for group in kv_cache_config.kv_cache_groups
        ]
        places = _places(modules, kv_cache_config.kv_cache_groups)
        self._tensors = {at: tensors[place.name] for at, place in places.items() if place.spec}
        self._places = places
        self._orders: dict[tuple[Any, ...], BlockOrder] = {}
        self._manifest = _manifest(vllm_config, self.model_directory, places)
        for layer in self._manifest.layers:
            if layer.parts:
                self._check_tensor(layer)
                self._order(layer.index)

    def manifest(self) -> Manifest:
        """A decoder's; a source's differs in its role and in what is emitted."""
        return self._manifest

    def cache_group(self, layer: int) -> int:
        return self._places[layer].cache_group

    def block_size(self, cache_group: int) -> int:
        return self._sizes[cache_group]

    def kernel_block_size(self, layer: int) -> int:
        """Positions of one block of the tensor, into which vLLM may split its own blocks."""
        return int(self._tensors[layer].shape[2])

    def layer_of(self, name: str) -> int | None:
        """The layer whose cells an attention module writes; None if it shares another's."""
        layer = layer_number(name)
        return layer if layer in self._tensors else None

    def write(self, layer: int, states: Sequence[torch.Tensor], cells: torch.Tensor) -> None:
        """Through the backend's own op; it is over when this returns."""
        keys, values = states
        self._write(layer, keys, values, self._tensors[layer], cells)

    def read(self, layer: int, part: int, cells: torch.Tensor) -> torch.Tensor:
        return self._order(layer).read(self._tensors[layer], part, cells)

    def _write(
        self,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        tensor: torch.Tensor,
        cells: torch.Tensor,
    ) -> None:
        module = self._places[layer].module
        module.impl.do_kv_cache_update(module, keys, values, tensor, cells)

    def _order(self, layer: int) -> BlockOrder:
        """Layers of one shape and one backend have one order, which is learned once."""
        tensor = self._tensors[layer]
        key = (tuple(tensor.shape[1:]), tensor.dtype)
        if key not in self._orders:
            heads, size, width = tensor.shape[1:]

            def write(
                keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, cells: torch.Tensor
            ) -> None:
                self._write(layer, keys, values, cache, cells)

            self._orders[key] = learn(write, heads, size, width // 2, tensor.dtype)
        return self._orders[key]

    def _check_tensor(self, layer: Layer) -> None:
        tensor, (part, _) = self._tensors[layer.index], layer.parts
        heads, head_dim = part.heads, part.head_dim
        size = tensor.shape[2] if tensor.dim() == 4 else 0
        shape = self.num_blocks * (self._sizes[self.cache_group(layer.index)] // (size or 1))
        if tuple(tensor.shape) != (shape, heads, size, 2 * head_dim) or (
            _DTYPE_NAMES.get(tensor.dtype) != part.dtype
        ):
            raise Refused(
                f"{layer.name}: its cache is {tuple(tensor.shape)} {tensor.dtype}, and "
                f"[{shape}, {heads}, block size, {2 * head_dim}] {part.dtype} was expected",
                field=layer.name,
            )


def layer_number(name: str) -> int:
    """The number of the layer that an attention module's name tells.

    Raises:
        Refused: it tells none, or several.
    """
    numbers = re.findall(r"(?<=\.)\d+(?=\.)", f".{name}.")
    if len(numbers) != 1:
        raise Refused(f"which layer is the attention module {name!r}?", field="layers")
    return int(numbers[0])


def model_directory(name: str, revision: str | None = None) -> Path:
    """The directory of a model that vLLM was told by a path or by its hub name.

    Raises:
        Refused: no such model is on this disk.
    """
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError) as exc:
        raise Refused(
            f"the model {name!r} is no directory and not in the hub's cache here, so its "
            "fingerprint cannot be taken; give vLLM the model's directory",
            field="model",
        ) from exc


def _places(modules: Mapping[str, Any], groups: Sequence[Any]) -> dict[int, _Place]:
    """Every decoder layer's place, by its number."""
    specs = {
        name: (number, _spec_of(group.kv_cache_spec, name))
        for number, group in enumerate(groups)
        for name in group.layer_names
    }
    places: dict[int, _Place] = {}
    for name, module in modules.items():
        if not hasattr(module, "attn_type"):
            if name in specs:
                raise Refused(
                    f"{name} keeps {type(specs[name][1]).__name__}, which is not supported yet",
                    field=name,
                )
            continue
        if getattr(module.attn_type, "value", module.attn_type) != "decoder":
            raise Refused(f"{name} is {module.attn_type} attention, which is not supported yet")
        number = layer_number(name)
        if number in places:
            raise Refused(f"{name} and {places[number].name} are one layer", field="layers")
        shares = module.kv_sharing_target_layer_name
        group, spec = specs.get(name, (-1, None)) if shares is None else (-1, None)
        if shares is None and spec is None:
            raise Refused(f"{name} is in none of vLLM's cache groups", field=name)
        places[number] = _Place(name, module, group, spec)
    if sorted(places) != list(range(len(places))):
        raise Refused(f"the model's attention layers are {sorted(places)}", field="layers")
    return dict(sorted(places.items()))


def _spec_of(spec: Any, name: str) -> Any:
    """A layer's own spec, also in a group of layers that differ in size."""
    return getattr(spec, "kv_cache_specs", {name: spec})[name]


def _manifest(vllm_config: Any, directory: Path, places: Mapping[int, _Place]) -> Manifest:
    model = vllm_config.model_config
    max_positions = int(model.max_model_len)
    return Manifest(
        role="decoder",
        model=fingerprint(directory),
        layers=tuple(_layer(at, place, max_positions) for at, place in places.items()),
        layouts=("token_major", "head_major"),
        vocab_size=int(model.hf_text_config.vocab_size),
        logits_dtype="float32",
        max_positions=max_positions,
    )


def _layer(number: int, place: _Place, max_positions: int) -> Layer:
    module, name = place.module, f"layers.{number}"
    target = module.kv_sharing_target_layer_name
    if target is not None:
        return Layer(number, name, Shared(f"layers.{layer_number(target)}"), ())
    backend = module.attn_backend.get_name()
    if backend not in VERIFIED_BACKENDS:
        raise Refused(
            f"{place.name} uses the attention backend {backend}, whose cache was not verified; "
            f"verified are {', '.join(VERIFIED_BACKENDS)}",
            field="attention backend",
        )
    spec, kind = place.spec, type(place.spec).__name__
    if kind not in _KINDS:
        raise Refused(f"{place.name} keeps {kind}, which is not supported yet", field=name)
    dtype = _DTYPE_NAMES.get(spec.dtype)
    head_dim, value_dim = int(spec.head_size), int(spec.head_size_v or spec.head_size)
    if dtype is None or int(spec.kv_quant_mode) or head_dim != value_dim:
        raise Refused(
            f"{place.name} keeps {spec.dtype} {head_dim} and {value_dim} wide, "
            f"{module.kv_cache_dtype}; only plain keys and values of one width are supported yet",
            field=name,
        )
    if getattr(spec, "attention_chunk_size", None) is not None:
        raise Refused(f"{place.name} attends by chunks, which is not supported yet", field=name)
    parts = tuple(Part(part, int(spec.num_kv_heads), head_dim, dtype) for part in "kv")
    return Layer(number, name, _kind(module, spec, kind, max_positions), parts)


def _kind(module: Any, spec: Any, kind: str, max_positions: int) -> Kind:
    window = getattr(module, "sliding_window", None)
    if kind == "SlidingWindowSpec":
        if window != spec.sliding_window:
            raise LocalProtocolError(f"windows of {window} and {spec.sliding_window} in one layer")
        size = int(spec.block_size)
        return Sliding(int(window), -(-(int(window) - 1) // size) * size)
    return Full() if window is None else Sliding(int(window), max_positions)
