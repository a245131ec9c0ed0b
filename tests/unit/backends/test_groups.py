"""The layer groups of positions, against a statement of which cells they must hold."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.backends.groups import LayerGroups, cut
from headrace.backends.null import decoder_like
from headrace.backends.replay import open as open_replay
from headrace.ids import Span
from headrace.messages import Prefill
from headrace.plan import compile_plan
from headrace.testing.sinks import MemorySink, ask

SOURCE = open_replay(
    {"layers": 6, "heads": 1, "head_dim": 4, "window": 8, "full_every": 3}
).manifest()
CONTEXT = 64


@st.composite
def cases(draw: st.DrawFn) -> tuple[MemorySink, int, int]:
    """A sink of any cut, and positions [start, stop) that are computed."""
    num_tokens = draw(st.integers(1, 40))
    begin = draw(st.integers(0, num_tokens - 1))
    asked: Prefill = ask(
        num_tokens,
        "streamed",
        group_layers=draw(st.integers(0, 7)),
        chunk=draw(st.integers(0, 12)),
        emission=draw(st.sampled_from(["layers", "cache_groups"])),
        start=begin,
        cuts=(begin,) if begin else (),
    )
    plan = compile_plan(decoder_like(SOURCE), "head_major", num_tokens, CONTEXT, begin)
    start = draw(st.integers(0, num_tokens - 1))
    return MemorySink(plan, asked), start, draw(st.integers(start + 1, num_tokens))


def cells_of(sink: MemorySink, spans: tuple[Span, ...]) -> list[tuple[int, int]]:
    return [
        (copy.layer, at)
        for span in spans
        for copy in sink.plan.copies(span)
        if copy.part == 0
        for at in range(copy.start, copy.stop)
    ]


@given(cases())
def test_the_groups_hold_each_cell_of_the_positions_once(
    case: tuple[MemorySink, int, int],
) -> None:
    sink, start, stop = case
    groups = LayerGroups(sink, sink.options.start).of(start, stop)
    distinct = {id(group): group for group in groups.values()}.values()
    told = [
        each
        for group in distinct
        for batch in group.batches
        for each in cells_of(sink, batch.spans)
    ]
    wanted = [
        (layer, at)
        for layer, (lo, hi) in enumerate(sink.plan.windows)
        for at in range(max(lo, start), min(hi, stop))
    ]
    assert sorted(told) == wanted
    assert set(groups) == {layer for layer, _ in wanted}


@given(cases())
def test_a_group_ends_with_its_last_layer_and_keeps_to_the_chunk(
    case: tuple[MemorySink, int, int],
) -> None:
    sink, start, stop = case
    groups = LayerGroups(sink, sink.options.start).of(start, stop)
    size = sink.options.group_layers or 6
    for layer, group in groups.items():
        members = [each for each, other in groups.items() if other is group]
        assert group.last == max(members)
        assert layer in members
        assert len(members) <= size
        if sink.options.emission == "cache_groups":
            assert len({sink.plan.layers[each].kind for each in members}) == 1
        for batch in group.batches:
            assert batch.writer is None
            assert all(sink.plan.span_nbytes(span) for span in batch.spans)
            longest = max(span.stop - span.start for span in batch.spans)
            assert longest <= (sink.options.chunk or longest)


@given(cases())
def test_a_cut_tiles_its_positions(case: tuple[MemorySink, int, int]) -> None:
    sink, start, stop = case
    pieces = list(cut(sink, start, stop))
    assert [at for first, last in pieces for at in range(first, last)] == list(range(start, stop))
    assert list(cut(sink, stop, stop)) == []
