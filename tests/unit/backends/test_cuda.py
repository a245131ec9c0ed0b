"""The CUDA decoder on a device model: it decodes as the cpu's, and its host does not wait.

That it keeps the order of what it queues is shown by `tests/model/test_device_mutants.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from headrace.backends import cuda as cuda_backend
from headrace.backends.base import (
    CopyTuning,
    Decoder,
    HostRange,
    KeepsEntries,
    PinsSlabs,
    PrefillsItself,
    TimedFence,
)
from headrace.backends.copy_probe import probe
from headrace.backends.cpu import CpuDecoder
from headrace.backends.cuda import CudaDecoder
from headrace.engine.loading import load_model
from headrace.errors import BackendUnavailable, Closed, DeviceError, LocalProtocolError, Refused
from headrace.geometry import Layout
from headrace.testing.conformance_decoder import Prompt
from headrace.testing.fake_device import FakeDevice, open_decoder
from tests.e2e.families import FAMILIES, directory_of, greedy

CONTEXT = 64
COPIES = CopyTuning(4096, 4096, 16384, 4096)


@contextmanager
def decoder_on(
    device: FakeDevice, family: str = "gemma3", lanes: int = 2, **how: Any
) -> Iterator[CudaDecoder]:
    model = load_model(directory_of(family))
    decoder = CudaDecoder(model, lanes, CONTEXT, device, copies=COPIES, **how)
    try:
        yield decoder
    finally:
        decoder.close()


def tokens(
    decoder: Decoder, layout: Layout, num_tokens: int, steps: int
) -> list[tuple[int, bytes]]:
    """Greedy tokens after an imported prompt, with their rows of logits."""
    prompt = Prompt(decoder, layout, num_tokens, CONTEXT, seed=num_tokens)
    reservation = decoder.reserve(num_tokens)
    fence = decoder.begin_import(reservation, prompt.view, prompt.copies())
    while not fence.done():
        pass
    entry, fed, rows = decoder.publish(reservation), 1, []
    for _ in range(steps):
        (row,) = decoder.decode_step([(entry, fed)])
        fed = greedy(row)
        rows.append((fed, bytes(row.cast("B"))))
    decoder.free(entry)
    return rows


def test_it_is_a_decoder_that_pins_and_keeps() -> None:
    with decoder_on(FakeDevice()) as decoder:
        as_decoder: Decoder = decoder
        assert isinstance(as_decoder, PinsSlabs)
        assert isinstance(as_decoder, KeepsEntries)
        assert not isinstance(as_decoder, PrefillsItself)
        assert decoder.caps.device_events
        assert decoder.caps.copies == COPIES


@pytest.mark.parametrize("family", [f for f in FAMILIES if f in ("llama", "gemma3", "exaone4")])
@pytest.mark.parametrize("layout", ["head_major", "token_major"])
def test_its_tokens_and_logits_are_the_cpus(family: str, layout: Layout) -> None:
    """Past a move of sliding rows to the front of their buffers."""
    model = load_model(directory_of(family))
    cpu = CpuDecoder(model, 2, CONTEXT)
    device = FakeDevice(all_pinned=True)
    with decoder_on(device, family) as decoder, device.watched():
        for num_tokens, steps in ((1, 2), (24, 20)):
            wanted = tokens(cpu, layout, num_tokens, steps)
            assert tokens(decoder, layout, num_tokens, steps) == wanted
    assert not device.faults
    cpu.close()


def test_batched_decode_is_the_cpus_too() -> None:
    model = load_model(directory_of("gemma3"))
    cpu = CpuDecoder(model, 2, CONTEXT, 2)
    device = FakeDevice(all_pinned=True)
    with decoder_on(device, decode_batch=2) as decoder, device.watched():
        assert tokens(decoder, "head_major", 20, 5) == tokens(cpu, "head_major", 20, 5)
        assert decoder.caps.decode_batch == 2
    assert not device.faults


def test_what_goes_on_from_a_kept_entry_is_the_cpus() -> None:
    device = FakeDevice(all_pinned=True)
    with decoder_on(device, lanes=2, keep_nbytes=1 << 20) as decoder:
        prompt = Prompt(decoder, "head_major", 12, CONTEXT, seed=3)
        entries = []
        for _ in range(2):
            reservation = decoder.reserve(12)
            decoder.begin_import(reservation, prompt.view, prompt.copies())
            entries.append(decoder.publish(reservation))
        kept = decoder.keep(entries[0])
        wanted = [bytes(decoder.decode_step([(entries[1], 5)])[0].cast("B")) for _ in range(1)]
        for entry in entries:
            device.synchronize()
            decoder.free(entry)
        again = decoder.publish(decoder.reserve_from(kept, 12, 12))
        assert [bytes(decoder.decode_step([(again, 5)])[0].cast("B"))] == wanted
        decoder.evict(kept)
    assert not device.faults


def test_the_host_waits_for_logits_and_reads_only() -> None:
    device = FakeDevice(all_pinned=True)
    with decoder_on(device) as decoder:
        before = device.counts["host_waits"]
        rows = tokens(decoder, "token_major", 17, 3)
        assert rows
        assert device.counts["host_waits"] == before + 3  # the logits of each step
        prompt = Prompt(decoder, "head_major", 4, CONTEXT, seed=0)
        reservation = decoder.reserve(4)
        decoder.begin_import(reservation, prompt.view, prompt.copies())
        decoder.read(reservation, "head_major", prompt.copies()[0])
        assert device.counts["host_waits"] == before + 4


def test_one_copy_for_each_part_of_a_layer() -> None:
    device = FakeDevice(all_pinned=True)
    with decoder_on(device) as decoder:
        prompt = Prompt(decoder, "head_major", 40, CONTEXT, seed=0)
        reservation = decoder.reserve(40)
        decoder.begin_import(reservation, prompt.view, prompt.copies())
        assert device.counts["copies"] == len(prompt.copies())


def test_fences_tell_when_their_copies_ran() -> None:
    device = FakeDevice(all_pinned=True)
    with decoder_on(device) as decoder:
        prompt = Prompt(decoder, "token_major", 40, CONTEXT, seed=0)
        fence = decoder.begin_import(decoder.reserve(40), prompt.view, prompt.copies())
        assert isinstance(fence, TimedFence)
        with pytest.raises(LocalProtocolError, match="not done"):
            fence.times()
        while not fence.done():
            pass
        assert 0 < fence.times().begun_ns < fence.times().ended_ns


def test_a_failed_copy_fails_its_fence_and_all_after_it() -> None:
    device = FakeDevice(all_pinned=True, failing_copy=3)
    model = load_model(directory_of("llama"))
    decoder = CudaDecoder(model, 1, CONTEXT, device, copies=COPIES)
    prompt = Prompt(decoder, "head_major", 16, CONTEXT, seed=0)
    reservation = decoder.reserve(16)
    fence = decoder.begin_import(reservation, prompt.view, prompt.copies())
    with pytest.raises(DeviceError, match="a copy failed"):
        all(not fence.done() for _ in range(100))
    for act in (
        lambda: decoder.begin_import(reservation, prompt.view, prompt.copies()),
        lambda: decoder.free(reservation),
    ):
        with pytest.raises(DeviceError, match="a copy failed"):
            act()
    with pytest.raises(DeviceError):
        decoder.close()
    decoder.close()


def test_too_little_device_memory_is_refused() -> None:
    model = load_model(directory_of("llama"))
    device = FakeDevice(memory_nbytes=100_000)
    with pytest.raises(Refused, match="device memory"):
        CudaDecoder(model, 64, CONTEXT, device, copies=COPIES)
    device.close()


def test_a_context_beyond_the_models_is_refused() -> None:
    model = load_model(directory_of("llama"))
    with pytest.raises(Refused, match="context is 513, the model was made for 512"):
        CudaDecoder(model, 1, 513, FakeDevice(), copies=COPIES)


def test_statistics_tell_of_lanes_slabs_and_the_device() -> None:
    device = FakeDevice()
    slab = HostRange(1 << 30, 1 << 20)
    with decoder_on(device, measured={"probe_mb_per_s": 7}) as decoder:
        decoder.register(slab)
        statistics = decoder.statistics()
        assert statistics["pinned_nbytes"] == statistics["registered_nbytes"] == slab.nbytes
        assert statistics["probe_mb_per_s"] == 7
        assert statistics["lanes_free"] == 2
        assert statistics["device_nbytes"] > statistics["nbytes"] > 0


def test_closing_twice_is_harmless_and_nothing_works_after() -> None:
    device = FakeDevice()
    with decoder_on(device) as decoder:
        decoder.close()
        with pytest.raises(Closed):
            decoder.decode_step([])
    assert device.statistics()["device_nbytes"] == 0
    assert not device.faults


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch was built for CUDA")
def test_without_cuda_it_is_told_in_one_sentence() -> None:
    with pytest.raises(BackendUnavailable, match="built without CUDA"):
        cuda_backend.open({"model": str(directory_of("llama"))})


@pytest.mark.parametrize("options", [{"lanes": 0}, {"device": -1}, {"unknown": 1}, {}])
def test_options_are_read_before_anything_is_opened(options: dict[str, Any]) -> None:
    model = {"model": "m"} if options else {}
    with pytest.raises(Refused, match="options of cuda"):
        cuda_backend.open({**model, **options})


def test_the_factory_on_a_device_model() -> None:
    options = {"model": str(directory_of("llama")), "lanes": 2, "context": CONTEXT, "seed": 3}
    decoder = open_decoder(options)
    assert decoder.caps.max_lanes == 2
    decoder.close()
    with pytest.raises(Refused, match="options of cuda on a fake device"):
        open_decoder({**options, "other": 1})


def test_opening_measures_the_link_and_feeds_it_so(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    monkeypatch.setattr(cuda_backend, "open_device", lambda index: device)
    monkeypatch.setattr(cuda_backend, "probe", lambda on: probe(on, (4096,), (1,), 8192))
    decoder = cuda_backend.open({"model": str(directory_of("llama")), "context": CONTEXT})
    assert decoder.caps.copies is not None
    assert decoder.caps.copies.chunk_nbytes == decoder.statistics()["chunk_nbytes"] >= 4096
    assert decoder.statistics()["probe_pinned"] == 1
    decoder.close()


def test_a_device_is_closed_when_opening_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    monkeypatch.setattr(cuda_backend, "open_device", lambda index: device)
    with pytest.raises(Refused, match=r"holds no config\.json"):
        cuda_backend.open({"model": "/nowhere"})
    with pytest.raises(LocalProtocolError, match="was closed"):
        device.synchronize()
