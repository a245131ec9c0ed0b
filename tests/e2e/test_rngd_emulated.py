"""The RNGD source on the vendor's kernels, emulated on the CPU, in processes of their own.

Exactness is to the last bit: the route, the transfer chunk and the layer group change nothing. The
numbers themselves are held against torch's, by the bound of `headrace.bench.rngd_states`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from headrace.backends.load import open_decoder
from headrace.backends.null import NullDecoder, decoder_like
from headrace.bench.rngd_states import (
    OverBound,
    Prefilled,
    States,
    check_bound,
    distance,
    prefill,
)
from headrace.bench.stand import Stand
from headrace.engine.models import resolve
from headrace.errors import Refused
from headrace.runtime.owner import DecoderOwner
from headrace.runtime.requests import Request, RequestOptions
from headrace.runtime.reuse import Speeds
from headrace.runtime.worker import SourceHandle
from tests.e2e.rngd_mistakes import MISTAKES
from tests.rngd_checkpoints import checkpoint_of

pytestmark = [pytest.mark.rngd_emulation, pytest.mark.usefixtures("nothing_left")]

CONTEXT = 192
VOCAB = 512
BUCKETS = (16, 32)
EDGES = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97)
LENGTHS = (2, 33, 100)

StandOf: TypeAlias = Callable[..., AbstractContextManager[Stand]]


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB) for _ in range(num_tokens)]


@pytest.fixture(scope="module")
def llama() -> Path:
    return checkpoint_of("llama").kernels


@contextmanager
def stand_of(
    directory: Path, engine: str, interpreter: str | None = None, **options: Any
) -> Iterator[Stand]:
    """A source process and a decoder that is memory only."""
    handle = SourceHandle(
        engine, {"model": str(directory), "threads": 1, **options}, interpreter=interpreter
    )
    handle.start()
    try:
        decoder = NullDecoder(decoder_like(handle.manifest), context=CONTEXT, lanes=1)
    except BaseException:
        handle.close()
        raise
    with Stand(handle, decoder, context=CONTEXT) as stand:
        yield stand


@pytest.fixture
def emulated(rngd_python: str) -> StandOf:
    """Stands with the emulated engine, or another engine that runs in the vendor's environment."""

    def made(directory: Path, engine: str = "rngd", **more: Any) -> AbstractContextManager[Stand]:
        options = {"emulate": True, "token_buckets": BUCKETS, "max_positions": CONTEXT, **more}
        return stand_of(directory, engine, rngd_python, **options)

    return made


def routes() -> Iterator[dict[str, Any]]:
    yield {"route": "chunked"}
    yield {"route": "chunked", "chunk": 7}
    yield {"route": "streamed", "group_layers": 1, "digest": True}
    yield {"route": "streamed", "group_layers": 3, "chunk": 10}
    yield {"route": "streamed", "group_layers": 2, "emission": "cache_groups"}


def test_every_route_has_the_same_bytes_at_the_edges_of_buckets_and_chunks(
    llama: Path, emulated: StandOf
) -> None:
    """Beyond 32 tokens the later chunks run the extend kernels."""
    with emulated(llama) as stand:
        for prefill_chunk in (0, 20):
            for num_tokens in EDGES:
                tokens = prompt(num_tokens)
                whole = prefill(stand, tokens, prefill_chunk=prefill_chunk)
                assert not any(set(raw) == {0xFF} for raw in whole.cells.values())
                for asked in routes():
                    got = prefill(stand, tokens, prefill_chunk=prefill_chunk, **asked)
                    assert got.same_bytes(whole), (num_tokens, prefill_chunk, asked)


def test_all_but_the_last_group_is_announced_before_the_logits(
    llama: Path, emulated: StandOf
) -> None:
    with emulated(llama) as stand:
        for size, groups in ((1, 4), (2, 2), (3, 2), (4, 1)):
            got = prefill(stand, prompt(32), route="streamed", group_layers=size)
            announced, final_ns = announcements(got.request)
            assert len(announced) == groups
            assert all(at < final_ns for at in announced[:-1]), size


def announcements(request: Request) -> tuple[list[int], int]:
    """When each message of spans was told, and when the logits were there."""
    times = [message.ready_ns for message, _ in request.trace.source]
    return times[:-1], times[-1]


@contextmanager
def pair_of(directory: Path, interpreter: str, decoder: dict[str, Any]) -> Iterator[DecoderOwner]:
    """An owner with a cpu decoder in bf16 and the emulated source."""
    options = {"model": str(directory), "threads": 1, "dtype": "bfloat16"}
    source = {"emulate": True, "token_buckets": BUCKETS, "max_positions": CONTEXT}
    handle = SourceHandle("rngd", {**options, **source}, interpreter=interpreter)
    handle.start()
    try:
        opened = open_decoder("cpu", {**options, "lanes": 2, "context": CONTEXT, **decoder})
        owner = DecoderOwner(opened, context=CONTEXT)
        try:
            owner.attach(handle)
            yield owner
            assert owner.drain()
            owner.check_integrity()
        finally:
            owner.close()
    finally:
        handle.close()


def run(owner: DecoderOwner, tokens: Sequence[int], **asked: Any) -> Request:
    options = {"max_tokens": 6, "audit": True, "digest": True, **asked}
    request = owner.submit(tokens, RequestOptions(**options))
    owner.run_until_done(request)
    assert request.outcome == "finished", request.reason
    return request


def facts(request: Request) -> tuple[object, ...]:
    return request.tokens, request.logits_digest, request.kv_digests


def check_pair(owner: DecoderOwner, lengths: Sequence[int], tokens_of: Any) -> None:
    for num_tokens in lengths:
        tokens = tokens_of(num_tokens)
        whole = run(owner, tokens, digest=False)
        for asked in routes():
            assert facts(run(owner, tokens, **asked)) == facts(whole), (num_tokens, asked)


def test_a_cpu_decoder_goes_on_with_the_same_tokens_by_every_route(
    llama: Path, rngd_python: str
) -> None:
    with pair_of(llama, rngd_python, {}) as owner:
        check_pair(owner, (1, 17, 33, 65), prompt)


@pytest.mark.real_model
def test_a_real_model_too(rngd_python: str) -> None:
    with pair_of(smollm2(), rngd_python, {}) as owner:
        check_pair(owner, (31, 33), prompt)


def test_the_rest_of_a_kept_prompt_has_the_bits_of_a_prefill_that_is_cut_there(
    llama: Path, rngd_python: str
) -> None:
    with pair_of(llama, rngd_python, {"keep_nbytes": 64 << 20}) as owner:
        owner._keeping._speeds = lambda *_, **__: Speeds(None, None, None, None)  # type: ignore[method-assign]
        for number, shared in enumerate((1, 16, 31, 32, 33, 50)):
            begin, end = prompt(shared, seed=100 + number), prompt(70 - shared, seed=200 + number)
            run(owner, [*begin, *prompt(5, seed=300 + number)], prefix="shared")
            late = run(owner, [*begin, *end], prefix="shared", route="streamed", group_layers=2)
            assert late.reuse is not None
            if late.reuse.positions == 0:  # too short to be worth it
                continue
            assert late.reuse.remainder == "source"
            whole = run(owner, [*begin, *end], prefill_cuts=(late.reuse.positions,))
            assert facts(late) == facts(whole), shared


def states(stand: AbstractContextManager[Stand], lengths: Sequence[int]) -> list[States]:
    with stand as opened:
        return [prefill(opened, prompt(num_tokens)).states() for num_tokens in lengths]


def torch_states(directory: Path, lengths: Sequence[int]) -> list[tuple[States, States]]:
    """In bf16 and in float32, by prompt."""
    made = [states(stand_of(directory, "torch", dtype=d), lengths) for d in ("bfloat16", "float32")]
    return list(zip(*made, strict=True))


def smollm2() -> Path:
    try:
        return resolve("smollm2-135m")
    except Refused as exc:
        pytest.skip(f"smollm2-135m is not here: {exc}")


def test_its_numbers_are_within_the_bound(emulated: StandOf) -> None:
    """`test_rngd_families` has the other families, held against the same arithmetic in torch."""
    checkpoint = checkpoint_of("llama")
    torches = torch_states(checkpoint.plain, LENGTHS)
    found = states(emulated(checkpoint.kernels), LENGTHS)
    for mine, (rounded, exact) in zip(found, torches, strict=True):
        check_bound(mine, rounded, exact)


@pytest.mark.real_model
def test_the_numbers_of_a_real_model_are_within_the_bound(emulated: StandOf) -> None:
    directory = smollm2()
    torches = torch_states(directory, LENGTHS)
    for mine, (rounded, exact) in zip(states(emulated(directory), LENGTHS), torches, strict=True):
        check_bound(mine, rounded, exact)


@pytest.fixture(scope="module")
def wanted(llama: Path) -> list[tuple[States, States]]:
    return torch_states(llama, (40,))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_bound_shows_every_mistake(
    llama: Path, emulated: StandOf, wanted: list[tuple[States, States]], mistake: str
) -> None:
    stand = emulated(llama, "tests.e2e.rngd_mistakes:open", mistake=mistake)
    (mine,), (torches,) = states(stand, (40,)), wanted
    if mistake == "none":
        check_bound(mine, *torches)
        return
    with pytest.raises(OverBound):
        check_bound(mine, *torches)


def test_states_are_compared_in_one_order(llama: Path) -> None:
    """Torch's lie head by head and the kernels' token by token."""
    with stand_of(llama, "torch", dtype="float32") as stand:
        got = prefill(stand, prompt(5))
    assert isinstance(got, Prefilled)
    made = got.states()
    assert {tensor.shape for tensor in made.cells.values()} == {(5, 2, 64)}
    assert distance(made.logits, made.logits) == (0.0, 0.0)
