"""Sinks that a test watches while a device fills them, and whether the device is done with one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.backends.base import Cells
from headrace.ids import Span
from headrace.messages import DeviceTimes, Prefill
from headrace.testing.fake_device import FakeDevice
from tests.e2e.families import FakeSink, FakeWriter, decoder_of, make_sink, source_of

Told = tuple[tuple[Span, ...], DeviceTimes, DeviceTimes]


def sink_for(family: str, asked: Prefill) -> FakeSink:
    """A sink of what the torch engine and the cpu decoder of a family agree on."""
    return make_sink(source_of(family).manifest(), decoder_of(family).manifest(), asked)


class Watched(FakeSink):
    """Calls `on_check` at each check and `on_commit` with the spans of each commit before it."""

    on_check: Callable[[], None] | None = None
    on_commit: Callable[[tuple[Span, ...]], None] | None = None

    def check(self) -> None:
        if self.on_check is not None:
            self.on_check()

    def write(self, *spans: Span) -> Any:
        return WatchedWriter(super().write(*spans), self, spans)


class WatchedWriter:
    """One of its writers, which takes nobody's word for times."""

    def __init__(self, writer: FakeWriter, sink: Watched, spans: tuple[Span, ...]) -> None:
        self._writer = writer
        self._sink = sink
        self._spans = spans

    def cells(self, layer: int) -> list[Cells]:
        return self._writer.cells(layer)

    def commit(self) -> None:
        if self._sink.on_commit is not None:
            self._sink.on_commit(self._spans)
        self._writer.commit()


class Timed(FakeSink):
    """Its writers note when a device says that it computed and copied their cells."""

    def write(self, *spans: Span) -> Any:
        return TimedWriter(super().write(*spans), self.times, spans)

    @property
    def times(self) -> list[Told]:
        """What was told, in order."""
        found: list[Told] = self.__dict__.setdefault("_times", [])
        return found


class TimedWriter:
    """One of its writers."""

    def __init__(self, writer: FakeWriter, told: list[Told], spans: tuple[Span, ...]) -> None:
        self._told = told
        self._spans = spans
        self.cells = writer.cells
        self.commit = writer.commit

    def ran(self, computed: DeviceTimes, copied: DeviceTimes) -> None:
        self._told.append((self._spans, computed, copied))


def watched(family: str, asked: Prefill) -> Watched:
    """`sink_for`, watched."""
    plain = sink_for(family, asked)
    return Watched(plain.plan, plain.options, plain.buffer)


def timed(family: str, asked: Prefill) -> Timed:
    """`sink_for`, timed."""
    plain = sink_for(family, asked)
    return Timed(plain.plan, plain.options, plain.buffer)


def check_quiet(device: FakeDevice, sink: FakeSink) -> None:
    """The device has nothing left to do with the slot's memory: a fault if it may have."""
    flat = np.frombuffer(sink.buffer, np.uint8)
    device._check_unused(int(flat.ctypes.data), flat.nbytes, "given back")
    assert device.faults == []
