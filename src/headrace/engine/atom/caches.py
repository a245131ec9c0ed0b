"""The caches of a compiled model, as its own metadata tells them: nothing about them is assumed.

Each layer has two, of keys and of values. Their heads and their width may differ from layer to
layer. Those of full attention are cut into blocks of `rows` positions; those of a sliding window
have one block for each item of a batch, and keep the last `rows` positions in it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from headrace.engine.atom.sdk import VENDOR
from headrace.errors import BackendUnavailable, Refused
from headrace.geometry import Full, Kind, Layer, Part, Sliding

PART_NAMES: Final = ("k", "v")
_NAME = re.compile(r"past_key_values_(\d+)")
_KINDS: Final[dict[str, Literal["full", "sliding"]]] = {
    "full_attention": "full",
    "sliding_attention": "sliding",
}


@dataclass(frozen=True)
class Cache:
    """One cache tensor [blocks, heads, rows, head_dim] of the compiled model.

    part: 0 for keys, 1 for values. dtype: as it is declared; how a card keeps it is another matter.
    """

    name: str
    layer: int
    part: int
    kind: Literal["full", "sliding"]
    blocks: int
    heads: int
    rows: int
    head_dim: int
    dtype: str

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.blocks, self.heads, self.rows, self.head_dim

    @property
    def elements(self) -> int:
        """Of the whole tensor."""
        return self.blocks * self.heads * self.rows * self.head_dim


def read_caches(metas: Sequence[Any]) -> tuple[Cache, ...]:
    """The caches that a compiled model's `cache_metas` describe, in the order of layers and parts.

    Raises:
        Refused: one is of a kind that is not supported; the text names it.
        BackendUnavailable: api_missing: the metadata is not of the form that is known.
    """
    caches = sorted((_read(meta) for meta in metas), key=lambda each: (each.layer, each.part))
    wanted = [(layer, part) for layer in range(len(caches) // 2) for part in (0, 1)]
    if not caches or [(each.layer, each.part) for each in caches] != wanted:
        raise _unknown(f"caches {[each.name for each in caches]} are not two for each layer")
    for keys, values in zip(caches[::2], caches[1::2], strict=True):
        if (keys.kind, keys.blocks, keys.rows) != (values.kind, values.blocks, values.rows):
            raise _unknown(f"{keys.name} and {values.name} are of one layer and cut otherwise")
    rows = {each.rows for each in caches if each.kind == "full"}
    if len(rows) > 1:
        raise _unknown(f"blocks of full attention have {sorted(rows)} positions")
    return tuple(caches)


def layers_of(caches: Sequence[Cache], dtype: str) -> tuple[Layer, ...]:
    """The layers of a manifest whose parts come in `dtype`.

    A sliding layer needs all rows of its window: it holds what the model's own prefill leaves.
    """
    return tuple(
        Layer(
            keys.layer,
            f"layers.{keys.layer}",
            _kind(keys),
            tuple(
                Part(PART_NAMES[each.part], each.heads, each.head_dim, dtype)
                for each in (keys, values)
            ),
        )
        for keys, values in zip(caches[::2], caches[1::2], strict=True)
    )


def _kind(cache: Cache) -> Kind:
    return Full() if cache.kind == "full" else Sliding(cache.rows, cache.rows)


def _read(meta: Any) -> Cache:
    try:
        name, layer, shape = str(meta.name), int(meta.layer_index), tuple(map(int, meta.shape))
        dtype, layer_type = str(meta.dtype), str(meta.layer_type)
    except (AttributeError, TypeError, ValueError) as exc:
        raise _unknown(f"{meta!r} is no metadata of a cache: {exc}") from exc
    kind = _KINDS.get(layer_type)
    if kind is None:
        raise Refused(
            f"layers.{layer} is {layer_type}, which is not supported yet; only full and sliding "
            "attention are",
            field=f"layers[layers.{layer}].kind",
        )
    numbered = _NAME.fullmatch(name)
    if numbered is None or int(numbered[1]) // 2 != layer:
        raise _unknown(f"a cache of layer {layer} is named {name!r}")
    if len(shape) != 4 or min(shape) < 1:
        raise _unknown(
            f"{name} has the shape {shape}, and [blocks, heads, rows, head_dim] is known"
        )
    return Cache(name, layer, int(numbered[1]) % 2, kind, *shape, dtype)


def _unknown(detail: str) -> BackendUnavailable:
    hint = "Compile the model with optimum-rbln 0.12, which this was written for"
    return BackendUnavailable(VENDOR, "api_missing", "cache_metas", detail, hint)
