"""Places of the protocol where a process stands still, so that a test can do there what it wants.

A file names one place. The process that comes to it stops itself (SIGSTOP), and the test reads from
/proc that it stands there. Places begin with whose they are:

source  load, manifest, attach (as it maps the slab); of an attempt: start, poll K, writing K (half
        of the cells written), written K (not told), told K, computed, final (told), return; close
owner   load, slab (as it makes the slab), prompt (as it reads the memfd beside a submit), close;
        of an attempt: METHOD K before, METHOD K after, for the methods of a decoder, and fence K

K counts from 0 within one attempt. After the place may follow how the source behaves from there:
`deaf` to cancels. The variable that holds the file's path also marks every process of a test.
"""

from __future__ import annotations

import os
import signal
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from headrace.backends.base import (
    Caps,
    Cells,
    Entry,
    Fence,
    PrefillSink,
    Reservation,
    SlotView,
    SpanWriter,
)
from headrace.backends.null import NullDecoder, decoder_like
from headrace.backends.replay import ReplayEngine
from headrace.backends.replay import open as open_replay
from headrace.errors import DeviceError
from headrace.geometry import Layout, Manifest
from headrace.ids import Span
from headrace.memory import Slab
from headrace.messages import Prefill
from headrace.plan import Copy, Plan
from headrace.runtime.sink import SlotSink

_R = TypeVar("_R")

VARIABLE = "HEADRACE_TEST_STATION"
FAILS = "HEADRACE_TEST_FAILS"  # a method of the decoder that raises
LAYERS = 6
GEOMETRY: dict[str, Any] = {
    "layers": LAYERS,
    "heads": 2,
    "head_dim": 8,
    "window": 16,
    "full_every": 3,
    "vocab_size": 256,
}
SOURCE = "tests.faults.stations:open_source"
DECODER = "tests.faults.stations:open_decoder"


def reach(place: str) -> str:
    """Stand still if the file names this place; returns how to go on."""
    path = os.environ.get(VARIABLE)
    if path is None:
        return ""
    named, _, manner = Path(path).read_text().partition("\n")
    if named != place:
        return ""
    os.kill(os.getpid(), signal.SIGSTOP)
    return manner


class Stations:
    """The test's end of the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.clear()

    @property
    def marker(self) -> str:
        return f"{VARIABLE}={self._path}"

    def name(self, place: str, manner: str = "") -> None:
        """Whoever comes to this place stands still."""
        self._write(f"{place}\n{manner}")

    def clear(self) -> None:
        """Nobody stands still from here on."""
        self._write("")

    def left_by_decoder(self) -> str:
        """What the decoder that was closed last held then."""
        return self._path.with_suffix(".closed").read_text()

    def _write(self, text: str) -> None:
        fresh = self._path.with_suffix(".new")  # a reader sees the old text or the new one
        fresh.write_text(text)
        fresh.rename(self._path)


# A source.


def open_source(options: Mapping[str, Any]) -> StationEngine:
    """The replay engine, with places to stand still at."""
    reach("source load")
    _before(Slab, "attach", "source attach")
    return StationEngine(open_replay({k: v for k, v in options.items() if k != "gate"}))


class StationEngine:
    def __init__(self, engine: ReplayEngine) -> None:
        self._engine = engine

    def manifest(self) -> Manifest:
        reach("source manifest")
        return self._engine.manifest()

    def prefill_stream(self, tokens: Sequence[int], sink: PrefillSink, start: int = 0) -> None:
        standing = StationSink(sink)
        standing.reach("start")
        self._engine.prefill_stream(tokens, standing, start)
        standing.reach("return")

    def close(self) -> None:
        reach("source close")
        self._engine.close()


class StationSink:
    """A sink with places to stand still at; implements `PrefillSink`."""

    def __init__(self, sink: PrefillSink) -> None:
        self.plan: Plan = sink.plan
        self.options: Prefill = sink.options
        self._sink = sink
        self._num_polls = 0
        self._num_writers = 0

    def reach(self, place: str) -> None:
        if reach(f"source {place}") == "deaf":
            cast(SlotSink, self._sink)._poll = lambda: None

    def check(self) -> None:
        self.reach(f"poll {self._num_polls}")
        self._num_polls += 1
        self._sink.check()

    def write(self, *spans: Span) -> StationWriter:
        writer = StationWriter(self._sink.write(*spans), self.reach, self._num_writers)
        self._num_writers += 1
        return writer

    def final(
        self,
        logits: memoryview | bytes | None,
        *,
        token: int | None = None,
        ready_ns: int | None = None,
    ) -> None:
        self.reach("computed")
        self._sink.final(logits, token=token, ready_ns=ready_ns)
        self.reach("final")


class StationWriter:
    """A writer with places to stand still at; implements `SpanWriter`."""

    def __init__(self, writer: SpanWriter, reach: Callable[[str], None], number: int) -> None:
        self._writer = writer
        self._reach = reach
        self._number = number

    def cells(self, layer: int) -> list[Cells]:
        cells = self._writer.cells(layer)
        return _Halfway(cells, lambda: self._reach(f"writing {self._number}"))

    def commit(self) -> None:
        self._reach(f"written {self._number}")
        self._writer.commit()
        self._reach(f"told {self._number}")

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


class _Halfway(list[Cells]):
    """A list whose reader stands still after the first of several."""

    def __init__(self, cells: list[Cells], reach: Callable[[], None]) -> None:
        super().__init__(cells)
        self._reach = reach

    def __iter__(self) -> Iterator[Cells]:
        for at, cells in enumerate(super().__iter__()):
            if at == 1:
                self._reach()
            yield cells


def _before(holder: Any, name: str, place: str) -> None:
    """Come to `place` whenever `holder.name` is called, from here on."""
    inner = getattr(holder, name)

    def standing(*arguments: Any, **options: Any) -> Any:
        reach(place)
        return inner(*arguments, **options)

    setattr(holder, name, standing)


# An owner.


def open_decoder(options: Mapping[str, Any]) -> StationDecoder:
    """A memory-only decoder of `GEOMETRY` that decodes, with places to stand still at."""
    reach("owner load")
    _before(Slab, "create", "owner slab")
    _before(os, "pread", "owner prompt")
    manifest = decoder_like(open_replay(GEOMETRY).manifest())
    return StationDecoder(manifest, context=options["context"], lanes=options["lanes"])


class StationFence:
    """Not done when it is asked for the first time, so that an import is in flight for a turn."""

    def __init__(self, fence: Fence, place: str) -> None:
        self._fence = fence
        self._place = place
        self._asked = False

    def done(self) -> bool:
        if not self._asked:
            self._asked = True
            return False
        reach(self._place)
        return self._fence.done()


class StationDecoder(NullDecoder):
    """After token t comes t + 1, whatever the lane holds.

    When it is closed it leaves its statistics in the file beside the stations' one.
    """

    def __init__(self, manifest: Manifest, *, context: int, lanes: int) -> None:
        super().__init__(manifest, context=context, lanes=lanes)
        self.caps = Caps(max_lanes=lanes)
        self._calls: Counter[str] = Counter()
        self._fails = os.environ.get(FAILS, "")

    def reserve(self, num_tokens: int) -> Reservation:
        self._calls.clear()
        inner = super().reserve
        return self._around("reserve", lambda: inner(num_tokens))

    def begin_import(
        self, reservation: Reservation, slot: SlotView, copies: Sequence[Copy]
    ) -> Fence:
        number = self._calls["begin_import"]
        inner = super().begin_import
        fence = self._around("begin_import", lambda: inner(reservation, slot, copies))
        return StationFence(fence, f"owner fence {number}")

    def read(self, held: Reservation | Entry, layout: Layout, copy: Copy) -> bytes | memoryview:
        inner = super().read
        return self._around("read", lambda: inner(held, layout, copy))

    def publish(self, reservation: Reservation) -> Entry:
        inner = super().publish
        return self._around("publish", lambda: inner(reservation))

    def free(self, held: Reservation | Entry) -> None:
        inner = super().free
        self._around("free", lambda: inner(held))

    def decode_step(self, active: Sequence[tuple[Entry, int]]) -> list[memoryview]:
        return self._around("decode_step", lambda: self._rows(active))

    def close(self) -> None:
        reach("owner close")
        path = os.environ.get(VARIABLE)
        if path is not None:
            kept = {k: v for k, v in self.statistics().items() if k != "lane_nbytes"}
            text = ", ".join(f"{name} {count}" for name, count in kept.items())
            Path(path).with_suffix(".closed").write_text(text)
        super().close()

    def _rows(self, active: Sequence[tuple[Entry, int]]) -> list[memoryview]:
        rows = []
        for entry, token in active:
            self._check(entry)
            row = array("f", bytes(4 * self.manifest().vocab_size))
            row[(token + 1) % len(row)] = 1.0
            rows.append(memoryview(row))
        return rows

    def _around(self, name: str, call: Callable[[], _R]) -> _R:
        number = self._calls[name]
        self._calls[name] += 1
        reach(f"owner {name} {number} before")
        if name == self._fails:
            raise DeviceError(f"the device is on fire in {name}")
        result = call()
        reach(f"owner {name} {number} after")
        return result
