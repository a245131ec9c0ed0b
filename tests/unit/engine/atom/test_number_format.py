"""All 65,536 patterns, both ways, against the format as it is stated, computed value by value."""

from __future__ import annotations

import math

import pytest
import torch

from headrace.engine.atom import number_format
from headrace.engine.atom.number_format import INFINITY, LARGEST, count_changed, decode, encode

PATTERNS = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)


def stated(pattern: int) -> float:
    """Sign, 6 bits of exponent with a bias of 31, 9 bits of mantissa."""
    sign = -1.0 if pattern >> 15 else 1.0
    exponent, mantissa = pattern >> 9 & 63, pattern & 511
    if exponent == 63:
        return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        return sign * mantissa * 2.0**-39
    return sign * (1 + mantissa / 512) * 2.0 ** (exponent - 31)


STATED = torch.tensor([stated(pattern) for pattern in range(1 << 16)], dtype=torch.float64)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit by bit, but for the payload of NaNs."""
    kind = torch.int32 if one.dtype == torch.float32 else torch.int16
    either = (one.view(kind) == other.view(kind)) | (one.isnan() & other.isnan())
    return bool(either.all())


def nearest(values: torch.Tensor) -> torch.Tensor:
    """The patterns of the nearest values, found by search among all; of the even one between two.

    In float64, where all of this is exact. What is not a number has no pattern here.
    """
    magnitudes = torch.cat([STATED[:INFINITY], torch.tensor([2.0**32], dtype=torch.float64)])
    wanted = values.to(torch.float64).abs().clamp(max=2.0**32).contiguous()
    below = torch.searchsorted(magnitudes, wanted, right=True) - 1
    above = (below + 1).clamp(max=INFINITY)
    down, up = wanted - magnitudes[below], magnitudes[above] - wanted
    goes_up = (up < down) | ((up == down) & (below % 2 == 1))
    return torch.where(goes_up, above, below) + 0x8000 * values.signbit().to(torch.int64)


def test_every_pattern_has_the_stated_value() -> None:
    values = decode(PATTERNS, torch.float32)
    assert same(values, STATED.to(torch.float32))
    assert torch.equal(values.to(torch.float64).nan_to_num(7.0), STATED.nan_to_num(7.0))


def test_every_pattern_comes_back() -> None:
    values = decode(PATTERNS, torch.float32)
    numbers = ~values.isnan()
    assert torch.equal(encode(values)[numbers], PATTERNS[numbers])
    assert set(encode(values)[~numbers].tolist()) <= {number_format.NAN, number_format.NAN - 0x8000}
    assert count_changed(values) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_float_goes_to_the_nearest_value(dtype: torch.dtype) -> None:
    """All 65,536 patterns of what a source may send."""
    values = PATTERNS.view(dtype)
    wanted = nearest(values)
    found = encode(values).to(torch.int64) & 0xFFFF
    nan = values.isnan()
    assert torch.equal(found[~nan], wanted[~nan])
    assert bool(decode(encode(values), torch.float32)[nan].isnan().all())


def test_float32_goes_to_the_nearest_value_also_between_two() -> None:
    """Every midpoint of two neighbours, and its float32 neighbours on both sides."""
    magnitudes = STATED[: INFINITY + 1].clone()
    magnitudes[INFINITY] = 2.0**32
    middles = ((magnitudes[1:] + magnitudes[:-1]) / 2).to(torch.float32)
    up = torch.nextafter(middles, torch.tensor(math.inf))
    down = torch.nextafter(middles, torch.tensor(-math.inf))
    at = torch.arange(INFINITY, dtype=torch.int32)
    assert torch.equal(encode(middles).to(torch.int32), at + (at % 2))
    assert torch.equal(encode(up).to(torch.int32), at + 1)
    assert torch.equal(encode(down).to(torch.int32), at)
    assert torch.equal(encode(-middles).to(torch.int32) & 0x7FFF, at + (at % 2))


def test_what_is_too_large_is_infinite_and_what_is_too_small_is_nothing() -> None:
    values = torch.tensor([LARGEST, 3e38, -3e38, math.inf, 2.0**-41, -(2.0**-41), 0.0, -0.0])
    assert decode(encode(values), torch.float32).tolist() == [
        *(LARGEST, math.inf, -math.inf, math.inf),
        *(0.0, -0.0, 0.0, -0.0),
    ]
    assert count_changed(values) == 4  # 3e38 twice, 2^-41 twice


def test_bfloat16_of_float16s_normal_range_is_exact() -> None:
    """7682 patterns: 30 exponents of 128 mantissas with either sign, and two zeros."""
    values = PATTERNS.view(torch.bfloat16)
    inside = (values.abs() >= 2.0**-14) & (values.abs() < 65536) | (values == 0)
    assert int(inside.sum()) == 7682
    assert count_changed(values[inside]) == 0


def test_about_half_of_all_float16_lose_one_bit() -> None:
    values = PATTERNS.view(torch.float16)
    values = values[values.isfinite()]
    changed = count_changed(values)
    assert changed == 30720  # of 63,488: all with an odd last bit but for the subnormals
    assert changed == int((decode(encode(values), torch.float32) != values.float()).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_changed_values_are_counted_whatever_the_shape(dtype: torch.dtype) -> None:
    """Also of views with holes, and of more elements than are encoded at once."""
    values = torch.randn(3, 5, 30_000, generator=torch.Generator().manual_seed(1)).to(dtype)
    view = values.permute(1, 0, 2)[1:4, :, ::3]
    patterns = encode(view)
    assert (patterns.shape, patterns.dtype) == (view.shape, torch.int16)
    back = decode(patterns, torch.float32)
    assert count_changed(view) == int((back != view.float()).sum())
    assert float((back - view.float()).abs().max()) <= 2.0**-8
    assert torch.equal(patterns.to(torch.int64) & 0xFFFF, nearest(view))


def test_nan_is_no_change() -> None:
    assert count_changed(torch.tensor([math.nan, 1.0])) == 0
    assert count_changed(torch.tensor([math.nan, 1.0], dtype=torch.bfloat16)) == 0
