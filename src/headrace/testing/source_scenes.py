"""Short scenes of the CUDA source on a device model: what it must keep, whatever is cut how.

A scene ends quietly, or raises `Unkept` or what the source or the device model raised. They are the
instances of the bugs in `headrace.testing.source_bugs`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final

import numpy as np
from msgspec.structs import replace

from headrace.backends.cuda_source import CudaEngine
from headrace.backends.torch import TorchEngine
from headrace.engine.loading import LoadedModel
from headrace.errors import Cancelled, HeadraceError, Unquiet
from headrace.geometry import Manifest, Sliding
from headrace.messages import Prefill
from headrace.plan import compile_plan
from headrace.testing.fake.core import ERROR_NS
from headrace.testing.fake.device import FakeDevice
from headrace.testing.sinks import MemorySink, ask

NUM_TOKENS: Final = 40
TOKENS: Final = tuple(range(3, 3 + NUM_TOKENS))
ASKED: Final[tuple[Prefill, ...]] = (
    ask(NUM_TOKENS, "streamed"),
    ask(NUM_TOKENS, "streamed", group_layers=2, chunk=13, prefill_chunk=17),
    ask(NUM_TOKENS, "chunked", chunk=7, prefill_chunk=9),
    ask(NUM_TOKENS, "whole"),
    ask(NUM_TOKENS, "whole", prefill_chunk=9),
)
AGES_AGO_NS: Final = 1_000_000
AGES_AHEAD_NS: Final = 1 << 60
POLLS: Final = (1, 40)  # of the host, until one more thing is done


class Unkept(HeadraceError):
    """What a scene is to show does not hold."""


class _Ending(MemorySink):
    """Remembers when the prefill is said to have ended."""

    ready_ns: int | None = None

    def final(
        self,
        logits: memoryview | bytes | None,
        *,
        token: int | None = None,
        ready_ns: int | None = None,
    ) -> None:
        super().final(logits, token=token, ready_ns=ready_ns)
        self.ready_ns = ready_ns


class Bench:
    """A small model, and what is right, computed without a device."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        plain = TorchEngine(model, model.max_positions)
        self._decoder = _decoder_of(plain.manifest())
        self._right: dict[Prefill, MemorySink] = {}
        for asked in ASKED:
            self._right[asked] = self.sink(asked)
            plain.prefill_stream(TOKENS, self._right[asked])

    def sink(self, asked: Prefill, cancel_at: int | None = None) -> MemorySink:
        """A sink of a decoder that keeps window - 1 rows of a sliding layer."""
        plan = compile_plan(self._decoder, "head_major", NUM_TOKENS, NUM_TOKENS)
        return MemorySink(plan, asked, cancel_at=cancel_at)

    def check(self, asked: Prefill, sink: MemorySink) -> None:
        """Raise Unkept unless all was told as it is, and only once it was there."""
        right = self._right[asked]
        for told, due in zip(sink.snapshots, right.snapshots, strict=True):
            if told != due:
                raise Unkept(f"{asked}: told before it was there")
        same = sink.cells() == right.cells() and sink.logits == right.logits
        if not same or sink.commits != right.commits or sink.stray_bytes():
            raise Unkept(f"{asked}: other cells, logits or spans")

    @contextmanager
    def source(
        self, polls: int, now_ns: Callable[[], int] = time.monotonic_ns
    ) -> Iterator[tuple[CudaEngine, FakeDevice]]:
        """A source on a device model of its own, which reads its times from `now_ns`."""
        device = FakeDevice(all_pinned=True, seed=polls, polls_per_step=polls, now_ns=now_ns)
        engine = CudaEngine(self.model, self.model.max_positions, device)
        try:
            with device.watched():
                yield engine, device
        except BaseException:
            device.fail("the scene is over")  # what is queued must not touch what the scene drops
            raise
        finally:
            with suppress(HeadraceError):
                engine.close()


def cells_are_told_when_they_are_there(bench: Bench) -> None:
    """On every route and in every cut, and so are the logits; the host only looks at events."""
    for polls in POLLS:
        for asked in ASKED:
            with bench.source(polls) as (engine, device):
                sink = bench.sink(asked)
                engine.prefill_stream(TOKENS, sink)
                bench.check(asked, sink)
                _check_quiet(device, sink)
                if device.counts["host_waits"]:
                    raise Unkept(f"{asked}: the host waited, where it should only look")


def a_cancel_leaves_the_slot_quiet(bench: Bench) -> None:
    """Whenever it comes, nothing is on its way into the slot, and the next prefill is right."""
    for polls in POLLS:
        for asked in ASKED[1], ASKED[3]:
            for cancel_at in range(1, 12, 2):
                with bench.source(polls) as (engine, device):
                    sink = bench.sink(asked, cancel_at)
                    with suppress(Cancelled):
                        engine.prefill_stream(TOKENS, sink)
                    _check_quiet(device, sink)
                    after = bench.sink(asked)
                    engine.prefill_stream(TOKENS, after)
                    bench.check(asked, after)


def the_prefill_ends_with_its_logits(bench: Bench) -> None:
    """By the device's own time, whenever the host looks; but never after the host's look."""
    for clock_ns in AGES_AGO_NS, AGES_AHEAD_NS:
        for asked in ASKED:
            with bench.source(POLLS[1], partial(int, clock_ns)) as (engine, _):
                sink = _Ending(bench.sink(asked).plan, asked)
                engine.prefill_stream(TOKENS, sink)
                bench.check(asked, sink)
            latest_ns = min(clock_ns + ERROR_NS, time.monotonic_ns())
            if sink.ready_ns is None or sink.ready_ns > latest_ns:
                raise Unkept(f"{asked}: its end is told as {sink.ready_ns}, after {latest_ns}")


def the_device_failed_while_idle(bench: Bench) -> None:
    """A source that finds it so is of no use any more, and must say so each time it is asked."""
    device = FakeDevice(all_pinned=True)
    engine = CudaEngine(bench.model, bench.model.max_positions, device)
    asked = ASKED[0]
    before = bench.sink(asked)
    engine.prefill_stream(TOKENS, before)
    bench.check(asked, before)
    device.fail("nobody was looking")
    for _ in range(2):
        sink = bench.sink(asked)
        try:
            engine.prefill_stream(TOKENS, sink)
        except Unquiet:
            if sink.commits or sink.ended:
                raise Unkept("a device that failed gave something") from None
            continue
        raise Unkept("a device that failed computed a prompt")


SCENES: Final[Mapping[str, Callable[[Bench], None]]] = {
    each.__name__: each
    for each in (
        cells_are_told_when_they_are_there,
        a_cancel_leaves_the_slot_quiet,
        the_prefill_ends_with_its_logits,
        the_device_failed_while_idle,
    )
}


def _decoder_of(source: Manifest) -> Manifest:
    layers = tuple(
        replace(layer, kind=Sliding(layer.kind.window, layer.kind.window - 1))
        if isinstance(layer.kind, Sliding)
        else layer
        for layer in source.layers
    )
    return replace(source, role="decoder", layers=layers)


def _check_quiet(device: FakeDevice, sink: MemorySink) -> None:
    """A fault if the device may still use the slot."""
    flat = np.frombuffer(sink.buffer, np.uint8)
    device.unmapped(int(flat.ctypes.data), flat.nbytes)
