"""Weights of 8 bits with a scale for each block of 128 x 128, as several families' kernels take
them. Activations are quantised in the kernels, each 128 of a row by their own largest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from headrace.engine.rngd.family import Config, number
from headrace.engine.rngd.fields import check_parts
from headrace.errors import Refused

BLOCK: Final = 128

QUANTISED: Final = "_proj.weight"
"""How the names of those tensors end."""


def with_scales(weights: Mapping[str, str], suffix: str) -> dict[str, str]:
    """`weights` and, for each linear layer's weight, where its scales come from.

    weights: argument name -> tensor name, as in `Family.weights`. suffix: what the checkpoint calls
    the scales of `weight`.
    """
    scales = {
        f"{argument}_scale": f"{name.removesuffix('weight')}{suffix}"
        for argument, name in weights.items()
        if name.endswith(QUANTISED)
    }
    return {**weights, **scales}


def check_blocks(config: Config) -> None:
    """Check that a model is quantised in these blocks and that its sizes are whole blocks.

    config: of the text decoder, with how the checkpoint is quantised.

    Raises:
        Refused: it is not, or they are not.
    """
    found = _block(config.get("quantization_config") or {})
    if found != [BLOCK, BLOCK]:
        raise Refused(
            f"these kernels take 8 bit weights with a scale for each {BLOCK} x {BLOCK} block, and "
            f"this checkpoint has {'other weights' if found is None else f'blocks of {found}'}; "
            "name its FP8 release",
            field="model",
        )
    check_parts(
        {name: number(config, name) for name in ("hidden_size", "intermediate_size")}, BLOCK
    )


def _block(quantisation: Mapping[str, object]) -> list[int] | None:
    """Rows and columns of a block, in either of the two ways that configs say it."""
    if quantisation.get("quant_method") == "fp8":
        block = quantisation.get("weight_block_size")
        return list(block) if isinstance(block, list | tuple) else None
    groups = quantisation.get("config_groups")
    if quantisation.get("quant_method") != "compressed-tensors" or not isinstance(groups, dict):
        return None
    weights = [group.get("weights") or {} for group in groups.values()]
    if len(weights) != 1 or weights[0].get("num_bits") != 8 or weights[0].get("type") != "float":
        return None
    block = weights[0].get("block_structure")
    return list(block) if isinstance(block, list | tuple) else None
