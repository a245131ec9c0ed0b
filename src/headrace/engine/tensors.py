"""Tensors over bytes that this process does not own: a slot's cells, a lane's rows.

All are bounds-checked before a tensor exists, since `as_strided` and raw addresses check nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import torch

from headrace.errors import LocalProtocolError, Refused
from headrace.geometry import ITEMSIZE, Layout, Part
from headrace.plan import Region

DTYPES: Final[dict[str, torch.dtype]] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
"""The dtypes that a model can be loaded in, by their names on the wire."""


def dtype_of(part: Part) -> torch.dtype:
    """The dtype that a part's cells have in torch.

    Raises:
        Refused: no model can be loaded in it, though a manifest may name it.
    """
    if part.dtype not in DTYPES:
        raise Refused(
            f"part {part.name} has dtype {part.dtype!r}, which torch computes no cache in; use one "
            f"of {sorted(DTYPES)}",
            field=f"{part.name}.dtype",
        )
    return DTYPES[part.dtype]


class Place(Protocol):
    """Positions [start, stop) of one part of one layer in a slot, as `backends.base.Cells` is."""

    @property
    def buffer(self) -> memoryview: ...
    @property
    def region(self) -> Region: ...
    @property
    def layer(self) -> int: ...
    @property
    def part(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...


def over_region(
    buffer: memoryview, region: Region, part: Part, positions: int, layout: Layout
) -> torch.Tensor:
    """A tensor [heads, positions, head_dim] over a region of a slot, whatever its layout.

    It holds an export of the mapping's buffer, so the bytes stay even if `buffer` is released.

    Raises:
        LocalProtocolError: the region is not `positions` of `part`, or reaches past the buffer.
        Refused: torch has no cache of this dtype.
    """
    check_region(region, part, positions, layout, buffer.nbytes)
    flat = np.frombuffer(buffer, dtype=np.uint8, count=_extent(region), offset=region.offset)
    return _shaped(torch.from_numpy(flat), region, part, positions, layout)


def over_address(
    address: int, region: Region, part: Part, positions: int, layout: Layout
) -> torch.Tensor:
    """Like `over_region`, from the address of the slot's first byte.

    This serves memory that is mapped read-only, of which numpy makes no writable array. It keeps
    nothing alive and checks no bounds: the caller has called `check_region`, holds the mapping and
    drops the tensor before it returns. Raises Refused as `over_region` does.
    """
    raw = (ctypes.c_ubyte * _extent(region)).from_address(address + region.offset)
    flat = torch.from_numpy(np.frombuffer(memoryview(raw), dtype=np.uint8))
    return _shaped(flat, region, part, positions, layout)


def check_region(
    region: Region, part: Part, positions: int, layout: Layout, buffer_nbytes: int
) -> None:
    """Check that a region is `positions` of `part` in `layout` and lies inside the buffer.

    Raises:
        LocalProtocolError: it is not, or does not.
    """
    if layout == "head_major":
        rows, row_nbytes = part.heads, positions * part.head_nbytes
    else:
        rows, row_nbytes = 1, positions * part.row_nbytes
    if (region.rows, region.row_nbytes) != (rows, row_nbytes):
        raise LocalProtocolError(
            f"{region.rows} rows of {region.row_nbytes} bytes for {positions} positions of "
            f"{part.name}, expected {rows} of {row_nbytes} in {layout}"
        )
    if positions < 1 or (rows > 1 and region.stride < row_nbytes):
        raise LocalProtocolError(f"{region} does not hold {positions} positions of {part.name}")
    if region.offset < 0 or region.offset + _extent(region) > buffer_nbytes:
        raise LocalProtocolError(f"{region} reaches past the {buffer_nbytes} bytes of its slot")
    itemsize = ITEMSIZE[part.dtype]
    if region.offset % itemsize or region.stride % itemsize:
        raise LocalProtocolError(f"{region} is not aligned to {part.dtype}")


def copy_in(
    place: Place, parts: Sequence[Part], layout: Layout, states: torch.Tensor, start: int
) -> None:
    """Copy `states` [heads, positions from `start`, head_dim] into the cells of `place`.

    Only the positions that both have are copied; nothing is kept of the slot's memory.
    """
    first = max(place.start, start)
    last = min(place.stop, start + states.shape[1])
    if first >= last:
        return
    part = parts[place.part]
    cells = over_region(place.buffer, place.region, part, place.stop - place.start, layout)
    cells[:, first - place.start : last - place.start].copy_(
        states[:, first - start : last - start]
    )


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a host tensor in its logical order, copied only if it has holes."""
    return tensor.contiguous().view(torch.uint8).numpy().data.cast("B")


def _extent(region: Region) -> int:
    return (region.rows - 1) * region.stride + region.row_nbytes


def _shaped(
    flat: torch.Tensor, region: Region, part: Part, positions: int, layout: Layout
) -> torch.Tensor:
    typed = flat.view(dtype_of(part))
    if layout == "head_major":
        per_head = region.stride // ITEMSIZE[part.dtype]
        shape = (part.heads, positions, part.head_dim)
        return typed.as_strided(shape, (per_head, part.head_dim, 1))
    return typed.view(positions, part.heads, part.head_dim).permute(1, 0, 2)
