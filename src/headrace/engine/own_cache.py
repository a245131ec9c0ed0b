"""What an engine keeps of the prompts that it has computed, to go on from where another begins so.

A kept prompt serves a later one only where the states would be the same bits had they been computed
anew: the same tokens, by the same pieces. Of a sliding layer the rows of one window are kept, those
before the prompt's end, so that such a prompt serves up to its end only, unless it is shorter than
the window.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headrace.engine.pieces import pieces
from headrace.engine.prefill import Seed, States, needed_rows
from headrace.errors import LocalProtocolError
from headrace.geometry import Layer


class _Key(NamedTuple):
    """One computation: the prompt's u32 ids, and the pieces that it was computed by."""

    tokens: bytes
    pieces: tuple[tuple[int, int], ...]


class OwnCache:
    """The states of the last finished prompts, of at most `nbytes` bytes in all.

    They are let go of oldest use first. A seed that was handed out stays good until it is dropped.
    """

    def __init__(self, layers: Sequence[Layer], nbytes: int) -> None:
        if nbytes < 0:
            raise LocalProtocolError(f"an own cache of {nbytes} bytes")
        self._layers = layers
        self._capacity_nbytes = nbytes
        self._nbytes = 0
        self._kept: OrderedDict[_Key, Seed] = OrderedDict()
        self._hits = 0
        self._misses = 0

    def find(
        self, tokens: Sequence[int], start: int, cuts: Sequence[int], prefill_chunk: int
    ) -> Seed | None:
        """The states of positions [0, start), if a run of these `tokens` would compute the same.

        `start` is a place where the run is cut. None, and counted as a miss, if nothing kept is of
        these tokens and pieces up to there, or lacks the rows of a sliding layer.

        Raises:
            LocalProtocolError: the cuts are none of the prompt.
        """
        wanted = _key(tokens, prefill_chunk, cuts)
        before = tuple(piece for piece in wanted.pieces if piece[0] < start)
        for key, seed in self._kept.items():
            same = key.pieces[: len(before)] == before and before[-1][1] == start
            if same and key.tokens.startswith(wanted.tokens[: start * array("I").itemsize]):
                shorter = shortened(self._layers, seed, start)
                if shorter is not None:
                    self._kept.move_to_end(key)
                    self._hits += 1
                    return shorter
        self._misses += 1
        return None

    def put(
        self, tokens: Sequence[int], cuts: Sequence[int], prefill_chunk: int, seed: Seed
    ) -> None:
        """Keep the states of all of `tokens`; others make room. Too many bytes are not kept."""
        if seed.nbytes > self._capacity_nbytes:
            return
        key = _key(tokens, prefill_chunk, cuts)
        old = self._kept.pop(key, None)
        self._nbytes += seed.nbytes - (old.nbytes if old is not None else 0)
        self._kept[key] = seed
        while self._nbytes > self._capacity_nbytes:
            _, oldest = self._kept.popitem(last=False)
            self._nbytes -= oldest.nbytes

    def statistics(self) -> Mapping[str, int]:
        """Prompts and bytes kept, and how often one of use was found and not found."""
        return {
            "own_cache_prompts": len(self._kept),
            "own_cache_nbytes": self._nbytes,
            "own_cache_hits": self._hits,
            "own_cache_misses": self._misses,
        }

    def clear(self) -> None:
        """Let go of everything."""
        self._kept.clear()
        self._nbytes = 0


def shortened(layers: Sequence[Layer], seed: Seed, num_tokens: int) -> Seed | None:
    """The states of the seed's first `num_tokens` positions, views; None if it lacks some."""
    shorter: list[States | None] = []
    for layer, states in zip(layers, seed.layers, strict=True):
        if states is None:
            shorter.append(None)
            continue
        stop = states[0].shape[1] - (seed.num_tokens - num_tokens)
        start = stop - needed_rows(layer, num_tokens)
        if start < 0 or num_tokens > seed.num_tokens:
            return None
        shorter.append((states[0][:, start:stop], states[1][:, start:stop]))
    return Seed(num_tokens, tuple(shorter))


def _key(tokens: Sequence[int], prefill_chunk: int, cuts: Sequence[int]) -> _Key:
    ranges = pieces(len(tokens), prefill_chunk, cuts)
    return _Key(array("I", tokens).tobytes(), tuple(ranges))
