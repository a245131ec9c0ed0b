"""One sampler for all tokens, the first included: a row of logits to a token id.

It runs on the host in float64 with a generator of its own per request, so that a seed gives the
same tokens whatever else is served.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from headrace.errors import DeviceError, Refused
from headrace.messages import Sampling

_MAX_TEMPERATURE: Final = 100.0


class Sampler:
    """Chooses the tokens of one request.

    Raises:
        Refused: an option's value makes no sense; `field` names the option.
    """

    def __init__(self, sampling: Sampling) -> None:
        check_sampling(sampling)
        self._sampling = sampling
        self._generator = np.random.Generator(np.random.PCG64(sampling.seed))

    def sample(self, logits: memoryview) -> int:
        """The next token for a float32 row of logits; of equal logits the lowest id comes first.

        Raises:
            DeviceError: the row holds NaN where the choice is made.
        """
        row = np.frombuffer(logits, dtype=np.float32)
        greedy = int(np.argmax(row))  # which is the first NaN if there is any
        if math.isnan(row[greedy]):
            raise DeviceError(f"the logits of {row.size} tokens hold NaN, first at {greedy}")
        if self._sampling.temperature == 0.0 or not math.isfinite(row[greedy]):
            return greedy
        ids, weights = self._weights(row, float(row[greedy]))
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
        if 0 < options.top_k < ids.size:
            # All that tie with the k-th are kept for the stable sort, which lets the lowest win.
            kth = np.partition(row[ids], ids.size - options.top_k)[ids.size - options.top_k]
            ids = ids[row[ids] >= kth]
        ids = ids[np.argsort(-row[ids], kind="stable")]
        if options.top_k:
            ids = ids[: options.top_k]
        weights = np.exp((row[ids].astype(np.float64) - greatest) / options.temperature)
        if options.top_p < 1.0:
            cumulative = np.cumsum(weights)
            count = int(np.searchsorted(cumulative, options.top_p * cumulative[-1])) + 1
            ids, weights = ids[:count], weights[:count]
        return ids, weights


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
