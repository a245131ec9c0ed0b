"""Engines that each break one rule, for the pair suite to find; factories for `SourceHandle`.

They need no torch, so that a source of them starts at once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from headrace.backends.base import Cells, PrefillSink, SpanWriter
from headrace.backends.replay import ReplayEngine, ReplayOptions
from headrace.backends.replay import open as open_replay
from headrace.errors import Cancelled, Refused
from headrace.ids import Span
from headrace.messages import Prefill
from headrace.testing.sinks import GatedSink, GatedWriter

GEOMETRY: dict[str, Any] = {
    "layers": 6,
    "heads": 2,
    "head_dim": 8,
    "window": 16,
    "full_every": 3,
}


def _options(options: Mapping[str, Any]) -> ReplayOptions:
    return ReplayOptions(**{**GEOMETRY, **options})


class _Sink(GatedSink):
    """Passes everything on; what a fault changes is overridden."""

    def __init__(self, sink: PrefillSink) -> None:
        super().__init__(sink, lambda: None)


def open_early(options: Mapping[str, Any]) -> Early:
    return Early(_options(options))


class Early(ReplayEngine):
    """Announces each span before it writes it."""

    def prefill_stream(self, tokens: Sequence[int], sink: PrefillSink, start: int = 0) -> None:
        super().prefill_stream(tokens, _EarlySink(sink), start)


class _EarlySink(_Sink):
    def write(self, *spans: Span) -> GatedWriter:
        return _EarlyWriter(self._sink.write(*spans), spans)


class _EarlyWriter(GatedWriter):
    def __init__(self, writer: SpanWriter, spans: Sequence[Span]) -> None:
        super().__init__(writer, lambda: None)
        layers = [layer for span in spans for layer in range(span.layer_start, span.layer_stop)]
        self._cells = {layer: writer.cells(layer) for layer in layers}
        writer.commit()

    def cells(self, layer: int) -> list[Cells]:
        return self._cells[layer]

    def commit(self) -> None:
        """It was announced long ago."""


def open_deaf(options: Mapping[str, Any]) -> Deaf:
    return Deaf(_options(options))


class Deaf(ReplayEngine):
    """Takes a cancel for a fault that passes, and begins anew."""

    def prefill_stream(self, tokens: Sequence[int], sink: PrefillSink, start: int = 0) -> None:
        with suppress(Cancelled):
            super().prefill_stream(tokens, sink, start)
            return
        super().prefill_stream(tokens, sink, start)


def open_other_bytes_when_streamed(options: Mapping[str, Any]) -> OtherBytesWhenStreamed:
    return OtherBytesWhenStreamed(_options(options))


class OtherBytesWhenStreamed(ReplayEngine):
    """One layer differs on one route."""

    _asked: Prefill | None = None

    def prefill_stream(self, tokens: Sequence[int], sink: PrefillSink, start: int = 0) -> None:
        self._asked = sink.options
        super().prefill_stream(tokens, sink, start)

    def _fill(self, cells: Cells, seed: int) -> None:
        streamed = self._asked is not None and self._asked.route == "streamed"
        super()._fill(cells, seed + (streamed and cells.layer == 2))


def open_forgetful(options: Mapping[str, Any]) -> Forgetful:
    return Forgetful(_options(options))


class Forgetful(ReplayEngine):
    """Every fifth prompt gets some cells of the one before."""

    def __init__(self, options: ReplayOptions) -> None:
        super().__init__(options)
        self._num_prompts = 0
        self._before = 0

    def prefill_stream(self, tokens: Sequence[int], sink: PrefillSink, start: int = 0) -> None:
        self._num_prompts += 1
        super().prefill_stream(tokens, sink, start)
        self._before = sum(tokens)

    def _fill(self, cells: Cells, seed: int) -> None:
        stale = self._num_prompts % 5 == 0 and cells.layer == 4
        super()._fill(cells, seed + self._before if stale else seed)


def open_another_each_time(options: Mapping[str, Any]) -> AnotherEachTime:
    return AnotherEachTime(_options(options))


class AnotherEachTime(ReplayEngine):
    """What it computes depends on its process."""

    def _fill(self, cells: Cells, seed: int) -> None:
        super()._fill(cells, seed + os.getpid())


def open_once(options: Mapping[str, Any]) -> ReplayEngine:
    """A device that is not given back by a process that was killed."""
    mark = Path(options["mark"])
    if mark.exists():
        raise Refused("the device is held by a process that is gone")
    mark.touch()
    return ReplayEngine(_options({key: value for key, value in options.items() if key != "mark"}))


def open_mortal(options: Mapping[str, Any]) -> Mortal:
    return Mortal(_options(options))


class Mortal(ReplayEngine):
    """Dies of every longer prompt."""

    def prefill_stream(self, tokens: Sequence[int], sink: PrefillSink, start: int = 0) -> None:
        if len(tokens) > 16:
            os._exit(1)
        super().prefill_stream(tokens, sink, start)


def open_token_only(options: Mapping[str, Any]) -> TokenOnly:
    return TokenOnly(_options(options))


class TokenOnly(ReplayEngine):
    """No fault: an engine that gives a first token and no logits."""

    def manifest(self) -> Any:
        from msgspec.structs import replace

        return replace(super().manifest(), first="token")

    def prefill_stream(self, tokens: Sequence[int], sink: PrefillSink, start: int = 0) -> None:
        super().prefill_stream(tokens, _TokenSink(sink, sum(tokens) % 32), start)


class _TokenSink(_Sink):
    def __init__(self, sink: PrefillSink, token: int) -> None:
        super().__init__(sink)
        self._token = token

    def final(
        self,
        logits: memoryview | bytes | None,
        *,
        token: int | None = None,
        ready_ns: int | None = None,
    ) -> None:
        self._sink.final(None, token=self._token, ready_ns=ready_ns)


def open_occupied(options: Mapping[str, Any]) -> ReplayEngine:
    """A device that another uses, as `occupants` tells."""
    return open_replay(GEOMETRY)


def occupants(options: Mapping[str, Any]) -> Sequence[str]:
    """Asked for every factory of this file: only one has a device."""
    return [f"process {pid} computes on it" for pid in options.get("occupants", ())]
