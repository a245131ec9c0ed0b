"""Every bug that is planted into what drives a device is found on the device model."""

from __future__ import annotations

from functools import cache

import pytest

from headrace.backends.lane_copies import CopyFence
from headrace.engine.loading import load_model
from headrace.errors import LocalProtocolError
from headrace.testing.device_bugs import MUTANTS, hunt
from headrace.testing.device_ground import Ground
from headrace.testing.device_scenes import SCENES
from headrace.testing.planting import Mutant, Plant
from tests.e2e.families import directory_of


@cache
def ground() -> Ground:
    return Ground(load_model(directory_of("gemma3")))


@pytest.mark.parametrize("name", SCENES)
def test_a_scene_holds(name: str) -> None:
    SCENES[name](ground())


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.text)
def test_its_scene_finds_the_bug(mutant: Mutant) -> None:
    assert hunt(mutant, ground()) is not None


def test_there_are_bugs_of_every_scene() -> None:
    assert {mutant.instance for mutant in MUTANTS} == set(SCENES)
    assert len({mutant.text for mutant in MUTANTS}) == len(MUTANTS) >= 45


def test_a_bug_that_no_longer_fits_the_source_is_an_error() -> None:
    stale = Mutant("stale", "fences_tell", (Plant(CopyFence, "done", "no such text", "pass"),))
    with pytest.raises(LocalProtocolError, match="0 places"):
        hunt(stale, ground())
