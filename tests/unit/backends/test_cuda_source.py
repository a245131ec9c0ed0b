"""The CUDA source on a model of a device: exact, in order, and quiet when it is over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headrace.backends import cuda_source
from headrace.backends.base import HostRange, PinsSlabs, PrefillEngine, SpanWriter
from headrace.backends.cuda_source import CudaEngine
from headrace.engine.loading import load_model
from headrace.errors import (
    BackendUnavailable,
    Cancelled,
    Closed,
    DeviceError,
    LocalProtocolError,
    Refused,
)
from headrace.ids import Span
from headrace.messages import DeviceTimes, Prefill, Route
from headrace.testing.fake_device import FakeDevice
from tests.e2e.families import (
    FakeSink,
    FakeWriter,
    decoder_of,
    directory_of,
    make_prompt,
    make_sink,
    options,
    source_of,
)

ROUTES: tuple[Route, ...] = ("whole", "chunked", "streamed")
NUM_TOKENS = 43


def engine_on(device: FakeDevice, family: str = "llama", dtype: str = "float32") -> CudaEngine:
    return CudaEngine(load_model(directory_of(family), dtype=dtype), 512, device)


def sink_for(family: str, asked: Prefill) -> FakeSink:
    return make_sink(source_of(family).manifest(), decoder_of(family).manifest(), asked)


class Watching(FakeSink):
    """A sink that calls back: `on_check` at each check, `on_commit` at each commit of spans."""

    on_check: Callable[[], None] = staticmethod(lambda: None)
    on_commit: Callable[[tuple[Span, ...]], None] = staticmethod(lambda spans: None)
    timed = False

    def check(self) -> None:
        self.on_check()

    def write(self, *spans: Span) -> Any:
        writer = super().write(*spans)
        return (Timed if self.timed else Watched)(self, spans, writer)


class Watched:
    """One of its writers."""

    def __init__(self, sink: Watching, spans: tuple[Span, ...], writer: FakeWriter) -> None:
        self._sink = sink
        self._spans = spans
        self._writer = writer
        self.cells = writer.cells

    def commit(self) -> None:
        self._sink.on_commit(self._spans)
        self._writer.commit()


class Timed(Watched):
    """One that takes a device's word for its times."""

    told: list[tuple[tuple[Span, ...], DeviceTimes, DeviceTimes]]

    def ran(self, computed: DeviceTimes, copied: DeviceTimes) -> None:
        self._sink.__dict__.setdefault("told", []).append((self._spans, computed, copied))


def watching(family: str, asked: Prefill) -> Watching:
    plain = sink_for(family, asked)
    return Watching(plain.plan, plain.options, plain.buffer)


def is_quiet(device: FakeDevice, sink: FakeSink) -> bool:
    """Whether the device has nothing left to do with the slot's memory."""
    import numpy as np

    flat = np.frombuffer(sink.buffer, np.uint8)
    device.unmapped(int(flat.ctypes.data), flat.nbytes)  # a fault if something may still use it
    return not device.faults


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma4_shared"])
@pytest.mark.parametrize("route", ROUTES)
def test_it_gives_the_torch_engines_bytes(route: Route, family: str, pinned: bool) -> None:
    device = FakeDevice(seed=len(family), all_pinned=pinned, polls_per_step=3)
    engine = engine_on(device, family)
    for cuts in (
        {},
        {"prefill_chunk": 7},
        {"chunk": 5, "group_layers": 2},
        {"chunk": 9, "prefill_chunk": 25, "emission": "cache_groups"},
    ):
        asked = options(route, NUM_TOKENS, **cuts)  # type: ignore[arg-type]
        wanted, got = sink_for(family, asked), sink_for(family, asked)
        source_of(family).prefill_stream(make_prompt(NUM_TOKENS), wanted)
        engine.prefill_stream(make_prompt(NUM_TOKENS), got)
        assert (got.cells(), got.logits) == (wanted.cells(), wanted.logits)
        assert got.spans == wanted.spans
        assert is_quiet(device, got)
    assert (device.statistics()["pageable_copies"] == 0) == pinned
    engine.close()
    assert device.faults == []
