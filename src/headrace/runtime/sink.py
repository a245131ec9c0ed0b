"""The sink of one attempt in a source process: writable cells of the slot, announced on commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from headrace.backends.base import Cells
from headrace.errors import LocalProtocolError, WouldBlock
from headrace.ids import Span
from headrace.messages import DeviceTimes, FromSource
from headrace.protocol.source import SourceAttempt
from headrace.runtime.digest import crc32


class SlotSink:
    """What an engine writes one attempt into; implements `PrefillSink`."""

    def __init__(
        self,
        attempt: SourceAttempt,
        slot: memoryview,
        send: Callable[[FromSource], None],
        poll: Callable[[], None],
    ) -> None:
        """`send` queues a message without blocking; `poll` takes in a cancel if one has come."""
        self.plan = attempt.plan
        self.options = attempt.prefill
        self._attempt = attempt
        self._slot = slot
        self._send = send
        self._poll = poll

    def check(self) -> None:
        """Say that the engine is at work; raises Cancelled once the attempt is withdrawn."""
        self._poll()
        for message in self._attempt.computing(time.monotonic_ns()):
            try:
                self._send(message)
            except WouldBlock:
                return  # the owner has not read for long; what must arrive has room of its own

    def write(self, *spans: Span) -> SlotWriter:
        """A writer for the cells of `spans`; raises Cancelled once the attempt is withdrawn."""
        self._poll()
        self._attempt.check_writable(spans)
        return SlotWriter(self, spans)

    def final(
        self,
        logits: memoryview | bytes | None,
        *,
        token: int | None = None,
        ready_ns: int | None = None,
    ) -> None:
        """Put the logits row into the slot, or give a token id, and announce it."""
        self._check()
        if (logits is None) == (token is None):
            raise LocalProtocolError("a final is either a row of logits or a token id")
        if logits is not None:
            row = memoryview(logits).cast("B")
            layout = self.plan.slot
            if len(row) != layout.logits_nbytes:
                raise LocalProtocolError(
                    f"a logits row of {len(row)} bytes, expected {layout.logits_nbytes}"
                )
            self._slot[layout.logits_offset : layout.logits_offset + len(row)] = row
        now_ns = time.monotonic_ns()
        for message in self._attempt.final(token, ready_ns or now_ns, now_ns):
            self._send(message)

    def _check(self) -> None:
        self._poll()
        self._attempt.check_running()

    def _cells(self, span: Span, layer: int) -> list[Cells]:
        lo, hi = self.plan.windows[layer]
        start, stop = max(lo, span.start), min(hi, span.stop)
        if start >= stop:
            return []
        return [
            Cells(
                self._slot,
                self.plan.region(layer, part, start, stop),
                layer,
                part,
                start,
                stop,
            )
            for part in range(len(self.plan.layers[layer].parts))
        ]

    def _commit(
        self,
        spans: Sequence[Span],
        write_ns: int | None,
        computed: DeviceTimes | None,
        copied: DeviceTimes | None,
    ) -> None:
        self._check()
        if self._attempt.stamps_layers:
            spans = [layer for span in spans for layer in self.plan.by_layer(span)]
        digests = [self._digest(span) for span in spans] if self.options.digest else []
        messages = self._attempt.commit(
            spans,
            digests,
            time.monotonic_ns(),
            write_ns=write_ns,
            computed=computed,
            copied=copied,
        )
        for message in messages:
            self._send(message)

    def _digest(self, span: Span) -> int:
        return crc32(
            row
            for layer in range(span.layer_start, span.layer_stop)
            for cells in self._cells(span, layer)
            for row in cells.rows()
        )


class SlotWriter:
    """The writable cells of spans that are announced together.

    Implements `SpanWriter` and `TimedWriter`.
    """

    def __init__(self, sink: SlotSink, spans: Sequence[Span]) -> None:
        self._sink = sink
        self._spans = spans
        self._committed = False
        self._write_ns: int | None = None
        self._computed: DeviceTimes | None = None
        self._copied: DeviceTimes | None = None

    def cells(self, layer: int) -> list[Cells]:
        """The places of the layer's parts in these spans, part by part within each span."""
        if self._committed:
            raise LocalProtocolError(f"cells of {self._spans} asked for after their commit")
        if self._write_ns is None:
            self._write_ns = time.monotonic_ns()
        return [
            cells
            for span in self._spans
            if span.layer_start <= layer < span.layer_stop
            for cells in self._sink._cells(span, layer)
        ]

    def ran(self, computed: DeviceTimes, copied: DeviceTimes) -> None:
        """When a device computed and copied the cells; they are told with the spans."""
        if self._committed:
            raise LocalProtocolError(f"times of {self._spans} told after their commit")
        self._computed, self._copied = computed, copied

    def commit(self) -> None:
        """Announce the spans, once."""
        if self._committed:
            raise LocalProtocolError(f"{self._spans} committed twice")
        self._committed = True
        self._sink._commit(self._spans, self._write_ns, self._computed, self._copied)

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
