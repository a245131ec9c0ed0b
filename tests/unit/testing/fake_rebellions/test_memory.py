"""The fake's own idea of the private 16-bit float, and what is kept in it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.engine.atom import number_format
from headrace.testing.fake_rebellions import FakeRebellions
from headrace.testing.fake_rebellions.memory import from_patterns, to_patterns
from tests.e2e import families
from tests.unit.testing.fake_rebellions import driving

pytestmark = pytest.mark.usefixtures("one_thread")

K0 = "past_key_values_0"
EVERY = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)


@pytest.mark.parametrize(
    ("pattern", "value"),
    [
        (0x3E00, 1.0),  # exponent 31
        (0xBE01, -(1 + 2.0**-9)),
        (0x7DFF, 2.0**32 - 2.0**22),
        (0x0200, 2.0**-30),
        (0x0001, 2.0**-39),
        (0x7E00, float("inf")),
        (0x8000, -0.0),
    ],
)
def test_a_pattern_stands_for_a_value(pattern: int, value: float) -> None:
    patterns = torch.tensor([pattern], dtype=torch.int32).to(torch.int16)
    found = from_patterns(patterns)
    assert found.item() == value
    assert torch.signbit(found).item() == (str(value)[0] == "-")
    assert torch.equal(to_patterns(torch.tensor([value])), patterns)


def test_values_go_to_the_nearest_and_to_the_even() -> None:
    step = 2.0**-9
    given = torch.tensor([1 + step / 2, 1 + 1.5 * step, 1 + step * 0.49, 1 + step * 0.51, 1e38])
    expected = [1.0, 1 + 2 * step, 1.0, 1 + step, float("inf")]
    assert from_patterns(to_patterns(given)).tolist() == expected
    assert from_patterns(to_patterns(torch.tensor([float("nan")]))).isnan().all()


def test_the_engines_codec_agrees() -> None:
    """Two ways to the same format: all patterns, and all values of the 16-bit floats."""
    engine, fake = number_format.decode(EVERY, torch.float32), from_patterns(EVERY)
    assert torch.equal(engine.nan_to_num(-1.5), fake.nan_to_num(-1.5))
    for dtype in (torch.float16, torch.bfloat16):
        values = EVERY.view(dtype)
        values = values[~values.isnan()]
        assert torch.equal(number_format.encode(values), to_patterns(values.to(torch.float32)))
    drawn = torch.from_numpy(np.random.default_rng(0).integers(0, 1 << 32, 20_000, np.uint32))
    drawn = drawn.view(torch.float32)
    drawn = drawn[~drawn.isnan()]
    assert torch.equal(number_format.encode(drawn), to_patterns(drawn))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_card_may_keep_all_in_patterns(dtype: str) -> None:
    """Mirrors hold patterns, the card tells two bytes for each element, and attends to values."""
    driven = driving.load(FakeRebellions(number_format="custom_float16"), dtype=dtype)
    driven.prefill(families.make_prompt(9))
    shape = driven.meta(K0).shape
    assert driven.runtime._get_kv_cache_size(K0) == 2 * np.prod(shape)
    before = driven.fetch(K0, 0, torch.int16).clone()
    exact = driving.load(dtype=dtype)
    exact.prefill(families.make_prompt(9))
    assert torch.equal(before, to_patterns(exact.fetch(K0).to(torch.float32)))
    other = driving.load(FakeRebellions(number_format="custom_float16"), dtype=dtype)
    for meta in driven.config.cache_metas:
        for block in range(2):
            mirror = other.mirror(meta.name, torch.int16)
            mirror[block] = driven.fetch(meta.name, block, torch.int16)
            other.update(meta.name, mirror, block)
    assert torch.equal(driven.decode(5, 9), other.decode(5, 9))
    with_rounding, without = driven.decode(6, 10), (exact.decode(5, 9), exact.decode(6, 10))[1]
    assert torch.equal(with_rounding, without) == (dtype == "bfloat16")


def test_a_card_may_convert() -> None:
    """The mirrors have the declared dtype, and what comes back was rounded."""
    driven = driving.load(FakeRebellions(number_format="converted"))
    mirror = driven.mirror(K0)
    mirror[2] = torch.linspace(0.1, 9, mirror[2].numel()).view_as(mirror[2])
    driven.update(K0, mirror, 2)
    assert torch.equal(driven.fetch(K0, 2), from_patterns(to_patterns(mirror[2])))
    assert not torch.equal(driven.fetch(K0, 2), mirror[2])


def test_memory_that_nobody_wrote_is_no_number() -> None:
    driven = driving.load()
    assert driven.fetch(K0, 3).isnan().all()
    assert driven.fake.aligned(100).isnan().all()
    driven.update(K0, driven.mirror(K0), 3)
    assert not driven.fetch(K0, 3).any()
    assert driven.fetch(K0, 4).isnan().all()
