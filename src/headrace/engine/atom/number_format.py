"""The 16-bit float that ATOM's runtime may keep a cache in, whatever dtype the cache is said to be.

It has a sign, 6 bits of exponent with a bias of 31 and 9 bits of mantissa. That much is known of at
least one public import path. The rest is taken from IEEE 754 and confirmed by nothing: an exponent
of zero means a subnormal, one of all ones infinity or a NaN, and what lies between two values goes
to the nearer one, or to the even one.

Against float16 it has one bit more of range and one less of precision: every bfloat16 of float16's
normal range is a value of it, and about half of the float16 values are not.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np
import torch

EXPONENT_BIAS: Final = 31
MANTISSA_BITS: Final = 9
INFINITY: Final = 63 << MANTISSA_BITS
NAN: Final = INFINITY | 1 << (MANTISSA_BITS - 1)
LARGEST: Final = (2.0 - 2.0**-MANTISSA_BITS) * 2.0**EXPONENT_BIAS

_DROPPED: Final = 23 - MANTISSA_BITS  # bits of a float32's mantissa
_REBIAS: Final = (127 - EXPONENT_BIAS) << 23
_LEAST_NORMAL: Final = 2.0 ** (1 - EXPONENT_BIAS)
_SUBNORMALS_PER_ONE: Final = 2.0 ** (EXPONENT_BIAS - 1 + MANTISSA_BITS)
_PATTERNS: Final = 1 << 16
_PIECE: Final = 1 << 15  # elements that are encoded at once, so that a CPU keeps them near


def encode(values: torch.Tensor) -> torch.Tensor:
    """The patterns of `values` (float32, float16 or bfloat16), int16 of the same shape."""
    if values.dtype in (torch.float16, torch.bfloat16):
        return _looked_up(_pattern_of(values.dtype), values)
    found = torch.empty(values.shape, dtype=torch.int16)
    flat, given = found.view(-1), values.reshape(-1)
    for at in range(0, len(flat), _PIECE):
        flat[at : at + _PIECE] = _encode_float32(given[at : at + _PIECE])
    return found


def decode(patterns: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values of int16 `patterns`, as `dtype`: float32 holds all of them exactly."""
    found = _looked_up(_bits_of(dtype), patterns)
    return found.view(dtype)


def count_changed(values: torch.Tensor) -> int:
    """How many of `values` are no values of the format: encoding changes them. NaNs are none."""
    if values.dtype in (torch.float16, torch.bfloat16):
        return int(np.count_nonzero(_looked_up(_is_changed(values.dtype), values).numpy()))
    back = decode(encode(values), torch.float32)
    return int(((back != values) & ~values.isnan()).sum())


def _looked_up(table: torch.Tensor, patterns: torch.Tensor) -> torch.Tensor:
    """By numpy: torch has no index of 16 bits, and widening one costs ten times the look-up."""
    index = patterns.contiguous().view(torch.int16).numpy().view(np.uint16)
    return torch.from_numpy(np.take(table.numpy(), index))


def _encode_float32(values: torch.Tensor) -> torch.Tensor:
    bits = values.contiguous().view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    rebiased = magnitude - _REBIAS
    odd = (rebiased >> _DROPPED) & 1
    normal = (rebiased + (1 << (_DROPPED - 1)) - 1 + odd) >> _DROPPED
    normal = normal.clamp(max=INFINITY)
    absolute = values.abs()
    small = absolute < _LEAST_NORMAL
    subnormal = torch.round(torch.where(small, absolute, 0.0) * _SUBNORMALS_PER_ONE)
    found = torch.where(small, subnormal.to(torch.int32), normal)
    found = torch.where(values.isnan(), NAN, found)
    return (found | (bits >> 16 & 0x8000)).to(torch.int16)


def _every_pattern() -> torch.Tensor:
    return torch.arange(_PATTERNS, dtype=torch.int32).to(torch.int16)


@cache
def _pattern_of(dtype: torch.dtype) -> torch.Tensor:
    """By the pattern of a 16-bit float, the pattern here."""
    return _encode_float32(_every_pattern().view(dtype).to(torch.float32))


@cache
def _is_changed(dtype: torch.dtype) -> torch.Tensor:
    values = _every_pattern().view(dtype).to(torch.float32)
    back = decode(_pattern_of(dtype), torch.float32)
    return (back != values) & ~values.isnan()


@cache
def _bits_of(dtype: torch.dtype) -> torch.Tensor:
    """By the pattern here, the bits of the value in a torch dtype."""
    pattern = _every_pattern().to(torch.int32) & 0xFFFF
    sign, magnitude = pattern >> 15, pattern & 0x7FFF
    exponent, mantissa = magnitude >> MANTISSA_BITS, magnitude & ((1 << MANTISSA_BITS) - 1)
    normal = ((magnitude << _DROPPED) + _REBIAS).view(torch.float32)
    values = torch.where(exponent == 0, mantissa / _SUBNORMALS_PER_ONE, normal)
    values = torch.where(magnitude == INFINITY, float("inf"), values)
    values = torch.where(magnitude > INFINITY, float("nan"), values)
    values = torch.where(sign == 1, -values, values).to(dtype)
    return values.view(torch.int32 if dtype == torch.float32 else torch.int16)
