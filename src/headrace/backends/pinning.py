"""Slabs as pinned host memory: what the decoder and the source of a device have in common.

Pinning fails far below free memory, and fails more than once. So a small piece is tried before the
whole, the flag for reading only before none where that is enough, and a slab that is not pinned is
pageable: its copies are slower and hold the host up, and nothing else changes.
"""

from __future__ import annotations

import logging
import mmap
import time
from typing import Final

from headrace.backends.base import HostRange
from headrace.engine.device import Device, PinFailed
from headrace.errors import DeviceError, LocalProtocolError

_log = logging.getLogger("headrace.device")

PROBE_NBYTES: Final = 16 * mmap.PAGESIZE
"""Of a slab, pinned before the whole is tried."""


class Pins:
    """The slabs that one device was told of; `register` and `unregister` as `PinsSlabs` has them.

    read_only: the device never writes into them.
    """

    def __init__(self, device: Device, *, read_only: bool = False) -> None:
        self._device = device
        self._ways = (True, False) if read_only else (False,)
        self._pinned: dict[int, int] = {}
        self._pageable: dict[int, int] = {}
        self._failures = 0
        self._seconds = 0.0
        self._timed_nbytes = 0

    def register(self, slab: HostRange) -> None:
        """Pin a slab; where that fails it is pageable, which is said once and counted.

        Raises:
            LocalProtocolError: it was registered before.
        """
        if slab.address in self._pinned or slab.address in self._pageable:
            raise LocalProtocolError(f"the slab at {slab.address:#x} is registered already")
        try:
            self._pin(slab)
        except DeviceError as exc:
            self._pageable[slab.address] = slab.nbytes
            self._failures += 1
            if self._failures == 1:
                _log.warning(
                    "%s: a slab is not pinned, and its copies are pageable and slower: %s",
                    self._device.name,
                    exc,
                )
            return
        self._pinned[slab.address] = slab.nbytes

    def unregister(self, slab: HostRange) -> None:
        """A slab is about to be unmapped; one that is not known is none of ours.

        Raises:
            DeviceError: the device failed, or still uses it.
        """
        if self._pageable.pop(slab.address, None) is None and slab.address in self._pinned:
            del self._pinned[slab.address]
            self._device.unregister(slab.address)

    def statistics(self) -> dict[str, int]:
        """Bytes pinned and pageable, slabs that were not pinned, and how long a GB took."""
        per_gb = self._seconds * 1e6 / (self._timed_nbytes / 1e9) if self._timed_nbytes else 0.0
        return {
            "pinned_nbytes": sum(self._pinned.values()),
            "pageable_nbytes": sum(self._pageable.values()),
            "pin_failures": self._failures,
            "pin_us_per_gb": round(per_gb),
        }

    def close(self) -> None:
        """Unregister all that is left; the device is idle. Idempotent."""
        for address, nbytes in list(self._pinned.items()):
            self.unregister(HostRange(address, nbytes))
        self._pageable.clear()

    def _pin(self, slab: HostRange) -> None:
        small = HostRange(slab.address, min(slab.nbytes, PROBE_NBYTES))
        if small.nbytes < slab.nbytes:
            self._in_one_way(small)
            self._device.unregister(small.address)
        begun_s = time.monotonic()
        self._in_one_way(slab)
        self._seconds += time.monotonic() - begun_s
        self._timed_nbytes += slab.nbytes

    def _in_one_way(self, memory: HostRange) -> None:
        """Register in the first way that the device takes. Raises: PinFailed, as the last one."""
        for way in self._ways[:-1]:
            try:
                self._device.register(memory.address, memory.nbytes, read_only=way)
            except PinFailed:
                continue
            return
        self._device.register(memory.address, memory.nbytes, read_only=self._ways[-1])
