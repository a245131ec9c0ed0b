"""The CUDA source on a model of a device: exact, in order, and quiet when it is over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.backends import cuda_source, device_carrier
from headrace.backends.base import HostRange, PinsSlabs
from headrace.backends.cuda_source import CudaEngine
from headrace.engine.device import Event, Stream
from headrace.engine.loading import load_model
from headrace.errors import (
    BackendUnavailable,
    Cancelled,
    Closed,
    LocalProtocolError,
    Refused,
    Unquiet,
)
from headrace.ids import Span
from headrace.memory import Slab
from headrace.messages import Route
from headrace.plan import compile_plan
from headrace.testing.fake.core import FakeEvent
from headrace.testing.fake_device import FakeDevice
from headrace.testing.sinks import MemorySink, ask
from tests.e2e.families import (
    CONTEXT,
    FakeSink,
    decoder_of,
    directory_of,
    make_prompt,
    make_sink,
    options,
    source_of,
)
from tests.unit.backends.device_sinks import check_quiet, sink_for, timed, watched

ROUTES: tuple[Route, ...] = ("whole", "chunked", "streamed")
NUM_TOKENS = 43
CUTS: tuple[dict[str, Any], ...] = (
    {},
    {"prefill_chunk": 7},
    {"chunk": 5, "group_layers": 2},
    {"chunk": 9, "prefill_chunk": 25, "emission": "cache_groups"},
)

by_route = pytest.mark.parametrize("route", ROUTES)


def engine_on(device: FakeDevice, family: str = "llama", dtype: str = "float32") -> CudaEngine:
    return CudaEngine(load_model(directory_of(family), dtype=dtype), 512, device)


def fill(engine: CudaEngine, sink: FakeSink) -> FakeSink:
    engine.prefill_stream(make_prompt(sink.plan.num_tokens), sink)
    return sink


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma4_shared"])
@by_route
def test_it_gives_the_torch_engines_bytes(route: Route, family: str, pinned: bool) -> None:
    device = FakeDevice(seed=len(family), all_pinned=pinned, polls_per_step=3)
    engine = engine_on(device, family)
    for cuts in CUTS:
        asked = options(route, NUM_TOKENS, **cuts)
        wanted, got = sink_for(family, asked), fill(engine, sink_for(family, asked))
        source_of(family).prefill_stream(make_prompt(NUM_TOKENS), wanted)
        assert (got.cells(), got.logits) == (wanted.cells(), wanted.logits)
        assert got.spans == wanted.spans
        check_quiet(device, got)
    assert (device.counts["pageable_copies"] == 0) == pinned
    engine.close()
    assert device.faults == []


@by_route
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_from_a_start_it_gives_what_the_torch_engine_does(route: Route, family: str) -> None:
    """It computes all, cut where it is told to be, and carries what comes after `start`."""
    plain, device = source_of(family), FakeDevice(all_pinned=True, polls_per_step=5)
    engine = engine_on(device, family)
    decoder = decoder_of(family).manifest()
    for start, cuts in ((0, (5, 30)), (30, (5, 30)), (42, (42,))):
        asked = ask(NUM_TOKENS, route, prefill_chunk=16, start=start, cuts=cuts)
        plan = compile_plan(decoder, "head_major", NUM_TOKENS, CONTEXT, start)
        wanted, got = MemorySink(plan, asked), MemorySink(plan, asked)
        plain.prefill_stream(make_prompt(NUM_TOKENS), wanted, start)
        engine.prefill_stream(make_prompt(NUM_TOKENS), got, start)
        assert (got.cells(), got.logits) == (wanted.cells(), wanted.logits)
        assert (got.commits, got.snapshots) == (wanted.commits, wanted.snapshots)
        assert not got.stray_bytes()
        with pytest.raises(LocalProtocolError):
            engine.prefill_stream(make_prompt(NUM_TOKENS), got, start + 1)
    assert device.faults == []


def test_it_gives_them_in_half_precision() -> None:
    engine = engine_on(FakeDevice(all_pinned=True), "gemma3", "bfloat16")
    plain, asked = source_of("gemma3", "bfloat16"), options("streamed", NUM_TOKENS, chunk=16)
    wanted, got = (
        make_sink(plain.manifest(), decoder_of("gemma3", "bfloat16").manifest(), asked)
        for _ in range(2)
    )
    plain.prefill_stream(make_prompt(NUM_TOKENS), wanted)
    fill(engine, got)
    assert (got.cells(), got.logits) == (wanted.cells(), wanted.logits)


def test_a_layer_group_is_announced_while_later_ones_are_computed() -> None:
    device = FakeDevice(all_pinned=True)
    sink = watched("llama", options("streamed", NUM_TOKENS, prefill_chunk=9))
    told: list[str] = []
    sink.on_check = lambda: told.append("layer")
    sink.on_commit = lambda spans: told.append("spans")
    fill(engine_on(device), sink)
    assert told.count("spans") == 4 * 5
    assert "spans" in told[: len(told) - told[::-1].index("layer")]
    assert device.counts["host_waits"] == 0  # the host only looked


class LateEvent(FakeEvent):
    """Not seen to be done before the host has asked some times."""

    asked = 0
    seen = False

    def done(self) -> bool:
        self.asked += 1
        self.seen = self.asked > 20 and super().done()
        return self.seen


class SlowDevice(FakeDevice):
    """Computes slowly; it keeps what was recorded on the compute stream."""

    def __init__(self, **facts: Any) -> None:
        self.events: list[LateEvent] = []
        super().__init__(**facts)

    def record(self, stream: Stream) -> Event:
        event = super().record(stream)
        if stream is not self.compute:
            return event
        assert isinstance(event, FakeEvent)
        self.events.append(LateEvent(self, event.mark))
        return self.events[-1]


@pytest.mark.parametrize("ahead", [1, 4])
def test_the_host_queues_no_more_than_a_few_layers_ahead(
    ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a cancel need not wait for a prefill that is queued as a whole."""
    monkeypatch.setattr(device_carrier, "LAYERS_AHEAD", ahead)
    monkeypatch.setattr(device_carrier, "CHECK_EVERY_NS", 1 << 62)  # once per layer
    device = SlowDevice(all_pinned=True)
    sink = watched("llama", options("whole", NUM_TOKENS, prefill_chunk=7))
    behind: list[int] = []
    sink.on_check = lambda: behind.append(sum(not each.seen for each in device.events[1:]))
    fill(engine_on(device), sink)
    assert behind == [min(at, ahead) for at in range(4 * 7)]


def test_what_is_held_for_copies_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no room for any, each copy is waited for, and nothing else changes."""
    asked = options("streamed", NUM_TOKENS, prefill_chunk=9)
    most: list[int] = []
    kept = device_carrier.DeviceCarrier._enqueue

    def watch(self: Any, queued: Any) -> None:
        kept(self, queued)
        most.append(self._held_nbytes)

    monkeypatch.setattr(device_carrier.DeviceCarrier, "_enqueue", watch)
    results = []
    for bound in (0, 1 << 30):
        monkeypatch.setattr(device_carrier, "MOST_HELD_NBYTES", bound)
        device = FakeDevice(all_pinned=True, polls_per_step=60)
        sink = fill(engine_on(device), sink_for("llama", asked))
        results.append((sink.cells(), sink.logits, sink.spans))
        one_layer = 2 * 9 * 2 * 16 * 4
        assert (max(most) <= one_layer) == (bound == 0)
        most.clear()
    assert results[0] == results[1]


def test_states_that_pin_more_than_they_are_are_copied_out() -> None:
    """The rows of the last piece are a view of all positions: what is held for them is theirs."""
    device = FakeDevice(all_pinned=True, polls_per_step=1_000)
    sink = watched("llama", options("streamed", NUM_TOKENS, prefill_chunk=4))
    held: list[int] = []
    kept = device_carrier.DeviceCarrier._copy

    def watch(self: Any, piece: Any) -> None:
        kept(self, piece)
        held.append(piece.states.untyped_storage().nbytes() - 2 * piece.states.nbytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_carrier.DeviceCarrier, "_copy", watch)
        fill(engine_on(device), sink)
    assert max(held) <= 0


@by_route
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_cancel_at_any_commit_leaves_the_slot_quiet(route: Route, family: str) -> None:
    asked = options(route, NUM_TOKENS, prefill_chunk=25, group_layers=2)
    num_commits = len(fill(engine_on(FakeDevice()), sink_for("llama", asked)).spans)
    device = FakeDevice(all_pinned=True, polls_per_step=30)
    engine = engine_on(device, family)
    for last in range(num_commits):
        sink = watched(family, asked)
        left = [last]

        def withdraw(spans: tuple[Span, ...], left: list[int] = left) -> None:
            if not left[0]:
                raise Cancelled("by the test")
            left[0] -= 1

        sink.on_commit = withdraw
        with pytest.raises(Cancelled):
            fill(engine, sink)
        assert (len(sink.spans), sink.logits) == (last, None)
        check_quiet(device, sink)
    assert fill(engine, sink_for(family, asked)).logits is not None


@by_route
def test_a_cancel_is_heard_while_copies_are_waited_for(
    route: Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is queued and nothing lands: only the wait can hear it; what is queued is waited for."""
    monkeypatch.setattr(device_carrier, "CHECK_EVERY_NS", 0)
    device = FakeDevice(all_pinned=True)
    engine = engine_on(device)
    sink = watched("llama", options(route, NUM_TOKENS))
    device.hold_up(engine._side)
    checks: list[int] = []

    def withdraw() -> None:
        checks.append(len(sink.spans))
        if len(checks) == 50:
            device.go_on(engine._side)
            raise Cancelled("by the test")

    sink.on_check = withdraw
    with pytest.raises(Cancelled):
        fill(engine, sink)
    assert checks == [0] * 50
    assert (sink.spans, sink.logits) == ([], None)
    check_quiet(device, sink)


def test_any_error_leaves_the_slot_quiet() -> None:
    """Whatever the model raises, copies of earlier layers may be in flight."""
    device = FakeDevice(all_pinned=True, polls_per_step=1_000)
    engine = engine_on(device)
    assert engine._model is not None
    sink = sink_for("llama", options("streamed", NUM_TOKENS))
    broken = engine._model.module.model.layers[3].register_forward_pre_hook(_raise)
    try:
        with pytest.raises(ZeroDivisionError):
            fill(engine, sink)
    finally:
        broken.remove()
    check_quiet(device, sink)
    assert fill(engine, sink_for("llama", options("streamed", NUM_TOKENS))).logits is not None


def _raise(*arguments: Any) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("copy", [1, 5, 9])
def test_a_device_that_fails_is_not_known_to_be_quiet_and_nothing_more_is_told(copy: int) -> None:
    device = FakeDevice(all_pinned=True, failing_copy=copy)
    sink = sink_for("llama", options("streamed", NUM_TOKENS))
    with pytest.raises(Unquiet, match="a copy failed, as was asked for"):
        fill(engine_on(device), sink)
    assert len(sink.spans) == (copy - 1) // 2  # two copies to a layer, the logits last
    assert sink.logits is None


def test_a_device_that_failed_while_nothing_was_asked_is_told_as_such() -> None:
    """A plain error would leave the source in service, to fail each prompt for ever."""
    device = FakeDevice(all_pinned=True)
    engine = engine_on(device)
    asked = options("streamed", NUM_TOKENS)
    assert fill(engine, sink_for("llama", asked)).logits is not None
    device.fail("it fell off the bus")
    for _ in range(2):
        sink = sink_for("llama", asked)
        with pytest.raises(Unquiet, match=r"failed before this prefill: .*fell off the bus"):
            fill(engine, sink)
        assert (sink.spans, sink.num_writes) == ([], 0)


@by_route
def test_a_device_tells_when_it_computed_and_copied(route: Route) -> None:
    sink = timed("gemma3", options(route, NUM_TOKENS, prefill_chunk=25, chunk=16))
    fill(engine_on(FakeDevice(all_pinned=True, drift_ppm=0.0), "gemma3"), sink)
    assert [spans for spans, _, _ in sink.times] == sink.spans
    reached_ns = 0
    for _, computed, copied in sink.times:
        assert computed.begun_ns <= computed.ended_ns <= copied.ended_ns
        assert route == "chunked" or computed.ended_ns <= copied.begun_ns <= copied.ended_ns
        assert computed.begun_ns >= reached_ns
        assert computed.error_ns == copied.error_ns == 2_000
        reached_ns = computed.ended_ns
    first, *others = sink.times
    for before, after in zip([first, *others], others, strict=False):
        assert after[1].begun_ns == before[1].ended_ns  # the computing has no gap between groups


def test_a_pinned_slab_makes_no_copy_pageable() -> None:
    device = FakeDevice()
    engine = engine_on(device)
    assert isinstance(engine, PinsSlabs)
    asked = options("streamed", NUM_TOKENS)
    plain = sink_for("llama", asked)
    slab = Slab.create(plain.plan.slot.nbytes, "headrace-test")
    memory = HostRange(slab.address, slab.nbytes)
    try:
        engine.register(memory)
        sink = fill(engine, FakeSink(plain.plan, asked, slab.view))
        assert sink.logits is not None
        assert device.counts["pageable_copies"] == 0
        engine.unregister(memory)
        device.unmapped(*memory)
    finally:
        slab.close()
    engine.close()
    assert device.faults == []


def test_memory_that_cannot_be_pinned_is_pageable(caplog: pytest.LogCaptureFixture) -> None:
    device = FakeDevice(pin_fails=lambda ordinal, nbytes: True)
    engine = engine_on(device)
    assert "its copies are pageable" in caplog.text
    sink = fill(engine, sink_for("llama", options("streamed", NUM_TOKENS)))
    wanted = sink_for("llama", options("streamed", NUM_TOKENS))
    source_of("llama").prefill_stream(make_prompt(NUM_TOKENS), wanted)
    assert (sink.cells(), sink.logits) == (wanted.cells(), wanted.logits)
    assert device.counts["pageable_copies"] == 4 * 2 + 1
    engine.close()


def test_a_closed_engine_says_so_and_leaves_a_shared_device_open() -> None:
    device = FakeDevice()
    engine = CudaEngine(load_model(directory_of("llama")), 512, device, shared=True)
    engine.close()
    engine.close()
    with pytest.raises(Closed, match="the cuda engine was closed"):
        fill(engine, sink_for("llama", options("whole", 3)))
    assert device.statistics()["registered_nbytes"] == 0
    device.synchronize()  # it is open
    own = FakeDevice()
    engine_on(own).close()
    with pytest.raises(LocalProtocolError, match="was closed"):
        own.synchronize()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_is_unavailable_in_a_sentence() -> None:
    with pytest.raises(BackendUnavailable, match=r"^cuda: "):
        cuda_source.open({"model": str(directory_of("llama"))})


def test_it_opens_on_the_device_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    device = FakeDevice()

    def opened(index: int) -> FakeDevice:
        asked.append(index)
        return device

    monkeypatch.setattr(cuda_source, "open_device", opened)
    engine = cuda_source.open({"model": str(directory_of("llama")), "device": 2})
    assert (asked, engine.manifest().max_positions) == ([2], 512)
    engine.close()


def test_what_cannot_be_loaded_gives_its_device_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device = FakeDevice()
    monkeypatch.setattr(cuda_source, "open_device", lambda index: device)
    with pytest.raises(Refused, match=r"no config\.json"):
        cuda_source.open({"model": str(tmp_path)})
    with pytest.raises(LocalProtocolError, match="was closed"):
        device.synchronize()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "missing required field `model`"),
        ({"model": "x", "device": "cuda:0"}, r"`\$\.device`"),
        ({"model": "x", "device": -1}, r"`\$\.device`"),
        ({"model": "x", "lanes": 2}, "unknown field `lanes`"),
    ],
)
def test_wrong_options_are_refused_by_name(given: dict[str, Any], text: str) -> None:
    with pytest.raises(Refused, match=f"options of cuda: .*{text}"):
        cuda_source.open(given)


def test_positions_past_the_models_are_refused() -> None:
    with pytest.raises(Refused, match="513"):
        CudaEngine(load_model(directory_of("llama")), 513, FakeDevice())


def test_what_it_publishes_is_what_the_torch_engine_does() -> None:
    engine = engine_on(FakeDevice(), "gemma3")
    assert engine.manifest() == source_of("gemma3").manifest()
    assert engine.facts == source_of("gemma3").facts
