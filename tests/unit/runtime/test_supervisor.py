"""When a dead source is started again, with time as an argument."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import Refused
from headrace.runtime.supervisor import Restart, RestartPolicy, SetAside, Supervisor

S = 10**9


def delays(policy: RestartPolicy, deaths: int) -> list[float]:
    """Seconds from each of `deaths` deaths at 0 s to its restart."""
    supervisor = Supervisor("source torch", policy, 0)
    found = []
    for _ in range(deaths):
        decision = supervisor.died("signal 9", 0)
        assert isinstance(decision, Restart)
        found.append(decision.at_ns / S)
    return found


def test_each_death_in_a_row_waits_longer_up_to_a_bound() -> None:
    policy = RestartPolicy(0.2, 2.0, 1.0, max_failures=99)
    assert delays(policy, 6) == pytest.approx([0.2, 0.4, 0.8, 1.0, 1.0, 1.0])


def test_a_delay_that_outgrows_every_float_is_the_longest() -> None:
    policy = RestartPolicy(1.0, 1e300, 30.0, max_failures=9)
    assert delays(policy, 4) == [1.0, 30.0, 30.0, 30.0]


def test_the_time_of_the_death_counts() -> None:
    supervisor = Supervisor("source torch", RestartPolicy(), 5 * S)
    assert supervisor.died("x", 7 * S) == Restart(7 * S + S // 5)


def test_one_that_dies_again_and_again_is_set_aside() -> None:
    supervisor = Supervisor("source torch", RestartPolicy(max_failures=3), 0)
    assert isinstance(supervisor.died("exit status 1", 10 * S), Restart)
    assert isinstance(supervisor.died("exit status 1", 11 * S), Restart)
    assert supervisor.died("signal 9", 12 * S + S // 2) == SetAside(
        "source torch died 3 times within 2.5 s and is set aside; the last: signal 9"
    )
    assert supervisor.failures == 3


def test_one_chance_only() -> None:
    decision = Supervisor("source torch", RestartPolicy(max_failures=1), 0).died("signal 9", S)
    assert isinstance(decision, SetAside)
    assert "died once within 0.0 s" in decision.reason


@pytest.mark.parametrize(("alive_s", "failures"), [(59, 2), (60, 1), (61, 1)])
def test_one_that_lived_long_starts_over(alive_s: int, failures: int) -> None:
    supervisor = Supervisor("source torch", RestartPolicy(healthy_after_s=60.0), 0)
    supervisor.died("x", S)
    supervisor.entered(2 * S)
    supervisor.died("x", (2 + alive_s) * S)
    assert supervisor.failures == failures


def test_the_first_life_counts_too() -> None:
    """It was attached long ago: its death is the first of a row."""
    supervisor = Supervisor("source torch", RestartPolicy(healthy_after_s=1.0), 0)
    supervisor.died("x", 100 * S)
    assert supervisor.failures == 1


def test_one_that_finished_a_request_starts_over() -> None:
    supervisor = Supervisor("source torch", RestartPolicy(max_failures=2), 0)
    for at in range(10):
        assert supervisor.died("x", at * S) == Restart(at * S + S // 5)
        supervisor.entered(at * S)
        supervisor.served()


def test_time_that_it_took_to_start_is_no_life() -> None:
    """It died while starting, however long that took: this is no sign of health."""
    supervisor = Supervisor("source torch", RestartPolicy(healthy_after_s=1.0, max_failures=3), 0)
    supervisor.died("x", 0)
    supervisor.died("x", 500 * S)
    assert isinstance(supervisor.died("x", 1000 * S), SetAside)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("first_delay_s", -1.0),
        ("first_delay_s", float("nan")),
        ("factor", 0.5),
        ("longest_delay_s", float("inf")),
        ("max_failures", 0),
        ("max_failures", 2.5),
        ("max_failures", True),
        ("healthy_after_s", "60"),
    ],
)
def test_numbers_that_make_no_sense_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(Refused, match=f"{name} is") as caught:
        RestartPolicy(**{name: value})
    assert caught.value.field == name


def test_a_death_that_was_no_health_forgives_nothing() -> None:
    supervisor = Supervisor("decoder cpu", RestartPolicy(healthy_after_s=1.0, max_failures=2), 0)
    assert isinstance(supervisor.died("no source is left", 100 * S, well=False), Restart)
    supervisor.entered(101 * S)
    decision = supervisor.died("no source is left", 200 * S, well=False)
    assert isinstance(decision, SetAside)
    assert decision.reason.startswith("decoder cpu died 2 times")
