"""A prefill by pieces: from where it may go on, and that its bits are those of a run from 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from headrace.engine.loading import LoadedModel, load_model
from headrace.engine.pieces import pieces
from headrace.engine.prefill import Seed, TakenCache, needed_rows, run_prefill
from headrace.errors import LocalProtocolError
from headrace.geometry import Layer, Sliding
from headrace.messages import Route
from tests.e2e.families import (
    FAMILIES,
    WINDOW,
    decoder_of,
    directory_of,
    make_prompt,
    make_sink,
    options,
    source_of,
)

NUM_TOKENS = 40
BELOW_AT_ABOVE = (3, WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1, 33)


class States:
    """A taker that keeps a copy of all that it is shown, by layer and first position."""

    keep_full = False

    def __init__(self) -> None:
        self.begun: list[tuple[int, int]] = []
        self.taken: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def begin(self, start: int, stop: int) -> None:
        self.begun.append((start, stop))

    def take(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.taken[layer, self.begun[-1][0]] = keys.clone(), values.clone()

    def end(self, start: int, stop: int, cache: TakenCache) -> None:
        assert (start, stop) == self.begun[-1]


def run(
    family: str, tokens: Sequence[int], prefill_chunk: int = 0, **asked: Any
) -> tuple[States, torch.Tensor]:
    taker = States()
    logits, _ = run_prefill(
        model_of(family), layers_of(family), tokens, prefill_chunk, taker, **asked
    )
    return taker, logits


def model_of(family: str) -> LoadedModel:
    return load_model(directory_of(family))


def layers_of(family: str) -> tuple[Layer, ...]:
    return source_of(family).manifest().layers


def seed_of(family: str, tokens: Sequence[int], prefill_chunk: int = 0) -> Seed:
    """What a run over `tokens` leaves for a later one."""
    kept: list[Seed] = []
    run(family, tokens, prefill_chunk, keep=kept.append)
    return kept[0]


@pytest.mark.parametrize(
    ("prefill_chunk", "cuts", "wanted"),
    [
        (0, (), [(0, 20)]),
        (8, (), [(0, 8), (8, 16), (16, 20)]),
        (20, (), [(0, 20)]),
        (99, (), [(0, 20)]),
        (0, (7,), [(0, 7), (7, 20)]),
        (8, (9,), [(0, 8), (8, 9), (9, 17), (17, 20)]),
        (8, (8,), [(0, 8), (8, 16), (16, 20)]),
        (5, (1, 2, 19), [(0, 1), (1, 2), (2, 7), (7, 12), (12, 17), (17, 19), (19, 20)]),
    ],
)
def test_pieces(prefill_chunk: int, cuts: tuple[int, ...], wanted: list[tuple[int, int]]) -> None:
    assert pieces(20, prefill_chunk, cuts) == wanted


@pytest.mark.parametrize("cuts", [(0,), (-1,), (20,), (21,), (5, 5), (7, 5), (5, 7, 6), (0, 5)])
def test_cuts_that_are_none_of_the_prompt(cuts: tuple[int, ...]) -> None:
    with pytest.raises(LocalProtocolError, match="cuts at"):
        pieces(20, 8, cuts)
    source = source_of("llama")
    asked = options("whole", 20, cuts=cuts)
    sink = make_sink(source.manifest(), decoder_of("llama").manifest(), asked)
    with pytest.raises(LocalProtocolError, match="cuts at"):
        source.prefill_stream(make_prompt(20), sink)
    assert sink.num_writes == 0


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("prefill_chunk", [0, 7])
def test_a_seeded_run_is_a_run_from_zero(family: str, prefill_chunk: int) -> None:
    """Every state of every layer and the logits, for seeds below, at and above the window."""
    tokens = make_prompt(NUM_TOKENS)
    for cut in BELOW_AT_ABOVE:
        cold, logits = run(family, tokens, prefill_chunk, cuts=(cut,))
        seed = seed_of(family, tokens[:cut], prefill_chunk)
        warm, seeded = run(family, tokens, prefill_chunk, cuts=(cut,), seed=seed)
        assert torch.equal(seeded, logits), cut
        assert warm.begun == [piece for piece in cold.begun if piece[0] >= cut]
        assert warm.taken.keys() == {key for key in cold.taken if key[1] >= cut}
        for key, states in warm.taken.items():
            assert all(map(torch.equal, states, cold.taken[key])), (cut, key)


@pytest.mark.parametrize("family", ["gemma3", "gemma4_shared"])
def test_seeds_chain(family: str) -> None:
    """A seeded run leaves the same seed as the run from 0, also when its last piece is short."""
    tokens = make_prompt(NUM_TOKENS)
    seed = seed_of(family, tokens[:5])
    for cuts in ((5, 25), (5, 25, 26), (5, 25, 26, 39)):
        kept: list[Seed] = []
        stop = cuts[-1]
        seeded = {"cuts": cuts[:-1], "keep": kept.append}
        run(family, tokens[:stop], 6, seed=seed, **seeded)
        run(family, tokens[:stop], 6, **seeded)
        for warm, cold in zip(kept[0].layers, kept[1].layers, strict=True):
            assert (warm is None) == (cold is None)
            assert warm is None or all(map(torch.equal, warm, cold or ()))
        seed = kept[0]


def test_a_seed_is_read_only_and_as_small_as_it_can_be() -> None:
    seed = seed_of("gemma3", make_prompt(33))
    before = [(keys.clone(), values.clone()) for keys, values in filter(None, seed.layers)]
    for _ in range(2):
        run("gemma3", make_prompt(NUM_TOKENS), cuts=(33,), seed=seed)
    nbytes = 0
    for layer, states, old in zip(layers_of("gemma3"), seed.layers, before, strict=True):
        assert states is not None
        assert all(map(torch.equal, states, old))
        rows = WINDOW - 1 if isinstance(layer.kind, Sliding) else 33
        assert needed_rows(layer, 33) == rows == states[0].shape[1]
        nbytes += rows * layer.row_nbytes
        assert (
            sum(tensor.untyped_storage().nbytes() for tensor in states) == rows * layer.row_nbytes
        )
    assert seed.nbytes == nbytes


def test_a_seed_may_be_a_view_into_longer_rows() -> None:
    """As a decoder's lane is: rows of other positions lie around them."""
    tokens = make_prompt(NUM_TOKENS)
    seed = seed_of("gemma3", tokens[:25])

    def inside(tensor: torch.Tensor) -> torch.Tensor:
        rows = tensor.shape[1]
        wide = torch.full((tensor.shape[0], rows + 9, tensor.shape[2]), float("nan"))
        wide[:, 4 : 4 + rows] = tensor
        return wide[:, 4 : 4 + rows]

    views = tuple(states and (inside(states[0]), inside(states[1])) for states in seed.layers)
    _, logits = run("gemma3", tokens, cuts=(25,))
    _, seeded = run("gemma3", tokens, cuts=(25,), seed=Seed(25, views))
    assert torch.equal(seeded, logits)


@pytest.mark.parametrize(("cuts", "prefill_chunk"), [((), 0), ((24,), 0), ((26,), 9), ((), 10)])
def test_a_seed_where_no_piece_begins(cuts: tuple[int, ...], prefill_chunk: int) -> None:
    seed = seed_of("llama", make_prompt(25))
    with pytest.raises(LocalProtocolError, match="a seed of 25 positions, where no piece begins"):
        run("llama", make_prompt(NUM_TOKENS), prefill_chunk, cuts=cuts, seed=seed)


def test_a_seed_of_the_whole_prompt_leaves_nothing_to_compute() -> None:
    seed = seed_of("llama", make_prompt(25))
    with pytest.raises(LocalProtocolError, match="no piece begins"):
        run("llama", make_prompt(25), seed=seed)


def test_a_seed_of_other_shapes() -> None:
    seed = seed_of("gemma3", make_prompt(25))
    short = tuple(states and (states[0][:, 1:], states[1][:, 1:]) for states in seed.layers)
    with pytest.raises(LocalProtocolError, match=r"layers\.0\.k: .*14.*15"):
        run("gemma3", make_prompt(NUM_TOKENS), cuts=(25,), seed=Seed(25, short))


def test_another_forward_can_stand_in() -> None:
    model, calls = model_of("llama"), []

    def forward(ids: torch.Tensor, cache: Any) -> torch.Tensor:
        calls.append(tuple(ids.shape))
        return model.forward(ids, cache)

    _, logits = run("llama", make_prompt(20), 8, forward=forward)
    assert calls == [(1, 8), (1, 8), (1, 4)]
    assert torch.equal(logits, run("llama", make_prompt(20), 8)[1])


@pytest.mark.parametrize("family", ["gemma3", "gemma4_shared", "exaone4"])
def test_routes_agree_from_a_start(family: str) -> None:
    """All three routes emit [start, n) and nothing else, with the bytes of a cold run cut there."""
    source, decoder = source_of(family), decoder_of(family)
    tokens = make_prompt(43)
    routes: tuple[Route, ...] = ("whole", "chunked", "streamed")
    for start in (1, WINDOW - 1, WINDOW, 30, 42):
        cold = make_sink(
            source.manifest(),
            decoder.manifest(),
            options("whole", 43, prefill_chunk=9, cuts=(start,)),
        )
        source.prefill_stream(tokens, cold)
        for route in routes:
            asked = options(
                route, 43, chunk=4, group_layers=2, prefill_chunk=9, start=start, cuts=(start,)
            )
            sink = make_sink(source.manifest(), decoder.manifest(), asked)
            source.prefill_stream(tokens, sink, start)
            assert sink.logits == cold.logits
            for (layer, part), got in sink.cells().items():
                lo, hi = sink.plan.windows[layer]
                first = cold.plan.windows[layer][0]
                assert lo == max(start, first)
                shape = sink.plan.layers[layer].parts[part]
                wanted = cold.cells()[layer, part]
                stride = (hi - first) * shape.head_nbytes
                skip = (lo - first) * shape.head_nbytes
                heads = [wanted[at * stride :][skip:stride] for at in range(shape.heads)]
                assert got == b"".join(heads), (route, start, layer, part)


def test_a_start_must_be_the_plans_and_the_last_cut() -> None:
    source, decoder = source_of("llama"), decoder_of("llama")
    for start, cuts in ((5, ()), (5, (4,)), (5, (5, 6))):
        asked = options("whole", 20, start=start, cuts=cuts)
        sink = make_sink(source.manifest(), decoder.manifest(), asked)
        with pytest.raises(LocalProtocolError, match="not the last of the cuts"):
            source.prefill_stream(make_prompt(20), sink, start)
        assert sink.num_writes == 0
    for planned, start in ((0, 5), (5, 0), (5, 6)):
        asked = options("whole", 20, start=planned, cuts=(5, 6))
        sink = make_sink(source.manifest(), decoder.manifest(), asked)
        with pytest.raises(LocalProtocolError, match=f"the plan begins at {planned}"):
            source.prefill_stream(make_prompt(20), sink, start)
        assert sink.num_writes == 0
