"""Device memory as a decoder: by the suite of all decoders, and who pins what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest

from headrace.backends.base import CopyTuning, Decoder, HostRange
from headrace.backends.cuda_memory import CudaMemory
from headrace.backends.null import decoder_like
from headrace.backends.replay import open as open_replay
from headrace.bench.discarding import DiscardingDecoder
from headrace.bench.stand import Stand
from headrace.engine.host import HostMemory
from headrace.errors import LocalProtocolError, Refused
from headrace.runtime.requests import RequestOptions
from headrace.runtime.worker import SourceHandle
from headrace.testing.conformance_decoder import DecoderConformance
from headrace.testing.fake_device import FakeDevice

COPIES = CopyTuning(1 << 12, 1 << 12, 1 << 14, 1 << 12)
GEOMETRY = {"layers": 5, "heads": 2, "head_dim": 8, "window": 16, "full_every": 3}


def memory(device: FakeDevice, *, lanes: int = 1, context: int = 64, pins: bool = True) -> Decoder:
    manifest = decoder_like(open_replay(GEOMETRY).manifest())
    return CudaMemory(manifest, device, context=context, copies=COPIES, lanes=lanes, pins=pins)


class TestCudaMemory(DecoderConformance):
    dtype: ClassVar[str] = "float16"

    def make_decoder(self, lanes: int) -> Decoder:
        device = FakeDevice(all_pinned=True, polls_per_step=2)
        return memory(device, lanes=lanes, context=self.context)


class TestCudaMemoryOneLane(TestCudaMemory):
    lanes: ClassVar[int] = 1
    lengths: ClassVar[Sequence[int]] = (1, 40)


def test_it_decodes_nothing() -> None:
    decoder = memory(FakeDevice())
    assert not decoder.caps.decodes
    with pytest.raises(LocalProtocolError, match="decodes nothing"):
        decoder.decode_step([])
    decoder.close()


def test_memory_that_is_not_there_is_refused() -> None:
    with pytest.raises(Refused, match="bytes of device memory"):
        memory(FakeDevice(memory_nbytes=1 << 10))


@pytest.mark.parametrize("pins", [True, False])
def test_a_slab_is_pinned_unless_all_are_to_be_pageable(*, pins: bool) -> None:
    decoder, slab = memory(FakeDevice(), pins=pins), HostMemory(1 << 16)
    assert isinstance(decoder, CudaMemory)
    mapped = HostRange(slab.address, slab.nbytes)
    decoder.register(mapped)
    assert decoder.statistics()["pinned_nbytes"] == (slab.nbytes if pins else 0)
    assert decoder.statistics()["registered_nbytes"] == (slab.nbytes if pins else 0)
    decoder.unregister(mapped)
    assert decoder.statistics()["registered_nbytes"] == 0
    decoder.close()
    decoder.close()


@pytest.mark.parametrize("discarding", [False, True])
def test_an_owner_has_the_slab_of_its_source_pinned(*, discarding: bool) -> None:
    """Also where its decoder stands behind one that may discard."""
    device = FakeDevice()
    inner = memory(device, context=64)
    decoder = DiscardingDecoder(inner) if discarding else inner
    source = SourceHandle("replay", GEOMETRY, num_slots=1)
    source.start()
    with Stand(source, decoder, context=64) as stand:
        assert inner.statistics()["pinned_nbytes"] > 0
        stand.serve([1] * 20, RequestOptions(route="streamed", max_tokens=1))
        assert device.counts["pageable_copies"] == 0
    assert device.statistics()["registered_nbytes"] == 0
    assert device.faults == []
