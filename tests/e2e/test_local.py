"""The cpu decoder prefills by itself: to the last bit as a source process of the same pairing does.

The engine shares the decoder's weights and is run while other entries of the same decoder are held,
imported and published.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from headrace.backends import cpu as cpu_backend
from headrace.backends.load import prefill_engine_of
from headrace.errors import Closed
from headrace.messages import Route
from headrace.runtime.owner import DecoderOwner
from headrace.runtime.requests import Request, RequestOptions
from headrace.runtime.worker import SourceHandle
from tests.e2e.families import CONTEXT, directory_of, make_prompt

FAMILIES = ["llama", "gemma3", "gemma4_shared", "gpt_oss"]
NUM_TOKENS = 43
ROUTES: tuple[Route, ...] = ("whole", "chunked", "streamed")


@contextmanager
def owner_of(family: str) -> Iterator[DecoderOwner]:
    options = {"model": str(directory_of(family)), "threads": 1}
    decoder = cpu_backend.open({**options, "lanes": 3, "context": CONTEXT})
    owner = DecoderOwner(decoder, context=CONTEXT, local=prefill_engine_of(decoder))
    try:
        yield owner
        assert owner.drain()
        owner.check_integrity()
    finally:
        owner.close()
    with pytest.raises(Closed):
        decoder.prefill_engine()


def result(owner: DecoderOwner, route: Route, **changes: Any) -> Request:
    chunk = 9 if route == "chunked" else 0
    asked: dict[str, Any] = {"route": route, "chunk": chunk, "max_tokens": 5, "audit": True}
    request = owner.submit(make_prompt(NUM_TOKENS), RequestOptions(**asked | changes))
    owner.run_until_done(request)
    assert request.outcome == "finished", request.reason
    return request


def facts(request: Request) -> tuple[object, ...]:
    return request.tokens, request.logits_digest, request.kv_digests


@pytest.mark.parametrize("family", FAMILIES)
def test_local_results_are_those_of_a_source(family: str) -> None:
    handle = SourceHandle("torch", {"model": str(directory_of(family)), "threads": 1})
    handle.start()
    with owner_of(family) as owner:
        owner.attach(handle)
        expected = facts(result(owner, "streamed"))
        os.kill(handle.pid, signal.SIGKILL)
        for route in ROUTES:
            held = result(owner, route, on_failure="local", hold=True, audit=False)
            for options in ({}, {"digest": True, "poison": True}, {"prefill_chunk": NUM_TOKENS}):
                assert facts(result(owner, route, on_failure="local", **options)) == expected
            owner.release(held)


def test_a_local_prefill_is_cancelled_within_a_layer() -> None:
    with owner_of("gemma3") as owner:
        request = owner.submit(
            make_prompt(NUM_TOKENS),
            RequestOptions(route="streamed", on_failure="local"),
            on_progress=lambda *_: owner.cancel(request),
        )
        owner.turn(0.0)
        assert (request.outcome, request.cause) == ("cancelled", "cancelled")
        assert owner.idle
        assert result(owner, "streamed", on_failure="local").tokens


def test_the_engine_computes_with_the_decoders_own_weights() -> None:
    decoder = cpu_backend.open({"model": str(directory_of("llama")), "context": CONTEXT})
    engine = decoder.prefill_engine()
    assert engine._model is decoder._model
    engine.close()
    assert decoder._model is not None
    decoder.close()
