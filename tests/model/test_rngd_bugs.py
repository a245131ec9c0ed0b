"""Each bug planted into the RNGD engine is found on a fake card, and none without one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from headrace.backends.rngd_emitter import Emitter
from headrace.errors import LocalProtocolError
from headrace.testing.planting import Mutant, Plant
from headrace.testing.rngd_bugs import MUTANTS, hunt
from headrace.testing.rngd_scenes import SCENES, Bench
from tests.unit.engine.rngd.small_kernels import write_checkpoint


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("rngd") / "llama"
    bench = Bench(write_checkpoint(directory, num_hidden_layers=3))
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
    assert len({mutant.text for mutant in MUTANTS}) == len(MUTANTS) >= 40


def test_a_bug_that_no_longer_fits_the_source_is_an_error(bench: Bench) -> None:
    stale = Mutant(
        "stale", "another_thread_is_refused", (Plant(Emitter, "poll", "no such", "pass"),)
    )
    with pytest.raises(LocalProtocolError, match="0 places"):
        hunt(stale, bench)
