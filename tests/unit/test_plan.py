"""The plan: the transfer set, and byte ranges that are exact, disjoint and inside the slot."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import Refused
from headrace.geometry import (
    ITEMSIZE,
    Emission,
    Full,
    Kind,
    Latent,
    Layer,
    Layout,
    Manifest,
    Part,
    Shared,
    Sliding,
    State,
)
from headrace.ids import Span
from headrace.plan import Copy, Plan, Region, compile_plan, live_window, slot_layout
from tests.unit.protocol.builders import (
    CONTEXT,
    FEW,
    HYBRID,
    PARTS,
    WINDOW,
    cells_of,
    decoder_manifest,
    geometries,
    make_plan,
    spans_in,
)

Geometry = tuple[Manifest, Layout, int, int]
EMISSIONS: tuple[Emission, ...] = ("layers", "cache_groups")


def bytes_of(region: Region) -> list[int]:
    """Every byte of a region, in its order."""
    return [
        region.offset + row * region.stride + at
        for row in range(region.rows)
        for at in range(region.row_nbytes)
    ]


def place_cells(plan: Plan) -> dict[tuple[int, int, int, int], int]:
    """The slow reference: the offset of each (layer, part, head, position), one after the other."""
    offset = plan.slot.kv_offset
    places = {}
    for layer in plan.layers:
        live = {
            "Full": plan.num_tokens,
            "Shared": 0,
            "Sliding": min(getattr(layer.kind, "tail", 0), plan.num_tokens),
        }[type(layer.kind).__name__]
        positions = range(plan.num_tokens - live, plan.num_tokens)
        for number, part in enumerate(layer.parts):
            heads = range(part.heads)
            order = (
                [(head, at) for head in heads for at in positions]
                if plan.layout == "head_major"
                else [(head, at) for at in positions for head in heads]
            )
            for head, at in order:
                places[layer.index, number, head, at] = offset
                offset += part.head_dim * ITEMSIZE[part.dtype]
            offset += -offset % 64
    return places


def test_every_position_of_a_full_layer_is_carried() -> None:
    assert live_window(Layer(0, "a", Full(), PARTS), 9) == (0, 9)


@pytest.mark.parametrize("tail", [WINDOW, WINDOW - 1, 0])
@pytest.mark.parametrize("num_tokens", [1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 50])
def test_the_live_tail_of_a_sliding_layer_is_carried(tail: int, num_tokens: int) -> None:
    lo, hi = live_window(Layer(0, "a", Sliding(WINDOW, tail), PARTS), num_tokens)
    assert list(range(lo, hi)) == [at for at in range(num_tokens) if at >= num_tokens - tail]


@pytest.mark.parametrize("num_tokens", [1, WINDOW, 50])
def test_a_shared_layer_carries_nothing(num_tokens: int) -> None:
    lo, hi = live_window(Layer(0, "a", Shared("b"), ()), num_tokens)
    assert lo == hi


@pytest.mark.parametrize(("kind", "word"), [(Latent(), "latent"), (State(), "state")])
def test_a_kind_that_is_not_built_has_no_window(kind: Kind, word: str) -> None:
    with pytest.raises(Refused, match=f"layer a: {word} layers are not supported"):
        live_window(Layer(0, "a", kind, PARTS), 9)


@pytest.mark.parametrize("num_tokens", [1, 2, WINDOW - 1, WINDOW, WINDOW + 1])
def test_the_transfer_set_of_a_hybrid_model(num_tokens: int) -> None:
    plan = make_plan(num_tokens)
    live = [hi - lo for lo, hi in plan.windows]
    n = num_tokens
    assert live == [min(n, WINDOW), n, min(n, WINDOW - 1), 0, n]
    assert plan.nbytes == plan.span_nbytes(plan.whole()) == 48 * sum(live)


@pytest.mark.parametrize(
    ("num_tokens", "text"), [(0, "empty"), (-1, "empty"), (CONTEXT + 1, "raise --context")]
)
def test_a_prompt_that_cannot_fit_is_refused(num_tokens: int, text: str) -> None:
    with pytest.raises(Refused, match=text) as refusal:
        make_plan(num_tokens)
    assert refusal.value.field == "prompt"


def test_a_prompt_as_long_as_the_context_fits() -> None:
    assert make_plan(CONTEXT).whole() == Span(0, len(HYBRID), 0, CONTEXT)


def test_the_areas_of_a_slot_are_aligned_and_follow_each_other() -> None:
    slot = slot_layout(decoder_manifest(), CONTEXT)
    assert slot.prompt_offset == 0
    assert slot.logits_offset >= 4 * CONTEXT
    assert slot.logits_nbytes == 11 * 4
    assert slot.kv_offset >= slot.logits_offset + slot.logits_nbytes
    assert not [at for at in (slot.logits_offset, slot.kv_offset, slot.nbytes) if at % 4096]


@FEW
@given(geometries())
def test_every_cell_has_its_own_bytes_inside_the_slot(geometry: Geometry) -> None:
    manifest, layout, num_tokens, context = geometry
    plan = compile_plan(manifest, layout, num_tokens, context)
    copies = plan.copies(plan.whole())
    taken = [at for copy in copies for at in bytes_of(copy.source)]
    assert len(set(taken)) == len(taken) == plan.nbytes
    assert all(plan.slot.kv_offset <= at < plan.slot.nbytes for at in taken)
    assert plan.slot == slot_layout(manifest, context)


@FEW
@given(st.data(), geometries())
def test_a_span_is_where_a_walk_over_its_cells_finds_it(
    data: st.DataObject, geometry: Geometry
) -> None:
    plan = compile_plan(*geometry)
    places = place_cells(plan)
    span = data.draw(spans_in(len(plan.layers), plan.num_tokens))
    assert sum(copy.nbytes for copy in plan.copies(span)) == plan.span_nbytes(span)
    told: Counter[tuple[int, int, int, int]] = Counter()
    for copy in plan.copies(span):
        part = plan.layers[copy.layer].parts[copy.part]
        heads, positions = range(part.heads), range(copy.start, copy.stop)
        order = (
            [(head, at) for head in heads for at in positions]
            if plan.layout == "head_major"
            else [(head, at) for at in positions for head in heads]
        )
        cells = [(copy.layer, copy.part, head, at) for head, at in order]
        told.update(cells)
        assert bytes_of(copy.source) == [
            places[cell] + at for cell in cells for at in range(part.head_nbytes)
        ]
    inside = [
        cell
        for cell in places
        if span.layer_start <= cell[0] < span.layer_stop and span.start <= cell[3] < span.stop
    ]
    assert told == Counter(inside)


@FEW
@given(st.data(), geometries(), st.integers(0, 400))
def test_the_pieces_of_a_cut_hold_its_cells_once_each_and_keep_to_the_budget(
    data: st.DataObject, geometry: Geometry, budget: int
) -> None:
    plan = compile_plan(*geometry)
    span = data.draw(spans_in(len(plan.layers), plan.num_tokens))
    pieces = plan.cut(span, budget)
    assert sorted(cells_of(plan, *pieces)) == sorted(cells_of(plan, span))
    for piece in pieces:
        assert plan.span_nbytes(piece) <= budget or len(cells_of(plan, piece)) == 1


def test_whole_layers_stay_together_as_long_as_they_fit() -> None:
    plan = make_plan(8, *HYBRID)  # 4, 8, 3, 0 and 8 cells of 48 bytes
    assert plan.cut(plan.whole(), 1 << 20) == [plan.whole()]
    assert plan.cut(plan.whole(), 12 * 48) == [Span(0, 2, 0, 8), Span(2, 5, 0, 8)]
    assert plan.cut(Span(1, 2, 0, 8), 3 * 48) == [
        Span(1, 2, a, b) for a, b in ((0, 3), (3, 6), (6, 8))
    ]


@FEW
@given(geometries(), st.integers(1, 6), st.sampled_from(EMISSIONS))
def test_the_layer_groups_hold_each_owning_layer_once(
    geometry: Geometry, size: int, emission: Emission
) -> None:
    plan = compile_plan(*geometry)
    groups = plan.layer_groups(size, emission)
    emitted = [layer for group in groups for run in group for layer in run]
    owning = [layer for layer, (lo, hi) in enumerate(plan.windows) if lo < hi]
    assert len(set(emitted)) == len(emitted)
    assert [layer for layer in sorted(emitted) if layer in owning] == owning
    for group in groups:
        assert sum(map(len, group)) <= size
        assert all(a.stop < b.start for a, b in pairwise(group))
        assert any(layer in owning for run in group for layer in run)
        if emission == "cache_groups":
            members = [plan.layers[layer] for run in group for layer in run]
            assert len({(layer.kind, layer.parts) for layer in members}) == 1
    assert [group[-1].stop for group in groups] == sorted(group[-1].stop for group in groups)


def test_layer_groups_by_cache_group_need_not_be_neighbours() -> None:
    kinds = (Sliding(4, 4), Full(), Sliding(4, 4), Full(), Shared("layers.3"))
    plan = make_plan(8, *kinds)
    assert plan.layer_groups(2, "cache_groups") == [
        (range(1), range(2, 3)),
        (range(1, 2), range(3, 4)),
    ]
    assert plan.layer_groups(2, "layers") == [(range(2),), (range(2, 4),)]
    assert plan.layer_groups(99, "layers") == [(range(5),)]


@pytest.mark.parametrize("size", [0, -1])
@pytest.mark.parametrize("emission", EMISSIONS)
def test_a_layer_group_of_no_layers_is_refused(size: int, emission: Emission) -> None:
    with pytest.raises(Refused) as refusal:
        make_plan(4).layer_groups(size, emission)
    assert refusal.value.field == "group_layers"


def test_both_ends_compile_one_plan_however_the_layers_are_listed() -> None:
    manifest = decoder_manifest()
    listed = msgspec.structs.replace(manifest, layers=manifest.layers[::-1])
    plans = [compile_plan(m, "head_major", 9, CONTEXT) for m in (manifest, listed)]
    assert plans[0].copies(plans[0].whole()) == plans[1].copies(plans[1].whole())


@pytest.mark.parametrize("layout", ["head_major", "token_major"])
def test_sizes_past_32_bits_are_exact_integers(layout: Layout) -> None:
    n = 131_072
    parts = (Part("k", 8, 256, "bfloat16"), Part("v", 8, 256, "bfloat16"))
    model = tuple(Layer(i, f"layers.{i}", Full(), parts) for i in range(64))
    plan = compile_plan(decoder_manifest(layers=model), layout, n, n)
    layer_nbytes = 2 * 8 * 256 * 2 * n
    assert plan.nbytes == 64 * layer_nbytes == 1 << 36
    last: Copy = plan.copies(Span(63, 64, n - 1, n))[-1]
    end = last.source.offset + (last.source.rows - 1) * last.source.stride + last.source.row_nbytes
    assert end == plan.slot.kv_offset + plan.nbytes == plan.slot.nbytes
    pieces = plan.cut(plan.whole(), (1 << 32) + 8)
    assert sum(map(plan.span_nbytes, pieces)) == 1 << 36


def test_a_slot_for_131072_tokens() -> None:
    n = 131_072
    slot = slot_layout(decoder_manifest(Sliding(1024, 1024), Full()), n)
    assert (slot.logits_offset, slot.logits_nbytes) == (4 * n, 44)
    assert slot.kv_offset == 4 * n + 4096
    assert slot.nbytes == slot.kv_offset + 48 * (1024 + n)


def test_a_larger_prompt_never_needs_more_than_the_slot_holds() -> None:
    for n in range(1, CONTEXT + 1):
        plan = make_plan(n)
        ends = [b for copy in plan.copies(plan.whole()) for b in bytes_of(copy.source)[-1:]]
        assert max(ends) < plan.slot.nbytes


def test_a_span_by_layer_has_the_same_cells_and_no_empty_parts() -> None:
    plan = make_plan(9, Full(), Sliding(4, 3), Sliding(1, 0), Full())
    span = Span(0, 4, 2, 7)
    parts = plan.by_layer(span)
    assert parts == [Span(0, 1, 2, 7), Span(1, 2, 2, 7), Span(3, 4, 2, 7)]
    assert list(cells_of(plan, *parts)) == list(cells_of(plan, span))
    assert plan.by_layer(Span(2, 3, 0, 9)) == []


# Positions that the decoder has kept.


@given(geometries(), st.data())
@FEW
def test_a_plan_from_a_position_carries_the_cells_from_there_and_no_others(
    geometry: Geometry, data: st.DataObject
) -> None:
    manifest, layout, num_tokens, context = geometry
    start = data.draw(st.integers(0, num_tokens - 1))
    whole = compile_plan(manifest, layout, num_tokens, context)
    rest = compile_plan(manifest, layout, num_tokens, context, start)
    kept = [cell for cell in cells_of(whole, whole.whole()) if cell[1] < start]
    assert sorted([*kept, *cells_of(rest, rest.whole())]) == sorted(cells_of(whole, whole.whole()))
    assert rest.nbytes == sum(copy.nbytes for copy in rest.copies(rest.whole()))
    assert rest.nbytes <= whole.nbytes
    assert rest.start == start


@pytest.mark.parametrize("start", [-1, 4, 5])
def test_a_plan_from_outside_the_prompt_is_refused(start: int) -> None:
    with pytest.raises(Refused, match=f"start {start} of a prompt of 4 tokens"):
        make_plan(4, start=start)
