"""One owner and one real source process, taken step by step.

The source is the replay engine behind a gate: it waits for a byte before each commit, before its
final and before it returns. So a test knows how far a source has come without a clock, and waits
for what the owner has seen by turning it until a condition holds.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from headrace.backends.base import Caps, Entry, Fence, Reservation, SlotView
from headrace.backends.null import NullDecoder, decoder_like
from headrace.backends.replay import ReplayOptions
from headrace.backends.replay import open as open_replay
from headrace.errors import DeviceError
from headrace.geometry import Manifest
from headrace.ids import Span
from headrace.plan import Copy, compile_plan
from headrace.runtime.owner import DecoderOwner
from headrace.runtime.requests import Request, RequestOptions
from headrace.runtime.supervisor import RestartPolicy
from headrace.runtime.worker import SourceHandle
from headrace.testing.sinks import MemorySink, ask, row_ranges

LAYERS = 6
GEOMETRY: dict[str, Any] = {
    "layers": LAYERS,
    "heads": 2,
    "head_dim": 8,
    "window": 16,
    "full_every": 3,
}
CONTEXT = 64
NUM_TOKENS = 40
GATED = "headrace.testing.sinks:open_gated"
CANARY = 0xA5
WITHIN_S = 20.0


def prompt(seed: int, num_tokens: int = NUM_TOKENS) -> list[int]:
    """A prompt that differs with `seed`, of ids that replay's vocabulary has."""
    return [(seed * 7 + at * 3) % 31 + 1 for at in range(num_tokens)]


def replay_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a source's options that the replay engine knows."""
    return {k: v for k, v in options.items() if k in ReplayOptions.__struct_fields__}


def expected_cells(
    tokens: Sequence[int], geometry: dict[str, Any] | None = None, context: int = CONTEXT
) -> dict[tuple[int, int], bytes]:
    """The cells that the replay engine gives for a prompt, made in this process."""
    engine = open_replay(geometry or GEOMETRY)
    manifest = engine.manifest()
    plan = compile_plan(decoder_like(manifest), manifest.layouts[0], len(tokens), context)
    sink = MemorySink(plan, ask(len(tokens)))
    engine.prefill_stream(tokens, sink)
    return sink.cells()


class LateFence:
    """The fence of a copy that reads its slot only when it is let go, as a device's queue may."""

    def __init__(self, decoder: CountingDecoder, copy: Callable[[], Fence]) -> None:
        self._decoder = decoder
        self._copy: Callable[[], Fence] | None = copy

    def done(self) -> bool:
        if self._decoder.hold_fences:
            return False
        if self._copy is not None:
            copy, self._copy = self._copy, None
            copy()
        return True


class CountingDecoder(NullDecoder):
    """A null decoder that decodes: after token t comes t + 1, whatever the lane holds.

    While `hold_fences` is set, imports are begun and none is done. `fail_imports`: the number of
    imports that still succeed before one fails.
    """

    def __init__(self, manifest: Manifest, *, context: int, lanes: int) -> None:
        super().__init__(manifest, context=context, lanes=lanes)
        self.caps = Caps(max_lanes=lanes)
        self.hold_fences = False
        self.fail_imports: int | None = None
        self.before_step: Callable[[], object] = lambda: None

    def begin_import(
        self, reservation: Reservation, slot: SlotView, copies: Sequence[Copy]
    ) -> Fence:
        if self.fail_imports is not None:
            if self.fail_imports == 0:
                raise DeviceError("the copy engine is on fire")
            self.fail_imports -= 1
        whole = super().begin_import
        return LateFence(self, lambda: whole(reservation, slot, copies))

    def decode_step(self, active: Sequence[tuple[Entry, int]]) -> list[memoryview]:
        self.before_step()
        rows = []
        for entry, token in active:
            self._check(entry)
            row = [0.0] * self.manifest().vocab_size
            row[(token + 1) % len(row)] = 1.0
            rows.append(memoryview(array("f", row)))
        return rows


class Gate:
    """The writing end of a FIFO that a source waits at."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)
        self._fd: int | None = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def allow(self, steps: int) -> None:
        """Let the source take `steps` more steps."""
        assert self._fd is not None
        os.write(self._fd, bytes(steps))

    def open(self) -> None:
        """Let it run free from here on."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class Lab:
    """An owner in this process, its decoder, and a source behind a gate."""

    def __init__(
        self,
        directory: Path,
        *,
        lanes: int = 2,
        slots: int = 2,
        engine: str = GATED,
        options: dict[str, Any] | None = None,
        restart: RestartPolicy | None = None,
        **limits: Any,
    ) -> None:
        """`restart`: of each source that is attached. `limits`: of the owner."""
        self.directory = directory
        self.restart = restart
        self.num_slots = slots
        self._engine = engine
        self._options = options or GEOMETRY
        self._num_sources = 0
        self.handles: list[SourceHandle] = []
        self.gates: list[Gate] = []
        source = open_replay(replay_options(self._options))
        manifest = decoder_like(source.manifest())
        self.decoder = CountingDecoder(manifest, context=CONTEXT, lanes=lanes)
        self.owner = DecoderOwner(self.decoder, context=CONTEXT, **limits)
        self.attach()

    def attach(self) -> SourceHandle:
        """Spawn one more source and attach it."""
        gate = Gate(self.directory / f"gate-{len(self.gates)}")
        self.gates.append(gate)
        options = {**self._options, "gate": str(gate.path)}
        handle = SourceHandle(self._engine, options, num_slots=self.num_slots, start_timeout_s=20.0)
        self.handles.append(handle)
        handle.start()
        self.owner.attach(handle, restart=self.restart)
        return handle

    @property
    def gate(self) -> Gate:
        return self.gates[-1]

    @property
    def handle(self) -> SourceHandle:
        return self.handles[-1]

    def submit(self, tokens: Sequence[int], **options: Any) -> Request:
        """Streamed, layer by layer, audited, publish only, unless `options` say otherwise."""
        asked: dict[str, Any] = {"route": "streamed", "max_tokens": 0, "audit": True} | options
        return self.owner.submit(tokens, RequestOptions(**asked))

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Turn the owner until `condition` holds."""
        deadline_s = time.monotonic() + WITHIN_S
        while not condition():
            if time.monotonic() > deadline_s:
                pytest.fail(f"not within {WITHIN_S} s: {what}; {self.owner.statistics()}")
            self.owner.turn(0.05)

    def until_done(self, *requests: Request) -> None:
        self.until(lambda: all(request.done for request in requests), "the requests are done")

    def until_told(self, request: Request, num_groups: int) -> None:
        """Until the owner has counted `num_groups` progress messages of a request."""
        active = next(a for a in self.owner._active.values() if a.request is request)
        self.until(lambda: active.record.num_groups >= num_groups, f"{num_groups} groups are told")

    def wait_for_message(self) -> None:
        """Wait until the source has told something that the owner has not read."""
        assert self.handle._channel is not None
        assert self.handle._channel.wait_readable(WITHIN_S)

    def counts(self, what: str) -> dict[str, int]:
        return self.owner.statistics()[what]

    def until_count(self, what: str, key: str, value: int) -> None:
        self.until(lambda: self.counts(what).get(key, 0) == value, f"{what}.{key} == {value}")

    def settle(self) -> None:
        """Everything is free again, and adds up."""
        self.until(lambda: self.owner.idle, "the owner is idle")
        self.until_count("slots", "quarantined", 0)
        self.owner.check_integrity()
        slots, lanes = self.counts("slots"), self.counts("lanes")
        assert slots["free"] == sum(slots.values())
        assert lanes["free"] == self.decoder.caps.max_lanes
        assert self.decoder.statistics()["free"] == self.decoder.caps.max_lanes

    def serve_exact(self, seed: int, **options: Any) -> None:
        """The next request is served and every cell of it is right; the gate must be open."""
        tokens = prompt(seed)
        request = self.submit(tokens, hold=True, **options)
        self.until_done(request)
        assert request.reason == ""
        self.assert_exact(request, tokens)
        self.owner.release(request)
        self.settle()

    def assert_exact(self, request: Request, tokens: Sequence[int]) -> None:
        """The cells of a held request are those of its prompt."""
        assert request.entry is not None
        assert self.cells_of(request) == expected_cells(tokens)

    def cells_of(self, request: Request) -> dict[tuple[int, int], bytes]:
        assert request.entry is not None
        plan = self.owner.plan_of(request)
        return {
            (copy.layer, copy.part): bytes(self.decoder.read(request.entry, plan.layout, copy))
            for copy in plan.copies(Span(0, LAYERS, 0, plan.num_tokens))
        }

    # Canaries.

    def fill_canaries(self) -> None:
        """Fill all slots and all lanes; nothing may be held or running."""
        assert self.owner.idle
        for index in range(self.num_slots):
            slot = self.handle.slot(index)
            slot[:] = bytes([CANARY]) * len(slot)
        for lane in self.decoder._lanes:
            lane.view[:] = bytes([CANARY]) * lane.nbytes

    def assert_canaries(self, *, slots: Sequence[int], lanes: Sequence[int]) -> None:
        """These slots and lanes were not touched."""
        for index in slots:
            slot = bytes(self.handle.slot(index))
            assert slot.count(CANARY) == len(slot), f"slot {index} was written"
        for index in lanes:
            lane = bytes(self.decoder._lanes[index].view)
            assert lane.count(CANARY) == len(lane), f"lane {index} was written"

    def assert_rest_of_lane(self, lane: int, num_tokens: int = NUM_TOKENS) -> None:
        """In the lane of a prompt, nothing outside the prompt's cells was touched."""
        manifest = self.decoder.manifest()
        plan = compile_plan(manifest, self.handle.layout, num_tokens, CONTEXT)
        rest = bytearray(self.decoder._lanes[lane].view)
        for copy in plan.copies(plan.whole()):
            for begin, end in row_ranges(copy.source):
                begin, end = begin - plan.slot.kv_offset, end - plan.slot.kv_offset
                rest[begin:end] = bytes([CANARY]) * (end - begin)
        assert rest.count(CANARY) == len(rest)

    def close(self) -> None:
        for gate in self.gates:
            gate.open()
        self.owner.close()
        for handle in self.handles:
            handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
