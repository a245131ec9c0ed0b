"""The calls that registration is made of, as CUDA has them: a failure is told twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from headrace.engine.registration import REGISTER_READ_ONLY

NO_MEMORY: Final = 2
NOT_SUPPORTED: Final = 801
NOT_REGISTERED: Final = 713
_TEXTS: Final = {NO_MEMORY: "out of memory", NOT_SUPPORTED: "operation not supported"}

PinFails = Callable[[int, int], bool]
"""Whether a registration fails: which one it is, from 1, and its bytes."""


class FakeRegistrationCalls:
    """Registration that fails on demand, and keeps the last error until it is taken."""

    def __init__(self, fails: PinFails, *, read_only: bool) -> None:
        """`read_only`: whether the flag is known."""
        self._fails = fails
        self._takes_read_only = read_only
        self._calls = 0
        self.left = 0
        self.ranges: dict[int, tuple[int, bool]] = {}

    def host_register(self, address: int, nbytes: int, flags: int) -> int:
        read_only = flags == REGISTER_READ_ONLY
        if read_only and not self._takes_read_only:
            self.left = NOT_SUPPORTED
            return self.left
        self._calls += 1
        if self._fails(self._calls, nbytes):
            self.left = NO_MEMORY
            return self.left
        self.ranges[address] = (nbytes, read_only)
        return 0

    def host_unregister(self, address: int) -> int:
        if self.ranges.pop(address, None) is None:
            self.left = NOT_REGISTERED
        return self.left

    def take_last_error(self) -> int:
        left, self.left = self.left, 0
        return left

    def error_text(self, status: int) -> str:
        return _TEXTS.get(status, f"error {status}")

    def registered(self, begin: int, end: int) -> tuple[bool, bool]:
        """Whether bytes [begin, end) are all pinned, and whether for reading only."""
        for address, (nbytes, read_only) in self.ranges.items():
            if address <= begin and end <= address + nbytes:
                return True, read_only
        return False, False

    def meets(self, begin: int, end: int) -> bool:
        """Whether any of these bytes is pinned."""
        return any(a < end and begin < a + n for a, (n, _) in self.ranges.items())
