"""The geometry of a model: per layer its kind, its parts and their shapes.

It is derived from the config by the same function that transformers sizes its own cache with, never
as layers x heads x head_dim, since all of these differ inside one model. It is a guess until the
first real tensor confirms it, which `check_states` does before anything is written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from transformers.cache_utils import get_layer_types_and_kwargs

from headrace.engine.checkpoint import fingerprint
from headrace.engine.tensors import dtype_of
from headrace.errors import LocalProtocolError, Refused
from headrace.geometry import (
    Full,
    Kind,
    Latent,
    Layer,
    Layout,
    Manifest,
    Part,
    Shared,
    Sliding,
    State,
    kind_name,
)

Role = Literal["source", "decoder"]

PART_NAMES = ("k", "v")
LAYOUTS: dict[Role, tuple[Layout, ...]] = {
    "source": ("head_major",),
    "decoder": ("head_major", "token_major"),
}

_STATE_TYPES = ("conv", "linear_attention", "hybrid", "hybrid_sliding")


def manifest(config: Any, directory: Path, role: Role, dtype: str, max_positions: int) -> Manifest:
    """What a side that runs this model publishes.

    `config` is the text decoder's configuration.

    Raises:
        Refused: a layer's cache is of a kind that is not supported; the text names it.
    """
    return Manifest(
        role=role,
        model=fingerprint(directory),
        layers=geometry(config, role, dtype, max_positions),
        layouts=LAYOUTS[role],
        vocab_size=int(config.vocab_size),
        logits_dtype="float32",
        max_positions=max_positions,
    )


def geometry(config: Any, role: Role, dtype: str, max_positions: int) -> tuple[Layer, ...]:
    """The layers of a text decoder's configuration.

    A source sees every row of a sliding layer when the layer's cache is updated, so its tail is all
    positions; a decoder's cache keeps, and so needs, the last window - 1.

    Raises:
        Refused: a layer's cache is of a kind that is not supported.
    """
    types, options = get_layer_types_and_kwargs(config)
    configs = config.per_layer_config
    layers = []
    for index, (layer_type, option) in enumerate(zip(types, options, strict=True)):
        own = configs[index]
        window = option.get("sliding_window")
        kind = _kind(config, own, index, layer_type, window, role, max_positions)
        parts = () if isinstance(kind, Shared) else _parts(own, index, dtype)
        layers.append(Layer(index, _name(index), kind, parts))
    return tuple(layers)


def check_states(layer: Layer, keys: torch.Tensor, values: torch.Tensor, positions: int) -> None:
    """Check a layer's real states [1, heads, positions, head_dim] against its geometry.

    Raises:
        LocalProtocolError: naming the layer, the part and both shapes.
        Refused: torch has no cache of a part's dtype.
    """
    for part, states in zip(layer.parts, (keys, values), strict=True):
        want = (1, part.heads, positions, part.head_dim)
        if tuple(states.shape) != want or states.dtype != dtype_of(part):
            raise LocalProtocolError(
                f"{layer.name}.{part.name}: the model made {tuple(states.shape)} "
                f"{states.dtype}, its config says {want} {part.dtype}"
            )


def _kind(
    config: Any,
    own: Any,
    index: int,
    layer_type: str,
    window: int | None,
    role: Role,
    max_positions: int,
) -> Kind:
    if layer_type in _STATE_TYPES:
        raise _unsupported(index, kind_name(State()), f"a {layer_type} layer")
    if getattr(own, "kv_lora_rank", None) is not None:
        raise _unsupported(index, kind_name(Latent()), "compressed KV, kv_lora_rank is set")
    match layer_type:
        case "full_attention":
            return Full()
        case "sliding_attention":
            if window is None or window < 2:
                # The library's sliding cache keeps everything for a window of 1.
                raise _unsupported(index, "sliding", f"a window of {window}")
            return Sliding(window, max_positions if role == "source" else window - 1)
        case "dummy":
            return _shared(config, index)
    raise _unsupported(index, layer_type, "its cache is not keys and values per position")


def _shared(config: Any, index: int) -> Shared:
    """The layer reuses what the storing layer of its own attention type computed."""
    modes = getattr(config, "kv_sharing_modes", None)
    types = getattr(config, "layer_types", None)
    if modes is None or types is None or modes[index] != "reuse":
        raise _unsupported(index, "no attention", "a layer without a cache of its own")
    owners = [at for at, mode in enumerate(modes) if mode == "store" and types[at] == types[index]]
    if len(owners) != 1:
        raise _unsupported(index, "shared", f"it shares {len(owners)} layers")
    return Shared(_name(owners[0]))


def _parts(own: Any, index: int, dtype: str) -> tuple[Part, ...]:
    heads = getattr(own, "num_key_value_heads", None) or getattr(own, "num_attention_heads", None)
    head_dim = getattr(own, "head_dim", None)
    if head_dim is None and heads is not None:
        head_dim = own.hidden_size // own.num_attention_heads
    if heads is None or head_dim is None:
        raise _unsupported(index, "unknown", "the config tells no KV heads")
    return tuple(Part(name, int(heads), int(head_dim), dtype) for name in PART_NAMES)


def _name(index: int) -> str:
    return f"layers.{index}"


def _unsupported(index: int, kind: str, why: str) -> Refused:
    where = _name(index)
    return Refused(f"{where} is {kind} ({why}), which is not supported yet", field=where)
