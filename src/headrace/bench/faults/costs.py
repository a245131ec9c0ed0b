"""What is paid without a fault: digests and poison on an import, and looking at an owner's books.

Digests and poison are measured in one process on the same pair, A B .. B A. Whether they find what
they are for is counted on layers that a source announces wrongly.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from headrace.backends.null import NullDecoder, decoder_like
from headrace.bench.faults.pair import CycleFailed, context_of
from headrace.bench.faults.seeded import FAULTS, SEEDED, SOUND
from headrace.runtime.owner import DecoderOwner
from headrace.runtime.requests import RequestOptions
from headrace.runtime.worker import SourceHandle

GEOMETRY = {"layers": 16, "heads": 8, "head_dim": 128, "dtype": "float16"}
SEEDED_GEOMETRY = {"layers": 6, "heads": 2, "head_dim": 64, "window": 16, "full_every": 3}
SEEDED_TOKENS = 48
HAS_POISON = any(field.name == "poison" for field in dataclasses.fields(RequestOptions))
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "digest": {"digest": True},
    **({"digest and poison": {"digest": True, "poison": True}} if HAS_POISON else {}),
}
BOOK_LANES, BOOK_SOURCES, BOOK_SLOTS, BOOK_REQUESTS = 8, 2, 8, 32


def digests(sizes_mb: tuple[int, ...], repeats: int) -> Iterator[dict[str, Any]]:
    """A row for each request; of each size the first round is left out."""
    for size_mb in sizes_mb:
        with ExitStack() as stack:
            handle = SourceHandle("replay", GEOMETRY, num_slots=1)
            stack.callback(handle.close)
            handle.start()
            manifest = decoder_like(handle.manifest)
            context = context_of(manifest, 2 * (size_mb << 20) + (1 << 20), 1 << 20)
            owner = DecoderOwner(NullDecoder(manifest, context=context, lanes=1), context=context)
            stack.callback(owner.close)
            owner.attach(handle)
            for repeat in range(repeats + 1):
                order = list(VARIANTS) if repeat % 2 else list(reversed(VARIANTS))
                for variant in order:
                    row = _transfer(owner, context, variant)
                    if repeat:
                        yield {"measure": "digest", "size_mb": size_mb, "repeat": repeat, **row}


def _transfer(owner: DecoderOwner, num_tokens: int, variant: str) -> dict[str, Any]:
    asked = RequestOptions(route="whole", max_tokens=1, trace=True, **VARIANTS[variant])
    request = owner.submit([1] * num_tokens, asked)
    owner.run_until_done(request)
    owner.drain()
    measured = request.measured
    if measured is None:
        raise CycleFailed(request.reason)
    return {
        "variant": variant,
        "nbytes": measured.kv_nbytes,
        "import_ns": measured.published_ns - request.imports[0].begun_ns,
        "ttft_ns": measured.first_token_ns - measured.submitted_ns,
        "load_1min": os.getloadavg()[0],
    }


def detection(rounds: int) -> Iterator[dict[str, Any]]:
    """A row for each attempt whose source announces one layer wrongly, and for sound ones."""
    with ExitStack() as stack:
        handle = SourceHandle(SEEDED, SEEDED_GEOMETRY)
        stack.callback(handle.close)
        handle.start()
        manifest = decoder_like(handle.manifest)
        decoder = NullDecoder(manifest, context=SEEDED_TOKENS, lanes=1)
        owner = DecoderOwner(decoder, context=SEEDED_TOKENS)
        stack.callback(owner.close)
        owner.attach(handle)
        for _ in range(rounds):
            for number, fault in enumerate((*FAULTS, "sound")):
                for layer in range(SEEDED_GEOMETRY["layers"]):
                    for digest in (True, False):
                        yield _announced_wrongly(owner, number, fault, layer, digest=digest)


def _announced_wrongly(
    owner: DecoderOwner, number: int, fault: str, layer: int, *, digest: bool
) -> dict[str, Any]:
    tokens = [number, layer] + [SOUND] * (SEEDED_TOKENS - 2)
    options = RequestOptions(route="streamed", max_tokens=0, digest=digest)
    request = owner.submit(tokens, options)
    owner.run_until_done(request)
    owner.drain()
    owner.check_integrity()
    named = f"layers [{layer}, {layer + 1})" in request.reason or f"layer {layer}" in request.reason
    return {
        "measure": "detection",
        "fault": fault,
        "layer": layer,
        "digest": digest,
        "found": request.outcome == "failed",
        "layer_named": named,
        "reason": request.reason,
    }


def books(samples: int) -> Iterator[dict[str, Any]]:
    """What `check_integrity` and `snapshot` take on an owner with much in its books."""
    slow = {"layers": 4, "heads": 2, "head_dim": 8, "layer_ms": 60_000.0}
    with ExitStack() as stack:
        handles = [SourceHandle("replay", slow, num_slots=BOOK_SLOTS) for _ in range(BOOK_SOURCES)]
        for handle in handles:
            stack.callback(handle.close, 0.0)
            handle.start()
        manifest = decoder_like(handles[0].manifest)
        owner = DecoderOwner(NullDecoder(manifest, context=64, lanes=BOOK_LANES), context=64)
        for handle in handles:
            owner.attach(handle)
        for _ in range(BOOK_REQUESTS):
            owner.submit([1] * 32, RequestOptions(route="streamed", max_tokens=0))
        held = owner.statistics()
        for name in ("check_integrity", "snapshot"):
            look = getattr(owner, name, None)
            if look is not None:
                yield {"measure": "books", "call": name, "held": held, "ns": _timed(look, samples)}
        for handle in handles:  # they would sleep out their layer before they hear of the end
            handle.kill()
        owner.close()


def _timed(call: Any, samples: int) -> list[int]:
    taken = []
    for _ in range(samples):
        begun_ns = time.perf_counter_ns()
        call()
        taken.append(time.perf_counter_ns() - begun_ns)
    return taken
