"""One sampler: greedy, cuts, seeds, and options that make no sense."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.sampling import LEAST_LOGPROB, Logprobs, Sampler
from headrace.errors import DeviceError, Refused
from headrace.messages import Sampling


def row(*values: float) -> memoryview:
    return np.array(values, np.float32).data


def drawn(sampling: Sampling, logits: memoryview, count: int) -> list[int]:
    sampler = Sampler(sampling)
    return [sampler.sample(logits).token for _ in range(count)]


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    assert drawn(Sampling(), row(1.0, 3.0, 3.0, 2.0), 3) == [1, 1, 1]
    assert drawn(Sampling(top_k=2, top_p=0.5, seed=1), row(1.0, 3.0, 3.0), 2) == [1, 1]


def test_rows_may_be_plain_bytes() -> None:
    assert drawn(Sampling(), row(1.0, 3.0).cast("B"), 1) == [1]


def test_a_seed_gives_the_same_tokens_again() -> None:
    logits = np.random.default_rng(1).normal(size=500).astype(np.float32).data
    first = drawn(Sampling(temperature=1.0, seed=7), logits, 50)
    assert first == drawn(Sampling(temperature=1.0, seed=7), logits, 50)
    assert first != drawn(Sampling(temperature=1.0, seed=8), logits, 50)
    assert drawn(Sampling(temperature=1.0), logits, 50) != first


def test_the_tokens_of_a_seed_are_fixed() -> None:
    """A change here changes what users get for a seed."""
    logits = row(*[0.1 * at for at in range(20)])
    tokens = drawn(Sampling(temperature=0.7, top_k=15, top_p=0.9, seed=42), logits, 8)
    assert tokens == [12, 16, 11, 14, 19, 8, 13, 12]


def test_frequencies_follow_the_softmax() -> None:
    logits = row(*np.log([0.5, 0.3, 0.2]))
    tokens = drawn(Sampling(temperature=1.0, seed=3), logits, 20_000)
    shares = np.bincount(tokens, minlength=3) / len(tokens)
    assert np.abs(shares - [0.5, 0.3, 0.2]).max() < 0.02
    hot = drawn(Sampling(temperature=2.0, seed=3), logits, 20_000)
    wanted = np.sqrt([0.5, 0.3, 0.2])
    shares = np.bincount(hot, minlength=3) / len(hot)
    assert np.abs(shares - wanted / wanted.sum()).max() < 0.02


def test_top_k_keeps_k_and_the_lowest_of_equal_ids() -> None:
    logits = row(0.0, 1.0, 1.0, 1.0, -1.0)
    assert set(drawn(Sampling(temperature=1.0, top_k=2, seed=0), logits, 300)) == {1, 2}
    assert set(drawn(Sampling(temperature=1.0, top_k=1, seed=0), logits, 20)) == {1}
    assert set(drawn(Sampling(temperature=9.0, top_k=99, seed=0), logits, 500)) == set(range(5))


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    logits = row(*np.log([0.2, 0.5, 0.3]))
    for top_p, kept in ((0.4, {1}), (0.6, {1, 2}), (0.95, {0, 1, 2}), (1e-9, {1})):
        sampling = Sampling(temperature=1.0, top_p=top_p, seed=0)
        assert set(drawn(sampling, logits, 300)) == kept, top_p


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = row(-math.inf, 0.0, -math.inf, 0.0)
    assert set(drawn(Sampling(temperature=100.0, seed=0), logits, 200)) == {1, 3}
    assert drawn(Sampling(temperature=1.0, seed=0), row(-math.inf, -math.inf), 1) == [0]
    assert drawn(Sampling(temperature=1.0, seed=0), row(0.0, math.inf), 2) == [1, 1]


def test_nan_is_never_a_choice() -> None:
    for temperature in (0.0, 1.0):
        with pytest.raises(DeviceError, match="first at 1"):
            drawn(Sampling(temperature=temperature, seed=0), row(0.0, math.nan, 1.0), 1)


@pytest.mark.parametrize(
    ("sampling", "option"),
    [
        (Sampling(temperature=-0.1), "temperature"),
        (Sampling(temperature=math.nan), "temperature"),
        (Sampling(temperature=math.inf), "temperature"),
        (Sampling(top_p=0.0), "top_p"),
        (Sampling(top_p=1.1), "top_p"),
        (Sampling(top_p=math.nan), "top_p"),
        (Sampling(top_k=-1), "top_k"),
        (Sampling(seed=-1), "seed"),
    ],
)
def test_options_that_make_no_sense_are_refused(sampling: Sampling, option: str) -> None:
    with pytest.raises(Refused, match=option) as caught:
        Sampler(sampling)
    assert caught.value.field == option


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=40),
    temperature=st.floats(0.01, 10),
    top_k=st.integers(0, 50),
    top_p=st.floats(0.001, 1.0),
    seed=st.integers(0, 2**32),
)
def test_what_is_drawn_is_a_candidate(
    values: list[float], temperature: float, top_k: int, top_p: float, seed: int
) -> None:
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    (token,) = drawn(sampling, row(*values), 1)
    above = sum(value > values[token] for value in values)
    assert above < (top_k or len(values))


# Logprobs.


def logprobs(logits: memoryview, num_top: int, sampling: Sampling | None = None) -> Logprobs:
    found = Sampler(sampling or Sampling(), num_top).sample(logits).logprobs
    assert found is not None
    return found


def test_none_are_kept_unless_asked_for() -> None:
    assert Sampler(Sampling()).sample(row(1.0, 2.0)).logprobs is None


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.floats(-500, 500, width=32), min_size=1, max_size=40),
    num_top=st.integers(0, 20),
    temperature=st.sampled_from([0.0, 0.5, 2.0]),
    seed=st.integers(0, 2**32),
)
def test_they_are_those_of_the_raw_row(
    values: list[float], num_top: int, temperature: float, seed: int
) -> None:
    """Against sums of exact exponents; and whoever asks for them gets the same tokens."""
    sampling = Sampling(temperature=temperature, top_k=3, top_p=0.8, seed=seed)
    asking, plain = Sampler(sampling, num_top), Sampler(sampling)
    total = math.log(math.fsum(math.exp(value - max(values)) for value in values)) + max(values)
    likeliest = sorted(range(len(values)), key=lambda at: (-values[at], at))[:num_top]
    for _ in range(3):
        token, found = asking.sample(row(*values))
        assert found is not None
        assert token == plain.sample(row(*values)).token
        assert found.logprob == pytest.approx(values[token] - total, abs=1e-9)
        assert [each for each, _ in found.top] == likeliest
        for each, logprob in found.top:
            assert logprob == pytest.approx(values[each] - total, abs=1e-9)


def test_of_equal_ones_the_lowest_id_comes_first() -> None:
    top = logprobs(row(0.0, 1.0, 1.0, -1.0, 1.0), 2).top
    assert [token for token, _ in top] == [1, 2]


def test_infinite_logits_have_logprobs_that_travel() -> None:
    inf, half = math.inf, math.log(0.5)
    assert logprobs(row(0.0, -inf, 0.0), 3) == (half, ((0, half), (2, half), (1, LEAST_LOGPROB)))
    assert logprobs(row(0.0, inf, inf), 2) == (half, ((1, half), (2, half)))
    assert logprobs(row(-inf, -inf), 1) == (LEAST_LOGPROB, ((0, LEAST_LOGPROB),))
    assert logprobs(row(0.0, -3e38), 2) == (0.0, ((0, 0.0), (1, LEAST_LOGPROB)))
