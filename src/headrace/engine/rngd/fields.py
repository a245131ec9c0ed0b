"""What several families read of a config in the same way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from headrace.engine.rngd.family import FULL, SLIDING, Config, number
from headrace.errors import Refused

SHAPE: Final = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "intermediate_size",
)
"""The numbers that the kernels of every family here are made for."""


def told(config: Config, max_positions: int, *more: str) -> dict[str, Any]:
    """What kernels are told of a model: `SHAPE`, the numbers named in `more`, the norms' epsilon,
    and how long a rope table they take.

    Raises:
        Refused: one of them is missing or makes no sense.
    """
    return {
        **{name: number(config, name) for name in (*SHAPE, *more)},
        "rms_norm_eps": epsilon(config),
        "max_position_embeddings": max_positions,
    }


def epsilon(config: Config) -> float:
    """What norms add to a mean square; raises Refused if the config does not say."""
    value = config.get("rms_norm_eps")
    if not isinstance(value, float) or not 0 < value < 1:
        raise Refused(
            f"config.json: rms_norm_eps is {value!r}, expected a small number above 0",
            field="rms_norm_eps",
        )
    return value


def listed_kinds(config: Config) -> tuple[str, ...]:
    """The kind of each layer, as the config lists them.

    Raises:
        Refused: it does not, or not for as many layers as there are.
    """
    listed = tuple(config.get("layer_types") or ())
    if len(listed) != number(config, "num_hidden_layers") or set(listed) - {FULL, SLIDING}:
        raise Refused(
            f"config.json: layer_types must name {SLIDING!r} or {FULL!r} for every layer",
            field="layer_types",
        )
    return listed


def check_parts(values: Mapping[str, int], unit: int) -> None:
    """Check that numbers, by what they are called, divide into parts of `unit`.

    Raises:
        Refused: one does not.
    """
    for name, value in values.items():
        if value % unit:
            raise Refused(
                f"config.json: {name} is {value}, these kernels take multiples of {unit}",
                field=name,
            )
