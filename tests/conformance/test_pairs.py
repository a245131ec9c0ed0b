"""The pairs that headrace ships, by the suite that it ships: real processes, quick."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from headrace.backends.base import Decoder
from headrace.geometry import Manifest
from headrace.testing.conformance import PairConformance
from headrace.testing.pair.cases import CASES
from headrace.testing.pair.leftovers import nothing_more
from headrace.testing.pair.subject import Settings
from tests.docs.reading import ROOT, blocks
from tests.e2e.families import directory_of

BACKENDS = ROOT / "docs" / "add-a-backend.md"
HYBRID = {"layers": 6, "heads": 2, "head_dim": 8, "window": 16, "full_every": 3}


@pytest.fixture(scope="module", autouse=True)
def _no_class_leaves_anything() -> Iterator[None]:
    """A class keeps its pair from test to test, and ends it with its last one."""
    with nothing_more("a class"):
        yield


class TestReplayNull(PairConformance):
    source = "replay"
    source_options: ClassVar[Mapping[str, Any]] = HYBRID
    decoder = "null"
    quick = True


class TestReplayTokenMajorNullOneLane(TestReplayNull):
    source_options: ClassVar[Mapping[str, Any]] = {**HYBRID, "layout": "token_major"}
    lanes = 1


class TestReplayCpu(PairConformance):
    """Replay in the geometry of a tiny hybrid model, whose decoder really decodes."""

    source = "replay"
    decoder = "cpu"
    family: ClassVar[str] = "gemma3"
    dtype: ClassVar[str] = "float32"
    decode_batch: ClassVar[int] = 1
    quick = True

    def make_decoder(self, source: Manifest | None) -> Decoder:
        cpu_backend = pytest.importorskip("headrace.backends.cpu")
        options = {
            "model": str(directory_of(self.family)),
            "dtype": self.dtype,
            "lanes": self.lanes,
            "context": self.context,
            "decode_batch": self.decode_batch,
        }
        decoder: Decoder = cpu_backend.open(options)
        return decoder


@pytest.mark.full_matrix
class TestReplayCpuOneLane(TestReplayCpu):
    family = "llama"
    dtype = "bfloat16"
    lanes = 1


@pytest.mark.full_matrix
class TestReplayCpuBatch(TestReplayCpu):
    """All that a pair must keep while its entries decode in one forward."""

    decode_batch = 4


class TestReplayCudaOnFake(PairConformance):
    """The CUDA decoder on a device model, in the owner that every decoder has; every copy lags."""

    source = "replay"
    decoder = "headrace.testing.fake_device:open_decoder"
    family: ClassVar[str] = "gemma3"
    dtype: ClassVar[str] = "float32"
    fake: ClassVar[Mapping[str, Any]] = {"all_pinned": True}
    quick = True

    def make_decoder(self, source: Manifest | None) -> Decoder:
        fake_device = pytest.importorskip("headrace.testing.fake_device")
        options = {
            "model": str(directory_of(self.family)),
            "dtype": self.dtype,
            "lanes": self.lanes,
            "context": self.context,
            **self.fake,
        }
        decoder: Decoder = fake_device.open_decoder(options)
        return decoder


@pytest.mark.full_matrix
class TestReplayTokenMajorCudaOnFakeOneLane(TestReplayCudaOnFake):
    """Cells that are laid out on the device, and slabs that cannot be pinned."""

    source_options: ClassVar[Mapping[str, Any]] = {"layout": "token_major"}
    dtype: ClassVar[str] = "bfloat16"
    lanes = 1
    fake: ClassVar[Mapping[str, Any]] = {"failing_pin": 1, "polls_per_step": 3, "seed": 5}


@pytest.mark.full_matrix
class TestCudaSourceOnFakeCpu(TestReplayCpu):
    """The CUDA source on a device model, in a process as any source is, late in all it does."""

    source = "headrace.testing.fake_device:open_source"

    @property
    def settings(self) -> Settings:
        options = {
            "model": str(directory_of(self.family)),
            "dtype": self.dtype,
            "polls_per_step": 3,
        }
        return replace(super().settings, source_options=options)


@pytest.mark.full_matrix
def test_the_worked_pair_conforms(tmp_path: Path) -> None:
    """The page's own engine, decoder and subclass, as written there."""
    (suite,) = (block for block in blocks(BACKENDS) if "PairConformance" in block.code)
    for block in blocks(BACKENDS):
        if block.file is not None and not block.file.startswith("test_"):
            (tmp_path / block.file).write_text(block.code)
    (tmp_path / "test_worked.py").write_text(suite.code)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(tmp_path)])},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(CASES) - 1} passed, 1 skipped" in done.stdout  # it takes no prefill chunk
