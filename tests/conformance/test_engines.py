"""The prefill engines that headrace ships, by the suite that it ships."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from headrace.backends.base import PrefillEngine
from headrace.backends.legacy import LegacyEngine, WholePrefill
from headrace.backends.replay import ReplayEngine
from headrace.backends.replay import open as open_replay
from headrace.backends.rngd import RngdEngine
from headrace.engine.rngd.card import CardExecutor
from headrace.engine.rngd.compiled import CompiledKernels
from headrace.engine.rngd.model import read_model
from headrace.engine.rngd.record import Reads
from headrace.errors import LocalProtocolError
from headrace.geometry import Layout, Manifest
from headrace.testing.conformance_engine import PrefillEngineConformance
from headrace.testing.fake_furiosa import FakeFuriosa
from headrace.testing.sinks import MemorySink, ask
from tests.e2e.families import CONTEXT, directory_of
from tests.unit.engine.rngd.small_kernels import write_checkpoint

GEOMETRY: dict[str, Any] = {"layers": 6, "heads": 2, "head_dim": 8, "vocab_size": 97}


class TestReplay(PrefillEngineConformance):
    def make_engine(self) -> PrefillEngine:
        return open_replay(GEOMETRY)


class TestReplayHybrid(PrefillEngineConformance):
    layout: ClassVar[Layout] = "head_major"

    def make_engine(self) -> PrefillEngine:
        return open_replay({**GEOMETRY, "window": 16, "full_every": 3, "layout": self.layout})


class TestReplayTokenMajor(TestReplayHybrid):
    layout: ClassVar[Layout] = "token_major"


class TestTorchLlama(PrefillEngineConformance):
    family: ClassVar[str] = "llama"
    context: ClassVar[int] = CONTEXT
    lengths: ClassVar[Sequence[int]] = (1, 17, 33)
    group_sizes: ClassVar[Sequence[int]] = (1, 3)

    def make_engine(self) -> PrefillEngine:
        torch_backend = pytest.importorskip("headrace.backends.torch")
        engine: PrefillEngine = torch_backend.open({"model": str(directory_of(self.family))})
        return engine


class TestTorchHybrid(TestTorchLlama):
    family: ClassVar[str] = "gemma3"


class TestTorchOwnCache(TestTorchLlama):
    """Goes on from earlier prompts where it may: the bytes are the same."""

    lengths: ClassVar[Sequence[int]] = (1, 33)
    group_sizes: ClassVar[Sequence[int]] = (3,)

    def make_engine(self) -> PrefillEngine:
        torch_backend = pytest.importorskip("headrace.backends.torch")
        options = {"model": str(directory_of(self.family)), "own_cache_nbytes": 1 << 22}
        engine: PrefillEngine = torch_backend.open(options)
        return engine


class TestTorchOwnCacheHybrid(TestTorchOwnCache):
    family: ClassVar[str] = "gemma3"


class TestTorchShared(TestTorchLlama):
    family: ClassVar[str] = "gemma4_shared"
    lengths: ClassVar[Sequence[int]] = (1, 33)
    group_sizes: ClassVar[Sequence[int]] = (1,)


class TestCudaOnFakeLlama(TestTorchLlama):
    """The CUDA source on a model of a device, which tells on whoever misuses it."""

    lengths: ClassVar[Sequence[int]] = (1, 17)
    group_sizes: ClassVar[Sequence[int]] = (3,)
    chunks: ClassVar[Sequence[int]] = (7,)
    prefill_chunks: ClassVar[Sequence[int]] = (0, 9)
    pinned: ClassVar[bool] = True

    def make_engine(self) -> PrefillEngine:
        fake = pytest.importorskip("headrace.testing.fake_device")
        options = {"model": str(directory_of(self.family)), "all_pinned": self.pinned, "seed": 5}
        engine: PrefillEngine = fake.open_source(options)
        return engine


class TestCudaOnFakeHybrid(TestCudaOnFakeLlama):
    family: ClassVar[str] = "gemma3"
    lengths: ClassVar[Sequence[int]] = (1, 33)
    group_sizes: ClassVar[Sequence[int]] = (1,)
    chunks: ClassVar[Sequence[int]] = (0,)
    prefill_chunks: ClassVar[Sequence[int]] = (0, 20)


@pytest.mark.full_matrix
class TestCudaOnFakePageable(TestCudaOnFakeLlama):
    """No host memory is registered: a copy holds the host up, and all else is the same."""

    family: ClassVar[str] = "gemma3"
    pinned: ClassVar[bool] = False
    lengths: ClassVar[Sequence[int]] = (17,)
    prefill_chunks: ClassVar[Sequence[int]] = (9,)


class TestRngdOnFakeLlama(PrefillEngineConformance):
    """The RNGD engine on a fake card, looked at seldom: what is announced is there."""

    reads: ClassVar[Reads] = "narrow"
    polls_per_step: ClassVar[int] = 2
    lengths: ClassVar[Sequence[int]] = (1, 19)
    group_sizes: ClassVar[Sequence[int]] = (2,)
    chunks: ClassVar[Sequence[int]] = (11,)
    prefill_chunks: ClassVar[Sequence[int]] = (0, 8)

    @pytest.fixture(autouse=True)
    def one_thread(self) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(before)

    def make_engine(self) -> PrefillEngine:
        directory = Path(tempfile.mkdtemp(prefix="headrace-rngd-"))
        atexit.register(shutil.rmtree, directory)
        fake = FakeFuriosa(seed=7, polls_per_step=self.polls_per_step)
        cache = CompiledKernels(fake.sdk(), directory=directory / "kernels")
        card = CardExecutor(fake.sdk(), 0, chips=1, reads=self.reads, cache=cache)
        checkpoint = write_checkpoint(directory / "llama", num_hidden_layers=3)
        model = read_model(checkpoint, max_positions=self.context, token_buckets=(8, 16))
        return RngdEngine(model, fake.sdk(), card, threads=1)


@pytest.mark.full_matrix
class TestRngdOnFakeByWholeTensors(TestRngdOnFakeLlama):
    reads: ClassVar[Reads] = "whole"
    polls_per_step: ClassVar[int] = 1
    lengths: ClassVar[Sequence[int]] = (1, 33)


class WholeReplay:
    """A legacy engine: the replay engine's result, all at once; it keeps `kept` rows at most."""

    def __init__(self, engine: ReplayEngine, kept: int = 1 << 20) -> None:
        self._engine = engine
        self._kept = kept

    def manifest(self) -> Manifest:
        return self._engine.manifest()

    def prefill(self, tokens: Sequence[int]) -> WholePrefill:
        from headrace.backends.null import decoder_like
        from headrace.plan import compile_plan

        manifest = self.manifest()
        plan = compile_plan(decoder_like(manifest), manifest.layouts[0], len(tokens), len(tokens))
        sink = MemorySink(plan, ask(len(tokens)))
        self._engine.prefill_stream(tokens, sink)
        cells = sink.cells()
        parts = [[cells[layer, part] for part in range(2)] for layer in range(len(plan.layers))]
        return WholePrefill(parts, sink.logits)

    def close(self) -> None:
        self._engine.close()


class TestLegacy(PrefillEngineConformance):
    starts: ClassVar[bool] = False
    checks: ClassVar[bool] = False

    def make_engine(self) -> PrefillEngine:
        return LegacyEngine(WholeReplay(open_replay({**GEOMETRY, "window": 16, "full_every": 3})))

    def test_it_gives_whole_results_only(self) -> None:
        assert self.engine.manifest().emits == ()
        sink = MemorySink(self._plan(4), ask(4))
        with pytest.raises(LocalProtocolError, match="cannot start at position 2"):
            self.engine.prefill_stream([1, 2, 3, 4], sink, 2)


class TestLegacyTokenMajor(TestLegacy):
    def make_engine(self) -> PrefillEngine:
        return LegacyEngine(WholeReplay(open_replay({**GEOMETRY, "layout": "token_major"})))
