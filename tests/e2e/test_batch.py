"""Requests that decode in one batch get what each of them gets alone in a batch of that size.

The owner prefills by itself, one request in a turn, so that it is the same each time who decodes
with whom.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from headrace.backends import cpu as cpu_backend
from headrace.backends.base import Entry
from headrace.backends.load import prefill_engine_of
from headrace.messages import Route, Sampling
from headrace.runtime.owner import DecoderOwner
from headrace.runtime.requests import Request, RequestOptions
from tests.e2e.families import CONTEXT, WINDOW, directory_of, make_prompt

FAMILIES = ["llama", "gemma4_shared", "qwen3_moe"]
BATCH, LANES = 4, 6  # more entries than rows
STEPS = 2 * WINDOW + 4  # a sliding lane is moved back to its front at least once


class Asked(NamedTuple):
    num_tokens: int
    max_tokens: int
    route: Route
    sampling: Sampling

    def options(self) -> RequestOptions:
        return RequestOptions(
            route=self.route,
            max_tokens=self.max_tokens,
            sampling=self.sampling,
            on_failure="local",
            audit=True,
        )


ASKED = [
    Asked(1, STEPS, "whole", Sampling()),
    Asked(WINDOW, 9, "streamed", Sampling(0.8, 0.95, 0, 1)),
    Asked(43, STEPS, "streamed", Sampling(0.8, 1.0, 20, 2)),
    Asked(WINDOW - 1, 3, "whole", Sampling()),
    Asked(60, STEPS, "whole", Sampling(1.2, 1.0, 0, 3)),
    Asked(7, STEPS, "streamed", Sampling(0.8, 0.95, 0, 1)),
    Asked(20, 12, "whole", Sampling()),
    Asked(2, STEPS, "streamed", Sampling()),
]


class Watched(cpu_backend.CpuDecoder):
    """Tells how many entries each of its steps took."""

    sizes: list[int]

    def decode_step(self, active: Sequence[tuple[Entry, int]]) -> list[memoryview]:
        self.sizes.append(len(active))
        return super().decode_step(active)


@contextmanager
def owner_of(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[DecoderOwner, Watched]]:
    monkeypatch.setattr(cpu_backend, "CpuDecoder", Watched)
    options = {"model": str(directory_of(family)), "lanes": LANES, "context": CONTEXT}
    decoder = cpu_backend.open({**options, "decode_batch": BATCH})
    assert isinstance(decoder, Watched)
    decoder.sizes = []
    owner = DecoderOwner(decoder, context=CONTEXT, local=prefill_engine_of(decoder))
    try:
        yield owner, decoder
    finally:
        owner.close()


def submit(
    owner: DecoderOwner, asked: Asked, requests: list[Request], later: Sequence[Asked] = ()
) -> None:
    """Start a request; its second token and each one after it starts two of `later`."""
    waiting = list(later)

    def began(token: int) -> None:
        for _ in range(2 if len(request.tokens) >= 2 else 0):
            if waiting:
                submit(owner, waiting.pop(0), requests)

    prompt = make_prompt(asked.num_tokens, seed=asked.max_tokens)
    request = owner.submit(prompt, asked.options(), on_token=began)
    requests.append(request)


@pytest.mark.parametrize("family", FAMILIES)
def test_company_changes_no_token(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight requests on six lanes and four rows, which begin while others decode."""
    with owner_of(family, monkeypatch) as (owner, decoder):
        alone: list[Request] = []
        for asked in ASKED:
            submit(owner, asked, alone)
            owner.run_until_done(*alone)
        assert set(decoder.sizes) == {1}
        decoder.sizes.clear()
        together: list[Request] = []
        submit(owner, ASKED[0], together, ASKED[1:])
        while len(together) < len(ASKED) or not all(each.done for each in together):
            owner.turn(1.0)
        assert max(decoder.sizes) == BATCH
        assert owner.drain()
        owner.check_integrity()
        assert {request.outcome for request in (*alone, *together)} == {"finished"}
        tokens = [request.tokens for request in alone]
        assert [len(each) for each in tokens] == [asked.max_tokens for asked in ASKED]
        assert [request.tokens for request in together] == tokens
        if decoder.rows_alike:  # else the last bits depend on the row that one got
            digests = [request.logits_digest for request in alone]
            assert [request.logits_digest for request in together] == digests
