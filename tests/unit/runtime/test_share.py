"""The account of imports among decode steps."""

from __future__ import annotations

from headrace.runtime.share import MOST_STEPS, ImportShare


def test_a_dear_piece_is_begun_and_paid_off_by_steps() -> None:
    share = ImportShare(0.02)
    assert share.may_begin
    share.spent(1_000)
    assert not share.may_begin
    steps = 0
    while not share.may_begin:
        share.decoded(10_000)
        steps += 1
    assert steps == 5


def test_imports_take_the_share_and_no_more_in_the_long_run() -> None:
    share = ImportShare(0.02)
    spent = decoded = 0
    for _ in range(1000):
        while share.may_begin:
            share.spent(1_500)
            spent += 1_500
        share.decoded(40_000)
        decoded += 40_000
    assert 0.018 < spent / decoded <= 0.0205


def test_quiet_time_saves_up_no_burst() -> None:
    share = ImportShare(0.5)
    for _ in range(100):
        share.decoded(1_000)
    begun = 0
    while share.may_begin:
        share.spent(500)
        begun += 1
    assert begun <= 3


def test_where_steps_are_short_an_import_is_late_and_never_stands_still() -> None:
    share = ImportShare(0.02)
    for _ in range(5):
        share.spent(200_000)
        steps = 0
        while not share.may_begin:
            share.decoded(10)
            steps += 1
        assert steps == MOST_STEPS


def test_nothing_is_owed_when_nobody_decodes() -> None:
    share = ImportShare(0.02)
    share.spent(1_000_000)
    share.clear()
    assert share.may_begin
