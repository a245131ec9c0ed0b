"""Which compiled shapes a prompt is computed with.

A kernel takes a fixed number of tokens, its token bucket, and attention looks at a fixed number of
positions, its attention bucket. What a bucket has too much is padding: those rows are scattered to
slot 0 and seen by nobody. A piece of a prompt that is longer than the largest token bucket is
computed in several chunks, on top of each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from headrace.errors import LocalProtocolError, Refused

TOKEN_BUCKETS: Final = (64, 256, 1024)
"""By default. Each is a set of kernels that a card has compiled for minutes."""


@dataclass(frozen=True)
class Chunk:
    """Positions [start, stop), computed at once with `tokens` rows, of which the first are real.

    attention: the positions that full attention looks at, from 0, at least `stop`.
    """

    start: int
    stop: int
    tokens: int
    attention: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    def window_size(self, window: int) -> int:
        """The positions that attention with this window looks at.

        A row looks back over `window` positions, itself included, and there are `tokens` rows.
        """
        return min(self.attention, self.tokens + window)


@dataclass(frozen=True)
class Buckets:
    """The token buckets, ascending, and the longest prompt."""

    tokens: tuple[int, ...]
    max_positions: int

    def chunks(self, pieces: Sequence[tuple[int, int]]) -> list[Chunk]:
        """The chunks of a prompt that is cut into `pieces`, in order."""
        largest = self.tokens[-1]
        return [
            self._chunk(at, min(at + largest, stop))
            for start, stop in pieces
            for at in range(start, stop, largest)
        ]

    def attention(self, tokens: int, start: int, stop: int) -> int:
        """The attention bucket: the token bucket for a prompt's beginning, else the next power of
        two that holds `stop` positions and is larger than the token bucket.
        """
        if start == 0:
            return tokens
        return max(1 << (stop - 1).bit_length(), 1 << tokens.bit_length())

    def shapes(self) -> list[Chunk]:
        """A chunk of every shape that a prompt can be computed with, each token bucket's first with
        its own attention bucket.
        """
        made = []
        for tokens in self.tokens:
            made.append(Chunk(0, tokens, tokens, tokens))
            size = 1 << tokens.bit_length()
            while size <= self.attention(tokens, 1, self.max_positions):
                made.append(Chunk(size - tokens, size, tokens, size))
                size *= 2
        return made

    def _chunk(self, start: int, stop: int) -> Chunk:
        if stop > self.max_positions:
            raise LocalProtocolError(f"position {stop - 1}, the engine holds {self.max_positions}")
        tokens = next(size for size in self.tokens if size >= stop - start)
        return Chunk(start, stop, tokens, self.attention(tokens, start, stop))


def choose(
    asked: Sequence[int], max_positions: int, window: int | None, least: int = 1, unit: int = 1
) -> Buckets:
    """The buckets for a model whose shortest sliding window is `window`, None if it has none, and
    whose kernels take at least `least` tokens, and multiples of `unit`.

    A kernel for a sliding layer takes no more tokens than the window here. What is larger or
    smaller than that is left out.

    Raises:
        Refused: a bucket is no positive number, is asked for twice, or none is left.
    """
    if not asked or any(size < 1 for size in asked) or len(set(asked)) != len(asked):
        raise Refused(f"token_buckets {list(asked)} must be positive and differ", field="buckets")
    largest = max(asked) if window is None else window
    fitting = sorted(size for size in asked if least <= size <= largest and not size % unit)
    if not fitting:
        raise Refused(
            f"token_buckets {list(asked)}: this model's kernels take {least} to {largest} tokens"
            f"{f', in multiples of {unit}' if unit > 1 else ''}; add a bucket of such a size",
            field="buckets",
        )
    # No prompt needs more than the first bucket that holds the longest one.
    needed = sum(size < max_positions for size in fitting) + 1
    return Buckets(tuple(fitting[:needed]), max_positions)
