"""A source that announces a layer wrongly, to see whether digest mode finds it.

torn: the bytes that were stamped are in the slot, but for half of the last row. stale: in the slot
lies what another prompt left there. early: the layer is announced, and written after that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from headrace.backends.base import Cells, PrefillSink, SpanWriter
from headrace.backends.options import read_options
from headrace.backends.replay import ReplayEngine, ReplayOptions
from headrace.geometry import Manifest
from headrace.ids import Span
from headrace.messages import FromSource
from headrace.runtime.sink import SlotSink

SEEDED = "headrace.bench.faults.seeded:open"
FAULTS = ("torn", "stale", "early")
SOUND = len(FAULTS)


def open(options: Mapping[str, Any]) -> SeededEngine:
    """The factory; options as in `ReplayOptions`."""
    return SeededEngine(ReplayEngine(read_options(options, ReplayOptions, "seeded")))


class SeededEngine:
    """The replay engine; a prompt's first token is the fault by number, its second the layer."""

    def __init__(self, engine: ReplayEngine) -> None:
        self._engine = engine

    def manifest(self) -> Manifest:
        return self._engine.manifest()

    def prefill_stream(self, tokens: Sequence[int], sink: PrefillSink, start: int = 0) -> None:
        if tokens[0] < SOUND:
            sink = _WrongSink(cast(SlotSink, sink), FAULTS[tokens[0]], tokens[1])
        self._engine.prefill_stream(tokens, sink, start)

    def close(self) -> None:
        self._engine.close()


class _WrongSink:
    """A sink that announces one layer wrongly; implements `PrefillSink`."""

    def __init__(self, sink: SlotSink, fault: str, layer: int) -> None:
        self.plan = sink.plan
        self.options = sink.options
        self.check = sink.check
        self.final = sink.final
        self._sink = sink
        self._fault = fault
        self._layer = layer

    def write(self, *spans: Span) -> SpanWriter:
        writer = self._sink.write(*spans)
        if any(span.layer_start <= self._layer < span.layer_stop for span in spans):
            return _WrongWriter(writer, self._sink, self._fault, self._layer)
        return writer


class _WrongWriter:
    """A writer that does to one layer what the fault says."""

    def __init__(self, writer: SpanWriter, sink: SlotSink, fault: str, layer: int) -> None:
        self._writer = writer
        self._sink = sink
        self._fault = fault
        self._layer = layer
        self._places: list[Cells] = []
        self._due: list[Cells] = []

    def cells(self, layer: int) -> list[Cells]:
        cells = self._writer.cells(layer)
        if layer != self._layer:
            return cells
        self._places = self._due = cells
        if self._fault == "early":
            self._due = [
                place._replace(buffer=memoryview(bytearray(len(place.buffer)))) for place in cells
            ]
        return self._due

    def commit(self) -> None:
        if self._fault == "early":
            self._writer.commit()
            for place, due in zip(self._places, self._due, strict=True):
                for row, right in zip(place.rows(), due.rows(), strict=True):
                    row[:] = right
            return
        send = self._sink._send  # what comes between the stamp and the message is no engine's to do

        def spoil_and_send(message: FromSource) -> None:
            self._spoil()
            send(message)

        self._sink._send = spoil_and_send
        self._writer.commit()
        self._sink._send = send

    def _spoil(self) -> None:
        rows = [row for place in self._places for row in place.rows()]
        if self._fault == "torn":
            rows = [rows[-1][len(rows[-1]) // 2 :]]
        for row in rows:
            row[:] = bytes(byte ^ 0x5A for byte in row[:64]) * (len(row) // 64) or bytes(len(row))

    def __enter__(self) -> _WrongWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.commit()
