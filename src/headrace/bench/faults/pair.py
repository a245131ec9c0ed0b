"""One owner in this process with one source after another, and neighbours that must not notice.

Neighbours run in every cycle: one holds its entry for good, one decodes while the victim's fault
happens. Each is compared with what it got when it ran alone.
"""

from __future__ import annotations

import hashlib
import os
import select
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from headrace.backends.base import Decoder, Entry
from headrace.backends.load import open_decoder
from headrace.backends.null import decoder_like
from headrace.bench.faults.engines import STAMP, TELLING, EmulatedDecoder
from headrace.errors import HeadraceError, Refused
from headrace.geometry import Manifest
from headrace.plan import slot_layout
from headrace.runtime.owner import DecoderOwner
from headrace.runtime.requests import Request, RequestOptions
from headrace.runtime.worker import SourceHandle

LANES, SLOTS = 4, 2
NEIGHBOUR_TOKENS = 32
NEIGHBOUR_DECODES = 200
GIVE_UP_S = 60.0


class CycleFailed(HeadraceError):
    """A cycle did not come to what it measures; the text says what was waited for."""


@dataclass(frozen=True)
class Setting:
    """What is measured: a source and a decoder by name, `null` being the emulated decoder."""

    source: str = "replay"
    source_options: Mapping[str, Any] = field(default_factory=dict)
    decoder: str = "null"
    decoder_options: Mapping[str, Any] = field(default_factory=dict)
    max_prompt: int = 1 << 20

    def engine(self, **pace: Any) -> dict[str, Any]:
        """The options of the source's engine; a pace is for replay alone."""
        return {**self.source_options, **(pace if self.source == "replay" else {})}


class Timed:
    """A decoder whose decode steps are timed; `look` is called before each of them.

    A decode step ends an owner's turn, and what was free before it would be seen only after it.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.steps_ns: list[int] = []
        self.decoder = decoder
        self.look: Callable[[], object] = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decoder, name)

    def decode_step(self, active: Sequence[tuple[Entry, int]]) -> list[memoryview]:
        self.look()
        begun_ns = time.monotonic_ns()
        rows = self.decoder.decode_step(active)
        self.steps_ns.append(time.monotonic_ns() - begun_ns)
        return rows


class Pair:
    """A pair under test; every turn of its owner is timed."""

    def __init__(
        self,
        setting: Setting,
        slab_nbytes: int,
        *,
        pace: Mapping[str, Any],
        engine: str = TELLING,
        **limits: Any,
    ) -> None:
        """`slab_nbytes`: about what the slab takes, which fixes the context."""
        self._setting = setting
        self._engine = engine
        self._pace = dict(pace)
        self.turns: list[tuple[int, int]] = []  # begun and ended
        self._held_by_us = ExitStack()
        with ExitStack() as undo:
            undo.callback(self.close)
            self._open(slab_nbytes, limits)
            undo.pop_all()

    def _open(self, slab_nbytes: int, limits: Mapping[str, Any]) -> None:
        keep = self._held_by_us
        directory = keep.enter_context(tempfile.TemporaryDirectory(prefix="headrace-faults-"))
        self.fifo = Path(directory) / "calls"
        os.mkfifo(self.fifo)
        self._calls = os.open(self.fifo, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        keep.callback(os.close, self._calls)
        self.handle = self._started()
        keep.callback(lambda: self.handle.close(0.0))
        manifest = decoder_like(self.handle.manifest)
        self.context = context_of(manifest, slab_nbytes, self._setting.max_prompt)
        self.timed = Timed(self._open_decoder(manifest))
        self.decoder = cast(Decoder, self.timed)
        self.owner = DecoderOwner(self.decoder, context=self.context, **limits)
        keep.callback(self.owner.close)
        self.owner.attach(self.handle)
        self.victim_tokens = min(self.context, self._setting.max_prompt)
        self._alone = self._told(self._run_out(self.start_neighbour()))
        self._holder = self._run_out(
            self.owner.submit([1] * NEIGHBOUR_TOKENS, RequestOptions(hold=True))
        )
        self.turn_until(lambda: self.slots("free") == SLOTS, "its slot is free")
        self._held = self._bytes_held()
        self.turns.clear()

    # Sources.

    def new_source(self) -> SourceHandle:
        """Start a source, load it, and attach it."""
        self.handle = self._started()
        self.owner.attach(self.handle)
        return self.handle

    def set_pace(self, pace: Mapping[str, Any]) -> None:
        """How fast sources that are started from here on compute."""
        self._pace = dict(pace)

    def unattached(self, epoch: int = 0) -> SourceHandle:
        """The same source with the same slab, mapped by both sides, and no owner."""
        handle = self._started()
        handle.attach(self.decoder.manifest(), self.context, epoch)
        return handle

    def calls_ns(self) -> list[int]:
        """When sources told that a cancel reached them, since last asked."""
        try:
            told = os.read(self._calls, 1 << 16)
        except BlockingIOError:
            return []
        return [stamp for (stamp,) in STAMP.iter_unpack(told)]

    def _started(self) -> SourceHandle:
        engine = self._setting.engine(**self._pace)
        options = {"engine": self._setting.source, "options": engine, "fifo": str(self.fifo)}
        if self._engine != TELLING:
            options = {**engine, "fifo": str(self.fifo)}
        handle = SourceHandle(self._engine, options, num_slots=SLOTS)
        handle.start()
        return handle

    def _open_decoder(self, manifest: Manifest) -> Decoder:
        if self._setting.decoder == "null":
            return EmulatedDecoder(manifest, context=self.context, lanes=LANES)
        options = {**self._setting.decoder_options, "context": self.context, "lanes": LANES}
        return open_decoder(self._setting.decoder, options)

    # Turns.

    def turn(self, timeout_s: float = 0.0) -> None:
        """One turn of the owner; what it waited for is not counted as the turn's time."""
        if timeout_s and self.owner.next_turn_s() != 0.0:
            self._wait(timeout_s)
        begun_ns = time.monotonic_ns()
        self.owner.turn(0.0)
        self.turns.append((begun_ns, time.monotonic_ns()))

    def turn_until(self, condition: Callable[[], bool], what: str) -> int:
        """Turn until `condition` holds; returns the time it was seen, in ns."""
        give_up_s = time.monotonic() + GIVE_UP_S
        seen_ns: list[int] = []

        def look() -> bool:
            if not seen_ns and condition():
                seen_ns.append(time.monotonic_ns())
            return bool(seen_ns)

        self.timed.look = look
        while not look():
            if time.monotonic() > give_up_s:
                raise CycleFailed(f"not within {GIVE_UP_S:.0f} s: {what}")
            self.turn(0.01)
        self.timed.look = lambda: None
        return seen_ns[0]

    def _wait(self, timeout_s: float) -> None:
        due_s = self.owner.next_turn_s()
        wait_s = timeout_s if due_s is None else min(timeout_s, due_s)
        select.select([self.owner.fileno()], [], [], wait_s)

    def turn_at(self, moment_ns: int, until_ns: int) -> int:
        """The longest turn that ran between two moments, in ns."""
        ran = [end - begin for begin, end in self.turns if end > moment_ns and begin < until_ns]
        return max(ran, default=0)

    # What is counted.

    @property
    def num_in_flight(self) -> int:
        """Imports in flight, as the emulated decoder counts them; -1 for another."""
        decoder = self.timed.decoder
        return decoder.num_in_flight if isinstance(decoder, EmulatedDecoder) else -1

    def copies_ns(self, request: Request) -> list[int]:
        """What the imports of a traced request took; the emulated decoder knows each copy."""
        decoder = self.timed.decoder
        if isinstance(decoder, EmulatedDecoder):
            return decoder.copies_ns()
        return [each.ended_ns - each.begun_ns for each in request.imports]

    def slots(self, state: str) -> int:
        """Slots of all sources in a state."""
        return self.owner.statistics()["slots"].get(state, 0)

    @property
    def lanes_free(self) -> int:
        return self.owner.statistics()["lanes"]["free"]

    # Neighbours.

    def start_neighbour(self) -> Request:
        """One that decodes from here on; it is published when this returns."""
        most = min(NEIGHBOUR_DECODES, self.context - NEIGHBOUR_TOKENS)
        tokens = [1 + at % 7 for at in range(NEIGHBOUR_TOKENS)]
        request = self.owner.submit(tokens, RequestOptions(max_tokens=most, audit=True))
        self.turn_until(lambda: bool(request.tokens) or request.done, "a neighbour decodes")
        self.turn_until(lambda: self.slots("free") == SLOTS, "its slot is free")
        return request

    def compare(self, neighbour: Request | None) -> int:
        """End a neighbour that decoded, if there was one, and compare both with what they were
        alone, as far as they came; returns how many were changed.
        """
        changed = int(self._bytes_held() != self._held)
        if neighbour is None:
            return changed
        self.owner.cancel(neighbour)
        outcome, tokens, digests = self._told(neighbour)
        _, all_tokens, alone = self._alone
        same = outcome != "failed" and tokens == all_tokens[: len(tokens)] and digests == alone
        return changed + (not same)

    def _run_out(self, request: Request) -> Request:
        self.turn_until(lambda: request.done, "a neighbour is done")
        return request

    def _told(self, request: Request) -> tuple[str, list[int], tuple[str, ...]]:
        return request.outcome, list(request.tokens), request.kv_digests

    def _bytes_held(self) -> str:
        plan = self.owner.plan_of(self._holder)
        digest = hashlib.blake2b()
        for layer, facts in enumerate(plan.layers):
            for part in range(len(facts.parts)):
                digest.update(self.owner.read(self._holder, layer, part))
        return digest.hexdigest()

    def close(self) -> None:
        """End all of it."""
        self._held_by_us.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def context_of(manifest: Manifest, slab_nbytes: int, max_prompt: int) -> int:
    """The most positions with which SLOTS slots take at most `slab_nbytes`.

    Raises:
        Refused: not even a neighbour fits.
    """
    least = 2 * NEIGHBOUR_TOKENS
    most = min(manifest.max_positions, max(max_prompt, least) + NEIGHBOUR_DECODES)
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if SLOTS * slot_layout(manifest, middle).nbytes <= slab_nbytes:
            low = middle
        else:
            high = middle - 1
    if low < least:
        raise Refused(
            f"a slab of {slab_nbytes} bytes holds {low} positions in each of {SLOTS} slots, and a "
            f"cycle needs {least}; give a larger size",
            field="sizes_mb",
        )
    return low
