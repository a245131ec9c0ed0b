"""Each bug planted into the CUDA source is found on a model of a device, and none without one."""

from __future__ import annotations

import functools

import pytest

from headrace.engine.loading import load_model
from headrace.testing.planting import Mutant
from headrace.testing.source_bugs import MUTANTS, hunt
from headrace.testing.source_scenes import SCENES, Bench
from tests.e2e.families import directory_of


@functools.cache
def bench() -> Bench:
    return Bench(load_model(directory_of("gemma3")))


@pytest.mark.parametrize("name", SCENES)
def test_a_scene_holds(name: str) -> None:
    SCENES[name](bench())


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.text)
def test_a_bug_is_found(mutant: Mutant) -> None:
    assert hunt(mutant, bench()) is not None


def test_each_scene_finds_something() -> None:
    assert {mutant.instance for mutant in MUTANTS} == set(SCENES)
