"""The two built-in models, pulled once, and one prompt through them by every route.

Gemma's terms are accepted by whoever sets HEADRACE_ACCEPT_LICENSES=1, never by a test.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import DynamicCache

from headrace.backends.load import open_decoder
from headrace.engine.loading import load_model
from headrace.engine.models import pull, resolve
from headrace.engine.text import ModelText
from headrace.errors import HeadraceError, Refused
from headrace.runtime.owner import DecoderOwner
from headrace.runtime.requests import RequestOptions
from headrace.runtime.worker import SourceHandle

TEXT = Path(__file__).parents[2] / "examples" / "pride_and_prejudice.txt"
WINDOWS = {"smollm2-135m": 0, "gemma3-270m": 512}
NUM_LAYERS = {"smollm2-135m": 30, "gemma3-270m": 18}


class Outcome(NamedTuple):
    """What two routes must have in common, digests standing for bytes."""

    tokens: tuple[int, ...]
    logits: str
    kv: tuple[str, ...]


@functools.cache
def directory_of(name: str) -> Path:
    """The pulled model's directory; pulls it where that is allowed and possible, else skips."""
    try:
        return resolve(name)
    except Refused:
        pass
    try:
        return pull(name, accept_license=os.environ.get("HEADRACE_ACCEPT_LICENSES") == "1")
    except HeadraceError as exc:
        pytest.skip(f"{name} is not here and cannot be pulled: {exc}")


@functools.cache
def prompt_of(name: str, num_tokens: int) -> tuple[int, ...]:
    """The first `num_tokens` ids of a real text, repeated where it is too short."""
    ids = ModelText(directory_of(name)).encode(TEXT.read_text())
    return tuple((ids * -(-num_tokens // len(ids)))[:num_tokens])


@contextmanager
def owner_of(name: str, context: int) -> Iterator[DecoderOwner]:
    """An owner with a cpu decoder in this process and a torch source in another."""
    options: dict[str, Any] = {"model": str(directory_of(name)), "threads": 1}
    handle = SourceHandle("torch", options)
    handle.start()
    try:
        owner = DecoderOwner(
            open_decoder("cpu", {**options, "lanes": 2, "context": context}), context=context
        )
        try:
            owner.attach(handle)
            yield owner
        finally:
            owner.close()
    finally:
        handle.close()


def hand_off(owner: DecoderOwner, tokens: tuple[int, ...], options: RequestOptions) -> Outcome:
    """One request, by the route that `options` ask for."""
    request = owner.submit(tokens, options)
    owner.run_until_done(request)
    assert request.outcome == "finished", request.reason
    owner.drain()
    owner.check_integrity()
    return Outcome(tuple(request.tokens), request.logits_digest, request.kv_digests)


def single_process(name: str, tokens: tuple[int, ...], num_decoded: int) -> tuple[Any, str]:
    """Tokens and logits digest of transformers alone: one process, its own dynamic cache."""
    model = load_model(directory_of(name), dtype="float32", threads=1, attention=None, device="cpu")
    cache = DynamicCache(config=model.config)
    logits = model.forward(torch.tensor([tokens]), cache)
    digest, out = hashlib.blake2b(digest_size=16), []
    for step in range(num_decoded):
        digest.update(logits.contiguous().view(-1).numpy().tobytes())
        out.append(int(logits.argmax()))
        if step + 1 < num_decoded:
            logits = model.forward(torch.tensor([[out[-1]]]), cache)
    return tuple(out), digest.hexdigest()
