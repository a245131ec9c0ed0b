"""A checkpoint's config: which family it is, what its cache is made of, what the kernels lack.

The model's own library is not installed beside the vendor's, so layers are read from config.json
here. Tests compare them with what that library says.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from headrace.engine.rngd import exaone4, gemma4, llama, qwen3
from headrace.engine.rngd.family import Config, Family, number
from headrace.errors import Refused
from headrace.geometry import Full, Layer, Part, Sliding

FAMILIES: Final[tuple[Family, ...]] = (
    llama.FAMILY,
    qwen3.FAMILY,
    qwen3.FAMILY_BF16,
    exaone4.FAMILY,
    gemma4.FAMILY,
)

KV_DTYPE: Final = "bfloat16"
"""Of the cache of every kernel that is used here."""

PARTS: Final = ("k", "v")


def read_config(directory: Path) -> dict[str, Any]:
    """The config of the model in `directory`.

    Raises:
        Refused: there is none, or it is no JSON object.
    """
    path = directory / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError as exc:
        raise Refused(f"{directory} holds no config.json", field="model") from exc
    except ValueError as exc:
        raise Refused(f"{path} is not JSON: {exc}", field="model") from exc
    if not isinstance(config, dict):
        raise Refused(f"{path} is not a JSON object", field="model")
    return config


def family_of(config: Config) -> Family:
    """The family whose kernels compute this model.

    Raises:
        Refused: none does, or the config asks for what its kernels cannot do.
    """
    model_type = config.get("model_type")
    quantised = bool(config.get("quantization_config"))
    fitting = [family for family in FAMILIES if family.model_type == model_type]
    for family in sorted(fitting, key=lambda family: family.quantised != quantised):
        family.check(family.text(config))
        return family
    known = ", ".join(sorted({family.model_type for family in FAMILIES}))
    raise Refused(
        f"config.json: model_type is {model_type!r}, and there are prefill kernels for {known}",
        field="model",
    )


def layers(family: Family, config: Config, max_positions: int) -> tuple[Layer, ...]:
    """The layers of a source: every row of a sliding layer is there, so its tail is all positions.

    Raises:
        Refused: the config contradicts itself.
    """
    text = family.text(config)
    by_kind, made = family.geometry(text), []
    for index, kind in enumerate(family.kinds(text)):
        shape = by_kind[kind]
        parts = tuple(Part(name, shape.heads, shape.head_dim, KV_DTYPE) for name in PARTS)
        sliding = Sliding(shape.window, max_positions) if shape.window is not None else None
        made.append(Layer(index, f"layers.{index}", sliding or Full(), parts))
    return tuple(made)


def longest(family: Family, config: Config) -> int:
    """The most positions that the model was made for."""
    return number(family.text(config), "max_position_embeddings")
