"""Kept prompts, from request to tokens: what is gone on from has the bits of a prefill.

An identical prompt has those of the prefill that it was kept from. One that begins alike has those
of a prefill that is cut where the shared part ends, whoever computes the rest; and differs from one
in a single pass by no more than a bound that is stated here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import pytest

from headrace.backends import cpu as cpu_backend
from headrace.backends.load import prefill_engine_of
from headrace.messages import Remainder
from headrace.runtime.owner import DecoderOwner
from headrace.runtime.requests import Request, RequestOptions
from headrace.runtime.reuse import Speeds
from headrace.runtime.worker import SourceHandle
from tests.e2e.families import CONTEXT, directory_of, make_prompt

FAMILIES = ["llama", "gemma3", "gemma4_shared"]
OwnerOf: TypeAlias = Callable[..., DecoderOwner]

KEPT = 8  # prompts that fit beside the lanes
PROMPT = 40
LONGER = 52
BOUND = 2e-5  # of the largest logit, float32: what another cut of the prefill changes at most


def new_owner(family: str, lanes: int, *, local: bool, own_cache_nbytes: int) -> DecoderOwner:
    options = {"model": str(directory_of(family)), "threads": 1}
    probe = cpu_backend.open({**options, "lanes": 1, "context": CONTEXT})
    keep_nbytes = KEPT * 2 * probe.statistics()["nbytes"]
    probe.close()
    decoder = cpu_backend.open(
        {**options, "lanes": lanes, "context": CONTEXT, "keep_nbytes": keep_nbytes}
    )
    engine = prefill_engine_of(decoder) if local else None
    owner = DecoderOwner(decoder, context=CONTEXT, local=engine)
    handle = SourceHandle("torch", {**options, "own_cache_nbytes": own_cache_nbytes})
    handle.start()
    owner.attach(handle)
    as_if(owner, Speeds(None, None, None, None))  # what is gone on from does not depend on times
    return owner


def as_if(owner: DecoderOwner, speeds: Speeds) -> None:
    """Have an owner choose by these figures."""
    owner._keeping._speeds = lambda *_, **__: speeds  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def owners() -> Iterator[OwnerOf]:
    """Owners that the tests share, one for each kind of pair; every test has prompts of its own."""
    made: dict[tuple[object, ...], DecoderOwner] = {}

    def owner_of(
        family: str, *, lanes: int = 2, local: bool = False, own_cache_nbytes: int = 0
    ) -> DecoderOwner:
        key = (family, lanes, local, own_cache_nbytes)
        if key not in made:
            made[key] = new_owner(family, lanes, local=local, own_cache_nbytes=own_cache_nbytes)
        return made[key]

    try:
        yield owner_of
        for owner in made.values():
            assert owner.drain()
            owner.check_integrity()
            assert owner.statistics()["prefix"]["pinned"] == 0
    finally:
        for owner in made.values():
            owner.close()


_seeds = itertools.count(10_000)


def fresh(num_tokens: int) -> list[int]:
    """A prompt that no owner has seen."""
    return make_prompt(num_tokens, seed=next(_seeds))


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
def test_an_identical_prompt_needs_no_prefill_and_has_the_same_bits(
    owners: OwnerOf, family: str
) -> None:
    owner = owners(family)
    prompt = fresh(PROMPT)
    cold = run(owner, prompt, prefix="off")
    first = run(owner, prompt, prefix="identical")
    assert taken(first) == (0, "source")
    sent = owner.statistics()["source 0"]["sent"]
    for _ in range(3):  # the storage it decoded in is gone on from again and again
        again = run(owner, prompt, prefix="identical")
        assert taken(again) == (PROMPT, "none")
        assert facts(again) == facts(first) == facts(cold)
    assert owner.statistics()["source 0"]["sent"] == sent, "the source was asked"


def test_two_that_are_identical_decode_at_the_same_time(owners: OwnerOf) -> None:
    """The one takes the kept storage over, the other gets a copy; both leave it as it is."""
    owner = owners("gemma3")
    prompt = fresh(PROMPT)
    first = run(owner, prompt, max_tokens=30)
    options = RequestOptions(max_tokens=30, audit=True, prefix="identical")
    both = [owner.submit(prompt, options) for _ in range(2)]
    owner.run_until_done(*both)
    assert [facts(each) for each in both] == [facts(first)] * 2
    assert facts(run(owner, prompt, max_tokens=30)) == facts(first)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("own_cache_nbytes", [0, 1 << 26])
def test_a_longer_prompt_goes_on_with_the_bits_of_a_prefill_cut_there(
    owners: OwnerOf, family: str, own_cache_nbytes: int
) -> None:
    owner = owners(family, own_cache_nbytes=own_cache_nbytes)
    longer = fresh(LONGER)
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
def test_the_owner_computes_a_short_remainder_with_the_same_bits(
    owners: OwnerOf, family: str
) -> None:
    owner = owners(family, local=True)
    longer = fresh(LONGER)
    cold = run(owner, longer, prefix="off", prefill_cuts=(PROMPT,))
    run(owner, longer[:PROMPT])
    as_if(owner, Speeds(1e9, 1.0, 1.0, 0.1))  # an owner that is fast
    by_owner = run(owner, longer)
    assert taken(by_owner) == (PROMPT, "owner")
    assert facts(by_owner) == facts(cold)


@pytest.mark.parametrize("family", FAMILIES)
def test_against_one_pass_the_logits_differ_by_no_more_than_the_bound(
    owners: OwnerOf, family: str
) -> None:
    longer = fresh(LONGER)
    owner = owners(family)
    one_pass = run(owner, longer, prefix="off", hold=True, audit=False)
    run(owner, longer[:PROMPT])
    shared = run(owner, longer, hold=True, audit=False)
    assert taken(shared) == (PROMPT, "source")
    rows = [np.frombuffer(each.logits, np.float32) for each in (one_pass, shared)]
    for each in (one_pass, shared):
        owner.release(each)
    assert np.abs(rows[0] - rows[1]).max() <= BOUND * np.abs(rows[0]).max()


@pytest.mark.parametrize("length", [5, 16, 17, 40])
def test_a_shorter_part_is_shared_where_a_sliding_window_allows_it(
    owners: OwnerOf, length: int
) -> None:
    """gemma3's tiny window is 16: up to 15 positions, an entry's tail holds all that came before.

    Prompts of 24 positions that share 12, cut at each 4: below the window, the 12 are shared; of a
    kept prompt that is longer than the window, nothing shorter is, since its rows were let go.
    """
    chunk = 4
    owner = owners("gemma3")
    begun = fresh(length)
    run(owner, begun, prefill_chunk=chunk)
    shared = length // 2 // chunk * chunk
    other = [*begun[: length // 2], *fresh(24)]
    cold = run(owner, other, prefill_chunk=chunk, prefix="off")
    warm = run(owner, other, prefill_chunk=chunk)
    expected = shared if length <= 15 else 0
    assert taken(warm)[0] == expected
    assert facts(warm) == facts(cold)


def test_what_is_longer_goes_on_below_at_and_above_the_window(owners: OwnerOf) -> None:
    for length in (9, 15, 16, 17, 33):
        owner = owners("gemma3")
        longer = fresh(LONGER)
        cold = run(owner, longer, prefix="off", prefill_cuts=(length,))
        run(owner, longer[:length])
        warm = run(owner, longer)
        assert taken(warm) == (length, "source")
        assert facts(warm) == facts(cold)


def test_identical_only_takes_no_part_and_no_other_cut(owners: OwnerOf) -> None:
    owner = owners("llama")
    longer = fresh(LONGER)
    run(owner, longer[:PROMPT], prefix="identical")
    assert taken(run(owner, longer, prefix="identical")) == (0, "source")
    other = fresh(30)
    run(owner, other, prefill_cuts=(7,))
    assert taken(run(owner, other, prefix="identical")) == (0, "source")
    cut = run(owner, other, prefix="identical", prefill_cuts=(7,))
    assert taken(cut) == (30, "none")


def test_what_is_not_asked_for_is_neither_kept_nor_gone_on_from(owners: OwnerOf) -> None:
    owner, prompt = owners("llama"), fresh(PROMPT)
    assert run(owner, prompt, prefix="off").reuse is None
    assert taken(run(owner, prompt)) == (0, "source")
    assert run(owner, prompt, prefix="off").reuse is None


def test_failed_and_cancelled_hand_offs_are_not_kept(owners: OwnerOf) -> None:
    owner, prompt = owners("llama"), fresh(PROMPT)
    before = owner.statistics()["prefix"]["added"]
    for deadline_s in (None, -1.0):
        options = RequestOptions(prefix="shared", deadline_s=deadline_s)
        request = owner.submit(prompt, options)
        owner.cancel(request)
        owner.run_until_done(request)
        assert request.outcome in ("cancelled", "failed")
    assert owner.statistics()["prefix"]["added"] == before
    assert taken(run(owner, prompt)) == (0, "source")


def test_the_bound_is_kept_and_the_oldest_goes_first(owners: OwnerOf) -> None:
    owner = owners("llama")
    prompts = [fresh(PROMPT) for _ in range(40)]
    for prompt in prompts:
        run(owner, prompt, max_tokens=1, audit=False)
        bound = owner._keeping.index.nbytes
        assert owner.statistics()["decoder"]["kept_nbytes"] <= bound
    assert taken(run(owner, prompts[-1])) == (PROMPT, "none")
    assert taken(run(owner, prompts[0])) == (0, "source")


def test_many_at_once_on_few_lanes_all_end_with_their_own_bits(owners: OwnerOf) -> None:
    owner = owners("gemma3", lanes=2)
    prompts = [fresh(20) for _ in range(4)]
    expected = [facts(run(owner, prompt, prefix="off")) for prompt in prompts]
    options = RequestOptions(max_tokens=6, audit=True, prefix="shared")
    requests = [owner.submit(prompts[at % 4], options) for at in range(24)]
    owner.run_until_done(*requests)
    assert [facts(each) for each in requests] == [expected[at % 4] for at in range(24)]
