"""Sinks for engines under test: one over plain memory, and one that stops at a gate.

`MemorySink` stands in for the slot of a real attempt and insists on what the real one insists on.
`open_gated` is an engine for `SourceHandle`: the replay engine, which waits for a byte from a FIFO
before each step, so that a test decides how far a source process has come and never sleeps.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from headrace.backends.base import Cells, PrefillEngine, PrefillSink, SpanWriter
from headrace.backends.replay import open as open_replay
from headrace.coverage import Coverage
from headrace.errors import Cancelled, LocalProtocolError, RemoteProtocolError
from headrace.geometry import Emission, Manifest
from headrace.ids import AttemptId, Span
from headrace.messages import Prefill, Route
from headrace.plan import Plan, Region

UNWRITTEN = 0xFF
"""What the memory of a sink is filled with: NaN in every float type, and no likely cell."""


def ask(
    num_tokens: int,
    route: Route = "whole",
    *,
    group_layers: int = 1,
    chunk: int = 0,
    prefill_chunk: int = 0,
    emission: Emission = "layers",
    start: int = 0,
    cuts: tuple[int, ...] = (),
) -> Prefill:
    """A grant of slot 0 to the first attempt, as an owner would send it."""
    return Prefill(
        AttemptId(0, 0, 1),
        0,
        0,
        num_tokens,
        route,
        group_layers,
        chunk,
        prefill_chunk,
        emission,
        digest=False,
        start=start,
        cuts=cuts,
    )


class MemorySink:
    """One attempt over plain memory; implements `PrefillSink`.

    `commits` are the span batches in order; `snapshots` the bytes of each batch's cells when it was
    announced, by (layer, part, start, stop). `cancel_at`: the number of calls of `check`, `write`,
    `commit` and `final` after which each raises Cancelled; `calls` are the names of all of them in
    order, `num_refused` of those are the ones that it was raised in.
    """

    def __init__(self, plan: Plan, options: Prefill, *, cancel_at: int | None = None) -> None:
        self.plan = plan
        self.options = options
        self.buffer = memoryview(bytearray(bytes([UNWRITTEN]) * plan.slot.nbytes))
        self.commits: list[tuple[Span, ...]] = []
        self.snapshots: list[dict[tuple[int, int, int, int], bytes]] = []
        self.logits: bytes | None = None
        self.token: int | None = None
        self.ended = False
        self.calls: list[str] = []
        self.num_refused = 0
        self._broken = ""
        self._cancel_at = cancel_at
        self.windows = plan.windows
        self._coverage = Coverage(self.windows, plan.num_tokens)

    @property
    def num_calls(self) -> int:
        """How often the engine called the sink."""
        return len(self.calls)

    def check(self) -> None:
        """The engine is at work."""
        self._check("check")

    def write(self, *spans: Span) -> MemoryWriter:
        """A writer for the cells of `spans`, none of which was told before."""
        self._check("write")
        try:
            self._coverage.check(spans)
        except RemoteProtocolError as exc:
            raise self._break(f"the engine would write {exc}") from exc
        return MemoryWriter(self, spans)

    def final(
        self,
        logits: memoryview | bytes | None,
        *,
        token: int | None = None,
        ready_ns: int | None = None,
    ) -> None:
        """The source-final input."""
        self._check("final")
        missing = self._coverage.first_missing()
        if missing is not None:
            raise LocalProtocolError(f"final, but {missing} is missing")
        if (logits is None) == (token is None):
            raise LocalProtocolError("a final is either a row of logits or a token id")
        if logits is not None:
            row = bytes(memoryview(logits).cast("B"))
            layout = self.plan.slot
            if len(row) != layout.logits_nbytes:
                raise LocalProtocolError(f"{len(row)} bytes, a row has {layout.logits_nbytes}")
            self.buffer[layout.logits_offset :][: len(row)] = row
            self.logits = row
        self.token = token
        self.ended = True

    def regions(self) -> dict[tuple[int, int], Region]:
        """Where the cells asked for lie, by (layer, part)."""
        return {
            (layer, part): self.plan.region(layer, part, lo, hi)
            for layer, (lo, hi) in enumerate(self.windows)
            if lo < hi
            for part in range(len(self.plan.layers[layer].parts))
        }

    def cells(self) -> dict[tuple[int, int], bytes]:
        """The bytes of every (layer, part) that was asked for, in the slot's order."""
        return {key: region_bytes(self.buffer, place) for key, place in self.regions().items()}

    def stray_bytes(self) -> bool:
        """Whether anything was written into the KV area beside the cells asked for."""
        rest = bytearray(self.buffer)
        for region in self.regions().values():
            for begin, end in row_ranges(region):
                rest[begin:end] = bytes([UNWRITTEN]) * (end - begin)
        area = rest[self.plan.slot.kv_offset :]
        return area.count(UNWRITTEN) != len(area)

    def _check(self, name: str) -> None:
        self.calls.append(name)
        if self._cancel_at is not None and len(self.calls) > self._cancel_at:
            self.num_refused += 1
            raise Cancelled("cancelled by the test")
        if self.ended:
            raise LocalProtocolError("the final was given already")
        if self._broken:
            raise LocalProtocolError(self._broken)

    def _break(self, text: str) -> LocalProtocolError:
        self._broken = text
        return LocalProtocolError(text)

    def _commit(self, spans: Sequence[Span]) -> None:
        self._check("commit")
        try:
            self._coverage.add(spans)
        except RemoteProtocolError as exc:
            raise self._break(f"the engine committed {exc}") from exc
        self.commits.append(tuple(spans))
        self.snapshots.append(
            {
                (copy.layer, copy.part, copy.start, copy.stop): region_bytes(
                    self.buffer, copy.source
                )
                for span in spans
                for copy in self.plan.copies(span)
            }
        )


class MemoryWriter:
    """The writable cells of spans that are announced together; implements `SpanWriter`."""

    def __init__(self, sink: MemorySink, spans: Sequence[Span]) -> None:
        self._sink = sink
        self._spans = spans
        self._committed = False

    def cells(self, layer: int) -> list[Cells]:
        """The places of a layer's parts in these spans."""
        if self._committed:
            raise LocalProtocolError("cells asked for after their commit")
        return [
            Cells(self._sink.buffer, copy.source, copy.layer, copy.part, copy.start, copy.stop)
            for span in self._spans
            if span.layer_start <= layer < span.layer_stop
            for copy in self._sink.plan.copies(Span(layer, layer + 1, span.start, span.stop))
        ]

    def commit(self) -> None:
        """Announce the spans, once."""
        if self._committed:
            raise LocalProtocolError("committed twice")
        self._committed = True
        self._sink._commit(self._spans)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None and not self._committed:
            self.commit()


def row_ranges(region: Region) -> list[tuple[int, int]]:
    """Half-open byte ranges of a region's rows."""
    begins = [region.offset + row * region.stride for row in range(region.rows)]
    return [(begin, begin + region.row_nbytes) for begin in begins]


def region_bytes(buffer: memoryview, region: Region) -> bytes:
    """The bytes of a region, row after row."""
    return b"".join(bytes(buffer[begin:end]) for begin, end in row_ranges(region))


def open_gated(options: Mapping[str, Any]) -> GatedEngine:
    """A factory: the replay engine of `options`, behind the FIFO at the path `gate`."""
    rest = dict(options)
    return GatedEngine(open_replay({k: v for k, v in rest.items() if k != "gate"}), rest["gate"])


class GatedEngine:
    """Waits for a byte from a FIFO before each commit, before the final and before it returns.

    The cells of a commit are written before the wait. Once the FIFO has no writer left, the gate
    stands open.
    """

    def __init__(self, engine: PrefillEngine, gate: str) -> None:
        self._engine = engine
        self._gate = os.open(gate, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(self._gate, True)  # only the opening must not wait for a writer

    def manifest(self) -> Manifest:
        return self._engine.manifest()

    def prefill_stream(self, tokens: Sequence[int], sink: PrefillSink, start: int = 0) -> None:
        self._engine.prefill_stream(tokens, GatedSink(sink, self.wait), start)
        self.wait()

    def wait(self) -> None:
        """Take one byte."""
        os.read(self._gate, 1)

    def close(self) -> None:
        os.close(self._gate)
        self._engine.close()


class GatedSink:
    """A sink whose commits and final wait at `gate` first; implements `PrefillSink`."""

    def __init__(self, sink: PrefillSink, gate: Any) -> None:
        self.plan = sink.plan
        self.options = sink.options
        self._sink = sink
        self._gate = gate

    def check(self) -> None:
        self._sink.check()

    def write(self, *spans: Span) -> GatedWriter:
        return GatedWriter(self._sink.write(*spans), self._gate)

    def final(
        self,
        logits: memoryview | bytes | None,
        *,
        token: int | None = None,
        ready_ns: int | None = None,
    ) -> None:
        self._gate()
        self._sink.final(logits, token=token, ready_ns=ready_ns)


class GatedWriter:
    """A writer whose commit waits at the gate; implements `SpanWriter`."""

    def __init__(self, writer: SpanWriter, gate: Any) -> None:
        self._writer = writer
        self._gate = gate

    def cells(self, layer: int) -> list[Cells]:
        return self._writer.cells(layer)

    def commit(self) -> None:
        self._gate()
        self._writer.commit()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.commit()
