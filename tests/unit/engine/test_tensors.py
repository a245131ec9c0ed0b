"""Which dtypes of the wire torch has tensors of; places and regions are tested with the lanes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from headrace.engine.lanes import Lane
from headrace.engine.layers import check_states
from headrace.engine.tensors import DTYPES, dtype_of, over_address, over_region
from headrace.errors import Refused
from headrace.geometry import ITEMSIZE, Full, Part, check_manifest
from headrace.plan import Region
from tests.unit.protocol.builders import layers, source_manifest

REGION = Region(0, 1, 16, 0)
STATES = torch.zeros(1, 2, 2, 4, dtype=torch.uint8)

MADE: dict[str, Callable[[Part], object]] = {
    "a lane": lambda part: Lane(layers(Full(), parts=(part, part)), 8),
    "a slot's cells": lambda part: over_region(
        memoryview(bytearray(16)), REGION, part, 2, "token_major"
    ),
    "an address": lambda part: over_address(1 << 12, REGION, part, 2, "token_major"),
    "a layer's states": lambda part: check_states(
        layers(Full(), parts=(part, part))[0], STATES, STATES, 2
    ),
}


@pytest.mark.parametrize("dtype", sorted(ITEMSIZE.keys() - DTYPES.keys()))
@pytest.mark.parametrize("made", MADE)
def test_a_dtype_that_torch_has_no_cache_of(made: str, dtype: str) -> None:
    """A manifest may name it: other engines and decoders may have such cells."""
    part = Part("k", 2, 4, dtype)
    check_manifest(source_manifest(layers=layers(Full(), parts=(part,))), "source")
    with pytest.raises(Refused, match=f"part k has dtype '{dtype}'") as caught:
        MADE[made](part)
    assert caught.value.field == "k.dtype"


def test_every_dtype_of_torch_is_one_of_the_wire() -> None:
    assert DTYPES.keys() < ITEMSIZE.keys()
    for name, dtype in DTYPES.items():
        assert dtype_of(Part("k", 1, 1, name)) is dtype
        assert dtype.itemsize == ITEMSIZE[name]
