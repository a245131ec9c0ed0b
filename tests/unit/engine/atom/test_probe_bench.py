"""What a probe sends to a card, and how it reads what comes."""

from __future__ import annotations

from itertools import repeat

import pytest
import torch

from headrace.engine.atom import number_format
from headrace.engine.atom.caches import Cache
from headrace.engine.atom.probe_bench import distance, pattern, readings, starts


def test_any_65536_patterns_that_follow_each_other_are_all_there_are() -> None:
    for start in (0, 1, 40_000, 1 << 20):
        assert len(set(pattern(start, 1 << 16).tolist())) == 1 << 16


@pytest.mark.parametrize(
    ("count", "blocks"),
    [(7, 5000), (1024, 5000), (1 << 15, 5000), (1 << 16, 60_000), (1 << 20, 60_000)],
)
def test_no_two_blocks_of_a_lane_have_the_same_pattern(count: int, blocks: int) -> None:
    begins = {start % (1 << 16) for start in starts(repeat(count, blocks))}
    assert len(begins) == blocks


def test_small_blocks_have_all_patterns_together() -> None:
    begins = starts(repeat(1024, 64))
    assert len({each for start in begins for each in pattern(start, 1024).tolist()}) == 1 << 16


def cache(dtype: str) -> Cache:
    return Cache("past_key_values_0", 0, 0, "full", 1, 1, 4, 8, dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_two_bytes_can_be_read_in_two_ways(dtype: str) -> None:
    values = torch.arange(32.0).view(1, 4, 8) / 4
    declared = values.to(getattr(torch, dtype))
    private = number_format.encode(values)
    for cells, name, other in (
        (declared, "declared", "custom_float16"),
        (private, "custom_float16", "declared"),
    ):
        found = {str(way): each for way, each in readings(cache(dtype), cells).items()}
        assert torch.equal(found[name], values)
        assert distance(found[other], values) > 0.3


def test_four_bytes_are_of_the_declared_dtype_and_two_bytes_then_are_not() -> None:
    values = torch.arange(32.0).view(1, 4, 8)
    assert list(readings(cache("float32"), values)) == ["declared"]
    assert list(readings(cache("float32"), number_format.encode(values))) == ["custom_float16"]


def test_what_is_no_number_is_near_to_nothing() -> None:
    values = torch.ones(4)
    assert distance(values, values) == 0.0
    assert distance(torch.tensor([1.0, 1.0, 1.0, float("nan")]), values) == float("inf")
    assert distance(torch.zeros(4), torch.zeros(4)) == float("inf")
