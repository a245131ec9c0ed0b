"""The devices of the fault benchmark: sources that tell when they were called, and a decoder.

A source tells, through a FIFO, the host's CLOCK_MONOTONIC at which a cancel reached its engine: at
a call of the sink, or for a legacy engine when its prefill ended. The decoder is emulated: memory
only, with paced copies in flight as a device's copy engine has them, and a paced decode step that
reads the whole entry and derives the next token from its bytes, so that a changed byte is seen.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from headrace.backends.base import (
    Caps,
    Entry,
    Fence,
    PrefillEngine,
    PrefillSink,
    Reservation,
    SlotView,
)
from headrace.backends.legacy import WholePrefill
from headrace.backends.load import open_source
from headrace.backends.null import NullDecoder, decoder_like
from headrace.backends.options import read_options
from headrace.backends.replay import ReplayEngine, ReplayOptions
from headrace.engine.host import copy_rows
from headrace.errors import Cancelled
from headrace.geometry import Layout, Manifest
from headrace.plan import Copy, compile_plan

TELLING = "headrace.bench.faults.engines:open_telling"
LEGACY = "headrace.bench.faults.engines:open_legacy"
EMULATED = "headrace.bench.faults.engines:open_emulated"
STAMP = struct.Struct("<q")
STEP_S = 0.004  # an emulated decode step takes at least this long
COPY_NBYTES_PER_S = 4e9  # an emulated copy is at most this fast


class TellingOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """The engine that does the work, and the FIFO to tell through; "" = tell nobody."""

    engine: str
    options: dict[str, Any]
    fifo: str = ""


def open_telling(options: Mapping[str, Any]) -> TellingEngine:
    """A factory: any engine by name, which tells when a cancel reached it."""
    read = read_options(options, TellingOptions, "telling")
    return TellingEngine(open_source(read.engine, read.options), _Teller(read.fifo))


class _Teller:
    """The writing end of a FIFO."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK) if path else None

    def tell(self) -> None:
        if self._fd is not None:
            os.write(self._fd, STAMP.pack(time.monotonic_ns()))

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)


class TellingEngine:
    """An engine whose sink tells when it raises `Cancelled`."""

    def __init__(self, engine: PrefillEngine, teller: _Teller) -> None:
        self._engine = engine
        self._teller = teller

    def manifest(self) -> Manifest:
        return self._engine.manifest()

    def prefill_stream(self, tokens: Sequence[int], sink: PrefillSink, start: int = 0) -> None:
        try:
            self._engine.prefill_stream(tokens, sink, start)
        except Cancelled:
            self._teller.tell()
            raise

    def close(self) -> None:
        self._engine.close()
        self._teller.close()


class LegacyOptions(ReplayOptions, frozen=True, forbid_unknown_fields=True):
    """Replay's geometry and pace, and the FIFO to tell through."""

    fifo: str = ""


def open_legacy(options: Mapping[str, Any]) -> LegacyReplay:
    """A factory: an engine that has only `prefill`, which computes as long as all layers take."""
    return LegacyReplay(read_options(options, LegacyOptions, "legacy"))


class LegacyReplay:
    """Zeros of any geometry, whole, at a set pace; it hears no cancel."""

    def __init__(self, options: LegacyOptions) -> None:
        self._options = options
        self._manifest = ReplayEngine(options).manifest()
        self._teller = _Teller(options.fifo)

    def manifest(self) -> Manifest:
        return self._manifest

    def prefill(self, tokens: Sequence[int]) -> WholePrefill:
        time.sleep(self._options.layers * self._options.layer_ms / 1000)
        parts = [
            [bytes(len(tokens) * part.row_nbytes) for part in layer.parts]
            for layer in self._manifest.layers
        ]
        self._teller.tell()
        return WholePrefill(parts, bytes(4 * self._manifest.vocab_size))

    def close(self) -> None:
        self._teller.close()


class EmulatedOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Replay's geometry, whose manifest the decoder takes, and the size of its memory."""

    geometry: dict[str, Any]
    context: int
    lanes: int = 4


def open_emulated(options: Mapping[str, Any]) -> EmulatedDecoder:
    """A factory of the emulated decoder, for a process of its own."""
    read = read_options(options, EmulatedOptions, "emulated")
    source = ReplayEngine(read_options(read.geometry, ReplayOptions, "replay"))
    return EmulatedDecoder(decoder_like(source.manifest()), context=read.context, lanes=read.lanes)


class _Copying:
    """A copy that was ordered, and its fence: it reads its slot when it is due, not before."""

    def __init__(self, work: list[tuple[int, SlotView, Copy]], due_ns: int) -> None:
        self._work = work
        self._due_ns = due_ns
        self.finished = False
        self.moved_ns = 0

    def done(self) -> bool:
        now_ns = time.monotonic_ns()
        if not self.finished and now_ns >= self._due_ns:
            for target, slot, copy in self._work:
                copy_rows(target, copy.source.stride, slot.address, copy.source)
            self._work = []
            self.moved_ns = time.monotonic_ns() - now_ns
            self.finished = True
        return self.finished


class EmulatedDecoder(NullDecoder):
    """Memory only; copies are made one after the other at a set pace, as by a copy engine, and
    decoding reads the whole entry.
    """

    def __init__(self, manifest: Manifest, *, context: int, lanes: int) -> None:
        super().__init__(manifest, context=context, lanes=lanes)
        self.caps = Caps(max_lanes=lanes)
        self._context = context
        self._vocab_size = manifest.vocab_size
        self._ordered: list[tuple[_Copying, int]] = []
        self._busy_until_ns = 0
        self._rows: dict[int, list[memoryview]] = {}

    @property
    def num_in_flight(self) -> int:
        """Copies that were ordered and are not finished."""
        return sum(not copying.finished for copying, _ in self._ordered)

    def copies_ns(self) -> list[int]:
        """What each copy since last asked took: its pace, and the host's move of the bytes."""
        taken = [pace_ns + copying.moved_ns for copying, pace_ns in self._ordered]
        self._ordered.clear()
        return taken

    def begin_import(
        self, reservation: Reservation, slot: SlotView, copies: Sequence[Copy]
    ) -> Fence:
        self._check(reservation)
        self._layouts[reservation.lane] = slot.layout
        address = self._lanes[reservation.lane].address
        work = [(address + self._lane_offset(reservation, c.source), slot, c) for c in copies]
        takes_ns = int(sum(copy.nbytes for copy in copies) / COPY_NBYTES_PER_S * 1e9)
        self._busy_until_ns = max(self._busy_until_ns, time.monotonic_ns()) + takes_ns
        copying = _Copying(work, self._busy_until_ns)
        self._ordered.append((copying, takes_ns))
        return copying

    def publish(self, reservation: Reservation) -> Entry:
        entry = super().publish(reservation)
        self._rows[entry.lane] = self._rows_of(entry)
        return entry

    def free(self, held: Reservation | Entry) -> None:
        super().free(held)
        self._rows.pop(held.lane, None)

    def decode_step(self, active: Sequence[tuple[Entry, int]]) -> list[memoryview]:
        due_s = time.monotonic() + STEP_S
        rows = [self._logits(entry, token) for entry, token in active]
        time.sleep(max(0.0, due_s - time.monotonic()))
        return rows

    def close(self) -> None:
        self._rows.clear()
        super().close()

    def _logits(self, entry: Entry, token: int) -> memoryview:
        self._check(entry)
        seen = token
        for row in self._rows[entry.lane]:
            seen = zlib.crc32(row, seen)
        logits = array("f", bytes(4 * self._vocab_size))
        logits[seen % self._vocab_size] = 1.0
        return memoryview(logits)

    def _rows_of(self, entry: Entry) -> list[memoryview]:
        layout: Layout = self._layouts.get(entry.lane, "head_major")
        plan = compile_plan(self.manifest(), layout, entry.num_tokens, self._context)
        view = self._lanes[entry.lane].view
        rows = []
        for copy in plan.copies(plan.whole()):
            offset, number, nbytes, stride = copy.source
            begins = [offset - plan.slot.kv_offset + at * stride for at in range(number)]
            rows += [view[begin : begin + nbytes] for begin in begins]
        return rows
