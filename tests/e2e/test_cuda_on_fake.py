"""The CUDA source and decoder on device models, in real processes, against the CPU's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.backends import cpu as cpu_backend
from headrace.backends.base import CopyTuning, Decoder
from headrace.backends.cuda import CudaDecoder
from headrace.engine.loading import load_model
from headrace.messages import Route
from headrace.runtime.owner import DecoderOwner
from headrace.runtime.requests import Request, RequestOptions
from headrace.runtime.worker import SourceHandle
from headrace.testing.fake_device import FakeDevice
from tests.e2e.families import CONTEXT, directory_of, make_prompt

ON_FAKE = "headrace.testing.fake_device:open_source"
PROMPTS = (make_prompt(17), make_prompt(40, seed=1), make_prompt(5, seed=2))


@contextmanager
def owner_of(decoder: Decoder, source: str, directory: Path) -> Iterator[DecoderOwner]:
    owner = DecoderOwner(decoder, context=CONTEXT)
    handle = SourceHandle(source, {"model": str(directory)})
    handle.start()
    try:
        owner.attach(handle)
        yield owner
    finally:
        owner.close()


def answers(owner: DecoderOwner, route: Route, *, digest: bool = True) -> list[list[int]]:
    """The tokens of requests that run beside each other."""
    options = RequestOptions(max_tokens=8, route=route, digest=digest)
    requests: list[Request] = [owner.submit(prompt, options) for prompt in PROMPTS]
    owner.run_until_done(*requests)
    assert [(r.outcome, r.reason) for r in requests] == [("finished", "")] * len(requests)
    return [request.tokens for request in requests]


def on_fake(directory: Path, **how: Any) -> tuple[CudaDecoder, FakeDevice]:
    device = FakeDevice(**how)
    copies = CopyTuning(4096, 4096, 16384, 8192)
    return CudaDecoder(load_model(directory), 2, CONTEXT, device, copies=copies), device


def test_tokens_are_the_cpus_on_every_route() -> None:
    directory = directory_of("gemma3")
    cpu = cpu_backend.open({"model": str(directory), "lanes": 2, "context": CONTEXT})
    with owner_of(cpu, "torch", directory) as owner:
        wanted = answers(owner, "whole")
    decoder, device = on_fake(directory, all_pinned=True, polls_per_step=2)
    routes: tuple[Route, ...] = ("whole", "chunked", "streamed")
    with owner_of(decoder, ON_FAKE, directory) as owner:
        for route in routes:
            assert answers(owner, route) == wanted
    assert not device.faults


def test_slabs_are_pinned_as_long_as_their_sources_serve() -> None:
    """Also that of a source that takes the place of one that died."""
    directory = directory_of("gemma3")
    decoder, device = on_fake(directory)
    with owner_of(decoder, "torch", directory) as owner:
        first = answers(owner, "streamed", digest=False)  # which reads lanes into pageable memory
        assert device.counts["pageable_copies"] == 0
        slab_nbytes = owner.statistics()["source 0"]["slab_nbytes"]
        assert owner.statistics()["decoder"]["pinned_nbytes"] == slab_nbytes
        (handle,) = owner._handles.values()
        assert isinstance(handle, SourceHandle)
        handle.kill()
        while owner.statistics()["decoder"]["pinned_nbytes"]:
            owner.turn(0.1)
        again = SourceHandle("torch", {"model": str(directory)})
        again.start()
        owner.attach(again)
        assert owner.statistics()["decoder"]["pinned_nbytes"] == slab_nbytes
        assert answers(owner, "streamed", digest=False) == first
        assert device.counts["pageable_copies"] == 0
    assert device.statistics()["registered_nbytes"] == 0
    assert not device.faults
