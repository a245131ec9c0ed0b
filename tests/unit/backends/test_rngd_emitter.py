"""The emitter on memory: what is read and announced when, by every route, however late."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.backends import rngd_emitter
from headrace.backends.null import decoder_like
from headrace.backends.rngd_emitter import Emitter
from headrace.engine.rngd.executor import Ticket
from headrace.engine.tensors import as_bytes
from headrace.errors import Cancelled, DeviceError, Unquiet
from headrace.geometry import Full, Kind, Layer, Manifest, Part, Sliding
from headrace.messages import Prefill, Route
from headrace.plan import Plan, compile_plan
from headrace.testing.sinks import MemorySink, ask
from tests.unit.backends.late_reads import LateReads

CONTEXT = 64
WINDOW = 8
VOCAB = 16
SHAPES: tuple[tuple[Kind, int, int], ...] = (
    (Full(), 2, 4),
    (Sliding(WINDOW, WINDOW), 1, 8),
    (Sliding(WINDOW, WINDOW), 1, 8),
    (Full(), 2, 4),
    (Sliding(WINDOW, WINDOW), 1, 8),
)
LAYERS = tuple(
    Layer(i, f"layers.{i}", kind, tuple(Part(n, heads, dim, "bfloat16") for n in ("k", "v")))
    for i, (kind, heads, dim) in enumerate(SHAPES)
)
SOURCE = Manifest(
    role="source",
    model="m",
    layers=LAYERS,
    layouts=("token_major",),
    vocab_size=VOCAB,
    logits_dtype="float32",
    max_positions=CONTEXT,
    prefix="recompute",
)


def cell(layer: int, part: int, start: int, stop: int) -> torch.Tensor:
    """What a cache holds: numbers below 256, which bf16 tells apart, that differ by position."""
    shape = SHAPES[layer]
    position = torch.arange(start, stop)[:, None, None]
    inner = torch.arange(shape[1] * shape[2]).reshape(shape[1], shape[2])
    return ((position * 5 + layer * 40 + part * 20 + inner) % 251).to(torch.bfloat16)


def plan_of(num_tokens: int, start: int = 0) -> Plan:
    return compile_plan(decoder_like(SOURCE), "token_major", num_tokens, CONTEXT, start)


def expected(layer: int, part: int, start: int, stop: int) -> bytes:
    return bytes(as_bytes(cell(layer, part, start, stop)))


class Engine:
    """Calls an emitter as the layer loop does, and checks what it reads against how far that is."""

    def __init__(self, sink: MemorySink, reads: LateReads) -> None:
        self.sink, self.reads = sink, reads
        self.emitter = Emitter(sink, sink.options.start, self.read)
        self.final_layer = -1
        self.computed = 0, 0
        self.reads_by_cell: dict[tuple[int, int, int], int] = {}

    def read(self, layer: int, part: int, start: int, stop: int, target: torch.Tensor) -> Ticket:
        first, until = self.computed
        there = until if layer <= self.final_layer else first
        assert 0 <= start < stop <= there, "read before it was computed"
        assert target.is_contiguous()
        assert target.shape == (stop - start, *SHAPES[layer][1:])
        for at in range(start, stop):
            key = layer, part, at
            self.reads_by_cell[key] = self.reads_by_cell.get(key, 0) + 1
        return self.reads.ticket(lambda: target.copy_(cell(layer, part, start, stop)))

    def run(self, chunks: Sequence[tuple[int, int]]) -> None:
        for start, stop in chunks:
            self.computed, self.final_layer = (start, stop), -1
            self.emitter.begin(start, stop)
            for layer in range(len(LAYERS)):
                self.final_layer = layer
                self.emitter.final(layer)
            self.emitter.end(start, stop)
        self.emitter.finish()
        self.sink.final(bytes(VOCAB * 4))


def chunks_of(num_tokens: int, step: int) -> list[tuple[int, int]]:
    return [(at, min(at + step, num_tokens)) for at in range(0, num_tokens, step)]


@st.composite
def attempts(draw: st.DrawFn) -> Prefill:
    """Of any route and cut, also one that starts late."""
    num_tokens = draw(st.integers(1, 40))
    start = draw(st.integers(0, num_tokens - 1))
    route: Route = draw(st.sampled_from(["whole", "chunked", "streamed"]))
    return ask(
        num_tokens,
        route,
        group_layers=draw(st.integers(1, 6)),
        chunk=draw(st.integers(0, num_tokens)),
        emission=draw(st.sampled_from(["layers", "cache_groups"])),
        start=start,
        cuts=(start,) if start else (),
    )


@settings(deadline=None)
@given(attempts(), st.integers(1, 40), st.integers(0, 5), st.randoms(use_true_random=False))
def test_every_cell_is_announced_once_with_its_bytes(
    asked: Prefill, step: int, most: int, rng: random.Random
) -> None:
    """However late reads are done, and in any order."""
    plan = plan_of(asked.num_tokens, asked.start)
    sink = MemorySink(plan, asked)
    engine = Engine(sink, LateReads(most, rng))
    engine.run(chunks_of(asked.num_tokens, step))
    assert sink.ended
    assert not sink.stray_bytes()
    for snapshot in sink.snapshots:
        for key, told in snapshot.items():
            assert told == expected(*key)
    for (layer, part), got in sink.cells().items():
        assert got == expected(layer, part, *plan.windows[layer])
    wanted = {
        (layer, part, at)
        for layer, (lo, hi) in enumerate(plan.windows)
        for part in (0, 1)
        for at in range(lo, hi)
    }
    assert engine.reads_by_cell == dict.fromkeys(wanted, 1)


@settings(deadline=None)
@given(attempts(), st.integers(1, 40), st.randoms(use_true_random=False))
def test_reads_that_are_done_late_change_no_announcement(
    asked: Prefill, step: int, rng: random.Random
) -> None:
    """They are announced in the order in which they were asked for."""
    commits = []
    for most in (0, 7):
        sink = MemorySink(plan_of(asked.num_tokens, asked.start), asked)
        Engine(sink, LateReads(most, rng)).run(chunks_of(asked.num_tokens, step))
        commits.append(sink.commits)
    assert commits[0] == commits[1]


@pytest.mark.parametrize("group_layers", [1, 2, 3, 5])
def test_all_but_the_last_group_is_announced_before_the_end(group_layers: int) -> None:
    """With reads that are done at once: each group at the final of its last layer."""
    asked = ask(20, "streamed", group_layers=group_layers)
    sink = MemorySink(plan_of(20), asked)
    engine = Engine(sink, LateReads(0, random.Random(0)))
    engine.computed = 0, 20
    engine.emitter.begin(0, 20)
    announced = []
    for layer in range(len(LAYERS)):
        engine.final_layer = layer
        engine.emitter.final(layer)
        announced.append(len(sink.commits))
    lasts = [min(at + group_layers, len(LAYERS)) - 1 for at in range(0, len(LAYERS), group_layers)]
    assert announced == [sum(last <= layer for last in lasts) for layer in range(len(LAYERS))]


@pytest.mark.parametrize("route", ["whole", "chunked", "streamed"])
def test_a_read_that_is_never_done_is_never_announced_and_a_cancel_ends_the_wait(
    route: Route,
) -> None:
    asked = ask(12, route, group_layers=2)
    calls_at_most = 60
    sink = MemorySink(plan_of(12), asked, cancel_at=calls_at_most)
    engine = Engine(sink, LateReads(None, random.Random(0)))
    with pytest.raises(Cancelled):
        engine.run([(0, 12)])
    assert sink.commits == []
    assert sink.num_calls == calls_at_most + 1


@pytest.mark.parametrize("route", ["whole", "chunked", "streamed"])
def test_a_card_that_falls_silent_is_not_waited_for_for_ever(
    route: Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rngd_emitter, "LONGEST_WAIT_S", 0.05)
    sink = MemorySink(plan_of(12), ask(12, route, group_layers=2))
    engine = Engine(sink, LateReads(None, random.Random(0)))
    with pytest.raises(Unquiet, match="a copy from the card did not end in 0 s"):
        engine.run([(0, 12)])
    assert sink.commits == []


def test_what_is_done_waits_for_what_was_asked_before_it() -> None:
    sink = MemorySink(plan_of(12), ask(12, "streamed", group_layers=1))
    never, at_once = LateReads(None, random.Random(0)), LateReads(0, random.Random(0))
    engine = Engine(sink, never)
    engine.computed = 0, 12
    engine.emitter.begin(0, 12)
    for layer in range(len(LAYERS)):
        engine.reads = never if layer == 1 else at_once
        engine.final_layer = layer
        engine.emitter.final(layer)
    assert [spans[0].layer_start for spans in sink.commits] == [0]
    for ticket in never.made:
        ticket.finish()
        ticket._polls = 0
    engine.emitter.poll()
    assert [spans[0].layer_start for spans in sink.commits] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("route", ["whole", "chunked", "streamed"])
@pytest.mark.parametrize("most", [0, 3])
def test_a_cancel_at_any_call_passes_and_nothing_is_announced_after_it(
    route: Route, most: int
) -> None:
    asked = ask(20, route, group_layers=2, chunk=7)
    whole = MemorySink(plan_of(20), asked)
    Engine(whole, LateReads(most, random.Random(1))).run(chunks_of(20, 9))
    for at in range(whole.num_calls):
        sink = MemorySink(plan_of(20), asked, cancel_at=at)
        with pytest.raises(Cancelled):
            Engine(sink, LateReads(most, random.Random(1))).run(chunks_of(20, 9))
        assert (sink.num_refused, sink.ended) == (1, False)
        assert sink.commits == whole.commits[: len(sink.commits)]


@dataclass
class Broken:
    """A ticket of a read that cannot come."""

    error: Exception

    def done(self) -> bool:
        raise self.error


def test_a_read_that_failed_is_told_and_not_announced() -> None:
    sink = MemorySink(plan_of(12), ask(12, "streamed"))
    emitter = Emitter(sink, 0, lambda *place: Broken(DeviceError("lost")))
    emitter.begin(0, 12)
    with pytest.raises(DeviceError, match="lost"):
        emitter.final(0)
    assert sink.commits == []
