"""An owner that prefills by itself, with an engine that a test can look into and hold up."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.backends.base import PrefillSink
from headrace.backends.null import NullDecoder, decoder_like
from headrace.backends.replay import ReplayEngine
from headrace.backends.replay import open as open_replay
from headrace.geometry import Manifest
from headrace.ids import Span
from headrace.runtime.owner import DecoderOwner
from headrace.runtime.requests import RequestOptions
from tests.faults.lab import CONTEXT, GEOMETRY, WITHIN_S, Lab


class LocalEngine:
    """The replay engine in this process; `at_layer` is called before each layer's check."""

    def __init__(self, **changes: Any) -> None:
        self._engine: ReplayEngine = open_replay({**GEOMETRY, **changes})
        self.at_layer: Callable[[int], object] = lambda layer: None
        self.num_layers = 0
        self.runs = 0
        self.closed = 0
        self.sink: PrefillSink | None = None

    def manifest(self) -> Manifest:
        return self._engine.manifest()

    def prefill_stream(self, tokens: Sequence[int], sink: PrefillSink, start: int = 0) -> None:
        self.runs += 1
        self.num_layers = 0
        self.sink = sink
        self.compute(tokens, Counting(self, sink), start)

    def compute(self, tokens: Sequence[int], sink: PrefillSink, start: int) -> None:
        self._engine.prefill_stream(tokens, sink, start)

    def check_until(self, condition: Callable[[], bool]) -> None:
        """Compute a layer for as long as it takes."""
        deadline_s = time.monotonic() + WITHIN_S
        assert self.sink is not None
        while not condition():
            assert time.monotonic() < deadline_s
            self.sink.check()

    def close(self) -> None:
        self.closed += 1


class Counting:
    """The sink of a local engine; implements `PrefillSink`."""

    def __init__(self, engine: LocalEngine, sink: PrefillSink) -> None:
        self.plan = sink.plan
        self.options = sink.options
        self._engine = engine
        self._sink = sink

    def check(self) -> None:
        self._engine.at_layer(self._engine.num_layers)
        self._engine.num_layers += 1
        self._sink.check()

    def write(self, *spans: Span) -> Any:
        return self._sink.write(*spans)

    def final(self, logits: Any, *, token: int | None = None, ready_ns: int | None = None) -> None:
        self._sink.final(logits, token=token, ready_ns=ready_ns)


@contextmanager
def lab(directory: Path, **changes: Any) -> Iterator[tuple[Lab, LocalEngine]]:
    engine = LocalEngine()
    facts: dict[str, Any] = {"lanes": 3, "slots": 2} | changes
    with Lab(directory, local=engine, **facts) as made:
        yield made, engine
    assert engine.closed == 1


@contextmanager
def alone(engine: LocalEngine, **limits: Any) -> Iterator[DecoderOwner]:
    """An owner without any source."""
    decoder = NullDecoder(decoder_like(engine.manifest()), context=CONTEXT, lanes=2)
    owner = DecoderOwner(decoder, context=CONTEXT, local=engine, **limits)
    try:
        yield owner
        assert owner.drain()
        owner.check_integrity()
    finally:
        owner.close()
    assert engine.closed == 1


def ask(**changes: Any) -> RequestOptions:
    """Streamed, local, publish only, unless `changes` say otherwise."""
    asked: dict[str, Any] = {"route": "streamed", "on_failure": "local", "max_tokens": 0}
    return RequestOptions(**asked | changes)


@contextmanager
def pipe(owner: DecoderOwner, act: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Something that comes to the owner through a descriptor, as a router's message does."""
    reader, writer = os.pipe()

    def read_and_act() -> None:
        os.read(reader, 1)
        act()

    owner.watch(reader, read_and_act)
    yield lambda: _write(writer)
    owner.unwatch(reader)
    os.close(reader)
    os.close(writer)


def _write(fd: int) -> None:
    os.write(fd, b"x")
