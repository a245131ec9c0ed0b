"""The replay source with finite numbers: its bytes are any, and vLLM's kernels spread NaN.

A cell that is masked counts nothing, but nothing times NaN is NaN: what a load leaves in a block
would change what vLLM computes with the next request's first cells of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

import numpy as np

from headrace.backends.base import Cells, PrefillSink, SpanWriter
from headrace.backends.replay import ReplayEngine
from headrace.backends.replay import open as open_replay
from headrace.geometry import Manifest
from headrace.ids import Span

FACTORY: Final = "tests.vllm.finite:open"
_KEPT, _EXPONENT = 0x807FFFFF, 0x3E000000  # of float32: all in [1/8, 1/4)


def open(options: Mapping[str, Any]) -> FiniteEngine:
    """The factory; options as of replay, with dtype float32."""
    return FiniteEngine(open_replay(options))


class FiniteEngine:
    """See the module."""

    def __init__(self, replay: ReplayEngine) -> None:
        self._replay = replay

    def manifest(self) -> Manifest:
        return self._replay.manifest()

    def prefill_stream(self, tokens: Sequence[int], sink: PrefillSink, start: int = 0) -> None:
        self._replay.prefill_stream(tokens, _Sink(sink), start)

    def close(self) -> None:
        self._replay.close()


class _Sink:
    def __init__(self, sink: PrefillSink) -> None:
        self.plan, self.options = sink.plan, sink.options
        self.check, self.final = sink.check, sink.final
        self._sink = sink

    def write(self, *spans: Span) -> _Writer:
        return _Writer(self._sink.write(*spans))


class _Writer:
    def __init__(self, writer: SpanWriter) -> None:
        self._writer = writer
        self._cells: list[Cells] = []
        self._committed = False

    def cells(self, layer: int) -> list[Cells]:
        cells = self._writer.cells(layer)
        self._cells += cells
        return cells

    def commit(self) -> None:
        self._committed = True
        for each in self._cells:
            for row in each.rows():
                numbers = np.frombuffer(row, np.uint32)
                numbers[:] = (numbers & _KEPT) | _EXPONENT
        self._writer.commit()

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
