"""Replay to null, through real processes and slabs: the route changes only when bytes move."""

from __future__ import annotations

import time
import zlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest

import headrace.channel as channel_module
from headrace.backends.base import Cells
from headrace.backends.null import NullDecoder, decoder_like
from headrace.backends.replay import open as open_replay
from headrace.engine.capacity import available_nbytes
from headrace.ids import Span
from headrace.messages import MAX_PROGRESS
from headrace.plan import Region, compile_plan
from headrace.runtime.owner import DecoderOwner
from headrace.runtime.prefill_worker import SubprocessPrefillWorker
from headrace.runtime.requests import Request, RequestOptions
from headrace.runtime.worker import SourceHandle
from headrace.testing.sinks import MemorySink, ask, region_bytes

pytestmark = pytest.mark.usefixtures("nothing_left")

CONTEXT = 96
GEOMETRY: dict[str, Any] = {"layers": 7, "heads": 3, "head_dim": 8, "window": 16, "full_every": 3}
LAYOUTS = ("head_major", "token_major")
ROUTES: list[dict[str, Any]] = [
    {"route": "whole"},
    *({"route": "chunked", "chunk": chunk} for chunk in (0, 1, 7, 64)),
    *(
        {"route": "streamed", "emission": emission, "group_layers": group_layers, "chunk": chunk}
        for emission, group_layers, chunk in product(
            ("layers", "cache_groups"), (1, 3, 99), (0, 1, 7)
        )
    ),
]


@contextmanager
def served(
    geometry: dict[str, Any],
    *,
    context: int = CONTEXT,
    lanes: int = 2,
    slots: int = 2,
    **limits: Any,
) -> Iterator[DecoderOwner]:
    """An owner with a null decoder and one replay source."""
    handle = SourceHandle("replay", geometry, num_slots=slots)
    handle.start()
    owner = None
    try:
        decoder = NullDecoder(decoder_like(handle.manifest), context=context, lanes=lanes)
        owner = DecoderOwner(decoder, context=context, **limits)
        owner.attach(handle)
        yield owner
        assert owner.drain()
        owner.check_integrity()
    finally:
        if owner is not None:
            owner.close()
        handle.close()


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return [(seed * 5 + at * 3) % 31 for at in range(num_tokens)]


def expected(geometry: dict[str, Any], tokens: Sequence[int]) -> dict[tuple[int, int], bytes]:
    engine = open_replay(geometry)
    manifest = engine.manifest()
    plan = compile_plan(decoder_like(manifest), manifest.layouts[0], len(tokens), CONTEXT)
    sink = MemorySink(plan, ask(len(tokens)))
    engine.prefill_stream(tokens, sink)
    return sink.cells()


def published(owner: DecoderOwner, request: Request) -> dict[tuple[int, int], bytes]:
    """The cells of a held request, as landed."""
    plan, entry = owner.plan_of(request), request.entry
    assert entry is not None
    return {
        (copy.layer, copy.part): bytes(owner._decoder.read(entry, plan.layout, copy))
        for copy in plan.copies(Span(0, len(plan.layers), 0, plan.num_tokens))
    }


def what_came(request: Request) -> tuple[Any, ...]:
    assert request.outcome == "finished", request.reason
    return tuple(request.tokens), request.logits_digest, request.kv_digests


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [0, 16])
def test_all_routes_are_equal(layout: str, window: int) -> None:
    geometry = {**GEOMETRY, "layout": layout, "window": window}
    with served(geometry) as owner:
        for num_tokens in (1, 2, 15, 16, 17, 63):
            tokens = prompt(num_tokens)
            held = owner.submit(tokens, RequestOptions(hold=True, max_tokens=0))
            owner.run_until_done(held)
            assert published(owner, held) == expected(geometry, tokens)
            owner.release(held)
            came: dict[tuple[Any, ...], list[Any]] = {}
            for asked, prefill_chunk, digest in product(ROUTES, (0, 5), (False, True)):
                options = RequestOptions(
                    **asked,
                    prefill_chunk=prefill_chunk,
                    digest=digest,
                    max_tokens=1,
                    audit=True,
                )
                request = owner.submit(tokens, options)
                owner.run_until_done(request)
                came.setdefault(what_came(request), []).append(asked)
            assert len(came) == 1, came


def test_many_requests_over_few_lanes_and_slots() -> None:
    """All routes, lengths and seeds at once; each gets what it gets alone."""
    requests = [
        (prompt(1 + at * 7 % 60, seed=at % 5), ROUTES[at % len(ROUTES)], at) for at in range(120)
    ]
    alone: dict[tuple[int, ...], tuple[Any, ...]] = {}
    with served(GEOMETRY, lanes=1, slots=1) as owner:
        for tokens, _, _ in requests:
            if tuple(tokens) not in alone:
                request = owner.submit(tokens, RequestOptions(max_tokens=1, audit=True))
                owner.run_until_done(request)
                alone[tuple(tokens)] = what_came(request)
    with served(GEOMETRY, lanes=3, slots=4, prefetch_depth=2, chunk_nbytes=500) as owner:
        running = []
        for tokens, asked, at in requests:
            options = RequestOptions(**asked, max_tokens=1, audit=True, digest=at % 2 == 0)
            running.append(owner.submit(tokens, options))
        owner.run_until_done(*running)
        for (tokens, asked, _), request in zip(requests, running, strict=True):
            assert what_came(request) == alone[tuple(tokens)], asked
        assert owner.statistics()["dropped"] == {}


def test_imports_begin_before_the_prefill_ends() -> None:
    """Paced, streamed: all but the last layer group is there when the source-final input is."""
    geometry = {**GEOMETRY, "window": 0, "layer_ms": 15.0}
    with served(geometry) as owner:
        shares = {}
        for route in ("whole", "streamed"):
            options = RequestOptions(route=route, max_tokens=1)
            request = owner.submit(prompt(60), options)
            owner.run_until_done(request)
            assert request.measured is not None
            shares[route] = request.measured.nbytes_before_final / request.measured.kv_nbytes
        assert shares["whole"] == 0.0
        assert shares["streamed"] >= (GEOMETRY["layers"] - 2) / GEOMETRY["layers"]


@pytest.mark.parametrize("emission", ["layers", "cache_groups"])
def test_more_spans_than_messages(emission: str) -> None:
    """Far more announcements than may be unread: they are merged, and the bytes are the same."""
    geometry = {**GEOMETRY, "layers": 40, "heads": 1}
    with served(geometry) as owner:
        tokens = prompt(90)
        whole = owner.submit(tokens, RequestOptions(max_tokens=1, audit=True))
        owner.run_until_done(whole)
        options = RequestOptions(
            route="streamed",
            emission=emission,  # type: ignore[arg-type]
            chunk=2,
            max_tokens=1,
            audit=True,
            digest=True,
        )
        request = owner.submit(tokens, options)
        owner.run_until_done(request)
        assert what_came(request) == what_came(whole)
        assert request.measured is not None
        assert request.measured.groups <= MAX_PROGRESS
        assert request.measured.spans > MAX_PROGRESS


GIB = 1 << 30
BIG: dict[str, Any] = {
    # 2 parts x 8 heads x 128 x 2 bytes x 131,072 tokens = 0.5 GiB for each layer
    "layers": 8,
    "heads": 8,
    "head_dim": 128,
}
BIG_TOKENS = 131_072


@pytest.mark.heavy
def test_four_gib_and_131072_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes past 2^31 and 2^32 bytes; what travels stays small."""
    available = available_nbytes()
    if available < 12 * GIB:
        pytest.skip(f"needs 12 GiB of memory, {available / GIB:.1f} GiB are available")
    longest = 0

    def watch(sock: Any, payload: bytes, flags: int) -> None:
        nonlocal longest
        longest = max(longest, len(payload))
        check(sock, payload, flags)

    check = channel_module._check_incoming
    monkeypatch.setattr(channel_module, "_check_incoming", watch)
    begun_s = time.monotonic()
    tokens = prompt(BIG_TOKENS)
    with served(BIG, context=BIG_TOKENS, lanes=1, slots=1) as owner:
        options = RequestOptions(
            route="streamed", chunk=16_384, hold=True, max_tokens=0, digest=True
        )
        request = owner.submit(tokens, options)
        owner.run_until_done(request)
        assert request.outcome == "finished", request.reason
        plan = owner.plan_of(request)
        assert plan.nbytes == 4 * GIB
        assert plan.slot.nbytes > 1 << 32
        assert request.entry is not None
        # The digests prove each span; these ends prove that each lies where the plan says.
        engine = open_replay(BIG)
        for layer in (0, 7):
            for start in (0, BIG_TOKENS - 3):
                piece = Span(layer, layer + 1, start, start + 3)
                for copy in plan.copies(piece):
                    landed = bytes(owner._decoder.read(request.entry, plan.layout, copy))
                    assert landed == one_piece(engine, tokens, copy.layer, copy.part, start)
        owner.release(request)
    assert 0 < longest < 64 << 10
    assert time.monotonic() - begun_s < 120.0  # 40 s on two busy cores


def one_piece(engine: Any, tokens: Sequence[int], layer: int, part: int, start: int) -> bytes:
    """Three positions of a part as the engine writes them, made without the other 4 GiB."""
    nbytes = 3 * BIG["head_dim"] * 2
    buffer = memoryview(bytearray(BIG["heads"] * nbytes))
    region = Region(0, BIG["heads"], nbytes, nbytes)
    seed = zlib.crc32(array("I", tokens).tobytes())
    engine._fill(Cells(buffer, region, layer, part, start, start + 3), seed)
    return region_bytes(buffer, region)


def test_the_worker_handle_gives_the_same_on_every_route() -> None:
    """`SubprocessPrefillWorker` is the same machinery behind a Future."""
    with SubprocessPrefillWorker("replay", GEOMETRY, context=CONTEXT) as worker:
        tokens = prompt(40)
        results = [
            worker.prefill(tokens, RequestOptions(**asked, digest=True)).result(30.0)
            for asked in ROUTES
        ]
        assert all(result == results[0] for result in results)
        cells = expected(GEOMETRY, tokens)
        parts = {
            (layer, part): results[0].parts[layer][part]
            for layer in range(GEOMETRY["layers"])
            for part in range(2)
        }
        assert parts == cells
