"""An engine's own cache: what a kept prompt may serve, with the bits of a cold run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.backends import torch as torch_backend
from headrace.engine.loading import LoadedModel
from headrace.engine.own_cache import OwnCache, shortened
from headrace.engine.pieces import pieces
from headrace.engine.prefill import Seed, needed_rows
from headrace.errors import Cancelled, LocalProtocolError
from headrace.geometry import Full, Kind, Layer, Part, Shared, Sliding
from headrace.messages import Route
from tests.e2e.families import (
    FAMILIES,
    WINDOW,
    FakeSink,
    decoder_of,
    directory_of,
    make_prompt,
    make_sink,
    options,
)

PARTS = (Part("k", 1, 2, "float32"), Part("v", 1, 2, "float32"))
ROW = 2 * 2 * 4


def layers_of(*kinds: Kind) -> list[Layer]:
    parts = [() if isinstance(kind, Shared) else PARTS for kind in kinds]
    pairs = zip(kinds, parts, strict=True)
    return [Layer(at, f"layers.{at}", kind, own) for at, (kind, own) in enumerate(pairs)]


FULL = layers_of(Full(), Shared("layers.0"))
HYBRID = layers_of(Sliding(4, 3), Full())


def seed_of(layers: Sequence[Layer], num_tokens: int) -> Seed:
    """Rows that say which position they are."""
    states: list[tuple[torch.Tensor, torch.Tensor] | None] = []
    for layer in layers:
        first = num_tokens - needed_rows(layer, num_tokens)
        rows = torch.arange(first, num_tokens, dtype=torch.float32)[None, :, None].expand(1, -1, 2)
        states.append((rows, rows + 0.5) if layer.parts else None)
    return Seed(num_tokens, tuple(states))


def put(
    cache: OwnCache,
    tokens: Sequence[int],
    layers: Sequence[Layer] = FULL,
    cuts: Sequence[int] = (),
    prefill_chunk: int = 0,
) -> None:
    cache.put(tokens, cuts, prefill_chunk, seed_of(layers, len(tokens)))


def first_rows(seed: Seed | None) -> list[float | None]:
    assert seed is not None
    return [None if states is None else float(states[0][0, 0, 0]) for states in seed.layers]


def test_a_prompt_serves_one_that_goes_on_from_its_end() -> None:
    cache = OwnCache(HYBRID, 1 << 20)
    put(cache, range(9), HYBRID)
    seed = cache.find(range(20), 9, (9,), 0)
    assert seed is not None
    assert seed.num_tokens == 9
    assert [states and states[0].shape[1] for states in seed.layers] == [3, 9]
    assert first_rows(seed) == [6.0, 0.0]
    assert cache.find([*range(8), 99, 100], 9, (9,), 0) is None
    assert cache.statistics() == {
        "own_cache_prompts": 1,
        "own_cache_nbytes": 12 * ROW,
        "own_cache_hits": 1,
        "own_cache_misses": 1,
    }


@pytest.mark.parametrize(
    ("kept", "asked", "start", "served"),
    [
        (((), 0), ((9,), 0), 9, True),
        (((), 4), ((9,), 4), 9, True),
        (((), 4), ((9,), 0), 9, False),
        (((), 0), ((9,), 4), 9, False),
        (((), 9), ((9,), 0), 9, True),  # one piece, whatever it was asked for as
        (((), 9), ((9,), 10), 9, True),
        (((), 4), ((8,), 4), 8, True),
        (((), 4), ((8,), 8), 8, False),
        (((), 4), ((7,), 4), 7, False),  # no piece of it ends there
        (((5,), 0), ((5,), 0), 5, True),
        (((5,), 3), ((5, 9), 3), 9, True),
        (((5,), 3), ((9,), 3), 9, False),
        (((), 0), ((5, 9), 0), 9, False),
        (((2, 5), 0), ((2,), 0), 2, True),
    ],
)
def test_pieces_must_agree_up_to_the_start(
    kept: tuple[tuple[int, ...], int],
    asked: tuple[tuple[int, ...], int],
    start: int,
    served: bool,
) -> None:
    cache = OwnCache(FULL, 1 << 20)
    put(cache, range(9), FULL, *kept)
    seed = cache.find(range(15), start, *asked)
    assert (seed is not None) is served
    if seed is not None:
        assert seed.num_tokens == start
        assert seed.layers[0] is not None
        assert seed.layers[0][0][0, :, 0].tolist() == list(range(start))


@pytest.mark.parametrize(("num_tokens", "start"), [(9, 8), (9, 4), (4, 3), (5, 2)])
def test_a_sliding_layer_without_the_rows_is_a_miss(num_tokens: int, start: int) -> None:
    cache = OwnCache(HYBRID, 1 << 20)
    put(cache, range(num_tokens), HYBRID, cuts=(start,))
    assert cache.find(range(20), start, (start,), 0) is None


@pytest.mark.parametrize("start", [1, 2, 3])
def test_below_the_window_a_sliding_layer_has_all_rows(start: int) -> None:
    cache = OwnCache(HYBRID, 1 << 20)
    put(cache, range(3), HYBRID, prefill_chunk=1)
    seed = cache.find(range(20), start, (start,), 1)
    assert first_rows(seed) == [0.0, 0.0]


def test_the_oldest_use_goes_first_and_the_bytes_are_bounded() -> None:
    cache = OwnCache(FULL, 30 * ROW)
    for first in (0, 100, 200):
        put(cache, range(first, first + 10))
    assert cache.find(range(20), 10, (10,), 0) is not None
    put(cache, range(300, 305))
    assert cache.find(range(100, 120), 10, (10,), 0) is None
    assert cache.find(range(20), 10, (10,), 0) is not None
    assert cache.find(range(200, 220), 10, (10,), 0) is not None
    assert cache.statistics()["own_cache_nbytes"] == 25 * ROW
    put(cache, range(31))
    assert cache.statistics()["own_cache_prompts"] == 3, "one too large to keep drives none out"
    cache.clear()
    assert cache.statistics()["own_cache_nbytes"] == 0


def test_the_same_computation_is_kept_once() -> None:
    cache = OwnCache(FULL, 1 << 20)
    put(cache, range(10))
    put(cache, range(10), prefill_chunk=10)
    assert cache.statistics()["own_cache_nbytes"] == 10 * ROW
    put(cache, range(10), prefill_chunk=9)
    assert cache.statistics()["own_cache_prompts"] == 2


def test_sizes_and_cuts_are_checked() -> None:
    with pytest.raises(LocalProtocolError, match="-1 bytes"):
        OwnCache(FULL, -1)
    with pytest.raises(LocalProtocolError, match="cuts at"):
        OwnCache(FULL, 1).find(range(10), 10, (10,), 0)
    assert shortened(FULL, seed_of(FULL, 5), 6) is None


@settings(max_examples=200, deadline=None, database=None)
@given(st.data())
def test_bytes_stay_counted(data: st.DataObject) -> None:
    """After any puts and finds the bytes are those of what is kept, and within the bound."""
    cache = OwnCache(HYBRID, 40 * ROW)
    for _ in range(data.draw(st.integers(1, 12))):
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=2, max_size=20))
        chunk = data.draw(st.integers(0, 5))
        if data.draw(st.booleans()):
            put(cache, tokens, HYBRID, prefill_chunk=chunk)
            continue
        start = data.draw(st.integers(1, len(tokens) - 1))
        seed = cache.find(tokens, start, (start,), chunk)
        assert seed is None or first_rows(seed) == [max(0.0, start - 3.0), 0.0]
    kept = list(cache._kept.values())
    assert cache.statistics()["own_cache_nbytes"] == sum(seed.nbytes for seed in kept) <= 40 * ROW
    for key, seed in cache._kept.items():
        assert key.pieces == tuple(
            pieces(seed.num_tokens, 0, [stop for _, stop in key.pieces[:-1]])
        )


# In the engine.


def engine_of(family: str, nbytes: int = 1 << 24) -> torch_backend.TorchEngine:
    return torch_backend.open({"model": str(directory_of(family)), "own_cache_nbytes": nbytes})


def prefill(
    engine: torch_backend.TorchEngine, family: str, tokens: Sequence[int], **asked: Any
) -> FakeSink:
    route: Route = asked.pop("route", "streamed")
    given = options(route, len(tokens), **asked)
    sink = make_sink(engine.manifest(), decoder_of(family).manifest(), given)
    engine.prefill_stream(tokens, sink, given.start)
    return sink


def hits(engine: torch_backend.TorchEngine) -> tuple[int, int]:
    counts = engine.statistics()
    return counts["own_cache_hits"], counts["own_cache_misses"]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_hit_gives_the_bits_of_a_miss(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On all routes; a hit computes only what comes after the start."""
    engine, cold = engine_of(family), engine_of(family, 0)
    assert (engine.manifest().prefix, cold.manifest().prefix) == ("own_cache", "recompute")
    tokens = make_prompt(43)
    computed: list[int] = []
    forward = LoadedModel.forward

    def counting(self: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        computed.append(ids.shape[1])
        return forward(self, ids, cache)

    routes: tuple[Route, ...] = ("whole", "chunked", "streamed")
    for start, route in zip((WINDOW - 1, WINDOW + 4, 42), routes, strict=True):
        asked = {"start": start, "cuts": (start,), "prefill_chunk": 9, "route": route}
        prefill(engine, family, tokens[:start], prefill_chunk=9)
        with monkeypatch.context() as patched:
            patched.setattr(LoadedModel, "forward", counting)
            warm = prefill(engine, family, tokens, **asked)
        assert sum(computed) == 43 - start
        computed.clear()
        missed = prefill(cold, family, tokens, **asked)
        assert (warm.cells(), warm.logits) == (missed.cells(), missed.logits)
    assert hits(engine) == (3, 0)


def test_a_turn_of_a_conversation_goes_on_from_the_last() -> None:
    """Each prompt begins with the one before; each is computed from its end, by the same cuts."""
    engine, cold = engine_of("gemma3"), engine_of("gemma3", 0)
    tokens = make_prompt(60)
    cuts: tuple[int, ...] = ()
    for stop in (12, 30, 31, 60):
        asked = {"start": cuts[-1] if cuts else 0, "cuts": cuts, "prefill_chunk": 8}
        warm, missed = (prefill(each, "gemma3", tokens[:stop], **asked) for each in (engine, cold))
        assert (warm.cells(), warm.logits) == (missed.cells(), missed.logits)
        cuts = (*cuts, stop)
    assert hits(engine) == (3, 0)


def test_what_was_withdrawn_or_failed_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("gemma3")
    tokens = make_prompt(20)
    given = options("streamed", 20)
    for at in range(5):
        sink = make_sink(engine.manifest(), decoder_of("gemma3").manifest(), given)
        sink.cancel_at_write = at if at < 4 else None
        if at == 4:
            monkeypatch.setattr(sink, "final", lambda *_, **__: cancel())
        with pytest.raises(Cancelled):
            engine.prefill_stream(tokens, sink)
        assert engine.statistics()["own_cache_prompts"] == 0
    prefill(engine, "gemma3", tokens)
    assert engine.statistics()["own_cache_prompts"] == 1
    engine.close()
    assert engine.statistics()["own_cache_prompts"] == 0


def cancel() -> None:
    raise Cancelled("cancelled by the test")


def test_without_an_own_cache_nothing_is_kept() -> None:
    engine = engine_of("llama", 0)
    prefill(engine, "llama", make_prompt(20))
    prefill(engine, "llama", make_prompt(20), start=5, cuts=(5,))
    assert set(engine.statistics().values()) == {0}
