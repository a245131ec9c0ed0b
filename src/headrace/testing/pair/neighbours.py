"""Who runs beside a fault, and must not notice it."""

from __future__ import annotations

from headrace.runtime.requests import Request
from headrace.testing.conformance_engine import require
from headrace.testing.pair.stand import Stand

HELD_TOKENS, DECODED_TOKENS = 11, 9
DECODED = 12
"""Tokens that a decoding neighbour is given, so that it is at it while something happens."""

ALONE = "neighbours beside it: the decoder has one lane"


class Neighbours:
    """An entry that is held, and a request that decodes, as far as there are lanes beside `spare`.

    The held entry's cells and the decoded tokens must be those that they are alone.
    """

    def __init__(self, stand: Stand, *, spare: int = 1) -> None:
        self._stand = stand
        self._held: Request | None = None
        self._decoding: Request | None = None
        self._held_tokens = stand.pair.prompt(HELD_TOKENS, seed=901)
        self._decoded_tokens = stand.pair.prompt(DECODED_TOKENS, seed=902)
        self.num_decoded = 0
        lanes = stand.num_lanes - spare
        self._decodes = lanes > 1 and stand.pair.decodes
        stand.reference(self._held_tokens)
        if self._decodes:
            stand.reference(self._decoded_tokens, num_decoded=DECODED)
        if lanes > 0:
            self._held = stand.hold(self._held_tokens)
        else:
            stand.pair.left_out.add(ALONE)
        self._begin()

    @property
    def num_lanes(self) -> int:
        """Lanes that they take."""
        return (self._held is not None) + self._decodes

    def check(self) -> None:
        """They are what they are alone; whoever has ended begins again."""
        if self._held is not None:
            self._stand.check_held(self._held, self._held_tokens, "the held neighbour")
        if self._decoding is not None and self._decoding.done:
            self._check_decoded(self._decoding)
            self._begin()

    def end(self) -> None:
        """As above, to the end, and their lanes are given back."""
        if self._decoding is not None:
            self._stand.until_done(self._decoding)
        decodes, self._decodes = self._decodes, False
        self.check()
        require(not decodes or self.num_decoded > 0, "no neighbour ever decoded to its end")
        if self._held is not None:
            self._stand.owner.release(self._held)
            self._held = None

    def _begin(self) -> None:
        self._decoding = None
        if self._decodes:
            self._decoding = self._stand.submit(self._decoded_tokens, max_tokens=DECODED)
            began = self._decoding
            self._stand.until(lambda: began.done or bool(began.tokens), "a neighbour decodes")

    def _check_decoded(self, request: Request) -> None:
        self._stand.check_exact(request, self._decoded_tokens, "the decoding neighbour")
        self.num_decoded += 1
