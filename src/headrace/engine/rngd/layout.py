"""Between a tensor as the model has it and as the chips store it.

A kernel may pad an axis, and may split one over its chips. On the CPU its arguments and results
then have a leading axis of chips, each with its part; see `signature.Tensor.stored`.
"""

from __future__ import annotations

import torch

from headrace.engine.rngd.signature import Tensor
from headrace.errors import LocalProtocolError


def padded(tensor: Tensor, host: torch.Tensor) -> torch.Tensor:
    """`host` with zeros added up to the padded shape.

    Raises:
        LocalProtocolError: `host` has another shape or dtype than the kernel takes.
    """
    if tuple(host.shape) != tensor.shape or str(host.dtype) != f"torch.{tensor.dtype}":
        raise LocalProtocolError(
            f"{tensor.name}: {tuple(host.shape)} {host.dtype}, the kernel takes {tensor.shape} "
            f"{tensor.dtype}"
        )
    if tensor.padded == tensor.shape:
        return host
    full = torch.zeros(tensor.padded, dtype=torch.uint8).to(host.dtype)
    full[tuple(slice(size) for size in tensor.shape)] = host
    return full


def stored(tensor: Tensor, host: torch.Tensor) -> torch.Tensor:
    """`host` as the chips store it, in memory of its own."""
    full = padded(tensor, host)
    if not tensor.on_chips:
        return full.clone()
    if tensor.split is None:
        return full[None].clone()
    return torch.stack(full.chunk(tensor.chips, tensor.split)).contiguous()


def whole(tensor: Tensor, kept: torch.Tensor) -> torch.Tensor:
    """The inverse of `stored`, in memory of its own.

    Raises:
        LocalProtocolError: `kept` is not of the stored shape.
    """
    full = _shaped(tensor, kept)
    if tensor.on_chips and tensor.split is None:
        full = full[0]
    elif tensor.on_chips and tensor.split is not None:
        full = full.movedim(0, tensor.split).reshape(tensor.padded)
    return full[tuple(slice(size) for size in tensor.shape)].clone(
        memory_format=torch.contiguous_format
    )


def rows(tensor: Tensor, kept: torch.Tensor, first: int, stop: int) -> torch.Tensor:
    """Rows [first, stop) of the first axis of the tensor as the model has it, out of `kept`, which
    is as the chips store it.

    Raises:
        LocalProtocolError: `kept` is not of the stored shape, or the first axis is a split one.
    """
    shaped = _shaped(tensor, kept)
    if tensor.on_chips and tensor.split == 0:
        raise LocalProtocolError(f"{tensor.name}: rows of what is split by its rows")
    if not tensor.on_chips:
        picked = shaped[first:stop]
    elif tensor.split is None:
        picked = shaped[0, first:stop]
    else:
        own = shaped[:, first:stop].movedim(0, tensor.split)
        picked = own.reshape(stop - first, *tensor.padded[1:])
    return picked[(slice(None), *(slice(size) for size in tensor.shape[1:]))]


def _shaped(tensor: Tensor, kept: torch.Tensor) -> torch.Tensor:
    if kept.numel() != _count(tensor.stored):
        raise LocalProtocolError(
            f"{tensor.name}: rows of {tuple(kept.shape)}, stored as {tensor.stored}"
        )
    return kept.reshape(tensor.stored)


def _count(shape: tuple[int, ...]) -> int:
    number = 1
    for size in shape:
        number *= size
    return number
