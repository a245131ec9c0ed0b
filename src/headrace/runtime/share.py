"""How much of the owner's time imports may take while entries decode.

Each decode step earns imports a share of the time that it took; each import spends the time for
which it held the owner up. One that a device carries out by itself spends next to nothing. A piece
that costs more than was earned is begun all the same and makes debt, which the steps after it pay
off before the next piece: so the token time of those who decode rises by the share and no more.
Only where steps are so short that a piece costs as much as many of them, a piece is begun after
MOST_STEPS all the same: an import may be late, and never stands still.
"""

from __future__ import annotations

from typing import Final

IMPORT_SHARE: Final = 0.02  # of decode time, by default
MOST_STEPS: Final = 16  # between two pieces that wait
_KEPT_STEPS: Final = 2  # whose earnings are kept, so that quiet time saves up no burst
_MOST_DEBT_NS: Final = 100_000_000


class ImportShare:
    """The account of imports among decode steps, in ns."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._earned_ns = 0.0
        self._num_steps = 0  # since the last piece

    @property
    def may_begin(self) -> bool:
        """Whether a piece may be begun between two decode steps."""
        return self._earned_ns >= 0 or self._num_steps >= MOST_STEPS

    def decoded(self, ns: int) -> None:
        """A decode step took this long."""
        earned_ns = self._share * ns
        self._earned_ns = min(self._earned_ns + earned_ns, _KEPT_STEPS * earned_ns)
        self._num_steps += 1

    def spent(self, ns: int) -> None:
        """An import held the owner up for this long."""
        self._earned_ns = max(self._earned_ns - ns, -_MOST_DEBT_NS)
        self._num_steps = 0

    def clear(self) -> None:
        """Nobody decodes: nothing is owed."""
        self._earned_ns, self._num_steps = 0.0, 0
