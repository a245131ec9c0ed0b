"""A fake of Rebellions' packages for tests: the calls that the engine uses, and no others.

It is handed to the engine by name, as `headrace.testing.fake_rebellions:open`, and says that it is
fake wherever the vendor's packages say their names. The engine's code is the one that a card runs.
What is known of a card's private calls was read and never run, so each thing that may be otherwise
is a knob here; what the fake does by default need not be what a card does.
"""

from __future__ import annotations

from headrace.testing.fake_rebellions.card import PRIVATE_CALLS, Call, Card, Fault
from headrace.testing.fake_rebellions.compiled import compile_fake
from headrace.testing.fake_rebellions.packages import FakeRebellions
from headrace.testing.fake_rebellions.variants import (
    open,
    open_converted,
    open_custom_float16,
    open_failing_decode,
    open_failing_update,
    open_leaky,
    open_loses_first,
    open_needs_warm_up,
    open_other_card,
    open_paced,
    open_ring,
    open_stale,
    open_sub_blocks,
    open_without_card,
    open_without_private_calls,
)

__all__ = [
    "PRIVATE_CALLS",
    "Call",
    "Card",
    "FakeRebellions",
    "Fault",
    "compile_fake",
    "open",
    "open_converted",
    "open_custom_float16",
    "open_failing_decode",
    "open_failing_update",
    "open_leaky",
    "open_loses_first",
    "open_needs_warm_up",
    "open_other_card",
    "open_paced",
    "open_ring",
    "open_stale",
    "open_sub_blocks",
    "open_without_card",
    "open_without_private_calls",
]
