"""The ground of the scenes on a device model: a model, its devices, and what is right."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Final

from headrace.backends.base import CopyTuning, Entry, Fence, HostRange, Reservation
from headrace.backends.cpu import CpuDecoder
from headrace.backends.cuda import CudaDecoder
from headrace.engine.device import Stream
from headrace.engine.host import HostMemory
from headrace.engine.loading import LoadedModel
from headrace.errors import HeadraceError
from headrace.geometry import Layout
from headrace.testing.conformance_decoder import Prompt
from headrace.testing.fake.device import FakeDevice
from headrace.testing.sinks import region_bytes

CONTEXT: Final = 64
NUM_TOKENS: Final = 40
FED: Final = (1, 2, 0)
COPIES: Final = CopyTuning(4096, 4096, 16384, 4096)
KEEP_NBYTES: Final = 1 << 20


class Broken(HeadraceError):
    """What a scene is to show does not hold."""


class Ground:
    """A small model with sliding layers, and what is right, computed without a device."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self.rows = lru_cache(maxsize=None)(self._rows)

    @contextmanager
    def decoder(
        self, lanes: int = 1, *, all_pinned: bool = True, keep_nbytes: int = 0, seed: int = 0
    ) -> Iterator[tuple[CudaDecoder, FakeDevice]]:
        """A decoder on a device model of its own."""
        device = FakeDevice(all_pinned=all_pinned, seed=seed)
        decoder = CudaDecoder(
            self.model, lanes, CONTEXT, device, copies=COPIES, keep_nbytes=keep_nbytes
        )
        try:
            with device.watched():
                yield decoder, device
        except BaseException:
            device.fail("the scene is over")  # what is queued must not touch what the scene drops
            raise
        finally:
            with suppress(HeadraceError):
                decoder.close()

    def _rows(self, layout: Layout, seed: int) -> list[bytes]:
        """The rows of logits of `FED` after a prompt."""
        decoder = CpuDecoder(self.model, 1, CONTEXT)
        prompt = prompt_of(decoder, layout, seed)
        reservation = decoder.reserve(NUM_TOKENS)
        decoder.begin_import(reservation, prompt.view, prompt.copies())
        rows = decode(decoder, decoder.publish(reservation))
        decoder.close()
        return rows


def prompt_of(
    decoder: CpuDecoder | CudaDecoder, layout: Layout = "head_major", seed: int = 0
) -> Prompt:
    return Prompt(decoder, layout, NUM_TOKENS, CONTEXT, seed)


def decode(decoder: CpuDecoder | CudaDecoder, entry: Entry) -> list[bytes]:
    return [bytes(decoder.decode_step([(entry, token)])[0].cast("B")) for token in FED]


def landed(decoder: CudaDecoder, held: Reservation | Entry, prompt: Prompt) -> bool:
    """Whether a lane holds a prompt's cells."""
    return all(
        bytes(decoder.read(held, prompt.plan.layout, copy))
        == region_bytes(prompt.view.buffer, copy.source)
        for copy in prompt.copies()
    )


def check(good: bool, text: str) -> None:
    if not good:
        raise Broken(text)


def fenced(decoder: CudaDecoder, prompt: Prompt) -> Reservation:
    """A reservation in which a prompt has landed."""
    reservation = decoder.reserve(NUM_TOKENS)
    fence = decoder.begin_import(reservation, prompt.view, prompt.copies())
    until_done(fence)
    return reservation


def until_done(fence: Fence) -> None:
    """Poll a fence, as an owner does."""
    for _ in range(10_000):
        if fence.done():
            return
    raise Broken("a fence that is never done")


def stream_of(device: FakeDevice, name: str) -> Stream:
    return next(stream for stream in device.streams if stream.name == name)


class Slot(bytearray):
    """Memory that tells when nobody holds it any more."""

    @property
    def address(self) -> int:
        return address_of(memoryview(self))


def address_of(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def slab_of(prompt: Prompt) -> HostMemory:
    slab = HostMemory(len(prompt.view.buffer))
    slab.view[:] = prompt.view.buffer
    return slab


def range_of(memory: HostMemory) -> HostRange:
    return HostRange(memory.address, memory.nbytes)


def said_by(act: Callable[[], object]) -> int:
    """How many warnings a call logs."""
    said: list[logging.LogRecord] = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = said.append  # type: ignore[method-assign,assignment]
    log = logging.getLogger("headrace.device")
    log.addHandler(listener)
    passed, log.propagate = log.propagate, False
    try:
        act()
    finally:
        log.removeHandler(listener)
        log.propagate = passed
    return len(said)
