"""The RNGD engine on small kernels: its contract, what it refuses, and its numbers."""

from __future__ import annotations

import atexit
import contextlib
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from headrace.backends import rngd
from headrace.backends.null import decoder_like
from headrace.backends.rngd import Options, RngdEngine
from headrace.engine.loading import load_model
from headrace.engine.rngd import geometry, llama
from headrace.engine.rngd.emulated import EmulatedExecutor
from headrace.engine.rngd.executor import Ticket
from headrace.engine.rngd.model import read_model
from headrace.engine.rngd.program import LayerProgram
from headrace.engine.rngd.sdk import Sdk
from headrace.engine.rngd.signature import Tensor
from headrace.errors import Cancelled, Closed, DeviceError, LocalProtocolError, Refused, Unquiet
from headrace.plan import compile_plan
from headrace.testing.conformance_engine import PrefillEngineConformance
from headrace.testing.sinks import MemorySink, ask
from tests.unit.backends.late_reads import LateReads
from tests.unit.engine.rngd.small_kernels import CONFIG, HYBRID, Library, write_checkpoint

CONTEXT = 64
POISON = 59
SDK = "tests.unit.engine.rngd.small_kernels:open_llama"


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("rngd") / "llama", poison=POISON)


def scratch() -> Path:
    """A directory for the engine of a suite, which is made once and outlives each test."""
    made = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, made)
    return Path(made)


class LateExecutor(EmulatedExecutor):
    """Copies when a read's ticket is asked for the last time, or when all is waited for."""

    def __init__(self, sdk: Sdk, most: int = 4) -> None:
        super().__init__(sdk)
        self.reads = LateReads(most, random.Random(5))
        self.waited = 0
        self.broken: DeviceError | None = None

    def read(
        self, tensor: Tensor, placed: Any, first: int, stop: int, target: torch.Tensor
    ) -> Ticket:
        rows = placed.rows(first, stop)
        return self.reads.ticket(lambda: target.copy_(rows))

    def wait(self) -> None:
        self.waited += 1
        if self.broken is not None:
            raise self.broken
        self.reads.finish()


def make(directory: Path, executor: Callable[[Sdk], Any] = EmulatedExecutor, **more: Any) -> Any:
    sdk = Library(llama.FAMILY).sdk()
    model = read_model(directory, **{"token_buckets": (8, 16), "max_positions": CONTEXT, **more})
    return RngdEngine(model, sdk, executor(sdk), threads=1)


def prefill(
    engine: RngdEngine, tokens: Sequence[int], route: Any = "whole", **asked: Any
) -> MemorySink:
    request = ask(len(tokens), route, **asked)
    plan = compile_plan(
        decoder_like(engine.manifest()), "token_major", len(tokens), CONTEXT, request.start
    )
    sink = MemorySink(plan, request)
    engine.prefill_stream(tokens, sink, request.start)
    return sink


def prompt(num_tokens: int) -> list[int]:
    return [(3 + 7 * at * at) % POISON for at in range(num_tokens)]


class TestConformance(PrefillEngineConformance):
    """A prompt of 33 takes chunks of 16, the later ones on top of the earlier."""

    lengths: ClassVar[Sequence[int]] = (1, 17, 33)
    group_sizes: ClassVar[Sequence[int]] = (2,)

    def make_tokens(self, num_tokens: int, seed: int = 0) -> list[int]:
        return [token % POISON for token in super().make_tokens(num_tokens, seed)]

    def make_engine(self) -> RngdEngine:
        path = scratch()
        engine: RngdEngine = make(write_checkpoint(path, num_hidden_layers=3))
        return engine


class TestConformanceOfLateReads(TestConformance):
    lengths: ClassVar[Sequence[int]] = (1, 21)
    prefill_chunks: ClassVar[Sequence[int]] = (0,)

    def make_engine(self) -> RngdEngine:
        path = scratch()
        engine: RngdEngine = make(write_checkpoint(path, num_hidden_layers=3), LateExecutor)
        return engine


class TestConformanceOfTwoCacheGroupsOnTwoChips(TestConformance):
    lengths: ClassVar[Sequence[int]] = (1, 21)
    chunks: ClassVar[Sequence[int]] = (7,)

    def make_engine(self) -> RngdEngine:
        path = scratch()
        directory = write_checkpoint(path, model_type="small_hybrid")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(geometry, "FAMILIES", (HYBRID,))
            sdk = Library(HYBRID, chips=2).sdk()
            model = read_model(directory, token_buckets=(8, 16, 32), max_positions=CONTEXT)
            return RngdEngine(model, sdk, EmulatedExecutor(sdk), threads=1)


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 16, 17, 33, 48])
def test_its_numbers_are_the_model_librarys(directory: Path, num_tokens: int) -> None:
    """K after rope, V and the last row of logits, but for the rounding to bf16 on the way."""
    tokens = prompt(num_tokens)
    sink = prefill(make(directory), tokens)
    model = load_model(directory, dtype="float32", threads=1, attention=None, device="cpu")
    cache = DynamicCache(config=model.config)
    wanted = model.forward(torch.tensor([tokens]), cache).view(-1)
    for (layer, part), got in sink.cells().items():
        states = cache.layers[layer].values if part else cache.layers[layer].keys
        assert states is not None
        theirs = states[0].transpose(0, 1)
        mine = torch.frombuffer(bytearray(got), dtype=torch.bfloat16).reshape(theirs.shape)
        assert relative(mine.float(), theirs) < 0.03, (layer, part)
    assert sink.logits is not None
    row = torch.from_numpy(np.frombuffer(sink.logits, np.float32).copy())
    assert relative(row, wanted) < 0.05


def relative(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """The rms of the difference over the rms of what is wanted."""
    return float((mine - theirs).pow(2).mean().sqrt() / theirs.pow(2).mean().sqrt())


def test_a_late_start_moves_the_later_cells_of_a_run_with_the_same_cuts(directory: Path) -> None:
    engine = make(directory)
    for cuts in ((5,), (8,), (16,), (3, 20), (39,)):
        whole = prefill(engine, prompt(40), cuts=cuts)
        late = prefill(engine, prompt(40), "streamed", cuts=cuts, start=cuts[-1])
        assert late.logits == whole.logits
        assert not late.stray_bytes()
        for (layer, part), got in late.cells().items():
            assert whole.cells()[layer, part].endswith(got)
            assert len(got) == (40 - cuts[-1]) * 2 * 8 * 2


def test_the_manifest_is_read_from_the_checkpoint(directory: Path) -> None:
    engine = make(directory)
    manifest = engine.manifest()
    assert manifest.layouts == ("token_major",)
    assert manifest.prefix == "recompute"
    assert (manifest.vocab_size, manifest.max_positions) == (CONFIG["vocab_size"], CONTEXT)
    assert len(manifest.layers) == CONFIG["num_hidden_layers"]
    assert make(directory, max_positions=None).manifest().max_positions == 256


def test_facts_and_statistics_tell_what_ran(directory: Path) -> None:
    engine = make(directory)
    assert engine.facts["sdk"] == "small kernels"
    assert engine.facts["emulated"] is True
    assert engine.facts["token_buckets"] == "8,16"
    assert engine.facts["small-kernels"] == "1"
    before = engine.statistics()
    assert before["kernels_loaded"] == 4, "those of the smallest bucket"
    prefill(engine, prompt(9))
    told = engine.statistics()
    assert told["kernels_loaded"] == 8
    assert all(told[f"{stage}_ns"] > 0 for stage in ("first", "attention", "mid", "last"))


def test_the_logits_are_ready_when_the_host_has_made_them(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the host multiplies by the head: the transfer tail counts from then on."""
    made_ns: list[int] = []
    made = LayerProgram.logits

    def noted(self: LayerProgram, row: torch.Tensor) -> torch.Tensor:
        logits = made(self, row)
        made_ns.append(time.monotonic_ns())
        return logits

    class Timed(MemorySink):
        def final(self, logits: Any, *, token: Any = None, ready_ns: Any = None) -> None:
            super().final(logits, token=token)
            made_ns.append(ready_ns)

    monkeypatch.setattr(LayerProgram, "logits", noted)
    engine = make(directory)
    plan = compile_plan(decoder_like(engine.manifest()), "token_major", 5, CONTEXT)
    engine.prefill_stream(prompt(5), Timed(plan, ask(5)))
    assert made_ns == sorted(made_ns)
    assert len(made_ns) == 2


@pytest.mark.parametrize("tokens", [[0, 1, 60], [-1, 0], [2**40]])
def test_a_token_that_the_model_does_not_know_is_refused(
    directory: Path, tokens: list[int]
) -> None:
    with pytest.raises(LocalProtocolError, match="token ids in"):
        prefill(make(directory), tokens)


def test_a_closed_engine_says_so(directory: Path) -> None:
    engine = make(directory)
    prefill(engine, prompt(3))
    engine.close()
    engine.close()
    with pytest.raises(Closed):
        prefill(engine, prompt(3))
    assert engine.statistics() == {"kernels_loaded": 4}


@pytest.mark.parametrize("poisoned", [[POISON], [1, POISON, 2], [POISON] * 20])
def test_a_prompt_of_no_number_leaves_nothing_for_the_next(
    directory: Path, poisoned: list[int]
) -> None:
    """The next one fills its buckets, so that it writes no padding of its own over the old."""
    engine = make(directory)
    sink = prefill(engine, poisoned)
    assert sink.logits is not None
    assert not np.isfinite(np.frombuffer(sink.logits, np.float32)).any()
    wanted = prefill(make(directory), prompt(48))
    got = prefill(engine, prompt(48))
    assert got.logits == wanted.logits
    assert got.cells() == wanted.cells()


def test_nor_does_one_that_is_cancelled_at_any_call(directory: Path) -> None:
    poisoned = [1, POISON, 2]
    calls = prefill(make(directory), poisoned, "streamed").num_calls
    engine = make(directory)
    wanted = prefill(make(directory), prompt(48))
    for at in range(calls):
        plan = compile_plan(decoder_like(engine.manifest()), "token_major", 3, CONTEXT)
        with pytest.raises(Cancelled):
            engine.prefill_stream(poisoned, MemorySink(plan, ask(3, "streamed"), cancel_at=at))
        assert prefill(engine, prompt(48)).cells() == wanted.cells(), f"cancelled at call {at}"


def test_nothing_is_in_flight_when_it_returns_or_raises(directory: Path) -> None:
    executors: list[LateExecutor] = []

    def late(sdk: Sdk) -> LateExecutor:
        executors.append(LateExecutor(sdk))
        return executors[0]

    engine = make(directory, late)
    (executor,) = executors
    calls = prefill(engine, prompt(20), "streamed").num_calls
    assert executor.waited == 1, "a device is waited for only when all is done"
    for at in range(calls):
        plan = compile_plan(decoder_like(engine.manifest()), "token_major", 20, CONTEXT)
        sink = MemorySink(plan, ask(20, "streamed"), cancel_at=at)
        with contextlib.suppress(Cancelled):  # it may be asked less often, and end before
            engine.prefill_stream(prompt(20), sink)
        assert executor.reads.all_over()
    assert executor.waited > 0


def test_a_device_that_is_not_known_to_be_quiet_is_told(directory: Path) -> None:
    executors: list[LateExecutor] = []

    def late(sdk: Sdk) -> LateExecutor:
        executors.append(LateExecutor(sdk))
        return executors[0]

    engine = make(directory, late)
    executors[0].broken = DeviceError("it fell off the bus")
    plan = compile_plan(decoder_like(engine.manifest()), "token_major", 20, CONTEXT)
    with pytest.raises(Unquiet, match="it fell off the bus") as caught:
        engine.prefill_stream(prompt(20), MemorySink(plan, ask(20), cancel_at=3))
    assert isinstance(caught.value.__cause__, Cancelled)


def test_it_opens_from_options(directory: Path) -> None:
    engine = rngd.open(
        {"model": str(directory), "sdk": SDK, "emulate": True, "token_buckets": [8, 16]}
    )
    assert prefill(engine, prompt(20)).cells() == prefill(make(directory), prompt(20)).cells()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"dtype": "float32"}, "give --dtype bfloat16"),
        ({"max_positions": 257}, "max_positions is 257, the model was made for 256"),
        ({"token_buckets": []}, "must be positive"),
        ({"token_bucket": [8]}, "token_bucket"),
        ({"threads": 0}, "threads"),
        ({"device": -1}, "device"),
        ({"model": "/nowhere"}, "holds no config.json"),
    ],
)
def test_an_option_that_is_wrong_is_refused(
    directory: Path, more: dict[str, Any], said: str
) -> None:
    options = {"model": str(directory), "sdk": SDK, "emulate": True, **more}
    with pytest.raises(Refused, match=said):
        rngd.open(options)


def test_options_are_those_that_are_documented() -> None:
    """Each is named in the docstring."""
    for field in msgspec.structs.fields(Options):
        assert field.name == "dtype" or f"{field.name}:" in (Options.__doc__ or ""), field.name


def without(directory: Path, name: str, target: Path, **config: Any) -> Path:
    """A copy of a checkpoint that lacks a tensor."""
    target.mkdir()
    told = json.loads((directory / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**told, **config}))
    tensors = load_file(directory / "model.safetensors")
    del tensors[name]
    save_file(tensors, target / "model.safetensors")
    return target


def test_a_lost_head_is_not_taken_for_a_tied_one(directory: Path, tmp_path: Path) -> None:
    lost = without(directory, "lm_head.weight", tmp_path / "lost", tie_word_embeddings=False)
    with pytest.raises(Refused, match=r"has no tensor 'lm_head\.weight'"):
        make(lost)
    tied = without(directory, "lm_head.weight", tmp_path / "tied", tie_word_embeddings=True)
    assert prefill(make(tied), prompt(3)).ended


def test_what_a_checkpoint_lacks_is_told_when_it_is_opened(directory: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(Refused, match=f"has no tensor '{name}'"):
        make(without(directory, name, tmp_path / "lost"))
