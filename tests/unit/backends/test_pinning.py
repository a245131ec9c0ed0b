"""Slabs pinned and not: the books, the one warning, the metric."""

from __future__ import annotations

import logging

import pytest

from headrace.backends.base import HostRange
from headrace.backends.pinning import PROBE_NBYTES, Pins
from headrace.errors import LocalProtocolError
from headrace.testing.fake_device import FakeDevice

NBYTES = 4 * PROBE_NBYTES
FIRST, SECOND = HostRange(1 << 30, NBYTES), HostRange(1 << 31, NBYTES)


def test_a_slab_is_pinned_and_timed() -> None:
    device = FakeDevice()
    pins = Pins(device)
    pins.register(FIRST)
    statistics = pins.statistics()
    assert statistics["pinned_nbytes"] == device.statistics()["registered_nbytes"] == NBYTES
    assert (statistics["pageable_nbytes"], statistics["pin_failures"]) == (0, 0)
    assert statistics["pin_us_per_gb"] > 0
    pins.unregister(FIRST)
    assert pins.statistics()["pinned_nbytes"] == device.statistics()["registered_nbytes"] == 0


def test_a_small_slab_is_tried_at_once() -> None:
    tried: list[int] = []
    device = FakeDevice(pin_fails=lambda _, nbytes: bool(tried.append(nbytes)))  # type: ignore[func-returns-value]
    Pins(device).register(HostRange(1 << 30, PROBE_NBYTES))
    assert tried == [PROBE_NBYTES]
    Pins(device).register(SECOND)
    assert tried == [PROBE_NBYTES, PROBE_NBYTES, NBYTES]


@pytest.mark.parametrize("failing", ["probe", "whole"])
def test_a_slab_that_is_not_pinned_is_pageable(
    failing: str, caplog: pytest.LogCaptureFixture
) -> None:
    small = PROBE_NBYTES if failing == "probe" else NBYTES
    device = FakeDevice(pin_fails=lambda _, nbytes: nbytes >= small)
    pins = Pins(device, read_only=True)
    with caplog.at_level(logging.WARNING, "headrace.device"):
        pins.register(FIRST)
        pins.register(SECOND)
    (said,) = caplog.records
    assert "fake:0: a slab is not pinned, and its copies are pageable" in said.getMessage()
    statistics = pins.statistics()
    assert statistics["pageable_nbytes"] == 2 * NBYTES
    assert statistics["pin_failures"] == 2
    assert device.statistics()["registered_nbytes"] == 0
    device.record(device.compute)  # the device works on
    pins.unregister(FIRST)
    assert pins.statistics()["pageable_nbytes"] == NBYTES


def test_a_flag_that_is_not_taken_is_no_failure() -> None:
    device = FakeDevice(pins_read_only=False)
    pins = Pins(device, read_only=True)
    pins.register(FIRST)
    assert pins.statistics()["pinned_nbytes"] == NBYTES
    assert device.statistics()["failed_registrations"] == pins.statistics()["pin_failures"] == 0
    assert device.statistics()["refused_read_only"] == 2  # of the small piece, and of the whole


def test_a_later_slab_may_fail_and_a_later_one_be_pinned() -> None:
    device = FakeDevice(pin_fails=lambda ordinal, _: ordinal == 3)
    pins = Pins(device)
    for slab in (FIRST, SECOND, HostRange(1 << 32, NBYTES)):
        pins.register(slab)
    assert pins.statistics()["pinned_nbytes"] == 2 * NBYTES
    assert pins.statistics()["pageable_nbytes"] == NBYTES


def test_the_same_slab_twice_is_a_bug() -> None:
    for fails in (False, True):
        pins = Pins(FakeDevice(pin_fails=lambda *_, fails=fails: fails))
        pins.register(FIRST)
        with pytest.raises(LocalProtocolError, match="registered already"):
            pins.register(FIRST)


def test_a_slab_that_is_not_known_is_none_of_ours() -> None:
    pins = Pins(FakeDevice())
    pins.unregister(FIRST)
    pins.register(FIRST)
    pins.close()
    pins.close()
    pins.unregister(FIRST)
    assert pins.statistics()["pinned_nbytes"] == 0


def test_a_device_that_failed_pins_nothing_and_the_caller_lives() -> None:
    device = FakeDevice()
    pins = Pins(device)
    device.fail("lost")
    pins.register(FIRST)
    assert pins.statistics()["pageable_nbytes"] == NBYTES
