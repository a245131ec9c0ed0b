"""What a link is fed with, from measured rates."""

from __future__ import annotations

import pytest

from headrace.backends.copy_probe import CHUNKS, DEPTHS, MIB, choose, probe
from headrace.testing.fake_device import FakeDevice


def rates(best: float, **shares: float) -> dict[tuple[int, int], float]:
    """By chunk in MiB and depth, such as m4x2=0.95, in shares of the best."""
    made = {}
    for key, share in shares.items():
        chunk, _, depth = key[1:].partition("x")
        made[int(chunk) * MIB, int(depth)] = best * share
    return made


def test_the_smallest_chunk_near_the_best_and_the_fewest_in_flight() -> None:
    tuning = choose(rates(1e9, m1x1=0.2, m1x4=0.5, m4x1=0.8, m4x2=0.91, m4x4=0.93, m64x4=1.0))
    assert tuning.chunk_nbytes == 4 * MIB
    assert tuning.in_flight_nbytes == 8 * MIB
    assert tuning.shared_in_flight_nbytes == 4 * MIB


def test_a_fast_link_has_some_milliseconds_of_work() -> None:
    tuning = choose(rates(25e9, m4x1=0.95, m64x4=1.0))
    assert tuning.chunk_nbytes == 4 * MIB
    assert 0.004 * 25e9 <= tuning.in_flight_nbytes < 0.004 * 25e9 + 4 * MIB
    assert tuning.in_flight_nbytes % tuning.chunk_nbytes == 0
    assert tuning.shared_in_flight_nbytes == tuning.in_flight_nbytes // 2


def test_a_slow_link_has_one_chunk_at_least() -> None:
    tuning = choose(rates(1e6, m1x1=1.0))
    assert tuning == (tuning.__class__)(MIB, MIB, MIB)


@pytest.mark.parametrize("pins", [True, False])
def test_it_measures_and_gives_everything_back(pins: bool) -> None:
    device = FakeDevice(pin_fails=lambda *_: not pins)
    probed = probe(device, chunks=(1024, 4096), depths=(1, 3), total_nbytes=8192)
    assert set(probed.rates) == {(chunk, depth) for chunk in (1024, 4096) for depth in (1, 3)}
    assert all(rate > 0 for rate in probed.rates.values())
    assert probed.tuning == choose(probed.rates)
    assert probed.pinned is pins
    assert probed.statistics()["probe_pinned"] == pins
    assert all(type(value) is int for value in probed.statistics().values())
    statistics = device.statistics()
    assert (statistics["device_nbytes"], statistics["registered_nbytes"]) == (0, 0)
    assert bool(device.counts["pageable_copies"]) is not pins
    device.close()
    assert not device.faults


def test_pageable_memory_is_measured_when_asked_for() -> None:
    device = FakeDevice()
    found = probe(device, (MIB,), (1,), MIB, pin=False)
    assert not found.pinned
    assert device.counts["pageable_copies"] == device.counts["copies"] > 0
    device.close()


def test_what_is_tried() -> None:
    assert [chunk // MIB for chunk in CHUNKS] == [1, 2, 4, 8, 16, 32, 64]
    assert DEPTHS == (1, 2, 3, 4)
