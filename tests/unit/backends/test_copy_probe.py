"""What a link is fed with, from measured rates."""

from __future__ import annotations

from itertools import product

import pytest

from headrace.backends import copy_probe
from headrace.backends.base import CopyTuning
from headrace.backends.copy_probe import CHUNKS, DEPTHS, MIB, SAMPLES, choose, probe
from headrace.testing.fake_device import FakeDevice


def rates(best: float, **shares: float) -> dict[tuple[int, int], float]:
    """By chunk in MiB and depth, such as m4x2=0.95, in shares of the best."""
    made = {}
    for key, share in shares.items():
        chunk, _, depth = key[1:].partition("x")
        made[int(chunk) * MIB, int(depth)] = best * share
    return made


def test_the_smallest_chunk_near_the_best_and_the_fewest_in_flight() -> None:
    tuning = choose(rates(1e9, m1x1=0.2, m1x4=0.5, m4x1=0.8, m4x3=0.91, m4x4=0.93, m64x4=1.0))
    assert tuning.chunk_nbytes == tuning.shared_chunk_nbytes == 4 * MIB
    assert tuning.in_flight_nbytes == 12 * MIB
    assert tuning.shared_in_flight_nbytes == 6 * MIB


def test_a_fast_link_has_some_milliseconds_of_work() -> None:
    tuning = choose(rates(25e9, m4x1=0.95, m64x4=1.0))
    assert 0.004 * 25e9 <= tuning.in_flight_nbytes < 0.004 * 25e9 + tuning.chunk_nbytes
    assert tuning.in_flight_nbytes % tuning.chunk_nbytes == 0
    assert tuning.shared_in_flight_nbytes == tuning.in_flight_nbytes // 2


@pytest.mark.parametrize(
    ("rate", "idle", "shared"), [(1e9, 1, 1), (12e9, 8, 2), (25e9, 16, 4), (50e9, 32, 8)]
)
def test_a_chunk_is_worth_what_a_piece_costs_its_owner(rate: float, idle: int, shared: int) -> None:
    """Even where the smallest copies go as fast as any."""
    tuning = choose(dict.fromkeys(product(CHUNKS, DEPTHS), rate))
    assert (tuning.chunk_nbytes, tuning.shared_chunk_nbytes) == (idle * MIB, shared * MIB)
    assert tuning.chunk_nbytes >= 0.0005 * rate
    assert tuning.shared_chunk_nbytes >= 0.00015 * rate


@pytest.mark.parametrize("rate", [10.0**n for n in range(5, 13)])
def test_two_chunks_are_in_flight_and_one_where_entries_decode(rate: float) -> None:
    for chunk in CHUNKS:
        tuning = choose({(chunk, 1): rate})
        assert tuning.in_flight_nbytes >= 2 * tuning.chunk_nbytes
        assert tuning.shared_in_flight_nbytes >= tuning.shared_chunk_nbytes


def test_a_slow_link_has_two_chunks_at_least() -> None:
    assert choose(rates(1e6, m1x1=1.0)) == CopyTuning(MIB, MIB, 2 * MIB, MIB)


def test_a_figure_is_the_best_of_samples_taken_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that another uses while one round is taken is not told slow."""
    taken: list[tuple[int, int]] = []
    given = iter([0.0, *(9.0, 1.0, 1.0, 8.0), *(5.0, 7.0, 2.0, 2.0), *(1.0, 1.0, 6.0, 1.0)])

    def rate(link: object, chunk: int, depth: int, total_nbytes: int) -> float:
        taken.append((chunk, depth))
        return next(given)

    monkeypatch.setattr(copy_probe._Link, "rate", rate)
    device = FakeDevice()
    probed = probe(device, (1024, 4096), (1, 3), 8192)
    device.close()
    cells = [(1024, 1), (1024, 3), (4096, 1), (4096, 3)]
    assert taken[1:] == cells * SAMPLES
    assert probed.rates == dict(zip(cells, (9.0, 7.0, 6.0, 8.0), strict=True))


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
    assert [chunk // MIB for chunk in CHUNKS] == [1, 2, 4, 8, 16, 32]
    assert DEPTHS == (1, 2, 4)
    assert SAMPLES >= 3
