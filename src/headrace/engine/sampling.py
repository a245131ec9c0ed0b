"""One sampler for all tokens, the first included: a row of logits to a token id.

It runs on the host in float64 with a generator of its own per request, so that a seed gives the
same tokens whatever else is served.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.errors import DeviceError, Refused
from headrace.messages import Sampling

LEAST_LOGPROB: Final = -9999.0  # stands for all below it, -inf included, which no JSON can carry
_MAX_TEMPERATURE: Final = 100.0


class Logprobs(NamedTuple):
    """How likely a token was, and which were the likeliest: natural logs of shares in the softmax.

    It is that of the raw row in float64: temperature, top_p and top_k are not in it. top: (token,
    logprob), the likeliest first, of equal ones the lowest id first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


class Chosen(NamedTuple):
    """A token, with its logprobs if they are kept."""

    token: int
    logprobs: Logprobs | None


class Sampler:
    """Chooses the tokens of one request.

    Raises:
        Refused: an option's value makes no sense; `field` names the option.
    """

    def __init__(self, sampling: Sampling, logprobs: int | None = None) -> None:
        """`logprobs`: of how many of the likeliest they are kept beside the chosen token's own."""
        check_sampling(sampling)
        self._sampling = sampling
        self._num_top = logprobs
        self._generator = np.random.Generator(np.random.PCG64(sampling.seed))

    def sample(self, logits: memoryview) -> Chosen:
        """The next token for a float32 row of logits; of equal logits the lowest id comes first.

        Raises:
            DeviceError: the row holds NaN where the choice is made.
        """
        row = np.frombuffer(logits, dtype=np.float32)
        greedy = int(np.argmax(row))  # which is the first NaN if there is any
        greatest = float(row[greedy])
        if math.isnan(greatest):
            raise DeviceError(f"the logits of {row.size} tokens hold NaN, first at {greedy}")
        draws = self._sampling.temperature > 0.0 and math.isfinite(greatest)
        token = self._drawn(row, greatest) if draws else greedy
        if self._num_top is None:
            return Chosen(token, None)
        return Chosen(token, _logprobs(row, greatest, token, self._num_top))

    def _drawn(self, row: npt.NDArray[np.float32], greatest: float) -> int:
        ids, weights = self._weights(row, greatest)
        cumulative = np.cumsum(weights)
        drawn = self._generator.random() * cumulative[-1]
        # Rounding may bring `drawn` up to the total, which lies past the last id.
        at = min(int(np.searchsorted(cumulative, drawn, side="right")), ids.size - 1)
        return int(ids[at])

    def _weights(
        self, row: npt.NDArray[np.float32], greatest: float
    ) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
        """The candidates, the likeliest first, and their probabilities up to a common factor."""
        options = self._sampling
        ids = np.flatnonzero(np.isfinite(row))
        ids = ids[_likeliest(row[ids], options.top_k or ids.size)]
        weights = np.exp((row[ids].astype(np.float64) - greatest) / options.temperature)
        if options.top_p < 1.0:
            cumulative = np.cumsum(weights)
            count = int(np.searchsorted(cumulative, options.top_p * cumulative[-1])) + 1
            ids, weights = ids[:count], weights[:count]
        return ids, weights


def _likeliest(row: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.intp]:
    """Where the `count` greatest of a row are, the greatest first, of equal ones the lowest."""
    ids = np.arange(row.size)
    if 0 < count < row.size:
        # All that tie with the last are kept for the stable sort, which lets the lowest win.
        ids = np.flatnonzero(row >= np.partition(row, row.size - count)[row.size - count])
    return ids[np.argsort(-row[ids], kind="stable")][:count]


def _logprobs(row: npt.NDArray[np.float32], greatest: float, token: int, num_top: int) -> Logprobs:
    """Of a row without NaN. Where some logits are infinite, they share all of the softmax."""
    top = _likeliest(row, num_top) if num_top else np.empty(0, np.intp)
    if math.isfinite(greatest):
        shifted = row.astype(np.float64) - greatest
    else:
        shifted = np.where(row == math.inf, 0.0, -math.inf)
    with np.errstate(divide="ignore"):  # no logit is above -inf: there is no softmax
        total = float(np.log(np.exp(shifted).sum()))

    def told(each: int) -> float:
        share = float(shifted[each])
        return max(share - total, LEAST_LOGPROB) if math.isfinite(share) else LEAST_LOGPROB

    return Logprobs(told(token), tuple((int(each), told(each)) for each in top))


def check_sampling(sampling: Sampling) -> None:
    """Check a request's sampling options.

    Raises:
        Refused: naming the option.
    """
    _check(
        "temperature",
        0.0 <= sampling.temperature <= _MAX_TEMPERATURE,
        sampling.temperature,
        f"a number from 0 to {_MAX_TEMPERATURE:g}",
    )
    _check("top_p", 0.0 < sampling.top_p <= 1.0, sampling.top_p, "above 0 and at most 1")
    _check("top_k", sampling.top_k >= 0, sampling.top_k, "0 or more")
    _check("seed", sampling.seed is None or sampling.seed >= 0, sampling.seed, "0 or more, or none")


def _check(option: str, holds: bool, value: object, wanted: str) -> None:
    if not holds:
        raise Refused(f"{option} is {value}, must be {wanted}", field=option)
