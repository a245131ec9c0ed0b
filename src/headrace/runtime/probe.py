"""What a machine is measured for before anything was served: copies, and a source's messages."""

from __future__ import annotations

import ctypes
import statistics
import time
from typing import Final, NamedTuple

from headrace.backends.null import decoder_like
from headrace.backends.replay import ReplayEngine, ReplayOptions
from headrace.channel import Channel, socket_pair
from headrace.engine.host import HostMemory
from headrace.geometry import agree
from headrace.ids import AttemptId
from headrace.messages import FromSource, Prefill, decode_from_source, encode
from headrace.plan import compile_plan
from headrace.protocol.source import SourceAttempt
from headrace.runtime.attempt import run_attempt
from headrace.runtime.sink import SlotSink

COPY_NBYTES: Final = 64 << 20  # beyond the caches of most machines
_COPIES: Final = 3
_LAYERS: Final = 32
_ATTEMPTS: Final = 5


class Probe(NamedTuple):
    """copy_ns_per_byte: of a copy between touched host memory. announce_ns: what a progress message
    holds its source up.
    """

    copy_ns_per_byte: float
    announce_ns: float


def probe() -> Probe:
    """Measure; takes about 0.1 s and 128 MiB.

    Raises:
        Refused, DeviceError: there is no memory for it. OSError: no sockets are left.
    """
    return Probe(_copy_ns_per_byte(), statistics.median(_announce_ns() for _ in range(_ATTEMPTS)))


def _copy_ns_per_byte() -> float:
    source, target = HostMemory(COPY_NBYTES), HostMemory(COPY_NBYTES)
    times = []
    for _ in range(_COPIES):
        begun_ns = time.perf_counter_ns()
        ctypes.memmove(target.address, source.address, COPY_NBYTES)
        times.append(time.perf_counter_ns() - begun_ns)
    return statistics.median(times) / COPY_NBYTES


def _announce_ns() -> float:
    """An attempt of many layers with hardly a byte each: what is left is the telling."""
    engine = ReplayEngine(ReplayOptions(layers=_LAYERS, heads=1, head_dim=1, vocab_size=1))
    decoder = decoder_like(engine.manifest())
    plan = compile_plan(decoder, agree(engine.manifest(), decoder), 1, 1)
    granted = Prefill(AttemptId(1, 1, 1), 0, 0, 1, "streamed", 1, 0, 0, "layers", False)
    slot = memoryview(bytearray(plan.slot.nbytes))
    ours, theirs = socket_pair(2 * _LAYERS, 1024)
    sending: Channel[FromSource, FromSource] = Channel(ours, encode, decode_from_source)
    with sending, theirs:
        attempt = SourceAttempt(granted, plan)
        sink = SlotSink(attempt, slot, sending.send, lambda: None)
        begun_ns = time.perf_counter_ns()
        run_attempt(engine, attempt, sink, slot)
        return (time.perf_counter_ns() - begun_ns) / _LAYERS
