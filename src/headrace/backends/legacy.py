"""A prefill engine that knows only `prefill(tokens)`, as one that streams nothing.

It keeps working unchanged: its result is written into the slot whole, so only the whole route can
be asked of it (its manifest emits nothing in parts).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from headrace.backends.base import Cells, PrefillSink
from headrace.errors import LocalProtocolError
from headrace.geometry import Manifest


class WholePrefill(NamedTuple):
    """All that a legacy engine returns for one prompt of n tokens.

    parts: per layer, per part, bytes of [heads, rows, head_dim] (`head_major`) or [rows, heads,
    head_dim] (`token_major`), where rows are the last positions that it kept, at most n; an empty
    sequence for layers without cells. logits: the last position's row, or None with `token`.
    """

    parts: Sequence[Sequence[memoryview | bytes]]
    logits: memoryview | bytes | None
    token: int | None = None


class LegacyPrefill(Protocol):
    """What a legacy engine has."""

    def manifest(self) -> Manifest: ...

    def prefill(self, tokens: Sequence[int]) -> WholePrefill: ...

    def close(self) -> None: ...


class LegacyEngine:
    """Wraps a legacy engine as a prefill engine for the whole route."""

    def __init__(self, engine: LegacyPrefill) -> None:
        self._engine = engine

    def manifest(self) -> Manifest:
        return replace(self._engine.manifest(), emits=(), prefix="none")

    def prefill_stream(self, tokens: Sequence[int], sink: PrefillSink, start: int = 0) -> None:
        if start:
            raise LocalProtocolError(f"a legacy engine cannot start at position {start}")
        result = self._engine.prefill(tokens)
        ready_ns = time.monotonic_ns()
        with sink.write(sink.plan.whole()) as writer:
            for layer in range(len(sink.plan.layers)):
                for cells in writer.cells(layer):
                    self._copy(result.parts[layer][cells.part], cells, len(tokens))
        sink.final(result.logits, token=result.token, ready_ns=ready_ns)

    def close(self) -> None:
        self._engine.close()

    def _copy(self, part: memoryview | bytes, cells: Cells, num_tokens: int) -> None:
        """Copy the window of [rows of one head, or one row] out of what the engine kept."""
        view = memoryview(part).cast("B")
        rows = cells.rows()
        row_nbytes = cells.region.row_nbytes
        position_nbytes = row_nbytes // (cells.stop - cells.start)
        kept, rest = divmod(len(view), len(rows) * position_nbytes)
        first = num_tokens - kept
        if rest or not 0 <= first <= cells.start:
            raise LocalProtocolError(
                f"layer {cells.layer} part {cells.part}: {len(view)} bytes do not hold "
                f"positions [{cells.start}, {cells.stop}) of {len(rows)} rows"
            )
        for number, row in enumerate(rows):
            at = (number * kept + cells.start - first) * position_nbytes
            row[:] = view[at : at + row_nbytes]
