"""Registering host memory: flags, books, and that no error is left behind."""

from __future__ import annotations

import pytest

from headrace.engine.device import PinFailed
from headrace.engine.registration import (
    REGISTER_DEFAULT,
    REGISTER_READ_ONLY,
    Registrations,
)
from headrace.errors import DeviceError, LocalProtocolError


class Calls:
    """Records what is called; fails where it is told to."""

    def __init__(self, *, register: int = 0, unregister: int = 0) -> None:
        self.register = register
        self.unregister = unregister
        self.log: list[tuple[object, ...]] = []

    def host_register(self, address: int, nbytes: int, flags: int) -> int:
        self.log.append(("register", address, nbytes, flags))
        return self.register

    def host_unregister(self, address: int) -> int:
        self.log.append(("unregister", address))
        return self.unregister

    def take_last_error(self) -> int:
        self.log.append(("take",))
        return self.register or self.unregister

    def error_text(self, status: int) -> str:
        return f"error {status}"


@pytest.mark.parametrize(
    ("read_only", "flags"), [(True, REGISTER_READ_ONLY), (False, REGISTER_DEFAULT)]
)
def test_it_registers_and_counts(read_only: bool, flags: int) -> None:
    calls = Calls()
    registrations = Registrations(calls)
    registrations.register(4096, 8192, read_only=read_only)
    assert registrations.nbytes == 8192
    registrations.unregister(4096)
    assert registrations.nbytes == 0
    assert calls.log == [("register", 4096, 8192, flags), ("unregister", 4096)]


def test_a_failure_takes_the_last_error_away_and_counts() -> None:
    calls = Calls(register=2)
    registrations = Registrations(calls)
    with pytest.raises(PinFailed, match="8192 bytes of host memory cannot be pinned: error 2"):
        registrations.register(4096, 8192, read_only=False)
    assert calls.log[1:] == [("take",)]
    assert (registrations.nbytes, registrations.failures) == (0, 1)
    calls.register = 0
    registrations.register(4096, 8192, read_only=False)
    assert registrations.nbytes == 8192


@pytest.mark.parametrize("status", [1, 801])
def test_a_flag_that_is_not_taken_is_counted_apart(status: int) -> None:
    """It is expected of some drivers, and the caller tries again without."""
    calls = Calls(register=status)
    registrations = Registrations(calls)
    with pytest.raises(PinFailed):
        registrations.register(4096, 8192, read_only=True)
    assert calls.log[-1] == ("take",)
    assert (registrations.failures, registrations.refused_read_only) == (0, 1)
    with pytest.raises(PinFailed):
        registrations.register(4096, 8192, read_only=False)
    assert (registrations.failures, registrations.refused_read_only) == (1, 1)
    calls.register = 2
    with pytest.raises(PinFailed):
        registrations.register(4096, 8192, read_only=True)
    assert (registrations.failures, registrations.refused_read_only) == (2, 1)


def test_what_is_registered_is_not_registered_again() -> None:
    registrations = Registrations(Calls())
    registrations.register(4096, 8192, read_only=False)
    with pytest.raises(LocalProtocolError, match="registered already"):
        registrations.register(4096, 16, read_only=False)
    with pytest.raises(LocalProtocolError, match="is not registered"):
        registrations.unregister(8192)


@pytest.mark.parametrize(("address", "nbytes"), [(0, 16), (4096, 0), (4096, -1)])
def test_no_memory_is_refused(address: int, nbytes: int) -> None:
    with pytest.raises(LocalProtocolError, match="cannot be registered"):
        Registrations(Calls()).register(address, nbytes, read_only=False)


def test_a_failure_to_unpin_is_the_devices() -> None:
    calls = Calls(unregister=719)
    registrations = Registrations(calls)
    registrations.register(4096, 8192, read_only=False)
    with pytest.raises(DeviceError, match="cannot be unpinned: error 719"):
        registrations.unregister(4096)
    assert calls.log[-1] == ("take",)


def test_close_unregisters_all_whatever_fails() -> None:
    calls = Calls()
    registrations = Registrations(calls)
    for address in (4096, 8192, 16384):
        registrations.register(address, 16, read_only=True)
    calls.unregister = 719
    with pytest.raises(DeviceError):
        registrations.close()
    assert [each for each in calls.log if each[0] == "unregister"] == [
        ("unregister", 4096),
        ("unregister", 8192),
        ("unregister", 16384),
    ]
    registrations.close()
