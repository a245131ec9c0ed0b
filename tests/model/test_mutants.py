"""The walk finds every bug that is planted into the machines."""

from __future__ import annotations

from functools import cache

import pytest

from headrace.errors import LocalProtocolError
from headrace.protocol.slots import Slot
from headrace.testing.mutants import EQUIVALENT, MUTANTS, hunt
from headrace.testing.planting import Mutant, Plant


@cache
def found(mutant: Mutant) -> str | None:
    return hunt(mutant)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.text)
def test_the_walk_finds_the_bug(mutant: Mutant) -> None:
    report = found(mutant)
    assert report is not None
    assert "\nafter" in report


@pytest.mark.parametrize("mutant", EQUIVALENT, ids=lambda mutant: mutant.text)
def test_a_shielded_bug_changes_nothing(mutant: Mutant) -> None:
    assert found(mutant) is None


def test_all_are_found() -> None:
    caught = sum(found(mutant) is not None for mutant in MUTANTS)
    print(f"{caught} of {len(MUTANTS)} bugs found; {len(EQUIVALENT)} shielded ones not counted")
    assert caught == len(MUTANTS) >= 25


def test_a_bug_is_taken_out_again() -> None:
    before = {name: member for name, member in vars(Slot).items() if name != "__doc__"}
    for mutant in MUTANTS:
        with mutant.planted():
            pass
    assert {name: member for name, member in vars(Slot).items() if name != "__doc__"} == before


def test_a_bug_that_no_longer_fits_the_source_is_an_error() -> None:
    stale = Mutant("stale", "one", (Plant(Slot, "lease", "no such text", "pass"),))
    with pytest.raises(LocalProtocolError, match="0 places"):
        hunt(stale)
