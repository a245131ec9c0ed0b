"""What a probe of a card found, as far as the decoder relies on it."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.engine.atom.casts import NumberFormat


@dataclass(frozen=True)
class Verified:
    """What was found to hold of one card, compiled model and set of packages.

    number_format: what a mirror's elements must be. sub_blocks: whether the first rows of a block
    can be transferred alone. clears: whether a lane must be cleared before it is used again.
    warms_up: whether the card must have computed once before a cache can be written.
    """

    number_format: NumberFormat
    sub_blocks: bool
    clears: bool
    warms_up: bool
