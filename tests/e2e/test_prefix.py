"""Kept prompts, from request to tokens: what is gone on from has the bits of a prefill.

An identical prompt has those of the prefill that it was kept from. One that begins alike has those
of a prefill that is cut where the shared part ends, whoever computes the rest; and differs from one
in a single pass by no more than a bound that is stated here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from headrace.backends import cpu as cpu_backend
from headrace.backends.load import prefill_engine_of
from headrace.messages import Remainder
from headrace.runtime.owner import DecoderOwner
from headrace.runtime.requests import Request, RequestOptions
from headrace.runtime.worker import SourceHandle
from tests.e2e.families import CONTEXT, directory_of, make_prompt

FAMILIES = ["llama", "gemma3", "gemma4_shared", "exaone4"]
KEPT = 8  # prompts that fit beside the lanes
PROMPT = 40
LONGER = 52
BOUND = 2e-5  # of the largest logit, float32: what another cut of the prefill changes at most


@contextmanager
def owner_of(
    family: str, *, lanes: int = 2, local: bool = False, **source: Any
) -> Iterator[DecoderOwner]:
    options = {"model": str(directory_of(family)), "threads": 1}
    probe = cpu_backend.open({**options, "lanes": 1, "context": CONTEXT})
    keep_nbytes = KEPT * 2 * probe.statistics()["nbytes"]
    probe.close()
    decoder = cpu_backend.open(
        {**options, "lanes": lanes, "context": CONTEXT, "keep_nbytes": keep_nbytes}
    )
    engine = prefill_engine_of(decoder) if local else None
    owner = DecoderOwner(decoder, context=CONTEXT, local=engine)
    handle = SourceHandle("torch", {**options, **source}, num_slots=2)
    handle.start()
    try:
        owner.attach(handle)
        yield owner
        assert owner.drain()
        owner.check_integrity()
        assert owner.statistics()["prefix"]["pinned"] == 0
    finally:
        owner.close()


def run(owner: DecoderOwner, tokens: Sequence[int], **changes: Any) -> Request:
    asked: dict[str, Any] = {"max_tokens": 6, "audit": True, "prefix": "shared"}
    request = owner.submit(tokens, RequestOptions(**asked | changes))
    owner.run_until_done(request)
    assert request.outcome == "finished", request.reason
    return request


def facts(request: Request) -> tuple[object, ...]:
    return request.tokens, request.logits_digest, request.kv_digests


def taken(request: Request) -> tuple[int, Remainder]:
    assert request.reuse is not None
    return request.reuse.positions, request.reuse.remainder


@pytest.mark.parametrize("family", FAMILIES)
def test_an_identical_prompt_needs_no_prefill_and_has_the_same_bits(family: str) -> None:
    with owner_of(family) as owner:
        cold = run(owner, make_prompt(PROMPT), prefix="off")
        first = run(owner, make_prompt(PROMPT), prefix="identical")
        assert taken(first) == (0, "source")
        source = dict(owner.statistics()["source 0"])
        for _ in range(3):  # the storage it decoded in is gone on from again and again
            again = run(owner, make_prompt(PROMPT), prefix="identical")
            assert taken(again) == (PROMPT, "none")
            assert facts(again) == facts(first) == facts(cold)
        assert owner.statistics()["source 0"] == source, "the source was asked for something"


def test_two_that_are_identical_decode_at_the_same_time() -> None:
    """The one takes the kept storage over, the other gets a copy; both leave it as it is."""
    with owner_of("gemma3") as owner:
        first = run(owner, make_prompt(PROMPT), max_tokens=30)
        options = RequestOptions(max_tokens=30, audit=True, prefix="identical")
        both = [owner.submit(make_prompt(PROMPT), options) for _ in range(2)]
        owner.run_until_done(*both)
        assert [facts(each) for each in both] == [facts(first)] * 2
        assert facts(run(owner, make_prompt(PROMPT), max_tokens=30)) == facts(first)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("own_cache_nbytes", [0, 1 << 26])
def test_a_longer_prompt_goes_on_with_the_bits_of_a_prefill_cut_there(
    family: str, own_cache_nbytes: int
) -> None:
    with owner_of(family, own_cache_nbytes=own_cache_nbytes) as owner:
        longer = make_prompt(LONGER)
        cold = run(owner, longer, prefix="off", prefill_cuts=(PROMPT,))
        run(owner, longer[:PROMPT])
        for route in ("whole", "chunked", "streamed"):
            with_rest = run(owner, [*longer[:-1], 7 + len(route)], route=route)
            assert taken(with_rest) == (PROMPT, "source")
        again = run(owner, longer)
        assert taken(again) == (PROMPT, "source")
        assert facts(again) == facts(cold)
        assert taken(run(owner, longer)) == (LONGER, "none")
        assert facts(run(owner, longer)) == facts(cold)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_owner_computes_a_short_remainder_with_the_same_bits(family: str) -> None:
    with owner_of(family, local=True) as owner:
        longer = make_prompt(LONGER)
        cold = run(owner, longer, prefix="off", prefill_cuts=(PROMPT,))
        run(owner, longer[:PROMPT])
        keeping = owner._keeping
        keeping._speeds = lambda *_: _fast_owner()  # type: ignore[method-assign]
        by_owner = run(owner, longer)
        assert taken(by_owner) == (PROMPT, "owner")
        assert facts(by_owner) == facts(cold)


def _fast_owner() -> Any:
    from headrace.runtime.reuse import Speeds

    return Speeds(source_ns=1e9, position_ns=1.0, carry_ns_per_byte=1.0, copy_ns_per_byte=0.1)


@pytest.mark.parametrize("family", FAMILIES)
def test_against_one_pass_the_logits_differ_by_no_more_than_the_bound(family: str) -> None:
    longer = make_prompt(LONGER)
    with owner_of(family) as owner:
        one_pass = run(owner, longer, prefix="off", hold=True, audit=False)
        run(owner, longer[:PROMPT])
        shared = run(owner, longer, hold=True, audit=False)
        assert taken(shared) == (PROMPT, "source")
        rows = [np.frombuffer(each.logits, np.float32) for each in (one_pass, shared)]
        for each in (one_pass, shared):
            owner.release(each)
    assert np.abs(rows[0] - rows[1]).max() <= BOUND * np.abs(rows[0]).max()


@pytest.mark.parametrize("length", [5, 16, 17, 40])
def test_a_shorter_part_is_shared_where_a_sliding_window_allows_it(length: int) -> None:
    """gemma3's tiny window is 16: up to 15 positions, an entry's tail holds all that came before.

    Prompts of 24 positions that share 12, cut at each 4: below the window, the 12 are shared; of a
    kept prompt that is longer than the window, nothing shorter is, since its rows were let go.
    """
    chunk = 4
    with owner_of("gemma3") as owner:
        begun = make_prompt(length)
        run(owner, begun, prefill_chunk=chunk)
        shared = length // 2 // chunk * chunk
        other = [*begun[: length // 2], *make_prompt(24, seed=1)]
        cold = run(owner, other, prefill_chunk=chunk, prefix="off")
        warm = run(owner, other, prefill_chunk=chunk)
        expected = shared if length <= 15 else 0
        assert taken(warm)[0] == expected
        assert facts(warm) == facts(cold)


def test_what_is_longer_goes_on_below_at_and_above_the_window() -> None:
    for length in (9, 15, 16, 17, 33):
        with owner_of("gemma3") as owner:
            longer = make_prompt(LONGER)
            cold = run(owner, longer, prefix="off", prefill_cuts=(length,))
            run(owner, longer[:length])
            warm = run(owner, longer)
            assert taken(warm) == (length, "source")
            assert facts(warm) == facts(cold)


def test_identical_only_takes_no_part_and_no_other_cut() -> None:
    with owner_of("llama") as owner:
        longer = make_prompt(LONGER)
        run(owner, longer[:PROMPT], prefix="identical")
        assert taken(run(owner, longer, prefix="identical")) == (0, "source")
        run(owner, make_prompt(30, seed=2), prefill_cuts=(7,))
        assert taken(run(owner, make_prompt(30, seed=2), prefix="identical")) == (0, "source")
        cut = run(owner, make_prompt(30, seed=2), prefix="identical", prefill_cuts=(7,))
        assert taken(cut) == (30, "none")


def test_what_is_not_asked_for_is_neither_kept_nor_gone_on_from() -> None:
    with owner_of("llama") as owner:
        assert run(owner, make_prompt(PROMPT), prefix="off").reuse is None
        assert len(owner._keeping.index) == 0
        run(owner, make_prompt(PROMPT))
        assert run(owner, make_prompt(PROMPT), prefix="off").reuse is None


def test_failed_and_cancelled_hand_offs_are_not_kept() -> None:
    with owner_of("llama") as owner:
        for _ in range(3):
            request = owner.submit(make_prompt(PROMPT), RequestOptions(prefix="shared"))
            owner.cancel(request)
            owner.run_until_done(request)
        late = owner.submit(make_prompt(PROMPT), RequestOptions(prefix="shared", deadline_s=-1.0))
        owner.run_until_done(late)
        assert (late.outcome, len(owner._keeping.index)) == ("failed", 0)


def test_the_bound_is_kept_and_the_oldest_goes_first() -> None:
    with owner_of("llama") as owner:
        prompts = [make_prompt(PROMPT, seed=seed) for seed in range(40)]
        for prompt in prompts:
            run(owner, prompt, max_tokens=1, audit=False)
            bound = owner._keeping.index.nbytes
            assert owner.statistics()["decoder"]["kept_nbytes"] <= bound
        assert taken(run(owner, prompts[-1])) == (PROMPT, "none")
        assert taken(run(owner, prompts[0])) == (0, "source")


def test_many_at_once_on_few_lanes_all_end_with_their_own_bits() -> None:
    with owner_of("gemma3", lanes=2) as owner:
        prompts = [make_prompt(20, seed=seed) for seed in range(4)]
        expected = [facts(run(owner, prompt, prefix="off")) for prompt in prompts]
        options = RequestOptions(max_tokens=6, audit=True, prefix="shared")
        requests = [owner.submit(prompts[at % 4], options) for at in range(24)]
        owner.run_until_done(*requests)
        assert [facts(each) for each in requests] == [expected[at % 4] for at in range(24)]
