"""What a model family is made of, for the layer loop: its kernels, and where arguments come from.

The kernels of all families are cut alike. `first` looks up embeddings (or takes them) and makes the
query and the K/V of layer 0. `attention` mixes what is in a layer's cache. `mid` ends one layer and
makes the query and the K/V of the next. `last` ends the last one and gives logits. So a family is
facts: names of kernels by the kinds of the layers on either side, and for each argument a tensor of
the checkpoint, a rope table, or something that the loop itself has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch

from headrace.errors import Refused

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Geometry:
    """One kind of layer: `heads` x `head_dim` elements of K and of V per position.

    window: the positions that a sliding layer looks back over, itself included; None for full.
    """

    heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True)
class Rope:
    """How a rope table is made: see `headrace.engine.rngd.rope`.

    head_dim: elements of a head. theta: the base. scaling: the config's own words, empty for none.
    rotated: how many of a head's elements turn, 0 for all; the others stay as they are.
    """

    head_dim: int
    theta: float
    scaling: Mapping[str, Any] = field(default_factory=dict)
    rotated: int = 0


class TensorsByName(Protocol):
    """Where weights come from: `weights.Weights`, or a stand-in for it."""

    def tensor(self, name: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """A tensor as a kernel takes it; raises Refused if there is none such."""
        ...


@dataclass(frozen=True)
class Family:
    """See the module's text.

    model_type: as the checkpoint's config says. module: of the kernel library. chips: how many a
    kernel spans. variant: of weights and cache, as the kernel library calls it.
    first, last: names of kernels. mid: by the kinds of the layer that it ends and of the one that
    it begins. attention: by kind. attention_options: further arguments of its factory, by kind.
    weights: argument name -> name of a tensor of the checkpoint, where {layer} stands for the layer
    whose K/V the kernel makes and {ended} for the one that it ends. tied: those that a
    checkpoint with tied embeddings may lack, by the tensor that stands in. ties: whether a config
    that does not say means so.
    ropes: argument name -> from a config, how the table is made.
    text: the part of a config that describes the text decoder.
    check: raises Refused for what of a config the kernels cannot do.
    geometry: a config's layers by kind. kinds: the kind of each layer.
    overrides: what the kernels are told, for `max_positions`.
    only_emulated: whether the vendor's compiler was seen to refuse these kernels for a card.
    quantised: whether they take 8 bit weights. min_tokens: the smallest token bucket.
    token_unit: what all token buckets are multiples of.
    head: a tensor of the checkpoint by which the host multiplies the one row that `last` leaves, or
    None where `last` gives logits.
    embed: from config, weights and int32 ids the bf16 rows that `first` takes instead of ids; None
    where it looks them up itself.
    """

    model_type: str
    module: str
    variant: str
    chips: int
    first: str
    last: str
    mid: Mapping[tuple[str, str], str]
    attention: Mapping[str, str]
    weights: Mapping[str, str]
    ropes: Mapping[str, Callable[[Config], Rope]]
    check: Callable[[Config], None]
    geometry: Callable[[Config], Mapping[str, Geometry]]
    kinds: Callable[[Config], tuple[str, ...]]
    overrides: Callable[[Config, int], Mapping[str, Any]]
    text: Callable[[Config], Config] = lambda config: config
    attention_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    ties: bool = False
    embed: Callable[[Config, TensorsByName, torch.Tensor], torch.Tensor] | None = None
    quantised: bool = False
    only_emulated: bool = False
    min_tokens: int = 1
    token_unit: int = 1
    head: str | None = None


def require(config: Config, field_name: str, *allowed: Any, absent: Any = None) -> None:
    """Check that a field of a config has a value that the kernels are made for.

    absent: what a config without it means.

    Raises:
        Refused: it has another; the text names the field and what would do.
    """
    value = config.get(field_name)
    if not any(_same(absent if value is None else value, each) for each in allowed):
        wanted = " or ".join(repr(each) for each in allowed)
        raise Refused(
            f"config.json: {field_name} is {value!r}, and the kernels for "
            f"{config.get('model_type')} are made for {wanted}",
            field=field_name,
        )


def _same(value: Any, allowed: Any) -> bool:
    """Whether they are equal; numbers that went through float32 on their way are."""
    if isinstance(value, float) and isinstance(allowed, float):
        return math.isclose(value, allowed, rel_tol=1e-6)
    return bool(value == allowed)


def number(config: Config, field_name: str) -> int:
    """A positive whole number of a config.

    Raises:
        Refused: it is missing or something else.
    """
    value = config.get(field_name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise Refused(f"config.json: {field_name} is {value!r}, expected a number above 0")
    return value
