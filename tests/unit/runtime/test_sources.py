"""Slabs are told to who copies from them: as long as they are mapped, and no longer."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from headrace.backends.base import HostRange
from headrace.backends.null import decoder_like
from headrace.backends.replay import open as open_replay
from headrace.errors import DeviceError
from headrace.memory import Slab
from headrace.protocol.books import Limits
from headrace.protocol.owner import Owner
from headrace.runtime.local import LocalSource
from headrace.runtime.source_main import _pinned
from headrace.runtime.sources import Sources
from headrace.runtime.watch import Watch
from headrace.runtime.worker import SourceHandle

pytestmark = pytest.mark.usefixtures("nothing_left")

GEOMETRY: dict[str, Any] = {"layers": 3, "heads": 2, "head_dim": 8}
CONTEXT = 64


class Device:
    """Takes slabs, and reads them when they come and when they go: they are mapped."""

    def __init__(self) -> None:
        self.held: list[HostRange] = []
        self.told = 0
        self.failure: DeviceError | None = None

    def register(self, slab: HostRange) -> None:
        ctypes.string_at(slab.address, slab.nbytes)
        self.held.append(slab)
        self.told += 1

    def unregister(self, slab: HostRange) -> None:
        if self.failure is not None:
            raise self.failure
        ctypes.string_at(slab.address, slab.nbytes)
        self.held.remove(slab)


@contextmanager
def sources_of(device: Device, local: bool = False) -> Iterator[tuple[Sources, Watch]]:
    engine = open_replay(GEOMETRY)
    decoder = decoder_like(engine.manifest())
    limits = Limits(2, CONTEXT, 1, 1 << 20, 10**12, 10**12)
    machine, watch = Owner(1, limits), Watch()
    own = LocalSource(engine, decoder, CONTEXT) if local else None
    sources = Sources(machine, decoder, CONTEXT, own, watch, lambda *_: None, lambda: None, device)
    try:
        yield sources, watch
    finally:
        sources.close()
        watch.close()


def attached(sources: Sources) -> SourceHandle:
    handle = SourceHandle("replay", GEOMETRY, num_slots=2)
    handle.start()
    sources.attach(handle, None)
    return handle


def bury(handle: SourceHandle, watch: Watch) -> None:
    handle.kill()
    assert handle.wait(10)
    watch.take_in(0)


def test_a_slab_is_pinned_from_attach_to_the_end() -> None:
    device = Device()
    with sources_of(device) as (sources, _):
        handle = attached(sources)
        assert device.held == [HostRange(handle.slot_address(0), 2 * handle.slot_nbytes)]
    assert device.held == []


def test_the_slab_of_a_dead_source_is_unpinned_before_it_is_unmapped() -> None:
    device = Device()
    with sources_of(device) as (sources, watch):
        bury(attached(sources), watch)
        assert len(device.held) == 1
        sources.let_go()
        assert device.held == []
        attached(sources)
        assert len(device.held) == 1
    assert device.told == 2


def test_a_slab_that_cannot_be_unpinned_stays_mapped(caplog: pytest.LogCaptureFixture) -> None:
    device = Device()
    with sources_of(device) as (sources, watch):
        handle = attached(sources)
        bury(handle, watch)
        device.failure = DeviceError("lost")
        with caplog.at_level(logging.ERROR, "headrace.owner"):
            sources.let_go()
        assert "stays mapped: lost" in caplog.text
        (slab,) = device.held
        assert len(ctypes.string_at(slab.address, slab.nbytes)) == slab.nbytes


def test_the_owners_own_slot_is_pinned_when_it_is_made() -> None:
    device = Device()
    with sources_of(device, local=True) as (sources, _):
        assert device.held == []
        sources.open_local()
        sources.open_local()
        assert len(device.held) == 1
    assert device.held == []


def test_an_engine_is_told_of_the_slab_while_it_is_mapped() -> None:
    class Engine(Device):
        manifest = prefill_stream = close = None

    engine: Any = Engine()
    with Slab.create(8192) as slab:
        with _pinned(engine, slab):
            assert engine.held == [HostRange(slab.address, 8192)]
        assert engine.held == []
        with pytest.raises(KeyError), _pinned(engine, slab):
            raise KeyError
        assert engine.held == []
        with _pinned(open_replay(GEOMETRY), slab):
            assert engine.told == 2
