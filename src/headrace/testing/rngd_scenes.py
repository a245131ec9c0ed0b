"""Short scenes of the RNGD engine on a fake card: what it must keep, whatever is cut how.

A scene ends quietly, or raises `Unkept` or what the engine raised. They are the instances of the
bugs in `headrace.testing.rngd_bugs`.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

import torch

from headrace.backends.null import decoder_like
from headrace.backends.rngd import RngdEngine
from headrace.engine.rngd.card import CardExecutor
from headrace.engine.rngd.compiled import CompiledKernels
from headrace.engine.rngd.emulated import EmulatedExecutor
from headrace.engine.rngd.executor import Executor
from headrace.engine.rngd.model import read_model
from headrace.engine.rngd.record import Reads
from headrace.engine.rngd.signature import Tensor
from headrace.errors import (
    BackendUnavailable,
    Cancelled,
    HeadraceError,
    LocalProtocolError,
    Unquiet,
)
from headrace.messages import Prefill
from headrace.plan import compile_plan
from headrace.testing.fake_furiosa import FakeFuriosa
from headrace.testing.fake_furiosa.card import FakeTensor
from headrace.testing.sinks import MemorySink, ask

MAX_POSITIONS: Final = 64
TOKEN_BUCKETS: Final = (8, 16)
NUM_TOKENS: Final = 39
ASKED: Final[tuple[Prefill, ...]] = (
    ask(NUM_TOKENS, "streamed", group_layers=2),
    ask(NUM_TOKENS, "streamed", chunk=11, prefill_chunk=8),
    ask(NUM_TOKENS, "chunked", chunk=7, prefill_chunk=16),
    ask(NUM_TOKENS, "whole"),
)
FULL_BUCKETS: Final = ask(24, "whole", prefill_chunk=8)
"""Its last chunk pads what attention looks at, and nothing pads its rows."""

WAYS: Final[tuple[Reads, ...]] = ("narrow", "whole")
POLLS: Final = (1, 23)  # of the host, until one more thing is done


class Unkept(HeadraceError):
    """What a scene is to show does not hold."""


class Bench:
    """A small model of the Llama family, and what is right for it, computed without a card."""

    def __init__(self, directory: Path) -> None:
        """directory: of the model's config and weights, its vocabulary at least 32."""
        self.model = read_model(directory, max_positions=MAX_POSITIONS, token_buckets=TOKEN_BUCKETS)
        self._kept = tempfile.TemporaryDirectory(prefix="headrace-fake-kernels-")
        self.kernels = Path(self._kept.name)
        fake = FakeFuriosa()
        self._plain = RngdEngine(self.model, fake.sdk(), EmulatedExecutor(fake.sdk()), 1)
        self._right: dict[tuple[Prefill, int], MemorySink] = {}

    def close(self) -> None:
        self._kept.cleanup()

    @contextmanager
    def engine(
        self, reads: Reads = "narrow", polls: int = 1, kernels: Path | None = None
    ) -> Iterator[tuple[RngdEngine, FakeFuriosa]]:
        """An engine on a fake card of its own."""
        fake = FakeFuriosa(seed=polls, polls_per_step=polls)
        engine = RngdEngine(self.model, fake.sdk(), self.executor(fake, reads, kernels), 1)
        try:
            yield engine, fake
        finally:
            with suppress(HeadraceError):
                engine.close()

    def executor(
        self, fake: FakeFuriosa, reads: Reads = "narrow", kernels: Path | None = None
    ) -> CardExecutor:
        cache = CompiledKernels(fake.sdk(), directory=kernels or self.kernels)
        return CardExecutor(fake.sdk(), 0, chips=1, reads=reads, cache=cache)

    def sink(self, asked: Prefill, cancel_at: int | None = None) -> MemorySink:
        decoder = decoder_like(self._plain.manifest())
        plan = compile_plan(decoder, "token_major", asked.num_tokens, MAX_POSITIONS)
        return MemorySink(plan, asked, cancel_at=cancel_at)

    def check(self, asked: Prefill, got: MemorySink, seed: int = 0) -> None:
        """Raise Unkept unless all was told as it is, and only once it was there."""
        if (asked, seed) not in self._right:
            self._right[asked, seed] = self.sink(asked)
            self._plain.prefill_stream(tokens(asked, seed), self._right[asked, seed])
        right = self._right[asked, seed]
        if got.commits != right.commits or got.snapshots != right.snapshots:
            raise Unkept(f"{asked}: told otherwise, or before it was there")
        if got.cells() != right.cells() or got.logits != right.logits or got.stray_bytes():
            raise Unkept(f"{asked}: other cells or logits")


def tokens(asked: Prefill, seed: int = 0) -> Sequence[int]:
    """A prompt of `asked.num_tokens` ids below 32."""
    return [(3 + seed * 5 + 7 * at * at) % 32 for at in range(asked.num_tokens)]


def cells_are_told_when_they_are_there(bench: Bench) -> None:
    """On every route and in every cut; then nothing is queued, and nothing was misused."""
    for reads in WAYS:
        for polls in POLLS:
            with bench.engine(reads, polls) as (engine, fake):
                for asked in ASKED:
                    sink = bench.sink(asked)
                    engine.prefill_stream(tokens(asked), sink)
                    bench.check(asked, sink)
                    _check_quiet(fake, sink)


def a_cancel_leaves_the_slot_quiet(bench: Bench) -> None:
    """At each call of the sink; what is queued later does not touch the slot, and the next prompt
    is right.
    """
    asked = ASKED[0]
    with bench.engine("narrow", 5) as (engine, fake):
        whole = bench.sink(asked)
        engine.prefill_stream(tokens(asked), whole)
        for at in range(0, whole.num_calls, 3):
            sink = bench.sink(asked, cancel_at=at)
            with suppress(Cancelled):  # asked less often while it waits, it may be over before
                engine.prefill_stream(tokens(asked), sink)
            _check_quiet(fake, sink)
        sink = bench.sink(asked)
        engine.prefill_stream(tokens(asked), sink)
        bench.check(asked, sink)


def a_failed_copy_is_told(bench: Bench) -> None:
    """Whichever copy it is, nobody can say whether the card still writes; the prefill says so."""
    for failing in (0, 3, 10):
        with bench.engine("narrow", 3) as (engine, fake):
            fake.card.fail_copy = failing
            sink = bench.sink(ASKED[0])
            try:
                engine.prefill_stream(tokens(ASKED[0]), sink)
            except Unquiet:
                continue
            raise Unkept(f"copy {failing} failed, and nobody heard of it")


def prompts_leave_nothing(bench: Bench) -> None:
    """The next prompt is what it is alone, whatever the one before left in the caches."""
    for reads in WAYS:
        with bench.engine(reads, 2) as (engine, fake):
            for asked, seed in ((FULL_BUCKETS, 1), (ASKED[1], 0), (FULL_BUCKETS, 0), (ASKED[3], 1)):
                sink = bench.sink(asked)
                engine.prefill_stream(tokens(asked, seed), sink)
                bench.check(asked, sink, seed)
                _check_quiet(fake, sink)
                for tensor in _caches(engine):
                    tensor.memory.fill_(torch.nan)


def kernels_are_compiled_once(bench: Bench) -> None:
    """A second process finds them; a file that is not as written is made again."""
    with tempfile.TemporaryDirectory() as made:
        counts: list[int] = []
        for breaks in (None, None, _cut, _turn, None):
            kept = sorted(Path(made).glob("*.kernel"))
            if len(kept) != (counts[0] if counts else 0):
                raise Unkept(f"{len(kept)} kernels are kept, compiled were {counts}")
            if breaks is not None:
                breaks(kept[0])
            with bench.engine(kernels=Path(made)) as (engine, fake):
                counts.append(fake.torch.compiler.num_compiled)
                sink = bench.sink(ASKED[3])
                engine.prefill_stream(tokens(ASKED[3]), sink)
                bench.check(ASKED[3], sink)
        if counts[0] < 2 or counts[1:] != [0, 1, 1, 0]:
            raise Unkept(f"kernels compiled by five engines in turn: {counts}")
        left = [path.name for path in Path(made).iterdir() if path.suffix not in _KEPT]
        if left:
            raise Unkept(f"left beside the kernels: {left}")


def a_failed_compilation_is_not_remembered(bench: Bench) -> None:
    """The vendor's own cache would give it again after its cause is gone."""
    with tempfile.TemporaryDirectory() as made:
        fake = FakeFuriosa()
        for toolchain in (False, False, True):
            fake.torch.compiler.toolchain = toolchain
            executor = bench.executor(fake, kernels=Path(made))
            try:
                executor.load(_kernel(fake))
            except BackendUnavailable as exc:
                if toolchain or exc.stage != "toolchain_missing":
                    raise Unkept(f"the toolchain is there: {toolchain}; told: {exc}") from exc
            else:
                if not toolchain:
                    raise Unkept("it was compiled without a toolchain")
            executor.close()


def another_thread_is_refused(bench: Bench) -> None:
    """Before the vendor's library is touched."""
    fake = FakeFuriosa()
    executor = bench.executor(fake)
    told: list[HeadraceError] = []
    other = threading.Thread(target=partial(_wait, executor, told))
    other.start()
    other.join()
    executor.close()
    if [type(each) for each in told] != [LocalProtocolError] or fake.card.faults:
        raise Unkept("a second thread got through")


def what_is_queued_is_bounded(bench: Bench) -> None:
    """However little the host looks."""
    with bench.engine("narrow", 1000) as (engine, fake):
        sink = bench.sink(ASKED[1])
        engine.prefill_stream(tokens(ASKED[1]), sink)
        bench.check(ASKED[1], sink)
        if fake.card.peak_in_flight > 32:
            raise Unkept(f"{fake.card.peak_in_flight} operations on one stream")


def what_is_queued_keeps_its_memory(bench: Bench) -> None:
    """Also if whoever asked for it has forgotten it, and what is made of zeros is zeros."""
    tensor = Tensor("rows", (5, 3), (5, 4), "bfloat16")
    host = torch.arange(15, dtype=torch.float32).reshape(5, 3).to(torch.bfloat16)
    for reads in WAYS:
        fake = FakeFuriosa(polls_per_step=1000)
        executor = bench.executor(fake, reads)
        got, zeros = (torch.ones(2, 3, dtype=torch.bfloat16) for _ in range(2))
        executor.read(tensor, executor.zeros(tensor), 0, 2, torch.empty_like(got))
        told = executor.read(tensor, executor.place(tensor, host.clone()), 2, 4, got)
        empty = executor.read(tensor, executor.zeros(tensor), 2, 4, zeros)
        executor.wait()
        if not told.done() or not empty.done() or fake.card.faults:
            raise Unkept(f"{reads}: not there after a wait, or misused: {fake.card.faults}")
        if not torch.equal(got, host[2:4]) or zeros.count_nonzero():
            raise Unkept(f"{reads}: other rows than were placed")
        executor.close()


SCENES: Final[Mapping[str, Callable[[Bench], None]]] = {
    scene.__name__: scene
    for scene in (
        cells_are_told_when_they_are_there,
        a_cancel_leaves_the_slot_quiet,
        a_failed_copy_is_told,
        prompts_leave_nothing,
        kernels_are_compiled_once,
        a_failed_compilation_is_not_remembered,
        another_thread_is_refused,
        what_is_queued_is_bounded,
        what_is_queued_keeps_its_memory,
    )
}

_KEPT: Final = (".kernel", ".lock")


def _check_quiet(fake: FakeFuriosa, sink: MemorySink) -> None:
    """Nothing that is still queued on the card writes into the slot, and no call was a misuse."""
    before = bytes(sink.buffer)
    fake.card.run_until(fake.card.quiet)
    if bytes(sink.buffer) != before:
        raise Unkept("the card wrote into a slot that was given back")
    if fake.card.faults:
        raise Unkept(fake.card.faults[0])


def _caches(engine: RngdEngine) -> list[FakeTensor]:
    program = engine._program
    return [cache for _, cache in program._caches.values()] if program is not None else []


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def _turn(path: Path) -> None:
    """Change a byte to another that reads as well, as a program of the same shapes."""
    body = bytearray(path.read_bytes())
    body[body.rindex(b"fake")] ^= 1
    path.write_bytes(body)


def _kernel(fake: FakeFuriosa) -> object:
    sizes = {"num_tokens": 8, "num_kv_cache_blocks": 17}
    config = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 32,
        "intermediate_size": 32,
        "max_position_embeddings": 16,
    }
    made: object = (
        fake.sdk()
        .kernels("llama")
        .llama3_1_8b_w16a16_first_tokenwise(**sizes, hf_config_overrides=config)
    )
    return made


def _wait(executor: Executor, told: list[HeadraceError]) -> None:
    try:
        executor.wait()
    except HeadraceError as exc:
        told.append(exc)
