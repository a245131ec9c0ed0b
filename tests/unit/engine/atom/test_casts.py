"""What a cast says of itself, and what it does to each value."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from headrace.engine.atom import number_format
from headrace.engine.atom.casts import Cast
from headrace.engine.tensors import DTYPES
from headrace.errors import Refused

FLOATS = ("float32", "float16", "bfloat16")
CASTS = [
    *(Cast(sent, kept, "declared") for sent, kept in itertools.product(FLOATS, FLOATS)),
    *(Cast(sent, "float32", "custom_float16") for sent in FLOATS),
    *(Cast(sent, kept, "converted") for sent, kept in itertools.product(FLOATS, FLOATS)),
]
SPECIAL = [0.0, -0.0, 1.0, -1.5, 65504.0, -65504.0, 2.0**-14, 1e-30, 3e38, math.inf, math.nan]


def name(value: Any) -> str:
    return value.name if isinstance(value, Cast) else str(value)


def every_value(dtype: str) -> torch.Tensor:
    """All finite values of a 16-bit dtype, [1, n, 1]; of float32 a sample with awkward ones."""
    if dtype == "float32":
        draw = torch.Generator().manual_seed(3)
        scale = 2.0 ** torch.randint(-40, 40, (5000,), generator=draw)
        drawn = torch.cat([torch.randn(5000, generator=draw) * scale, torch.tensor(SPECIAL[:-2])])
        return drawn.view(1, -1, 1)
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(DTYPES[dtype])
    return values[values.isfinite()].view(1, -1, 1)


@pytest.mark.parametrize("cast", CASTS, ids=name)
def test_a_cast_is_exact_just_if_it_keeps_every_finite_value(cast: Cast) -> None:
    values = every_value(cast.sent)
    stored = torch.empty(values.shape, dtype=cast.stored_dtype)
    changed = cast.store(stored, values)
    back = cast.load(stored)
    assert back.dtype == values.dtype
    assert cast.exact == bool((back == values).all())
    assert (changed == 0) == cast.exact


@pytest.mark.parametrize("cast", CASTS, ids=name)
def test_what_is_counted_is_what_came_back_otherwise(cast: Cast) -> None:
    """By the stored value itself, where it has more values than what was sent."""
    special = torch.tensor(SPECIAL).to(DTYPES[cast.sent]).view(1, -1, 1)
    values = torch.cat([every_value(cast.sent), special], dim=1)
    stored = torch.empty(values.shape, dtype=cast.stored_dtype)
    changed = cast.store(stored, values)
    if cast.number_format != "custom_float16":
        kept = stored.to(torch.float64)
    else:
        wide = Cast("float32", "float32", "custom_float16")
        kept = wide.load(stored).to(torch.float64)
    differs = (kept != values.to(torch.float64)) & ~values.isnan()
    assert changed == int(differs.sum())


@pytest.mark.parametrize("cast", CASTS, ids=name)
def test_a_view_with_holes_is_written_in_place(cast: Cast) -> None:
    """Token-major cells into head-major rows of a larger mirror; nothing beside them changes."""
    mirror = torch.zeros(2, 3, 10, 4, dtype=cast.stored_dtype)
    cells = torch.arange(1.0, 61.0).view(5, 3, 4).permute(1, 0, 2).to(DTYPES[cast.sent])
    assert cast.store(mirror[1, :, 2:7], cells) == 0
    assert torch.equal(cast.load(mirror[1, :, 2:7]), cells)
    mirror[1, :, 2:7] = 0
    assert not bool(mirror.any())


def test_it_says_what_it_is() -> None:
    assert Cast("bfloat16", "float32", "declared").name == "bfloat16 to float32: exact"
    assert Cast("bfloat16", "float16", "declared").name == "bfloat16 to float16: lossy"
    lossy = Cast("bfloat16", "float16", "custom_float16")
    assert (lossy.name, lossy.stored) == ("bfloat16 to custom_float16: lossy", "custom_float16")


@pytest.mark.parametrize("sent", FLOATS)
def test_what_the_card_converts_is_a_value_of_its_own_before(sent: str) -> None:
    """So what is fetched back is what was put there, and the card's rounding has no say."""
    values = every_value(sent)
    cast = Cast(sent, "float32", "converted")
    stored = torch.empty(values.shape)
    cast.store(stored, values)
    assert number_format.count_changed(stored) == 0


@pytest.mark.parametrize("dtype", ["float64", "float8_e4m3fn", "int8"])
def test_what_it_cannot_do_is_refused_by_name(dtype: str) -> None:
    with pytest.raises(Refused, match=f"the source sends {dtype}"):
        Cast(dtype, "float32", "declared")
    with pytest.raises(Refused, match=f"the cache is {dtype}"):
        Cast("float32", dtype, "custom_float16")


@pytest.mark.parametrize("cast", CASTS, ids=name)
def test_pieces_make_no_difference(cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any size, also less than a row: each value is stored once, and counted once."""
    values = every_value(cast.sent)[0, :1260, 0].reshape(2, 21, 30)
    whole = torch.empty(values.shape, dtype=cast.stored_dtype)
    changed = cast.store(whole, values)
    for piece in (1, 60, 150, 1200):
        monkeypatch.setattr("headrace.engine.atom.casts._PIECE", piece)
        stored = torch.zeros_like(whole)
        assert cast.store(stored, values) == changed
        assert torch.equal(stored.view(torch.uint8), whole.view(torch.uint8))


@pytest.mark.parametrize("cast", [cast for cast in CASTS if cast.exact], ids=name)
def test_an_exact_cast_gives_poison_back(cast: Cast) -> None:
    """It is a NaN whose payload tells it from any other, and is looked for in what is read."""
    poison = torch.tensor([0x7FF5] * 24, dtype=torch.int16).view(DTYPES[cast.sent]).view(2, -1, 2)
    stored = torch.empty(poison.shape, dtype=cast.stored_dtype)
    assert cast.store(stored, poison) == 0
    assert torch.equal(cast.load(stored).view(torch.int16), poison.view(torch.int16))


def test_every_bfloat16_comes_back_from_float32_bit_by_bit() -> None:
    cast = Cast("bfloat16", "float32", "declared")
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(1, -1, 1)
    stored = torch.empty(bits.shape)
    cast.store(stored, bits.view(torch.bfloat16))
    assert torch.equal(cast.load(stored).view(torch.int16), bits)
