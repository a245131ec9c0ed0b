"""Engines that fail by attempt number, and engines that announce what they have not written.

Both are the replay engine with a fault; prompts that do not begin with the token FAULTY are served
well. Options beside replay's are `gate`, the FIFO to wait at, and those of each class.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from headrace.backends.base import (
    Cells,
    Fence,
    PrefillEngine,
    PrefillSink,
    Reservation,
    SlotView,
    SpanWriter,
)
from headrace.backends.null import NullDecoder, decoder_like
from headrace.backends.replay import ReplayEngine
from headrace.backends.replay import open as open_replay
from headrace.channel import Channel
from headrace.errors import DeviceError, Refused
from headrace.geometry import Manifest
from headrace.ids import Span
from headrace.plan import Copy
from headrace.runtime.sink import SlotSink
from headrace.testing.sinks import open_gated
from tests.faults.engines import BEHAVIOURS, Rogue
from tests.faults.lab import GEOMETRY, CountingDecoder, prompt, replay_options

FAULTY = 0  # no prompt of the lab begins with it


def faulty(seed: int) -> list[int]:
    """A prompt that orders the fault."""
    return [FAULTY, *prompt(seed)[1:]]


def open_failing(options: Mapping[str, Any]) -> FailingEngine:
    """`faults`: for attempts 1, 2, ... a behaviour of `tests.faults.engines`, or "" for none."""
    return FailingEngine(open_replay(replay_options(options)), options["gate"], options["faults"])


class FailingEngine:
    """Behaves as it is told for each attempt of a faulty prompt."""

    def __init__(self, engine: ReplayEngine, gate: str, faults: Sequence[str]) -> None:
        self._engine = engine
        self._gate = gate
        self._faults = faults

    def manifest(self) -> Manifest:
        return self._engine.manifest()

    def prefill_stream(self, tokens: Sequence[int], sink: PrefillSink, start: int = 0) -> None:
        number = sink.options.attempt.attempt
        fault = self._faults[number - 1] if number <= len(self._faults) else ""
        rogue = Rogue(self._engine, cast(SlotSink, sink), tokens, self._gate)
        if tokens[0] == FAULTY and fault:
            BEHAVIOURS[fault](rogue)
        else:
            rogue.behave()

    def close(self) -> None:
        self._engine.close()


def open_late(options: Mapping[str, Any]) -> LateEngine:
    """`late`: keyword arguments of `LateEngine`."""
    return LateEngine(open_replay(replay_options(options)), options["gate"], **options["late"])


class LateEngine:
    """Announces cells of some layers before it has written them, or without ever writing them.

    kind: `early` (nothing of them is written before the commit), `torn` (the first half of the
    positions is) or `stale` (nothing ever is). moment: when the rest is written, between stamp and
    message (`stamped`) or after a byte from the gate (`gate`). attempts: those that go wrong.
    """

    def __init__(
        self,
        engine: ReplayEngine,
        gate: str,
        kind: str,
        layers: Sequence[int],
        moment: str = "gate",
        attempts: Sequence[int] = (1,),
    ) -> None:
        self._engine = engine
        self.gate = gate
        self.kind = kind
        self.layers = layers
        self.moment = moment
        self._attempts = attempts

    def manifest(self) -> Manifest:
        return self._engine.manifest()

    def prefill_stream(self, tokens: Sequence[int], sink: PrefillSink, start: int = 0) -> None:
        late = tokens[0] == FAULTY and sink.options.attempt.attempt in self._attempts
        target = LateSink(self, cast(SlotSink, sink)) if late else sink
        self._engine.prefill_stream(tokens, target, start)

    def wait_at_gate(self) -> None:
        with open(self.gate, "rb", buffering=0) as gate:
            gate.read(1)

    def close(self) -> None:
        self._engine.close()


class LateSink:
    """A sink whose writers keep the cells of some layers back; implements `PrefillSink`."""

    def __init__(self, engine: LateEngine, sink: SlotSink) -> None:
        self.plan = sink.plan
        self.options = sink.options
        self.engine = engine
        self.sink = sink

    def check(self) -> None:
        self.sink.check()

    def write(self, *spans: Span) -> LateWriter:
        return LateWriter(self, self.sink.write(*spans))

    def final(
        self,
        logits: memoryview | bytes | None,
        *,
        token: int | None = None,
        ready_ns: int | None = None,
    ) -> None:
        self.sink.final(logits, token=token, ready_ns=ready_ns)


class LateWriter:
    """Hands out scratch memory for the layers that are late; implements `SpanWriter`."""

    def __init__(self, late: LateSink, writer: SpanWriter) -> None:
        self._late = late
        self._writer = writer
        self._kept: list[tuple[Cells, Cells]] = []  # scratch, slot

    def cells(self, layer: int) -> list[Cells]:
        places = self._writer.cells(layer)
        if layer not in self._late.engine.layers:
            return places
        scratch = [place._replace(buffer=memoryview(bytearray(place.buffer))) for place in places]
        self._kept += zip(scratch, places, strict=True)
        return scratch

    def commit(self) -> None:
        engine = self._late.engine
        if not self._kept:
            self._writer.commit()
            return
        if engine.kind == "torn":
            self._write(half=True)
        if engine.moment == "stamped":
            self._commit_and_write_between()
            return
        self._writer.commit()
        engine.wait_at_gate()
        if engine.kind != "stale":
            self._write()

    def _commit_and_write_between(self) -> None:
        sink = self._late.sink
        send = sink._send

        def write_and_send(message: Any) -> None:
            self._write()
            send(message)

        sink._send = write_and_send
        self._writer.commit()
        sink._send = send

    def _write(self, *, half: bool = False) -> None:
        for scratch, slot in self._kept:
            count = slot.stop - slot.start
            share = (count // 2) / count if half else 1.0
            for source, target in zip(scratch.rows(), slot.rows(), strict=True):
                nbytes = int(len(target) * share)
                target[:nbytes] = source[:nbytes]

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


def open_once(options: Mapping[str, Any]) -> PrefillEngine:
    """A gated engine at its first start (as the file `started` tells); then as `again` says.

    exits, hangs, refuses, raises, hangs up; another (one of another model).
    """
    started, again = Path(options["started"]), options["again"]
    gated = {k: v for k, v in options.items() if k not in ("started", "again")}
    if not started.exists():
        started.touch()
        return open_gated(gated)
    if again == "exits":
        os._exit(7)
    if again == "hangs":
        signal.pause()
    if again == "refuses":
        raise Refused("the device is taken by another process", field="device")
    if again == "raises":
        raise OSError("no such device")
    if again == "hangs up":
        channel = next(each for each in gc.get_objects() if isinstance(each, Channel))
        channel.close()
        signal.pause()
    return open_gated({**gated, "model": again})


def open_faulty_decoder(options: Mapping[str, Any]) -> NullDecoder:
    """A null decoder for the lab's geometry whose imports fail while the file `fails` exists."""
    manifest = decoder_like(open_replay(GEOMETRY).manifest())
    return FaultyDecoder(manifest, Path(options["fails"]), options["context"], options["lanes"])


class FaultyDecoder(NullDecoder):
    def __init__(self, manifest: Manifest, fails: Path, context: int, lanes: int) -> None:
        super().__init__(manifest, context=context, lanes=lanes)
        self._fails = fails

    def begin_import(
        self, reservation: Reservation, slot: SlotView, copies: Sequence[Copy]
    ) -> Fence:
        if self._fails.exists():
            raise DeviceError("the copy engine is on fire")
        return super().begin_import(reservation, slot, copies)


def open_stepped_decoder(options: Mapping[str, Any]) -> CountingDecoder:
    """The lab's decoder, which waits for a byte of the FIFO `steps` before each decode step."""
    manifest = decoder_like(open_replay(GEOMETRY).manifest())
    decoder = CountingDecoder(manifest, context=options["context"], lanes=options["lanes"])
    steps = os.open(options["steps"], os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    os.set_blocking(steps, True)
    decoder.before_step = lambda: os.read(steps, 1)
    return decoder


def open_meeting(options: Mapping[str, Any]) -> ReplayEngine:
    """The replay engine, loaded once another one loads: they meet at the FIFO `meeting`.

    One of them has the side `read` and the other the side `write`: neither opens without the other.
    """
    rest = dict(options)
    path, side = rest.pop("meeting"), rest.pop("side")
    os.close(os.open(path, os.O_RDONLY if side == "read" else os.O_WRONLY))
    return open_replay(rest)
