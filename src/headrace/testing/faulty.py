"""An engine that wraps any other and misbehaves on command, in the real source process.

`headrace.testing.faulty:open` is a factory for `SourceHandle`. Before each prefill it looks for an
`Order` for this prompt in the directory `control`; without one the wrapped engine serves it as it
is. An ordered prefill tells each point that it comes to, waits there for a byte if it was given a
gate, and does what it was ordered to when it comes to the point that was named. So who gives the
orders knows how far a source has come, and never sleeps. The wrapped engine really computes.

Needs msgspec and the wrapped engine's own packages only.
"""

from __future__ import annotations

import contextlib
import os
import platform
import select
import sys
import time
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeAlias

import msgspec
from msgspec import Struct

from headrace.backends.base import Cells, PrefillEngine, PrefillSink, SpanWriter
from headrace.backends.legacy import LegacyEngine
from headrace.backends.load import open_source
from headrace.backends.options import read_options
from headrace.errors import Cancelled, LocalProtocolError
from headrace.geometry import Manifest
from headrace.ids import Span
from headrace.messages import Prefill
from headrace.testing import malformed
from headrace.testing.conformance_engine import PrefillEngineConformance
from headrace.testing.pair.occupants import device_use
from headrace.testing.pair.strays import STRAYS, Packet, Scene
from headrace.testing.pair.wire import Wire
from headrace.version import VERSION

FACTORY: Final = "headrace.testing.faulty:open"
FACTS: Final = "facts.json"
WORD: Final = "word: "
STEP, REST = b".", b"*"
_LOOK_MS = 2  # between two looks for a cancel while waiting at a gate

First: TypeAlias = Literal["logits", "token"]
Point: TypeAlias = Literal["begin", "commit", "final", "return", "cancelled"]


class Options(Struct, frozen=True, forbid_unknown_fields=True):
    """The engine that is wrapped, its own options, and the directory that orders come in."""

    engine: str
    control: str
    options: dict[str, Any] = {}
    share_device: bool = False


class Order(Struct, frozen=True, forbid_unknown_fields=True):
    """What the prefill of one prompt does beside computing.

    events, steps: paths of FIFOs; it writes an `Event` into one at each point, and takes a byte out
    of the other before it goes on, if there is one. deaf: it hears of no cancel while it waits, as
    in one long call of a device. fault: a name of `FAULTS` or of `strays.STRAYS`, or `WORD` and the
    name of one of `malformed.cases`; done at the `number`-th (from 1) time that it comes to
    `point`, in the `attempt`-th attempt of the request (0 = in each). alone: a check of
    `PrefillEngineConformance` that is made of the wrapped engine before it serves the prompt, with
    `limits` as its attributes.
    """

    events: str
    steps: str = ""
    deaf: bool = False
    fault: str = ""
    point: Point = "begin"
    number: int = 1
    attempt: int = 0
    seed: int = 0
    alone: str = ""
    limits: dict[str, Any] = {}


class Event(Struct, frozen=True, array_like=True):
    """A prefill came to a point, for the `number`-th time. at_ns: CLOCK_MONOTONIC of the host.

    `cancelled` stands for a call of the sink that said so.
    """

    point: Point
    number: int
    slot: int
    generation: int
    at_ns: int


def order_path(control: str, tokens: Sequence[int]) -> Path:
    """Where the order for a prompt lies."""
    return Path(control) / f"{zlib.crc32(array('I', tokens).tobytes()):08x}.json"


def open(options: Mapping[str, Any]) -> FaultyEngine:
    """Open the wrapped engine, and leave in `control` what it is and where it runs.

    Raises:
        Refused: an option is wrong, or its device is in use by another.
    """
    read = read_options(options, Options, "faulty")
    use = device_use("source", read.engine, read.options, share=read.share_device)
    engine = open_source(read.engine, read.options)
    facts = {
        "headrace": VERSION,
        "python": platform.python_version(),
        "engine": getattr(engine, "facts", {}),
        "devices": devices(sys.modules),
        "device_use": use,
    }
    (Path(read.control) / FACTS).write_bytes(msgspec.json.encode(facts, enc_hook=str))
    return FaultyEngine(engine, read.control)


class FaultyEngine:
    """Serves as the wrapped engine does, but for the prompts that an order was given for."""

    def __init__(self, engine: PrefillEngine, control: str) -> None:
        self._engine = engine
        self._control = control
        self._previous: Prefill | None = None

    def manifest(self) -> Manifest:
        return self._engine.manifest()

    def prefill_stream(self, tokens: Sequence[int], sink: PrefillSink, start: int = 0) -> None:
        try:
            self._serve(tokens, sink, start)
        finally:
            self._previous = sink.options

    def close(self) -> None:
        self._engine.close()

    def _serve(self, tokens: Sequence[int], sink: PrefillSink, start: int) -> None:
        path, first = order_path(self._control, tokens), self.manifest().first
        try:
            order = msgspec.json.decode(path.read_bytes(), type=Order)
            conduct = Misbehaviour(order, sink, first, self._previous)
        except FileNotFoundError:  # no order, or it was taken back meanwhile
            self._engine.prefill_stream(tokens, sink, start)
            return
        with conduct:
            conduct.reach("begin")
            if order.alone:
                check_alone(self._engine, order.alone, order.limits)
            self._engine.prefill_stream(tokens, FaultySink(sink, conduct), start)
            conduct.reach("return")


class Misbehaviour:
    """One ordered prefill: the points that it comes to, and what it does there."""

    def __init__(
        self, order: Order, sink: PrefillSink, first: First, previous: Prefill | None
    ) -> None:
        self.order = order
        self.sink = sink
        self.wire = Wire(sink)
        self.told: list[Span] = []
        self._first = first
        self._previous = previous
        self._counts: dict[Point, int] = {}
        self._free = not order.steps
        # Read and write: whoever gave the order may close its ends at any time.
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK
        self._events = os.open(order.events, flags)
        self._steps = os.open(order.steps, flags) if order.steps else -1

    def reach(self, point: Point) -> str:
        """Tell a point, wait for leave to go on, and do what is ordered; returns what is left to
        do by who asks.
        """
        self.tell(point)
        if not self._free:
            self._wait()
        fault = self.order.fault
        if not self._is_due(point):
            return ""
        if fault in _AT_ONCE:
            _AT_ONCE[fault](self)
            return ""
        if fault not in STRAYS and not fault.startswith(WORD):
            return fault
        for packet in self._packets(fault):
            self.wire.put(packet)
        return ""

    def _is_due(self, point: Point) -> bool:
        order, attempt = self.order, self.sink.options.attempt.attempt
        here = (order.point, order.number) == (point, self._counts[point])
        return here and order.attempt in (0, attempt)

    def _packets(self, fault: str) -> Sequence[Packet]:
        prefill, plan = self.sink.options, self.sink.plan
        if fault.startswith(WORD):
            word = fault.removeprefix(WORD)
            found = (c for c in malformed.cases(plan, prefill, first=self._first) if c.name == word)
            return next(found).payloads
        scene = Scene(prefill, plan, self._first, tuple(self.told), self.order.seed, self._previous)
        return STRAYS[fault](scene)

    def tell(self, point: Point) -> None:
        """Say that a point was come to."""
        number = self._counts[point] = self._counts.get(point, 0) + 1
        prefill = self.sink.options
        event = Event(point, number, prefill.slot, prefill.generation, time.monotonic_ns())
        with contextlib.suppress(BlockingIOError):  # full: nobody reads any more
            os.write(self._events, msgspec.json.encode(event) + b"\n")

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Tell each call of the sink that says that the attempt is cancelled."""
        try:
            yield
        except Cancelled:
            self.tell("cancelled")
            raise

    def _wait(self) -> None:
        """Take one byte; an engine at work hears of a cancel meanwhile."""
        poll = select.poll()
        poll.register(self._steps, select.POLLIN)
        while not poll.poll(None if self.order.deaf else _LOOK_MS):
            with self.heard(), contextlib.suppress(LocalProtocolError):  # raised after the final
                self.sink.check()
        self._free = os.read(self._steps, 1) == REST

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._events)
        if self._steps >= 0:
            os.close(self._steps)


class FaultySink:
    """The sink that the wrapped engine is given; implements `PrefillSink`."""

    def __init__(self, sink: PrefillSink, conduct: Misbehaviour) -> None:
        self.plan = sink.plan
        self.options = sink.options
        self._sink = sink
        self._conduct = conduct

    def check(self) -> None:
        with self._conduct.heard():
            self._sink.check()

    def write(self, *spans: Span) -> FaultyWriter:
        with self._conduct.heard():
            return FaultyWriter(self._sink.write(*spans), spans, self._conduct)

    def final(
        self,
        logits: memoryview | bytes | None,
        *,
        token: int | None = None,
        ready_ns: int | None = None,
    ) -> None:
        if self._conduct.reach("final") == "no final":
            return
        with self._conduct.heard():
            self._sink.final(logits, token=token, ready_ns=ready_ns)


class FaultyWriter:
    """A writer of the real slot; implements `SpanWriter`."""

    def __init__(self, writer: SpanWriter, spans: Sequence[Span], conduct: Misbehaviour) -> None:
        self._writer = writer
        self._spans = spans
        self._conduct = conduct
        self._committed = False
        wanted = conduct.order.fault in BENT_SPANS
        self._rows = [bytes(row) for row in self._places()] if wanted else []

    def cells(self, layer: int) -> list[Cells]:
        return self._writer.cells(layer)

    def commit(self) -> None:
        self._committed = True
        fault = self._conduct.reach("commit")
        with self._conduct.heard():
            match fault:
                case "a span that is never told":
                    return
                case "a stale span" | "an early span":
                    self._commit_before_writing(write=fault == "an early span")
                case "a torn span":
                    with self._conduct.wire.before_sending(self._tear):
                        self._writer.commit()
                case _:
                    self._writer.commit()
        self._conduct.told += self._spans

    def _commit_before_writing(self, *, write: bool) -> None:
        """Announce what lay in the slot before, and perhaps write the right bytes afterwards."""
        places = self._places()
        right = [bytes(row) for row in places]
        self._put(places, self._rows)
        self._writer.commit()
        if write:
            self._put(places, right)

    def _tear(self) -> None:
        """Leave the second half of each row as it was before."""
        for row, before in zip(self._places_told, self._rows, strict=True):
            row[len(row) // 2 :] = before[len(row) // 2 :]

    def _places(self) -> list[memoryview]:
        ranges = [range(span.layer_start, span.layer_stop) for span in self._spans]
        layers = sorted({layer for layers in ranges for layer in layers})
        self._places_told = [
            row for layer in layers for cells in self._writer.cells(layer) for row in cells.rows()
        ]
        return self._places_told

    def _put(self, places: Sequence[memoryview], rows: Sequence[bytes]) -> None:
        for place, row in zip(places, rows, strict=True):
            place[:] = row

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


def check_alone(engine: PrefillEngine, check: str, limits: Mapping[str, Any]) -> None:
    """Make one check of the engine's own suite, in the process and on the device where it runs."""
    whole_only = isinstance(engine, LegacyEngine)  # one foreign call, in which nothing is heard
    attributes = {
        "starts": False,
        "checks": not whole_only,
        **limits,
        "make_engine": lambda self: engine,
    }
    suite = type("Alone", (PrefillEngineConformance,), attributes)
    getattr(suite(), check)()


def devices(modules: Mapping[str, Any]) -> list[str]:
    """Names of the accelerators that this process sees through what it has imported already."""
    torch = modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]


def _raise(conduct: Misbehaviour) -> None:
    raise RuntimeError("ordered to raise")


_AT_ONCE: Final[Mapping[str, Callable[[Misbehaviour], None]]] = {
    "it raises": _raise,
    "it exits": lambda conduct: os._exit(3),
    "it hangs up": lambda conduct: conduct.wire.hang_up(),
}
BENT_SPANS: Final = ("a torn span", "a stale span", "an early span")
FAULTS: Final = (*_AT_ONCE, *BENT_SPANS, "a span that is never told", "no final")
