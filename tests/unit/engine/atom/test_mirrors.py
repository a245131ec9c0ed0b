"""Mirrors: where their memory begins, what of it is whose, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headrace.engine.atom.caches import Cache
from headrace.engine.atom.mirrors import make_mirror, nbytes_of
from headrace.errors import DeviceError
from headrace.testing.fake_rebellions import FakeRebellions

SDK = FakeRebellions().sdk()
CACHE = Cache("past_key_values_0", 0, 0, "full", 3, 2, 5, 7, "float32")
STORED = (torch.float32, torch.float16, torch.bfloat16, torch.int16)


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_both_are_the_same_zeroed_memory(stored: torch.dtype) -> None:
    """As the runtime is handed it, patterns look like a float of their size."""
    mirror = make_mirror(SDK, CACHE, stored)
    assert tuple(mirror.rows.shape) == tuple(mirror.host.shape) == CACHE.shape
    assert mirror.rows.dtype == stored
    assert mirror.host.dtype == (torch.float16 if stored == torch.int16 else stored)
    assert mirror.rows.data_ptr() == mirror.host.data_ptr()
    assert mirror.host.data_ptr() % 4096 == 0
    assert mirror.host.is_contiguous()
    assert not mirror.rows.count_nonzero()
    mirror.rows[1, 0, 2] = 1
    assert mirror.host[1, 0, 2].count_nonzero() == 7 == mirror.host.count_nonzero()


def test_mirrors_are_apart() -> None:
    one, other = (make_mirror(SDK, CACHE, torch.float32) for _ in range(2))
    one.rows.fill_(1)
    assert not other.rows.count_nonzero()


def test_a_mirror_has_no_byte_to_spare() -> None:
    assert nbytes_of(CACHE, torch.float32) == 3 * 2 * 5 * 7 * 4
    asked = []

    def aligned(numel: int) -> torch.Tensor:
        asked.append(numel)
        flat: torch.Tensor = SDK.aligned(numel)
        return flat

    make_mirror(replace(SDK, aligned=aligned), CACHE, torch.float32)
    make_mirror(replace(SDK, aligned=aligned), CACHE, torch.int16)
    assert asked == [420, 210]  # elements of two bytes


@pytest.mark.parametrize(("skipped", "short"), [(8, 0), (0, 1)])
def test_memory_that_is_not_as_it_has_to_be_is_told(skipped: int, short: int) -> None:
    def aligned(numel: int) -> torch.Tensor:
        flat: torch.Tensor = SDK.aligned(numel + skipped - short)
        return flat[skipped:]

    with pytest.raises(DeviceError, match="memory for past_key_values_0 of 840 bytes came as 4"):
        make_mirror(replace(SDK, aligned=aligned), CACHE, torch.float32)
