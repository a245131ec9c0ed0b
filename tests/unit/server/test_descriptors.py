"""Open files are raised to what the connections need, or it is said that they cannot be."""

from __future__ import annotations

import resource

import pytest

from headrace.errors import Refused
from headrace.server.descriptors import (
    ACCEPTED_AT_ONCE,
    MAX_REFUSED,
    OTHER_DESCRIPTORS,
    SPARE_CONNECTIONS,
    check_descriptors,
    descriptors_needed,
    raise_descriptors,
)

ENDLESS = resource.RLIM_INFINITY


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The soft and the hard limit, which a test may set."""
    now = [0, 0]

    def set_to(which: int, given: tuple[int, int]) -> None:
        assert which == resource.RLIMIT_NOFILE
        now[:] = given

    monkeypatch.setattr(resource, "getrlimit", lambda which: tuple(now))
    monkeypatch.setattr(resource, "setrlimit", set_to)
    return now


def test_what_is_no_connection_has_room() -> None:
    """All that asyncio may have accepted before one is closed, and half for files and owners."""
    under_way = SPARE_CONNECTIONS + MAX_REFUSED + 4 * ACCEPTED_AT_ONCE
    assert under_way <= OTHER_DESCRIPTORS / 2
    assert descriptors_needed(100) == 100 + OTHER_DESCRIPTORS


@pytest.mark.parametrize(
    ("soft", "hard", "then"),
    [
        (64, 4096, 612),
        (64, 612, 612),
        (64, ENDLESS, 612),
        (612, 4096, 612),
        (1024, 4096, 1024),
        (ENDLESS, ENDLESS, ENDLESS),
    ],
)
def test_the_soft_limit_is_raised_and_never_lowered(
    limits: list[int], soft: int, hard: int, then: int
) -> None:
    limits[:] = [soft, hard]
    raise_descriptors(100)
    assert limits == [then, hard]


@pytest.mark.parametrize(
    ("hard", "told"),
    [
        (611, "set `ulimit -n` to 612, or http.max_connections to at most 99"),
        (64, "set `ulimit -n` to 612"),
    ],
)
def test_a_hard_limit_below_is_refused_with_what_to_do(
    limits: list[int], hard: int, told: str
) -> None:
    limits[:] = [32, hard]
    for look in (check_descriptors, raise_descriptors):
        with pytest.raises(Refused) as refused:
            look(100)
        assert str(refused.value).endswith(told)
        assert f"may have {hard} at most" in str(refused.value)
        assert refused.value.field == "http.max_connections"
    assert limits == [32, hard]
