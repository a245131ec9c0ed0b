"""Rope tables as the kernels take them: [positions, head_dim / 2, 2, 2], a rotation per position.

Entry [p, i] is [[cos a, -sin a], [sin a, cos a]] with a = p times frequency i. Frequencies are made
in float32 by the same formulas as in the model's own library, so that both sides round alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from headrace.engine.rngd.family import Rope
from headrace.errors import Refused


def table(rope: Rope, num_positions: int) -> torch.Tensor:
    """The bf16 table for positions [0, num_positions).

    Raises:
        Refused: the config asks for a scaling that is not known here.
    """
    frequencies = inverse_frequencies(rope)
    angle = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies[None]
    cos, sin = angle.cos(), angle.sin()
    rotation = torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)
    return rotation.to(torch.bfloat16)


def inverse_frequencies(rope: Rope) -> torch.Tensor:
    """float32 [head_dim / 2]; raises Refused as `table`."""
    kind = rope.scaling.get("rope_type") or rope.scaling.get("type") or "default"
    if kind not in _SCALINGS:
        raise Refused(
            f"config.json: rope type {kind!r} is not supported here; known are "
            f"{', '.join(_SCALINGS)}",
            field="rope_scaling",
        )
    turned = rope.rotated or rope.head_dim
    steps = torch.arange(0, turned, 2, dtype=torch.int64).to(torch.float32)
    # The exponent counts in whole heads also where only part of a head turns.
    frequencies = 1.0 / (rope.theta ** (steps / rope.head_dim))
    still = torch.zeros(rope.head_dim // 2 - turned // 2)
    return torch.cat([_SCALINGS[kind](frequencies, rope.scaling), still])


def _unscaled(frequencies: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    return frequencies


def _proportional(frequencies: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Of a head that turns in part; how many frequencies there are is said elsewhere."""
    return frequencies / float(scaling.get("factor") or 1.0)


def _linear(frequencies: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    return frequencies / float(scaling["factor"])


def _llama3(frequencies: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Long wavelengths are stretched, short ones are not, and those between partly."""
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    trained = float(scaling["original_max_position_embeddings"])
    wavelength = 2 * math.pi / frequencies
    share = (trained / wavelength - low) / (high - low)
    between = (1 - share) * frequencies / factor + share * frequencies
    scaled = torch.where(wavelength > trained / low, frequencies / factor, between)
    return torch.where(wavelength < trained / high, frequencies, scaled)


_SCALINGS: Final[dict[str, Callable[[torch.Tensor, Mapping[str, Any]], torch.Tensor]]] = {
    "default": _unscaled,
    "proportional": _proportional,
    "linear": _linear,
    "llama3": _llama3,
}
