"""Each bug planted into the ATOM decoder is found on a fake card, and none without one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from headrace.engine.atom.lane import AtomLane
from headrace.errors import LocalProtocolError
from headrace.testing.atom_bugs import MUTANTS, SCENES, hunt
from headrace.testing.atom_ground import Bench
from headrace.testing.planting import Mutant, Plant
from tests.e2e.families import directory_of


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    bench = Bench(directory_of("llama"), directory_of("gemma3"))
    yield bench
    bench.close()
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", SCENES)
def test_a_scene_holds(name: str, bench: Bench) -> None:
    SCENES[name](bench)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.text)
def test_a_bug_is_found(mutant: Mutant, bench: Bench) -> None:
    assert hunt(mutant, bench) is not None


def test_each_scene_finds_something() -> None:
    assert {mutant.instance for mutant in MUTANTS} == set(SCENES)
    assert len({mutant.text for mutant in MUTANTS}) == len(MUTANTS) >= 140
    assert all(mutant.plants for mutant in MUTANTS)


def test_a_bug_that_no_longer_fits_the_source_is_an_error(bench: Bench) -> None:
    plants = (Plant(AtomLane, "end", "no such", "pass"),)
    with pytest.raises(LocalProtocolError, match="0 places"):
        hunt(Mutant("stale", "another_thread_is_refused", plants), bench)
