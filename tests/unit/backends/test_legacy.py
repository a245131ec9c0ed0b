"""A legacy engine behind the wrapper gives what the same engine streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from headrace.backends.legacy import LegacyEngine, WholePrefill
from headrace.backends.null import decoder_like
from headrace.backends.replay import open as open_replay
from headrace.errors import LocalProtocolError
from headrace.geometry import Layout, Manifest
from headrace.plan import Plan, compile_plan
from headrace.testing.sinks import MemorySink, ask

GEOMETRY: dict[str, Any] = {"layers": 4, "heads": 2, "head_dim": 4, "window": 8, "full_every": 2}
NUM_TOKENS = 20


class Whole:
    """The replay engine's whole result; sliding layers keep `kept` rows, the last ones."""

    def __init__(self, layout: Layout, kept: int) -> None:
        self.engine = open_replay({**GEOMETRY, "layout": layout})
        self.kept = kept
        self.closed = False
        self.change: Any = None
        self.token: int | None = None

    def manifest(self) -> Manifest:
        return self.engine.manifest()

    def plan(self, num_tokens: int) -> Plan:
        manifest = self.manifest()
        return compile_plan(decoder_like(manifest), manifest.layouts[0], num_tokens, 64)

    def prefill(self, tokens: Sequence[int]) -> WholePrefill:
        """Every row of every layer, cut to what is kept."""
        full = open_replay({**GEOMETRY, "window": 0, "layout": self.manifest().layouts[0]})
        manifest = full.manifest()
        plan = compile_plan(decoder_like(manifest), manifest.layouts[0], len(tokens), 64)
        sink = MemorySink(plan, ask(len(tokens)))
        full.prefill_stream(tokens, sink)
        parts = [
            [self._last(sink.cells()[layer, part], len(tokens)) for part in range(2)]
            for layer in range(4)
        ]
        if self.change is not None:
            self.change(parts)
        logits = None if self.token is not None else sink.logits
        return WholePrefill(parts, logits, self.token)

    def _last(self, cells: bytes, num_tokens: int) -> bytes:
        """The last rows: of each head, or of all heads at once."""
        kept = min(self.kept, num_tokens)
        rows = 2 if self.manifest().layouts[0] == "head_major" else 1
        each = len(cells) // rows
        drop = each // num_tokens * (num_tokens - kept)
        return b"".join(cells[row * each + drop : (row + 1) * each] for row in range(rows))

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("layout", ["head_major", "token_major"])
@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 20])
def test_whole_equals_streamed(layout: Layout, num_tokens: int) -> None:
    """The wrapper takes the window out of all rows that the engine kept."""
    whole = Whole(layout, kept=num_tokens)
    tokens = [at % 31 for at in range(num_tokens)]
    plan = whole.plan(num_tokens)
    wrapped = MemorySink(plan, ask(num_tokens))
    LegacyEngine(whole).prefill_stream(tokens, wrapped)
    streamed = MemorySink(plan, ask(num_tokens, "streamed"))
    whole.engine.prefill_stream(tokens, streamed)
    assert wrapped.cells() == streamed.cells()
    assert wrapped.logits == streamed.logits
    assert wrapped.commits == [(plan.whole(),)]
    assert not wrapped.stray_bytes()


def test_it_declares_whole_results_only() -> None:
    whole = Whole("head_major", NUM_TOKENS)
    engine = LegacyEngine(whole)
    assert (engine.manifest().emits, engine.manifest().prefix) == ((), "none")
    assert whole.manifest().emits != ()
    assert whole.manifest().prefix == "recompute"
    engine.close()
    assert whole.closed


def test_a_token_instead_of_logits() -> None:
    whole = Whole("head_major", NUM_TOKENS)
    whole.token = 5
    sink = MemorySink(whole.plan(NUM_TOKENS), ask(NUM_TOKENS))
    LegacyEngine(whole).prefill_stream([1] * NUM_TOKENS, sink)
    assert (sink.logits, sink.token) == (None, 5)


def test_too_few_rows_are_refused() -> None:
    """Full layers need all of them."""
    whole = Whole("head_major", kept=NUM_TOKENS - 1)
    sink = MemorySink(whole.plan(NUM_TOKENS), ask(NUM_TOKENS))
    with pytest.raises(
        LocalProtocolError, match=r"layer 1 part 0: .* do not hold positions \[0, 20"
    ):
        LegacyEngine(whole).prefill_stream([1] * NUM_TOKENS, sink)
    assert not sink.ended
    assert sink.commits == []


@pytest.mark.parametrize("extra", [1, 16])
def test_bytes_that_make_no_rows_are_refused(extra: int) -> None:
    """Half a row too much, or a row more than there are positions."""
    whole = Whole("head_major", kept=NUM_TOKENS)

    def add(parts: list[list[bytes]]) -> None:
        parts[2][1] += bytes(extra)

    whole.change = add
    sink = MemorySink(whole.plan(NUM_TOKENS), ask(NUM_TOKENS))
    with pytest.raises(LocalProtocolError, match="layer 2 part 1"):
        LegacyEngine(whole).prefill_stream([1] * NUM_TOKENS, sink)


def test_it_cannot_start_late() -> None:
    whole = Whole("head_major", kept=NUM_TOKENS)
    sink = MemorySink(whole.plan(NUM_TOKENS), ask(NUM_TOKENS))
    with pytest.raises(LocalProtocolError, match="cannot start at position 3"):
        LegacyEngine(whole).prefill_stream([1] * NUM_TOKENS, sink, 3)
