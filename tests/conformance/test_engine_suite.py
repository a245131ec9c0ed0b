"""The engine suite bites: one broken engine for each thing that it checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import pytest
from msgspec.structs import replace

from headrace.backends.base import Cells, PrefillEngine, PrefillSink
from headrace.backends.replay import ReplayEngine
from headrace.backends.replay import open as open_replay
from headrace.errors import Cancelled, HeadraceError
from headrace.geometry import Manifest
from headrace.ids import Span
from headrace.testing.conformance_engine import PrefillEngineConformance

Tokens = Sequence[int]
Prefill = Callable[["Broken", Tokens, PrefillSink, int], None]


class Broken:
    """The replay engine, with one thing wrong."""

    def __init__(self, prefill: Prefill) -> None:
        self.good: ReplayEngine = open_replay(
            {"layers": 4, "heads": 2, "head_dim": 8, "window": 16, "full_every": 2}
        )
        self.num_calls = 0
        self._prefill = prefill

    def manifest(self) -> Manifest:
        return self.good.manifest()

    def prefill_stream(self, tokens: Tokens, sink: PrefillSink, start: int = 0) -> None:
        self.num_calls += 1
        self._prefill(self, tokens, sink, start)

    def close(self) -> None:
        self.good.close()


class Sink:
    """A sink that engines under test are handed through, for one thing to go wrong in."""

    def __init__(self, sink: PrefillSink) -> None:
        self.plan = sink.plan
        self.options = sink.options
        self.inner = sink

    def check(self) -> None:
        self.inner.check()

    def write(self, *spans: Span) -> Writer:
        return Writer(self, spans)

    def final(
        self,
        logits: memoryview | bytes | None,
        *,
        token: int | None = None,
        ready_ns: int | None = None,
    ) -> None:
        self.inner.final(logits, token=token, ready_ns=ready_ns)

    def places(self, cells: list[Cells]) -> list[Cells]:
        return cells

    def commit(self, writer: Writer) -> None:
        writer.inner.commit()


class Writer:
    def __init__(self, sink: Sink, spans: Sequence[Span]) -> None:
        self.sink = sink
        self.spans = spans
        self.inner = sink.inner.write(*spans)
        self.given: list[Cells] = []

    def cells(self, layer: int) -> list[Cells]:
        cells = self.sink.places(self.inner.cells(layer))
        self.given += cells
        return cells

    def commit(self) -> None:
        self.sink.commit(self)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: object, exc: object, trace: object) -> None:
        if kind is None:
            self.commit()


class _Late(Sink):
    """The last byte of a span is written after its announcement."""

    def commit(self, writer: Writer) -> None:
        rows = [cells.rows()[-1] for cells in writer.given]
        last = [row[-1] for row in rows]
        for row in rows:
            row[-1] = 0
        writer.inner.commit()
        for row, byte in zip(rows, last, strict=True):
            row[-1] = byte


class _SkipsALayer(Sink):
    """Layer 1 is announced and never written."""

    def places(self, cells: list[Cells]) -> list[Cells]:
        return [c for c in cells if c.layer != 1]


class _SkipsAPart(Sink):
    def places(self, cells: list[Cells]) -> list[Cells]:
        return [c for c in cells if c.part != 1]


class _FinalEarly(Sink):
    """The final comes with the first span."""

    def commit(self, writer: Writer) -> None:
        writer.inner.commit()
        self.inner.final(bytes(self.plan.slot.logits_nbytes))


class _Twice(Sink):
    """A cell is told twice."""

    def commit(self, writer: Writer) -> None:
        writer.inner.commit()
        self.inner.write(*writer.spans).commit()


class _Stray(Sink):
    """A byte past the end of a slot's cells is written."""

    def commit(self, writer: Writer) -> None:
        if writer.given:
            writer.given[0].buffer[self.plan.slot.nbytes - 1] = 1
        writer.inner.commit()


class _ShortLogits(Sink):
    def final(
        self,
        logits: memoryview | bytes | None,
        *,
        token: int | None = None,
        ready_ns: int | None = None,
    ) -> None:
        self.inner.final(b"\0" * 4)


class _Token(Sink):
    """Its manifest says logits."""

    def final(
        self,
        logits: memoryview | bytes | None,
        *,
        token: int | None = None,
        ready_ns: int | None = None,
    ) -> None:
        self.inner.final(None, token=3)


class _NoFinal(Sink):
    def final(
        self,
        logits: memoryview | bytes | None,
        *,
        token: int | None = None,
        ready_ns: int | None = None,
    ) -> None:
        pass


class _Rerouted(Sink):
    """Whatever the route, it does as on another."""

    route = "whole"

    def __init__(self, sink: PrefillSink) -> None:
        super().__init__(sink)
        self.options = replace(sink.options, route=self.route)


class _NeverChecks(Sink):
    def check(self) -> None:
        pass


class _ChecksOnce(Sink):
    """When the prefill begins, and not in each layer."""

    def __init__(self, sink: PrefillSink) -> None:
        super().__init__(sink)
        sink.check()

    def check(self) -> None:
        pass


class _ChecksLate(Sink):
    """Often enough in all, and too late: nothing is heard while layers are computed."""

    def check(self) -> None:
        pass

    def commit(self, writer: Writer) -> None:
        writer.inner.commit()
        for _ in self.plan.layers:
            self.inner.check()


class _Unchunked(_Rerouted):
    def __init__(self, sink: PrefillSink) -> None:
        super().__init__(sink)
        self.options = replace(sink.options, chunk=0)


def through(kind: Callable[[PrefillSink], PrefillSink]) -> Prefill:
    def prefill(engine: Broken, tokens: Tokens, sink: PrefillSink, start: int) -> None:
        engine.good.prefill_stream(tokens, kind(sink), start)

    return prefill


def _swallows(engine: Broken, tokens: Tokens, sink: PrefillSink, start: int) -> None:
    try:
        engine.good.prefill_stream(tokens, sink, start)
    except Cancelled:
        return


def _goes_on(engine: Broken, tokens: Tokens, sink: PrefillSink, start: int) -> None:
    """Hears the cancel and computes on until its final; only then says so."""

    class Deaf(Sink):
        def check(self) -> None:
            with suppress(Cancelled):
                self.inner.check()

    engine.good.prefill_stream(tokens, Deaf(sink), start)


def _remembers(engine: Broken, tokens: Tokens, sink: PrefillSink, start: int) -> None:
    changed = [(token + engine.num_calls) % 32 for token in tokens]
    engine.good.prefill_stream(changed, sink, start)


def _ignores_the_prompt(engine: Broken, tokens: Tokens, sink: PrefillSink, start: int) -> None:
    engine.good.prefill_stream([1] * len(tokens), sink, start)


def _ignores_start(engine: Broken, tokens: Tokens, sink: PrefillSink, start: int) -> None:
    engine.good.prefill_stream(tokens, sink, 0)


def _other_bytes_when_streamed(
    engine: Broken, tokens: Tokens, sink: PrefillSink, start: int
) -> None:
    changed = [1, *tokens[1:]] if sink.options.route == "streamed" else tokens
    engine.good.prefill_stream(changed, sink, start)


FAULTS: dict[str, tuple[Prefill, str]] = {
    "writes a span late": (through(_Late), "test_a_cell_is_final_when_it_is_announced"),
    "skips a layer": (through(_SkipsALayer), "test_every_cell_is_written_once_and_nothing_else"),
    "skips a part": (through(_SkipsAPart), "test_every_cell_is_written_once_and_nothing_else"),
    "gives its final early": (
        through(_FinalEarly),
        "test_every_cell_is_written_once_and_nothing_else",
    ),
    "emits a cell twice": (through(_Twice), "test_every_cell_is_written_once_and_nothing_else"),
    "writes beside its cells": (
        through(_Stray),
        "test_every_cell_is_written_once_and_nothing_else",
    ),
    "gives a short row": (through(_ShortLogits), "test_it_ends_as_its_manifest_says"),
    "gives a token": (through(_Token), "test_it_ends_as_its_manifest_says"),
    "gives no final": (through(_NoFinal), "test_every_cell_is_written_once_and_nothing_else"),
    "does not stream": (through(_Rerouted), "test_it_streams_by_layer_group"),
    "does not cut": (through(_Unchunked), "test_it_keeps_to_the_transfer_chunk"),
    "swallows a cancel": (_swallows, "test_it_stops_when_it_is_withdrawn"),
    "goes on after a cancel": (_goes_on, "test_it_says_in_each_layer_that_it_is_at_work"),
    "never says that it is at work": (
        through(_NeverChecks),
        "test_it_says_in_each_layer_that_it_is_at_work",
    ),
    "says it once": (through(_ChecksOnce), "test_it_says_in_each_layer_that_it_is_at_work"),
    "says it late": (through(_ChecksLate), "test_it_says_in_each_layer_that_it_is_at_work"),
    "remembers": (_remembers, "test_a_prompt_leaves_nothing_for_the_next"),
    "ignores the prompt": (_ignores_the_prompt, "test_another_prompt_gives_other_cells"),
    "ignores start": (_ignores_start, "test_it_can_start_late"),
    "streams other bytes": (_other_bytes_when_streamed, "test_the_route_changes_no_byte"),
}


def suite_of(engine: PrefillEngine) -> PrefillEngineConformance:
    class Suite(PrefillEngineConformance):
        lengths = (1, 40)

        def make_engine(self) -> PrefillEngine:
            return engine

    return Suite()


@pytest.mark.parametrize("name", FAULTS)
def test_the_suite_finds(name: str) -> None:
    prefill, check = FAULTS[name]
    with pytest.raises((AssertionError, HeadraceError)):
        getattr(suite_of(Broken(prefill)), check)()


def test_the_suite_finds_a_manifest_that_changes() -> None:
    class Changing(Broken):
        def manifest(self) -> Manifest:
            return replace(self.good.manifest(), model=f"after {self.num_calls}")

    suite = suite_of(Changing(through(Sink)))
    with pytest.raises(AssertionError, match="the manifest changed"):
        suite.test_its_manifest_is_sound_and_stays_the_same()


def test_the_engine_behind_the_faults_is_good() -> None:
    suite = suite_of(Broken(through(Sink)))
    checks = [getattr(suite, name) for name in dir(suite) if name.startswith("test_")]
    assert len(checks) >= 11
    for check in checks:
        check()


def test_a_suite_without_an_engine_says_so() -> None:
    with pytest.raises(NotImplementedError, match="make_engine"):
        PrefillEngineConformance().test_its_manifest_is_sound_and_stays_the_same()
