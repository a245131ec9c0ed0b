"""Registering host memory with CUDA: what must happen below every caller of it.

A call that fails leaves its error behind as the thread's *last error*, and whoever launches a
kernel next is told it as if it were the kernel's. So it is taken away here, at once.
"""

from __future__ import annotations

from typing import Final, Protocol

from headrace.engine.device import PinFailed
from headrace.errors import DeviceError, LocalProtocolError

REGISTER_DEFAULT: Final = 0x00
REGISTER_READ_ONLY: Final = 0x08
"""The device only reads it; not every device and driver takes this flag."""
_FLAG_REFUSED: Final = (1, 801)
"""Statuses of a flag that is not taken: cudaErrorInvalidValue, cudaErrorNotSupported."""


class RegistrationCalls(Protocol):
    """The calls of the CUDA runtime that registration is made of; a status of 0 is success."""

    def host_register(self, address: int, nbytes: int, flags: int) -> int: ...

    def host_unregister(self, address: int) -> int: ...

    def take_last_error(self) -> int:
        """The thread's last error, which is then none."""

    def error_text(self, status: int) -> str: ...


class Registrations:
    """The host memory that one device has registered.

    failures: registrations that failed. refused_read_only: those that were only told that the flag
    for reading only is not taken, and can be tried without it.
    """

    def __init__(self, calls: RegistrationCalls) -> None:
        self._calls = calls
        self._nbytes: dict[int, int] = {}
        self.failures = 0
        self.refused_read_only = 0

    @property
    def nbytes(self) -> int:
        """Bytes registered now."""
        return sum(self._nbytes.values())

    def register(self, address: int, nbytes: int, *, read_only: bool) -> None:
        """Pin host memory.

        Raises:
            PinFailed: it was not pinned; nothing is left behind.
            LocalProtocolError: it is pinned already.
        """
        if nbytes < 1 or address < 1:
            raise LocalProtocolError(f"{nbytes} bytes at {address:#x} cannot be registered")
        if address in self._nbytes:
            raise LocalProtocolError(f"host memory at {address:#x} is registered already")
        flags = REGISTER_READ_ONLY if read_only else REGISTER_DEFAULT
        status = self._calls.host_register(address, nbytes, flags)
        if status:
            self._calls.take_last_error()
            if read_only and status in _FLAG_REFUSED:
                self.refused_read_only += 1
            else:
                self.failures += 1
            text = self._calls.error_text(status)
            raise PinFailed(f"{nbytes} bytes of host memory cannot be pinned: {text}")
        self._nbytes[address] = nbytes

    def unregister(self, address: int) -> None:
        """Undo it.

        Raises:
            LocalProtocolError: it is not registered.
            DeviceError: the device failed.
        """
        if address not in self._nbytes:
            raise LocalProtocolError(f"host memory at {address:#x} is not registered")
        del self._nbytes[address]
        status = self._calls.host_unregister(address)
        if status:
            self._calls.take_last_error()
            text = self._calls.error_text(status)
            raise DeviceError(f"host memory at {address:#x} cannot be unpinned: {text}")

    def close(self) -> None:
        """Unregister everything; the first failure is raised when all was tried."""
        failure: DeviceError | None = None
        for address in list(self._nbytes):
            try:
                self.unregister(address)
            except DeviceError as exc:
                failure = failure or exc
        if failure is not None:
            raise failure
