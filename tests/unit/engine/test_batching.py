"""Batched decode: near the exact mode, and a row's logits are its own, bit by bit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import modeling_rope_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headrace.backends import cpu as cpu_backend
from headrace.backends.base import Entry
from headrace.engine.batching import (
    BatchedForward,
    Batching,
    Fed,
    RowTable,
    without_repeats,
)
from headrace.engine.lanes import Lane
from headrace.engine.layers import geometry
from headrace.engine.loading import LoadedModel, load_model
from headrace.errors import DeviceError, LocalProtocolError, Refused
from headrace.geometry import Layer
from headrace.plan import live_window
from tests.e2e import families
from tests.e2e.families import (
    CONTEXT,
    FAMILIES,
    WINDOW,
    directory_of,
    hand_off,
    make_model,
    make_prompt,
    options,
    source_of,
)

BATCH = 4
STEPS = 3 * WINDOW  # past the window's edge, and past the end of a sliding layer's buffer
BOUNDS = {"float32": 1e-4, "bfloat16": 0.05}
"""Of the greatest difference from the exact mode's logits, as a share of the greatest logit. The
worst that was seen is 2.2e-5 and 2.0e-2, both on gemma4; in most families it is a tenth of that."""

Row = tuple[Lane, int] | None


@functools.cache
def model_of(family: str, dtype: str = "float32") -> LoadedModel:
    return load_model(directory_of(family), dtype=dtype)


def layers_of(model: LoadedModel) -> tuple[Layer, ...]:
    return geometry(model.config, "decoder", model.dtype, CONTEXT)


def filled(model: LoadedModel, num_tokens: int, seed: int = 0) -> Lane:
    """A published lane of random cells; every row but its live ones is NaN."""
    layers = layers_of(model)
    lane = Lane(layers, CONTEXT)
    spoil(lane)
    lane.begin(num_tokens)
    generator = torch.Generator().manual_seed(seed)
    for at, layer in enumerate(layers):
        start, stop = live_window(layer, num_tokens)
        for part in range(len(layer.parts) if start < stop else 0):
            cells = lane.cells(at, part, start, stop)
            cells.copy_(torch.randn(cells.shape, generator=generator))
    lane.publish()
    return lane


def spoil(lane: Lane) -> None:
    """NaN in all rows of all layers."""
    for parts in lane.storage.parts:
        for part in parts:
            part.fill_(float("nan"))


def spoil_beyond(lane: Lane) -> None:
    """NaN in all rows that the next step must not read."""
    for rows in lane.cache.layers:
        if not hasattr(rows, "origin"):
            continue
        stop = rows.length - rows.origin
        start = max(0, stop - (rows.sliding_window - 1)) if rows.is_sliding else 0
        for held in (rows.keys, rows.values):
            held[:, :, :start] = float("nan")
            held[:, :, stop:] = float("nan")


def copy_of(model: LoadedModel, lane: Lane) -> list[bytes]:
    return [
        bytes(part.contiguous().view(torch.uint8).numpy().tobytes())
        for parts in lane.storage.parts
        for part in parts
    ]


def exact(model: LoadedModel, lane: Lane, token: int) -> torch.Tensor:
    return model.forward(torch.tensor([[token]]), lane.cache)


# Against the exact mode.


def differs_from_exact(family: str, dtype: str) -> tuple[float, list[int], list[int]]:
    """The greatest difference, relative; and both sides' choices when fed the same tokens."""
    model = model_of(family, dtype)
    forward = BatchedForward(model, BATCH)
    lengths = (1, WINDOW - 1, 37)
    ours = [filled(model, n, seed=n) for n in lengths]
    theirs = [filled(model, n, seed=n) for n in lengths]
    tokens = [5] * len(lengths)
    worst = greatest = 0.0
    got, wanted = [], []
    for _ in range(STEPS):
        rows: list[Row] = [*zip(ours, tokens, strict=True), None]
        computed = forward(rows)
        for at, lane in enumerate(theirs):
            logits = exact(model, lane, tokens[at])
            worst = max(worst, float((logits - computed[at]).abs().max()))
            greatest = max(greatest, float(logits.abs().max()))
            tokens[at] = int(logits.argmax())
            got.append(int(computed[at].argmax()))
            wanted.append(tokens[at])
    return worst / greatest, got, wanted


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_near_the_exact_modes(family: str) -> None:
    worst, got, wanted = differs_from_exact(family, "float32")
    assert worst <= BOUNDS["float32"]
    assert got == wanted


@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma4_shared", "gpt_oss"])
def test_logits_are_near_the_exact_modes_in_half_precision(family: str) -> None:
    worst, _, _ = differs_from_exact(family, "bfloat16")
    assert worst <= BOUNDS["bfloat16"]


Call = tuple[tuple[int, ...], tuple[int, ...], bool, dict[str, object]]


@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma4_shared"])
def test_attention_is_called_as_in_the_exact_mode(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same shapes and strides, the same mask, the same options, its own position."""
    model = model_of(family)
    forward = BatchedForward(model, BATCH)
    calls: list[Call] = []
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def watched(
        module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        masked = mask is not None
        if masked:
            assert mask.shape[-1] == key.shape[2]
            assert bool(mask.all())
        held = (*key.shape, *key.stride(), *value.shape, *value.stride())
        told = {**options, "position_ids": options["position_ids"].tolist()}
        calls.append(((*query.shape, *query.stride()[1:]), held, masked, told))
        attended: tuple[torch.Tensor, None] = sdpa(module, query, key, value, mask, **options)
        return attended

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", watched)
    ours, theirs = filled(model, 10), filled(model, 10)
    for step in range(STEPS):
        forward([None, (ours, step), None, None])
        batched = calls.copy()
        calls.clear()
        exact(model, theirs, step)
        assert batched == calls
        calls.clear()


# A row's own.


def decoded(
    forward: BatchedForward,
    row: int,
    lane: Lane,
    company: Callable[[int], dict[int, tuple[Lane, int]]],
    *,
    spoils: bool = False,
) -> list[torch.Tensor]:
    """The logits of STEPS steps of `lane` in `row`, with what `company` has in the other rows."""
    rows = []
    for step in range(STEPS):
        others = company(step)
        if spoils:
            spoil_beyond(lane)
        fed: list[Row] = [others.get(at) for at in range(forward.batch)]
        fed[row] = lane, 3 + step
        rows.append(forward(fed)[row])
    assert not any(bool(logits.isnan().any()) for logits in rows)
    return rows


def alone(step: int) -> dict[int, tuple[Lane, int]]:
    return {}


def coming_and_going(
    model: LoadedModel, own: int, batch: int
) -> Callable[[int], dict[int, tuple[Lane, int]]]:
    """Companions of other lengths, one of NaN throughout; they enter, leave, and others follow."""
    lost = filled(model, 30, seed=1)
    spoil(lost)
    lanes = [lost, filled(model, 60, seed=2), filled(model, 1, seed=3)]
    late = filled(model, WINDOW, seed=4)
    others = [row for row in range(batch) if row != own]

    def company(step: int) -> dict[int, tuple[Lane, int]]:
        present: dict[int, tuple[Lane, int]] = {}
        for at, row in enumerate(others[: len(lanes)]):
            if (step + at * 7) % 20 < 13:
                present[row] = lanes[at], (step * 5 + at) % 100
        if step >= 25:
            present[others[-1]] = late, step
        return present

    return company


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("row", [0, 2])
def test_a_rows_logits_are_its_own(family: str, row: int) -> None:
    model = model_of(family)
    forward = BatchedForward(model, BATCH)
    wanted = decoded(forward, row, filled(model, 10), alone)
    company = coming_and_going(model, row, BATCH)
    got = decoded(forward, row, filled(model, 10), company)
    assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("batch", [2, 3, 5, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["gemma4", "qwen3_moe"])
def test_a_rows_logits_are_its_own_in_batches_of_any_size(
    family: str, dtype: str, batch: int
) -> None:
    model = model_of(family, dtype)
    forward = BatchedForward(model, batch)
    row = batch - 1
    wanted = decoded(forward, row, filled(model, 10), alone)
    company = coming_and_going(model, row, batch)
    assert all(map(torch.equal, decoded(forward, row, filled(model, 10), company), wanted))


@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma3n", "gpt_oss"])
def test_only_live_rows_are_read(family: str) -> None:
    model = model_of(family)
    forward = BatchedForward(model, BATCH)
    wanted = decoded(forward, 1, filled(model, 10), alone)
    got = decoded(forward, 1, filled(model, 10), alone, spoils=True)
    assert all(map(torch.equal, got, wanted))


def test_empty_rows_touch_no_lane() -> None:
    model = model_of("gemma3")
    batching = Batching(model, layers_of(model), BATCH)
    lanes = [filled(model, 20, seed=at) for at in range(BATCH)]
    before = [copy_of(model, lane) for lane in lanes]
    batching.step([Fed("one", lanes[0], 5)])
    batching.step([Fed("one", lanes[0], 6)])
    assert [copy_of(model, lane) for lane in lanes[1:]] == before[1:]
    assert copy_of(model, lanes[0]) != before[0]
    assert [lane.length for lane in lanes] == [22, 20, 20, 20]


# Rows, and who has them.


def test_holders_keep_their_rows_and_share_only_when_they_must() -> None:
    table = RowTable(3)
    assert [table.row_of(who) for who in "abc"] == [0, 1, 2]
    table.forget("b")
    table.forget("nobody")
    assert table.row_of("d") == 1
    assert [table.row_of(who) for who in "eacd"] == [0, 0, 2, 1]
    table.forget("a")
    assert table.row_of("f") == 0  # all rows have one holder
    table.forget("c")
    assert table.row_of("g") == 2


@pytest.mark.parametrize(
    ("rows", "forwards"),
    [
        ([], []),
        ([2, 0, 1], [[0, 1, 2]]),
        ([0, 0, 1, 0], [[0, 2], [1], [3]]),
        ([1, 0, 1, 0], [[0, 1], [2, 3]]),
    ],
)
def test_no_forward_repeats_a_row(rows: list[int], forwards: list[list[int]]) -> None:
    assert without_repeats(rows) == forwards


def test_more_sequences_than_rows_take_several_forwards() -> None:
    model = model_of("gemma3")
    together = Batching(model, layers_of(model), 2)
    apart = Batching(model, layers_of(model), 2)
    ours = [filled(model, 10 + at, seed=at) for at in range(5)]
    theirs = [filled(model, 10 + at, seed=at) for at in range(5)]
    for step in range(3):
        got = together.step([Fed(at, lane, step) for at, lane in enumerate(ours)])
        wanted = [apart.step([Fed(at, lane, step)])[0] for at, lane in enumerate(theirs)]
        assert all(map(torch.equal, got, wanted))
    assert [lane.length for lane in ours] == [13 + at for at in range(5)]


# What the module is afterwards.


@pytest.mark.parametrize("family", ["gemma3", "qwen3_moe", "gpt_oss"])
def test_the_model_is_as_it_was(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a step and after one that fails: the prefill runs the same modules."""
    model = model_of(family)
    was = model.config._attn_implementation, model.config._experts_implementation
    ids = torch.tensor([make_prompt(20)])

    def prefilled() -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = model.module(input_ids=ids).logits
            return logits

    wanted = prefilled()
    forward = BatchedForward(model, BATCH)
    row: list[Row] = [(filled(model, 5), 1), None, None, None]
    forward(row)
    assert torch.equal(prefilled(), wanted)
    monkeypatch.setattr(torch.nn.Linear, "forward", failing)
    with pytest.raises(DeviceError):
        forward(row)
    monkeypatch.undo()
    assert (model.config._attn_implementation, model.config._experts_implementation) == was
    assert torch.equal(prefilled(), wanted)


def failing(*_: Any) -> torch.Tensor:
    raise DeviceError("in the middle")


def test_all_advance_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that fails in its second forward is undone, also where rows were moved back."""
    decoders = [decoder_of_batch(lanes=3, decode_batch=2) for _ in range(2)]
    held = [published(decoder, (10, 12, WINDOW)) for decoder in decoders]
    calls = 0
    forward = torch.nn.Embedding.forward

    def second_fails(self: torch.nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise DeviceError("in the middle")
        return forward(self, ids)

    for step in range(STEPS):
        fed = [[(entry, step + at) for at, entry in enumerate(entries)] for entries in held]
        calls = 0
        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.Embedding, "forward", second_fails)
            with pytest.raises(DeviceError):
                decoders[0].decode_step(fed[0])
        rows = [decoder.decode_step(each) for decoder, each in zip(decoders, fed, strict=True)]
        assert [bytes(row) for row in rows[0]] == [bytes(row) for row in rows[1]]


def decoder_of_batch(lanes: int, decode_batch: int) -> cpu_backend.CpuDecoder:
    return cpu_backend.open(
        {
            "model": str(directory_of("gemma3")),
            "lanes": lanes,
            "context": CONTEXT,
            "decode_batch": decode_batch,
        }
    )


def published(decoder: cpu_backend.CpuDecoder, lengths: Sequence[int]) -> list[Entry]:
    source = source_of("gemma3")
    return [hand_off(source, decoder, make_prompt(n), options("whole", n))[1] for n in lengths]


def test_a_lane_that_was_freed_gives_its_row_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its next holder would take a forward of its own."""
    decoder = decoder_of_batch(lanes=2, decode_batch=2)
    first, second = published(decoder, (10, 20))
    decoder.decode_step([(first, 1), (second, 1)])
    decoder.free(second)
    (again,) = published(decoder, (10,))
    forwards = 0
    forward = torch.nn.Embedding.forward

    def counted(self: torch.nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        nonlocal forwards
        forwards += 1
        return forward(self, ids)

    monkeypatch.setattr(torch.nn.Embedding, "forward", counted)
    decoder.decode_step([(first, 1), (again, 1)])
    assert forwards == 1


def test_the_facts_tell_the_batch() -> None:
    assert decoder_of_batch(lanes=1, decode_batch=3).caps.decode_batch == 3
    assert decoder_of_batch(lanes=1, decode_batch=3).facts["decode_batch"] == 3
    assert decoder_of_batch(lanes=1, decode_batch=1).facts["decode_batch"] == 1
    for batch in (0, 257):
        with pytest.raises(Refused, match="decode_batch"):
            decoder_of_batch(lanes=1, decode_batch=batch)


# What is refused.


def test_a_batch_of_one_is_no_batch() -> None:
    with pytest.raises(Refused, match="2 or more"):
        BatchedForward(model_of("llama"), 1)


def test_a_forward_has_all_its_rows_and_a_sequence() -> None:
    forward = BatchedForward(model_of("llama"), BATCH)
    with pytest.raises(LocalProtocolError, match="1 rows in a forward of 4"):
        forward([(filled(model_of("llama"), 1), 1)])
    with pytest.raises(LocalProtocolError, match="without a sequence"):
        forward([None] * BATCH)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_depend_on_the_longest_row_are_refused(kind: str, tmp_path: Path) -> None:
    assert kind in modeling_rope_utils.ROPE_INIT_FUNCTIONS
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    if kind == "longrope":
        factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
        rope |= {**factors, "original_max_position_embeddings": 64}
    make_model(tmp_path, "LlamaConfig", {"rope_parameters": rope})
    with pytest.raises(Refused, match=f"{kind} positions") as refused:
        BatchedForward(load_model(tmp_path), BATCH)
    assert refused.value.field == "decode_batch"


@pytest.fixture
def head() -> tuple[LoadedModel, Any]:
    """A model whose last layer a test may replace."""
    model = load_model(directory_of("llama"))
    return model, model.module.lm_head.forward


def test_a_model_that_mixes_rows_is_refused(head: tuple[LoadedModel, Any]) -> None:
    model, forward = head

    def mixed(hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = forward(hidden)
        return logits + logits.mean(0, keepdim=True)

    model.module.lm_head.forward = mixed
    with pytest.raises(Refused, match="depends on the other rows; leave decode_batch out"):
        Batching(model, layers_of(model), BATCH)


def test_experts_that_meet_are_refused_where_they_run_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reason why experts run row by row: a product's shape is then what others chose."""
    model = model_of("qwen3_moe")
    seen = set()
    linear = torch.nn.functional.linear

    def watched(rows: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        seen.add((weight.shape, rows.shape[:-1].numel()))
        return linear(rows, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", watched)
    forward = BatchedForward(model, BATCH)
    forward([(filled(model, 5, seed=at), at) for at in range(BATCH)])
    counts = {count for _, count in seen}
    assert counts <= {1, BATCH}


def test_rows_that_round_otherwise_are_told(head: tuple[LoadedModel, Any]) -> None:
    model, forward = head
    assert Batching(model, layers_of(model), BATCH).rows_alike

    def by_row(hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = forward(hidden)
        return logits + torch.arange(len(logits))[:, None, None]

    model.module.lm_head.forward = by_row
    assert not Batching(model, layers_of(model), BATCH).rows_alike


def test_a_model_that_asks_its_cache_for_more_is_refused(head: tuple[LoadedModel, Any]) -> None:
    model, _ = head
    strange = replace(model, cache_argument="unheard_of")
    with pytest.raises(Refused, match="does not decode in batches"):
        Batching(strange, layers_of(model), BATCH)


def test_a_model_that_takes_one_rows_length_for_all_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its temperature follows the position that the cache tells, of which a batch has several."""
    tuned = {
        "layer_types": ["full_attention"] * 4,
        "no_rope_layers": [1, 0, 1, 0],
        "floor_scale": 4,
        "attn_scale": 0.5,
        "attn_temperature_tuning": True,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 64,
        "use_qk_norm": False,
        "moe_layers": [],
        "attention_chunk_size": None,
    }
    monkeypatch.setitem(families.FAMILIES, "tuned", ("Llama4TextConfig", tuned))
    model = model_of("tuned")
    with pytest.raises(Refused, match="depends on the other rows"):
        Batching(model, layers_of(model), 4)
