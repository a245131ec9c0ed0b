"""Host memory for lanes, and the copy that fills it from a slot. Needs the standard library only.

Memory that was never touched costs four to ten times a copy on its first write, so a lane's pages
are faulted in when it is made. Copies go through libc's memmove, which releases the GIL and runs at
the machine's memory speed whatever the size; slice assignment of memoryviews holds the GIL.
"""

from __future__ import annotations

import ctypes
import mmap

from headrace.engine.capacity import require_memory
from headrace.errors import DeviceError
from headrace.plan import Region

_MADV_POPULATE_WRITE = 23  # Linux 5.14
_PAGE = mmap.PAGESIZE


class HostMemory:
    """Private, zeroed, pre-faulted memory of `nbytes`; it lives as long as a view of it does."""

    def __init__(self, nbytes: int, what: str = "host memory") -> None:
        """Raises Refused when there is not that much, DeviceError when the kernel refuses."""
        require_memory(nbytes, what)
        try:
            self._mapping = mmap.mmap(
                -1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except (OSError, ValueError, OverflowError) as exc:
            raise DeviceError(f"{nbytes} bytes of host memory cannot be had: {exc}") from exc
        self.nbytes = nbytes
        self.view = memoryview(self._mapping)[:nbytes]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self._prefault()

    def _prefault(self) -> None:
        try:
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
            self._mapping.madvise(_MADV_POPULATE_WRITE)
        except OSError:  # an older kernel: touch every page instead
            for at in range(0, self.nbytes, _PAGE):
                self._mapping[at] = 0


def copy_rows(target: int, target_stride: int, source: int, region: Region) -> None:
    """Copy a region's rows from the slot at address `source` to rows at address `target`.

    Both addresses and the strides are in bytes; the caller has checked the bounds.
    """
    offset, rows, nbytes, stride = region
    if rows == 1 or stride == target_stride == nbytes:
        ctypes.memmove(target, source + offset, rows * nbytes)
        return
    for row in range(rows):
        ctypes.memmove(target + row * target_stride, source + offset + row * stride, nbytes)
