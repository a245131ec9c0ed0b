"""Host memory that mirrors a card's caches: a transfer reads and writes blocks where they lie.

The runtime takes a tensor of the shape of the whole cache, and reads block b of it at [b]. Its
memory must begin at a multiple of 4096 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from headrace.engine.atom.caches import Cache
from headrace.engine.atom.sdk import Sdk
from headrace.engine.capacity import require_memory
from headrace.errors import DeviceError

ALIGNMENT: Final = 4096
_CARRIER_NBYTES: Final = 2  # aligned memory comes in elements of float16


@dataclass(frozen=True)
class Mirror:
    """One cache's mirror [blocks, heads, rows, head_dim].

    rows: its elements as they are written and read. host: the same memory, as the runtime is handed
    it.
    """

    rows: torch.Tensor
    host: torch.Tensor


def make_mirror(sdk: Sdk, cache: Cache, stored: torch.dtype) -> Mirror:
    """A zeroed, pre-faulted mirror whose elements are `stored`, int16 for patterns.

    Raises:
        DeviceError: the vendor's memory is not as it has to be.
    """
    nbytes = nbytes_of(cache, stored)
    flat = sdk.aligned(-(-nbytes // _CARRIER_NBYTES))
    if flat.data_ptr() % ALIGNMENT or flat.element_size() * flat.numel() < nbytes:
        raise DeviceError(
            f"memory for {cache.name} of {nbytes} bytes came as {flat.numel()} elements at "
            f"{flat.data_ptr():#x}, expected a multiple of {ALIGNMENT}"
        )
    memory = flat.view(torch.uint8)[:nbytes].zero_()
    rows = memory.view(stored).view(cache.shape)
    return Mirror(rows, rows.view(torch.float16) if stored == torch.int16 else rows)


def nbytes_of(cache: Cache, stored: torch.dtype) -> int:
    """Bytes of a cache's mirror."""
    return cache.elements * stored.itemsize


def require_mirrors(caches: Sequence[Cache], stored: Sequence[torch.dtype]) -> None:
    """For all mirrors, and one more of each shape to fetch into.

    Raises:
        Refused: the host has not the memory.
    """
    mirrors = list(zip(caches, stored, strict=True))
    shapes = {(cache.shape, dtype): nbytes_of(cache, dtype) for cache, dtype in mirrors}
    total = sum(nbytes_of(*each) for each in mirrors) + sum(shapes.values())
    require_memory(total, "host mirrors of the card's caches")
