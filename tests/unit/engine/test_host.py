"""Host memory of lanes: its size and life, and the copy of a region's rows."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import pytest

from headrace.engine import host
from headrace.engine.host import HostMemory, copy_rows
from headrace.errors import DeviceError, Refused
from headrace.plan import Region


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 1 << 20])
def test_memory_is_zeroed_and_writable(nbytes: int) -> None:
    memory = HostMemory(nbytes)
    assert memory.nbytes == len(memory.view) == nbytes
    assert bytes(memory.view) == bytes(nbytes)
    memory.view[:] = b"\xa5" * nbytes
    assert ctypes.string_at(memory.address, nbytes) == b"\xa5" * nbytes


def test_a_view_keeps_the_memory_alive() -> None:
    memory = HostMemory(4096)
    view, address = memory.view[100:200], memory.address
    ctypes.memset(address + 100, 7, 100)
    del memory
    gc.collect()
    assert bytes(view) == bytes([7]) * 100


@pytest.mark.parametrize("nbytes", [1 << 60, 1 << 63, 1 << 80])
def test_more_than_there_is_is_refused(nbytes: int) -> None:
    with pytest.raises(Refused, match=rf"needs {nbytes} bytes .* bytes available"):
        HostMemory(nbytes)


def test_what_the_kernel_does_not_map_is_a_device_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "require_memory", lambda nbytes, what: None)
    for nbytes in (1 << 60, 1 << 63, 1 << 80):
        with pytest.raises(DeviceError, match=rf"{nbytes} bytes of host memory cannot be had"):
            HostMemory(nbytes)


def test_an_older_kernel_touches_every_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_MADV_POPULATE_WRITE", 12345)
    memory = HostMemory(3 * 4096 + 1)
    assert bytes(memory.view) == bytes(3 * 4096 + 1)


REGIONS: list[tuple[Region, int]] = [
    (Region(3, 1, 10, 0), 0),  # one row
    (Region(0, 4, 8, 8), 8),  # no hole on either side: one move
    (Region(5, 4, 8, 12), 12),  # holes on both sides
    (Region(5, 4, 8, 12), 8),  # holes in the slot alone
    (Region(0, 4, 8, 8), 20),  # holes in the lane alone
    (Region(7, 0, 8, 8), 8),  # nothing
]


@pytest.mark.parametrize(("region", "target_stride"), REGIONS)
def test_copy_rows_moves_the_rows_and_nothing_else(region: Region, target_stride: int) -> None:
    source = bytearray(range(100))
    target = bytearray(b"\xff" * 100)
    wanted: Any = bytearray(target)
    for row in range(region.rows):
        begin = region.offset + row * region.stride
        at = 4 + row * target_stride
        wanted[at : at + region.row_nbytes] = source[begin : begin + region.row_nbytes]
    pins = [(ctypes.c_char * 100).from_buffer(memory) for memory in (source, target)]
    source_at, target_at = (ctypes.addressof(pin) for pin in pins)
    copy_rows(target_at + 4, target_stride, source_at, region)
    del pins
    assert target == wanted
