"""How much of the owner's time imports may take while entries decode.

Each decode step earns imports a share of the time that it took; each import spends the time for
which it held the owner up. One that a device carries out by itself spends next to nothing. A piece
that costs more than was earned is begun all the same and makes debt, which the steps after it pay
off before the next piece: so an import is late, but never stands still, and the token time of
those who decode rises by the share and no more.
"""

from __future__ import annotations

from typing import Final

IMPORT_SHARE: Final = 0.02  # of decode time, by default
_MOST_STEPS: Final = 2  # whose earnings are kept, so that idle time saves up no burst


class ImportShare:
    """The account of imports among decode steps, in ns."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._earned_ns = 0.0

    @property
    def may_begin(self) -> bool:
        """Whether a piece may be begun between two decode steps."""
        return self._earned_ns >= 0

    def decoded(self, ns: int) -> None:
        """A decode step took this long."""
        earned_ns = self._share * ns
        self._earned_ns = min(self._earned_ns + earned_ns, _MOST_STEPS * earned_ns)

    def spent(self, ns: int) -> None:
        """An import held the owner up for this long."""
        self._earned_ns -= ns

    def clear(self) -> None:
        """Nobody decodes: nothing is owed."""
        self._earned_ns = 0.0
