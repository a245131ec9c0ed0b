"""States of any shape in memory come into the slot as a host would copy them, and in order."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest
import torch

from headrace.backends.carriers import HostCarrier
from headrace.backends.device_carrier import DeviceCarrier, LogitsMemory
from headrace.engine.prefill import States
from headrace.errors import LocalProtocolError
from headrace.geometry import Full, Layer, Layout, Manifest, Part
from headrace.ids import Span
from headrace.plan import compile_plan
from headrace.testing.fake_device import FakeDevice
from headrace.testing.sinks import MemorySink, ask

HEADS, HEAD_DIM, NUM_TOKENS, VOCAB = 3, 4, 10, 7

Make = Callable[[int, int], torch.Tensor]


def memory_sink(layout: Layout = "head_major", heads: int = HEADS, layers: int = 1) -> MemorySink:
    parts = tuple(Part(name, heads, HEAD_DIM, "float32") for name in ("k", "v"))
    manifest = Manifest(
        role="decoder",
        model="made up",
        layers=tuple(Layer(at, f"layers.{at}", Full(), parts) for at in range(layers)),
        layouts=(layout,),
        vocab_size=VOCAB,
        logits_dtype="float32",
        max_positions=64,
    )
    plan = compile_plan(manifest, layout, NUM_TOKENS, 16)
    return MemorySink(plan, ask(NUM_TOKENS, "streamed"))


def numbers(*shape: int) -> torch.Tensor:
    total = 1
    for size in shape:
        total *= size
    return torch.arange(total, dtype=torch.float32).reshape(shape)


def whole(heads: int, positions: int) -> torch.Tensor:
    return numbers(heads, positions, HEAD_DIM)


def last_of_many(heads: int, positions: int) -> torch.Tensor:
    return numbers(heads, 9 * positions, HEAD_DIM)[:, 8 * positions :]


def first_of_few(heads: int, positions: int) -> torch.Tensor:
    return numbers(heads, positions + 2, HEAD_DIM)[:, :positions]


def token_by_token(heads: int, positions: int) -> torch.Tensor:
    return numbers(positions, heads, HEAD_DIM).transpose(0, 1)


def number_by_number(heads: int, positions: int) -> torch.Tensor:
    return numbers(HEAD_DIM, heads, positions).permute(1, 2, 0)


def one_head_for_all(heads: int, positions: int) -> torch.Tensor:
    return numbers(1, positions, HEAD_DIM).expand(heads, positions, HEAD_DIM)


def every_other(heads: int, positions: int) -> torch.Tensor:
    return numbers(heads, positions, 2 * HEAD_DIM)[:, :, ::2]


def in_half(heads: int, positions: int) -> torch.Tensor:
    return whole(heads, positions).half()


MAKES = (
    whole,
    last_of_many,
    first_of_few,
    token_by_token,
    number_by_number,
    one_head_for_all,
    every_other,
    in_half,
)


@pytest.mark.parametrize("layout", ["head_major", "token_major"])
@pytest.mark.parametrize("heads", [1, HEADS])
@pytest.mark.parametrize("make", MAKES)
def test_states_of_any_strides_come_as_a_host_copies_them(
    make: Make, heads: int, layout: Layout
) -> None:
    """From positions that begin before the cells do, and end after them."""
    spans = (Span(0, 1, 0, 4), Span(0, 1, 4, NUM_TOKENS))
    wanted, got = (memory_sink(layout, heads) for _ in range(2))
    host = HostCarrier(wanted)
    device = FakeDevice(all_pinned=True, polls_per_step=5)
    carrier = DeviceCarrier(device, device.stream("states"), got, LogitsMemory(VOCAB))
    pieces = [(0, 3), (3, 7)]
    with device.on_compute():
        states = [(at, (make(heads, many), -make(heads, many))) for at, many in pieces]
        for span in spans:
            for sink, each in ((wanted, host), (got, carrier)):
                writer = sink.write(span)
                for start, pair in states:
                    each.carry(writer, 0, pair, start)
                each.commit(writer)
        del states
        carrier.settle()
    assert got.cells() == wanted.cells()
    assert not got.stray_bytes()
    assert got.commits == wanted.commits == [(span,) for span in spans]
    assert got.snapshots == wanted.snapshots  # nothing was told before it lay there
    assert device.faults == []


def test_a_writer_waits_for_those_committed_before_it() -> None:
    device = FakeDevice(all_pinned=True, polls_per_step=7)
    sink = memory_sink(layers=3)
    carrier = DeviceCarrier(device, device.stream("states"), sink, LogitsMemory(VOCAB))
    spans = [Span(at, at + 1, 0, NUM_TOKENS) for at in (2, 0, 1)]
    with device.on_compute():
        writers = [sink.write(span) for span in spans]
        for span, writer in reversed(list(zip(spans, writers, strict=True))):
            carrier.computed()
            states: States = whole(HEADS, NUM_TOKENS), -whole(HEADS, NUM_TOKENS)
            carrier.carry(writer, span.layer_start, states, 0)
        for writer in writers:
            carrier.commit(writer)
        carrier.settle()
    assert sink.commits == [(span,) for span in spans]


def test_what_was_never_carried_is_not_announced() -> None:
    device = FakeDevice(all_pinned=True)
    sink = memory_sink()
    carrier = DeviceCarrier(device, device.stream("states"), sink, LogitsMemory(VOCAB))
    writer = sink.write(Span(0, 1, 0, 4))
    carrier.carry(writer, 0, (whole(HEADS, 3), whole(HEADS, 3)), 5)  # none of it is the writer's
    with pytest.raises(LocalProtocolError, match="nothing was carried into it"):
        carrier.commit(writer)
    assert (sink.commits, device.counts["copies"]) == ([], 0)


def test_logits_come_when_they_are_computed() -> None:
    device = FakeDevice(all_pinned=True, polls_per_step=9)
    memory = LogitsMemory(VOCAB)
    sink = memory_sink()
    carrier = DeviceCarrier(device, device.stream("states"), sink, memory)
    with pytest.raises(LocalProtocolError, match="never taken"):
        carrier.logits()
    with device.on_compute():
        row = numbers(VOCAB) * 2
        carrier.take_logits(row)
        want = bytes(row.numpy().tobytes())
        del row
    view, ready_ns = carrier.logits()
    assert bytes(view) == want
    assert ready_ns <= time.monotonic_ns()
    assert ready_ns > 0
    assert carrier.logits()[1] == ready_ns
    assert device.faults == []


def test_the_end_is_when_the_logits_were_computed_and_not_when_they_came() -> None:
    """Their copy has to wait for states; a clock that each event moves on shows which was asked."""
    ticks = itertools.count(10_000, 10_000)
    device = FakeDevice(all_pinned=True, now_ns=lambda: next(ticks))
    side = device.stream("states")
    carrier = DeviceCarrier(device, side, memory_sink(), LogitsMemory(VOCAB))
    device.hold_up(side)
    with device.on_compute():
        row = numbers(VOCAB)
        carrier.take_logits(row)
        after = device.record(device.compute)
    while not after.done():
        pass
    device.go_on(side)
    _, ready_ns = carrier.logits()
    assert ready_ns == device.times(after, after).ended_ns - 10_000


def test_a_devices_time_is_not_taken_for_one_to_come() -> None:
    device = FakeDevice(all_pinned=True, now_ns=lambda: 1 << 60)
    carrier = DeviceCarrier(device, device.stream("states"), memory_sink(), LogitsMemory(VOCAB))
    before_ns = time.monotonic_ns()
    with device.on_compute():
        row = numbers(VOCAB)
        carrier.take_logits(row)
    _, ready_ns = carrier.logits()
    assert before_ns <= ready_ns <= time.monotonic_ns()
